"""Display names of methods, models, data sets and tasks.

Configurations, records, tables and figures for the screen have the short names that a user types;
titles, LaTeX tables and figures for print show these. Names that are not listed are shown as they
are typed, so a new method needs no line here.
"""

from __future__ import annotations

METHODS = {
    "ar": "Plain decoding",
    "ar_eager": "Plain decoding (eager)",
    "cacheback": "Cacheback",
    "card": "CARD",
    "choose": "Choose",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "eagle": "EAGLE",
    "eagle2": "EAGLE-2",
    "eagle3": "EAGLE-3",
    "hydra": "Hydra",
    "jacobi": "Jacobi",
    "logitspec": "LogitSpec",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "mtp": "MTP",
    "ngram_map": "ngram-map",
    "ngram_mod": "ngram-mod",
    "ngrammys": "N-Grammys",
    "opt_tree": "OPT-Tree",
    "oracle": "Oracle",
    "ouroboros": "Ouroboros",
    "pearl": "PEARL",
    "pld": "PLD",
    "racer": "RACER",
    "random_drafts": "Random drafts",
    "rest": "REST",
    "sam": "SAM",
    "sam_eagle2": "SAM + EAGLE-2",
    "sps": "SpS",
    "ssd": "SSD",
    "suffix_decoding": "Suffix decoding",
    "suffix_else_head": "Suffix decoding, else head",
    "token_recycling": "Token Recycling",
    "union": "Union",
}

MODELS = {
    "codellama13b": "CodeLlama-13B",
    "codellama34b": "CodeLlama-34B",
    "codellama7b": "CodeLlama-7B",
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "falcon_h1_1b": "Falcon-H1-1.5B",
    "gpt_oss_20b": "gpt-oss-20B",
    "granite4_micro": "Granite-4.0-H-Micro",
    "lfm2_1b": "LFM2-1.2B",
    "llama2_13b": "Llama-2-13B",
    "llama2_70b": "Llama-2-70B",
    "llama2_7b": "Llama-2-7B",
    "llama3_1b": "Llama-3.2-1B",
    "llama3_70b": "Llama-3.1-70B",
    "llama3_8b": "Llama-3.1-8B",
    "llama_7b": "Llama-7B",
    "mistral7b": "Mistral-7B",
    "phi3_mini": "Phi-3-mini",
    "qwen25_72b": "Qwen2.5-72B",
    "qwen25_7b": "Qwen2.5-7B",
    "qwen35_08b": "Qwen3.5-0.8B",
    "qwen35_2b": "Qwen3.5-2B",
    "qwen35_4b": "Qwen3.5-4B",
    "qwen35_9b": "Qwen3.5-9B",
    "qwen3_8b": "Qwen3-8B",
    "qwen3_next_80b": "Qwen3-Next-80B",
    "smollm2_135m": "SmolLM2-135M",
    "vicuna13b": "Vicuna-13B",
    "vicuna33b": "Vicuna-33B",
    "vicuna7b": "Vicuna-7B",
    "unspecified": "a model not stated",
    "unspecified_13b": "a 13B model",
    "unspecified_7b": "a 7B model",
}

DATASETS = {
    "aime24": "AIME 2024",
    "aime25": "AIME 2025",
    "alpaca": "Alpaca",
    "alpaca_eval": "AlpacaEval",
    "demo": "the demo questions",
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "livecodebench": "LiveCodeBench",
    "math500": "MATH-500",
    "mbpp": "MBPP",
    "mbpp_sanitized": "MBPP, sanitized",
    "mgsm": "MGSM",
    "mtbench": "MT-Bench",
    "sharegpt": "ShareGPT",
    "specbench": "Spec-Bench",
    "speed": "SPEED-Bench",
    "swebench": "SWE-bench",
}

TASKS = {
    "mt_bench": "MT-Bench",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "overall": "Overall",
}

_NAMES = METHODS | MODELS | DATASETS | TASKS


def display_name(name: str) -> str:
    """Return ``Token Recycling`` for ``token_recycling``; unlisted names and labels unchanged."""
    return _NAMES.get(name, name)
