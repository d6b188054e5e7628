"""Which of transformers' architectures decode here as they do there: docs/architectures.md.

Tiny models with random weights, made by transformers' own configuration classes. Each is put
through the self-check of a run in four dtypes. In float64 it answers three prompts greedily, plain
and with random draft trees, and ``model.generate`` answers them, too. All other causal models that
transformers has are made with one set of sizes, where that gives a small model.
`make check-architectures` runs all of them and writes the page; run it again on a new transformers.
"""

import copy
import os
import re
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from methods.random_drafts import RandomDrafts
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftContext
from specbench.errors import ConfigurationError, message_line
from specbench.kernels.architectures import usable_context
from specbench.models.checks import self_check
from specbench.models.loading import offered_attention
from specbench.models.target import Target
from tests.conftest import engine

DTYPES = ("float64", "float32", "bfloat16", "float16")
VOCAB, PROMPTS, PROMPT_TOKENS, NEW_TOKENS, NODES = 64, 3, 26, 24, 12
LONGEST = PROMPT_TOKENS + NEW_TOKENS
SINK_SPREAD = 2.0

_SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # spread logits: no accidental ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MANY_HEADS = {"num_key_value_heads": 4}  # of models without grouped heads
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512} | _MANY_HEADS
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 16}
_LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
_INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
_LONGCAT = {
    "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2,
    "zero_expert_num": 2,
}  # fmt: skip


def _rope(kind, **numbers):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


_SPREAD_ROPE = {"factor": 4.0, "original_max_position_embeddings": 128}
_LONG_ROPE = _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 5.0])
_GEMMA_2 = {
    "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0,
}  # fmt: skip
_GEMMA_3N = {
    "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4,
    "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
_LLAMA_4 = {
    "head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 4, "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
}  # fmt: skip
_GPT_NEO = {
    "num_layers": 2, "num_heads": 4, "window_size": 16,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
_FALCON = {"num_kv_heads": 2, "new_decoder_architecture": True}
_MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}
_DELTA_RULE = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 16, "num_local_experts": 0, "shared_intermediate_size": 48,
}  # fmt: skip
_KIMI = {
    "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1],
    "full_attn_layers": [2],
}  # fmt: skip

