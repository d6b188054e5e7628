"""Which of transformers' architectures decode here as they do there: docs/architectures.md.

    make check-architectures

Tiny models with random weights, made by transformers' own configuration classes. Each is put
through the self-check of a run in four dtypes. In float64 it answers three prompts greedily, plain
and with random draft trees, and ``model.generate`` answers them, too. Run it again on a new
transformers.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from methods.random_drafts import RandomDrafts
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import ConfigurationError, message_line
from specbench.models.checks import self_check, supported
from specbench.models.loading import offered_attention
from specbench.models.target import Target
from specbench.paths import PROJECT

PAGE = PROJECT / "docs" / "architectures.md"
DTYPES = ("float64", "float32", "bfloat16", "float16")

VOCAB = 64
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS, _NODES = 3, 26, 24, 12
_LONGEST = _PROMPT_TOKENS + _NEW_TOKENS

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
}  # fmt: skip


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


_SPREAD_ROPE = {"factor": 4.0, "original_max_position_embeddings": 128}
_LONG_ROPE = _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 5.0])


@dataclass(frozen=True, slots=True)
class Architecture:
    """A tiny model: its type in transformers, and what sets it apart."""

    name: str
    model_type: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
        """Random weights, with the attention that transformers would give it."""
        torch.manual_seed(seed)
        config = AutoConfig.for_model(self.model_type, **{**_SIZES, **self.numbers})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=offered_attention(config, "sdpa")
        )
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the others multiply no float64
        model.eval().requires_grad_(False)
        return model


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
_QWEN_3_NEXT = {
    **_EXPERTS, **_SHARED, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip

ARCHITECTURES = (
    Architecture("Llama", "llama"),
    Architecture("Llama, 1 layer", "llama", {"num_hidden_layers": 1}),
    Architecture("Llama, YaRN", "llama", _rope("yarn", **_SPREAD_ROPE)),
    Architecture(
        "Llama 3.1",
        "llama",
        _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SPREAD_ROPE),
    ),
    Architecture("Llama, dynamic RoPE", "llama", _rope("dynamic", factor=4.0)),
    Architecture(
        "Llama, dynamic RoPE outgrown",
        "llama",
        _rope("dynamic", factor=4.0) | {"max_position_embeddings": 40},
    ),
    Architecture("Mistral", "mistral", {"sliding_window": None}),
    Architecture("Mistral, window", "mistral", {"sliding_window": 12}),
    Architecture("Mixtral", "mixtral", _LOCAL_EXPERTS),
    Architecture("Phi", "phi"),
    Architecture("Phi-3, window", "phi3", {"sliding_window": 20}),
    Architecture(
        "Phi-3, LongRoPE",
        "phi3",
        _LONG_ROPE | {"sliding_window": None, "original_max_position_embeddings": 128},
    ),
    Architecture(
        "Phi-3, LongRoPE past its switch",
        "phi3",
        _LONG_ROPE | {"sliding_window": None, "original_max_position_embeddings": 40},
    ),
    Architecture("Qwen2", "qwen2", {"use_sliding_window": False}),
    Architecture(
        "Qwen2, window",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    Architecture("Qwen2-MoE", "qwen2_moe", _EXPERTS | _SHARED),
    Architecture("Qwen3", "qwen3", {"head_dim": 8}),
    Architecture("Qwen3-MoE", "qwen3_moe", _EXPERTS | {"head_dim": 8}),
    Architecture("Gemma", "gemma", {"head_dim": 8}),
    Architecture("Gemma-2, soft-capping", "gemma2", _GEMMA_2),
    Architecture("Gemma-3", "gemma3_text", _MIXED | {"head_dim": 8}),
    Architecture("Gemma-3n", "gemma3n_text", _GEMMA_3N),
    Architecture("OLMo", "olmo"),
    Architecture("OLMo-2", "olmo2"),
    Architecture("OLMo-3", "olmo3", _MIXED),
    Architecture("OLMoE", "olmoe", _EXPERTS),
    Architecture("Cohere", "cohere"),
    Architecture("Cohere-2", "cohere2", _MIXED),
    Architecture("StarCoder2, window", "starcoder2", {"sliding_window": 16}),
    Architecture("EXAONE-4", "exaone4", _MIXED),
    Architecture("Granite", "granite"),
    Architecture("Granite-MoE", "granitemoe", _LOCAL_EXPERTS),
    Architecture("GLM", "glm", {"head_dim": 8}),
    Architecture("GLM-4", "glm4", {"head_dim": 8}),
    Architecture("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Architecture("Helium", "helium", {"head_dim": 8}),
    Architecture("GPT-2", "gpt2", _GPT),
    Architecture("GPT-NeoX", "gpt_neox", _MANY_HEADS),
    Architecture("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32} | _MANY_HEADS),
    Architecture("GPT-BigCode", "gpt_bigcode", _GPT | {"num_key_value_heads": 1}),
    Architecture("Persimmon", "persimmon", _MANY_HEADS),
    Architecture("DiffLlama", "diffllama"),
    Architecture("JetMoE", "jetmoe", _LOCAL_EXPERTS | {"kv_channels": 8}),
    Architecture("gpt-oss", "gpt_oss", _MIXED | _LOCAL_EXPERTS | {"head_dim": 8}),
    Architecture("Llama-4", "llama4_text", _LLAMA_4),
    Architecture("StableLM", "stablelm"),
    Architecture("Nemotron", "nemotron"),
    Architecture("DeepSeek-V2", "deepseek_v2", _LATENT),
    Architecture("DeepSeek-V3", "deepseek_v3", _LATENT),
    Architecture("GPT-J", "gptj", _GPT | {"rotary_dim": 4}),
    Architecture("GPT-Neo", "gpt_neo", _GPT_NEO),
    Architecture("CodeGen", "codegen", _GPT | {"rotary_dim": 4}),
    Architecture("Falcon", "falcon", _FALCON),
    Architecture("BLOOM", "bloom", {"n_layer": 2, "n_head": 4}),
    Architecture("MPT", "mpt", _MPT),
    Architecture("Mamba", "mamba", {"state_size": 4}),
    Architecture("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"]}),
    Architecture("Qwen3-Next", "qwen3_next", _QWEN_3_NEXT),
    Architecture("Llama-4 within a chunk", "llama4_text", _LLAMA_4 | {"attention_chunk_size": 128}),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of an architecture.

    Attributes:
        refused: why it does not decode here, by dtype; empty where it does.
        equal: answers equal to ``model.generate``'s, of all; None where it was refused.
    """

    refused: dict[str, str]
    equal: tuple[int, int] | None