# By name: the type in transformers, and what sets it apart.
ARCHITECTURES = {
    "Llama": ("llama",),
    "Llama, 1 layer": ("llama", {"num_hidden_layers": 1}),
    "Llama, YaRN": ("llama", _rope("yarn", **_SPREAD_ROPE)),
    "Llama 3.1": (
        "llama",
        _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SPREAD_ROPE),
    ),
    "Llama, dynamic RoPE": ("llama", _rope("dynamic", factor=4.0)),
    "Llama, dynamic RoPE outgrown": (
        "llama",
        _rope("dynamic", factor=4.0) | {"max_position_embeddings": 40},
    ),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, window": ("mistral", {"sliding_window": 12}),
    "Mixtral": ("mixtral", _LOCAL_EXPERTS),
    "Phi": ("phi",),
    "Phi-3, window": ("phi3", {"sliding_window": 20}),
    "Phi-3, LongRoPE": (
        "phi3",
        _LONG_ROPE | {"sliding_window": None, "original_max_position_embeddings": 128},
    ),
    "Phi-3, LongRoPE past its switch": (
        "phi3",
        _LONG_ROPE | {"sliding_window": None, "original_max_position_embeddings": 40},
    ),
    "Qwen2": ("qwen2", {"use_sliding_window": False}),
    "Qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "Qwen2-MoE": ("qwen2_moe", _EXPERTS | _SHARED),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Qwen3-MoE": ("qwen3_moe", _EXPERTS | {"head_dim": 8}),
    "Gemma": ("gemma", {"head_dim": 8}),
    "Gemma-2, soft-capping": ("gemma2", _GEMMA_2),
    "Gemma-3": ("gemma3_text", _MIXED | {"head_dim": 8}),
    "Gemma-3n": ("gemma3n_text", _GEMMA_3N),
    "OLMo": ("olmo",),
    "OLMo-2": ("olmo2",),
    "OLMo-3": ("olmo3", _MIXED),
    "OLMoE": ("olmoe", _EXPERTS),
    "Cohere": ("cohere",),
    "Cohere-2": ("cohere2", _MIXED),
    "StarCoder2, window": ("starcoder2", {"sliding_window": 16}),
    "EXAONE-4": ("exaone4", _MIXED),
    "Granite": ("granite",),
    "Granite-MoE": ("granitemoe", _LOCAL_EXPERTS),
    "GLM": ("glm", {"head_dim": 8}),
    "GLM-4": ("glm4", {"head_dim": 8}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Helium": ("helium", {"head_dim": 8}),
    "GPT-2": ("gpt2", _GPT),
    "GPT-NeoX": ("gpt_neox", _MANY_HEADS),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32} | _MANY_HEADS),
    "GPT-BigCode": ("gpt_bigcode", _GPT | {"num_key_value_heads": 1}),
    "Persimmon": ("persimmon", _MANY_HEADS),
    "DiffLlama": ("diffllama",),
    "JetMoE": ("jetmoe", _LOCAL_EXPERTS | {"kv_channels": 8}),
    "gpt-oss": ("gpt_oss", _MIXED | _LOCAL_EXPERTS | {"head_dim": 8}),
    "Flint": ("flint", _MIXED | _EXPERTS | {"head_dim": 8}),
    "Granite, window": ("granite_swa", _MIXED),
    "Granite-MoE, window": ("granitemoe_swa", _MIXED | _LOCAL_EXPERTS),
    "Llama-4": ("llama4_text", _LLAMA_4),
    "StableLM": ("stablelm",),
    "Nemotron": ("nemotron",),
    "DeepSeek-V2": ("deepseek_v2", _LATENT),
    "DeepSeek-V3": ("deepseek_v3", _LATENT),
    "DeepSeek-V3.2": ("deepseek_v32", _LATENT | _INDEXER),
    "MiniCPM3": ("minicpm3", _LATENT),
    "Youtu": ("youtu", _LATENT),
    "GLM-4.7 Flash": ("glm4_moe_lite", _LATENT),
    "LongCat-Flash": ("longcat_flash", _LATENT | _LONGCAT),
    "A.X-K1": ("axk1", _LATENT),
    "MiMo-V2": ("mimo_v2_flash", _MIXED | _EXPERTS),
    "GPT-J": ("gptj", _GPT | {"rotary_dim": 4}),
    "GPT-Neo": ("gpt_neo", _GPT_NEO),
    "CodeGen": ("codegen", _GPT | {"rotary_dim": 4}),
    "Falcon": ("falcon", _FALCON),
    "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4}),
    "MPT": ("mpt", _MPT),
    "Mamba": ("mamba", {"state_size": 4}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "LFM3": ("lfm3", {"layer_types": ["conv", "full_attention"]}),
    "Qwen3-Next": ("qwen3_next", _DELTA_RULE | _EXPERTS | _SHARED),
    "Qwen3.5": ("qwen3_5_text", _DELTA_RULE),
    "OLMo-Hybrid": ("olmo_hybrid", _DELTA_RULE | _MANY_HEADS),
    "Kimi-Linear": (
        "kimi_linear",
        _LATENT | _LOCAL_EXPERTS | {"linear_attn_config": _KIMI},
    ),
    "Bamba": ("bamba", _MAMBA_2 | {"attn_layer_indices": [1]}),
    "Granite-4 hybrid": ("granitemoehybrid", _MAMBA_2 | {"layer_types": ["mamba", "attention"]}),
    "Falcon-H1": (
        "falcon_h1",
        _MAMBA_2 | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "head_dim": 8},
    ),
    "LFM2-MoE": (
        "lfm2_moe",
        _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", _DELTA_RULE | _EXPERTS | _SHARED),
    "Llama-4 within a chunk": ("llama4_text", _LLAMA_4 | {"attention_chunk_size": 128}),
}

TESTED = {model_type for model_type, *_ in ARCHITECTURES.values()}
OTHERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - TESTED)
SMALL = 3_000_000  # parameters of a model that is made of `_ANY` sizes
# Names that configurations have for the same few sizes; most know no other name than their own.
_ANY = {
    **_SIZES, **_EXPERTS, **_SHARED, **_GPT, **_MPT, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_layers": 2,
    "num_heads": 4, "ffn_dim": 48, "ffn_hidden_size": 48, "d_ff": 48, "word_embed_proj_dim": 32,
    "embedding_size": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "is_decoder": True,
}  # fmt: skip
_ANY_SIZES = (_ANY, _ANY | _MANY_HEADS, _SIZES | _MANY_HEADS | {"is_decoder": True})


def made_small(model_type, sizes):
    """Of ``sizes``, where that gives a small model; else why not."""
    try:
        config = AutoConfig.for_model(model_type, **sizes)
        if config.get_text_config() is not config:
            return "it has parts besides a language model"
        with init_empty_weights():
            parts = AutoModelForCausalLM.from_config(config).parameters()
        count = sum(part.numel() for part in parts)
        return network(config, torch.float64) if count <= SMALL else f"{count:,} parameters"
    except Exception as error:  # sizes that do not fit each other, a part that is not installed
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def build(name, dtype=torch.float32, width=32, spread=0.4, seed=0, noise=0.0):
    """Random weights, with the attention that transformers would give it.

    Args:
        name: of `ARCHITECTURES`, or what is there: a type and what sets it apart.
        width: of hidden states and all that goes with it.
        spread: standard deviation of matrices; ``noise``: what is added to norms and biases.
    """
    model_type, *numbers = ARCHITECTURES[name] if isinstance(name, str) else name
    sizes = _SIZES | dict(*numbers) | {"initializer_range": spread}
    for key in ("hidden_size", "n_embd", "intermediate_size", "ffn_dim", "word_embed_proj_dim"):
        if key in sizes and width != 32:
            sizes[key] = sizes[key] * width // 32
    if "head_dim" in sizes and "kv_lora_rank" not in sizes and width != 32:
        sizes["head_dim"] = width // 4
    model = network(AutoConfig.for_model(model_type, **sizes), dtype, seed)
    for weight in model.parameters():
        if noise and weight.dim() == 1:
            weight.data += noise * torch.randn_like(weight)
    return model


def network(config, dtype, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=offered_attention(config, "sdpa")
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others multiply no float64
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):  # near 0 they change little
            torch.nn.init.normal_(weight, std=SINK_SPREAD)
    return model.eval().requires_grad_(False)


def checked_target(model):
    """As a run makes it; raises ConfigurationError where the model is refused."""
    usable_context(model, "the model", LONGEST, NODES)
    return self_check.checked(
        model,
        lambda network: Target(network, max_len=LONGEST, max_nodes=NODES),
        subject="the model",
        longest=LONGEST,
    )[0]


def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB // 2, PROMPT_TOKENS) for _ in range(PROMPTS)]


def generated(model):
    """What transformers answers, without an end token."""
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    model.generation_config = generation
    batches = [torch.from_numpy(prompt)[None] for prompt in prompts()]
    answers = [
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        for ids in batches
    ]
    return [answer[0, PROMPT_TOKENS:].tolist() for answer in answers]


def answered(target):
    """What plain decoding answers here, and decoding with random drafts."""
    drafts = RandomDrafts(n_nodes=NODES)
    drafts.setup(DraftContext(VOCAB, frozenset(), max_len=LONGEST, target=target))
    for drafter in (Drafter(name="ar"), drafts):
        for prompt in prompts():
            drafter.reset()
            yield engine(target).decode(prompt, drafter, max_new_tokens=NEW_TOKENS).output_ids


def refusal(model):
    """What a run says of it; nothing where it takes it."""
    try:
        checked_target(model)
    except ConfigurationError as error:
        return message_line(error)
    return ""


def why_refused(name, dtype):
    return refusal(build(name, getattr(torch, dtype)))


def equal_answers(name):
    """How many answers are `generate`'s, of six."""
    return equal_of(build(name, torch.float64))


def equal_of(model):
    expected = generated(copy.deepcopy(model)) * 2
    return sum(a == b for a, b in zip(answered(checked_target(model)), expected, strict=True))