def check(architecture: Architecture) -> Finding:
    """Put an architecture through the self-check, and compare its answers."""
    refused = {}
    for dtype in DTYPES:
        try:
            checked_target(architecture.build(getattr(torch, dtype)))
        except ConfigurationError as error:
            refused[dtype] = message_line(error)
    if "float64" in refused:
        return Finding(refused, None)
    model = architecture.build(torch.float64)
    wanted = list(generated(copy.deepcopy(model)))
    target = checked_target(model)
    found = [answer for drafter in _drafters(target) for answer in _answers(target, drafter)]
    equal = sum(a == b for a, b in zip(found, wanted * 2, strict=True))
    return Finding(refused, (equal, len(found)))


def checked_target(model: PreTrainedModel) -> Target:
    """As a run makes it.

    Raises:
        ConfigurationError: the model is refused.
    """
    supported.usable_context(model, "the model", _LONGEST, _NODES)
    target, _ = self_check.checked(
        model,
        lambda network: Target(network, max_len=_LONGEST, max_nodes=_NODES),
        what="the model",
        longest=_LONGEST,
    )
    return target


def _prompts() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB // 2, _PROMPT_TOKENS) for _ in range(_PROMPTS)]


def generated(model: PreTrainedModel) -> Iterator[list[int]]:
    """What transformers answers, without an end token."""
    wanted = GenerationConfig(max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0)
    model.generation_config = wanted
    for prompt in _prompts():
        ids = torch.from_numpy(prompt)[None]
        out = model.generate(  # type: ignore[operator]  # typed as a buffer there
            ids, attention_mask=torch.ones_like(ids), generation_config=wanted
        )
        yield out[0, _PROMPT_TOKENS:].tolist()


def _drafters(target: Target) -> tuple[Drafter, Drafter]:
    drafts = RandomDrafts(n_nodes=_NODES)
    drafts.setup(
        DraftContext(
            vocab_size=VOCAB,
            eos_ids=frozenset(),
            tokenizer_hash="",
            max_len=_LONGEST,
            artifacts={},
            seed=0,
            sampling=Sampling(),
            target=target,
        )
    )
    return Drafter(name="ar"), drafts


def _answers(target: Target, drafter: Drafter) -> Iterator[list[int]]:
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    for prompt in _prompts():
        drafter.reset()
        yield engine.decode(prompt, drafter, max_new_tokens=_NEW_TOKENS).output_ids


_PAGE = """# Architectures

Checked on {date} with {versions}, on a CPU.
`make check-architectures` makes this page again.

Before a run measures anything, it compares logits of a chain and of a tree through this project's
attention, cache and masks with those of the model as transformers loads it. The model's own passes
of one row and of many differ, too; a difference over {times} times as large refuses the run (exit
code 2). An architecture that is not on this page is checked like any other when it is loaded.

Below are tiny models with random weights. The self-check ran in {dtypes}. The last
column counts greedy answers of {tokens} tokens in float64 to {prompts} prompts, plain and with
random draft trees.

## These decode

{decode}

## These are refused

{refuse}
"""


def page(findings: Mapping[str, Finding]) -> str:
    """The Markdown page."""
    types = {each.name: each.model_type for each in ARCHITECTURES}
    decode = pd.DataFrame(
        {
            "architecture": name,
            "`model_type`": types[name],
            "self-check": "passes"
            if not found.refused
            else "; ".join(f"{dtype}: {why}" for dtype, why in found.refused.items()),
            "answers equal to `generate`": "{} of {}".format(*(found.equal or (0, 0))),
        }
        for name, found in findings.items()
        if found.equal
    )
    refuse = pd.DataFrame(
        {
            "architecture": name,
            "`model_type`": types[name],
            "why": _reason(found.refused["float64"]),
        }
        for name, found in findings.items()
        if not found.equal
    )
    return _PAGE.format(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}",
        times=self_check.TIMES_SPREAD,
        dtypes=", ".join(DTYPES),
        tokens=_NEW_TOKENS,
        prompts=_PROMPTS,
        decode=decode.to_markdown(index=False),
        refuse=refuse.to_markdown(index=False),
    )


def _reason(message: str) -> str:
    """The part of a refusal that is about the architecture."""
    shown = message.removeprefix("the model does not decode here").removeprefix("the model")
    for rest in (" Take a model that", " This run's texts"):
        shown = shown.split(rest)[0]
    return shown.removeprefix(" as it does in transformers").removeprefix(":").strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    findings = {}
    for architecture in ARCHITECTURES:
        findings[architecture.name] = found = check(architecture)
        print(architecture.name, found.equal or _reason(found.refused["float64"]), flush=True)
    arguments.out.write_text(page(findings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