@pytest.fixture(scope="module")
def findings():
    """By architecture: why it is refused, by dtype, and its equal answers; at the end the page.

    Of `OTHERS` what became of them in a word, and why.
    """
    outcomes = {}
    yield outcomes
    if os.environ.get("ARCHITECTURES_PAGE"):
        Path(os.environ["ARCHITECTURES_PAGE"]).write_text(page(outcomes), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_decodes_as_in_transformers_or_is_refused_in_every_dtype(name, findings):
    refused = {dtype: why for dtype in DTYPES if (why := why_refused(name, dtype))}
    equal = 0 if "float64" in refused else equal_answers(name)
    findings[name] = (refused, equal)
    assert len(refused) in (0, len(DTYPES))
    assert bool(refused) or equal == 2 * PROMPTS


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_causal_model_decodes_as_in_transformers_or_is_refused(name, findings):
    why, refused = "", ""
    for sizes in _ANY_SIZES:
        model = made_small(name, sizes)
        if isinstance(model, str):
            why = why or model
        elif refused := refusal(copy.deepcopy(model)):
            continue
        else:
            findings[name] = ("decodes", "")
            assert equal_of(model) == 2 * PROMPTS
            return
    findings[name] = ("refused", refused) if refused else ("not tried", why)
    if not refused:
        pytest.skip(why)


PAGE = """# Architectures

Checked on {date} with {versions}, on a CPU.
`make check-architectures` makes this page again.

Before a run measures anything, it compares the logits of a chain, of a tree, and of each after its
first half was cached: this project's attention, cache and masks against the model as transformers
loads it. The model's own passes of one row and of many differ, too. The run is refused (exit code
2) by a difference over {times} times as large, and by own passes that differ by more than rounding
explains. An architecture that is not on this page is checked like any other when it is
loaded.

Below are tiny models with random weights. Outputs of {tokens} tokens in float64 to {prompts}
prompts, plain and with random draft trees, are compared with `generate`.
The self-check ran in {dtypes}.

## These decode

{decode}

## These are refused

{refuse}

## All other causal models of transformers

Each was made with one set of sizes, without what sets it apart, and checked in float64.

**Decode, with {n_decode} x {answers} equal answers:** {decode_too}.

**Not tried**, because these sizes give no small model: {untried}.

**Refused:**

{refuse_too}
"""


def reason(why):
    """A refusal without what is the same in all, and without names and numbers of one model."""
    why = why.removeprefix("the model does not decode here")
    why = why.removeprefix("the model").removeprefix(" as it does in transformers")
    for rest in (" Take a model that", " This run's texts", " What it answers depends"):
        why = why.split(rest)[0]
    why = re.sub(r"\w+(?:ForCausalLM|LMHeadModel)", "its class", why.removeprefix(":").strip())
    why = re.sub(r"\b\w+Attention computes", "its attention computes", why)
    why = re.sub(r"(layers of kind [\w, ]+|its class) keeps? a state", "it keeps a state", why)
    if why.startswith("logits of"):
        return "logits differ from those of its own attention and cache."
    if why.startswith("in transformers itself"):
        return "in transformers itself, passes of one row and of many differ."
    if why.startswith("transformers' own pass fails") and "keeps a state" not in why:
        return "transformers' own pass fails with these sizes."
    return why.removeprefix("transformers' own pass fails: ").split(". ")[0]


def listed(names_by_text):
    """A line for each text, with the names it is about, most names first."""
    ordered = sorted(names_by_text.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"- **{text.rstrip('.')}:** {'; '.join(names)}" for text, names in ordered)


def page(findings):
    decode, refuse, refuse_too = defaultdict(list), defaultdict(list), defaultdict(list)
    others = {name: findings[name] for name in OTHERS if name in findings}
    for name, (refused, equal) in findings.items():
        if name in others:
            continue
        name = f"{name} (`{ARCHITECTURES[name][0]}`)"
        if "float64" in refused:
            refuse[reason(refused["float64"])].append(name)
        else:
            checked = "; ".join(f"{dtype}: {why}" for dtype, why in refused.items()) or "passes"
            decode[f"self-check {checked}, {equal} of {2 * PROMPTS} answers equal"].append(name)
    for name, (status, why) in others.items():
        if status == "refused":
            refuse_too[reason(why)].append(name)
    became = {
        word: [name for name, (status, _) in others.items() if status == word]
        for word in ("decodes", "not tried")
    }
    return PAGE.format(
        n_decode=len(became["decodes"]),
        answers=2 * PROMPTS,
        decode_too=", ".join(became["decodes"]),
        untried=", ".join(became["not tried"]),
        refuse_too=listed(refuse_too),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}",
        times=self_check.TIMES,
        dtypes=", ".join(DTYPES),
        tokens=NEW_TOKENS,
        prompts=PROMPTS,
        decode=listed(decode),
        refuse=listed(refuse),
    )
