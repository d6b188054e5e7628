"""What differs from architecture to architecture: the one file that a new one touches.

Most need no line here: they are decoded through transformers' own layers, with this project's
attention, cache and masks, and the self-check of a run (``models.checks.self_check``) compares them
with the original. Here are the families whose layers are computed in fewer kernels, what
attention takes and refuses, and what is refused by the configuration, before any pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specbench.errors import ConfigurationError

ELSE = "Take a model that decodes here, see docs/architectures.md."


# -- layers that are computed in fewer kernels -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """Classes of transformers whose formulas are known: ``XRMSNorm``, ``XAttention``, ``XMLP``."""

    norms_heads: bool = False  # attention norms each head's query and key
    joined: bool = False  # query, key and value are one matrix, and so are gate and up
    window_in_config: bool = False  # else the attention has its sliding window itself


# By name: importing the models of a library that has hundreds takes longer than looking.
FAMILIES = {
    "Llama": Family(),
    "Mistral": Family(window_in_config=True),
    "Qwen2": Family(),
    "Qwen3": Family(norms_heads=True),
    "Phi3": Family(joined=True, window_in_config=True),
}
NORM, ATTENTION, GATED = "RMSNorm", "Attention", "MLP"
_PARTS = {
    family + part: (part, traits)
    for family, traits in FAMILIES.items()
    for part in (NORM, ATTENTION, GATED)
}

# Children of one module that are called one after the other with the same tensor, in this order.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
JOINED = ("qkv_proj", "gate_up_proj")


def known_part(module: nn.Module) -> tuple[str, Family] | tuple[None, None]:
    """Look up a module's part of a layer and its family's traits; None for unknown classes."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None, None
    return _PARTS.get(kind.__name__, (None, None))


def inputs_of(module: Any) -> list[Any]:
    """List the linears that read ``module``'s input, in the order of their outputs."""
    names = [*JOINED, *(name for together in SIBLINGS for name in together)]
    return [getattr(module, name) for name in names if hasattr(module, name)]


def sliding_window(attention: Any) -> int | None:
    """Read the layer's window from where its class takes it."""
    _, family = known_part(attention)
    holder = attention.config if family and family.window_in_config else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def window_sizes(model: PreTrainedModel) -> tuple[int, ...]:
    """List the distinct sliding-window sizes that ``model``'s layers hand to attention."""
    config = model.config.get_text_config()
    size = getattr(config, "sliding_window", None)
    if size is None or getattr(config, "use_sliding_window", True) is False:
        return ()
    kinds = getattr(config, "layer_types", None)
    return (int(size),) if kinds is None or "sliding_attention" in kinds else ()


# -- what attention takes --------------------------------------------------------------------------

# What layers hand on besides, and what moves no number of ours.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",  # of training
        "is_causal",  # the plan says it
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)

_FEATURES = {
    "position_bias": "a bias by distance",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


def refuse_arguments(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Refuse further arguments of a layer's attention that would change a number."""
    unsupported = sorted(k for k, v in others.items() if k not in WITHOUT_EFFECT and v is not None)
    if unsupported:
        named = ", ".join(f"{k} ({_FEATURES[k]})" if k in _FEATURES else k for k in unsupported)
        raise ConfigurationError(
            f"{type(module).__name__} computes attention with {named}, which this project's "
            f"attention lacks: outputs would be another model's. {ELSE}"
        )


# -- what a configuration says ---------------------------------------------------------------------

# Kinds of layers that keep a state; see `kernels.recurrent`.
STATEFUL = {"linear_attention", "conv", "hybrid", "mamba"}
# Types of models that are refused, and why.
_FROM_EMPTY = "starts each pass of several rows from an empty state in transformers"
_BY_DISTANCE = "adds a bias by distance to its attention, and this project's attention adds none"
_REFUSED = {
    "recurrent_gemma": "keeps its state in the layers themselves, which cannot go back where a "
    "draft is rejected",
    "minimax": "keeps its state in a cache class of its own",
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), _FROM_EMPTY),
    **dict.fromkeys(("inkling_text", "inkling2_text"), _BY_DISTANCE),
}


def keeps_states(model: PreTrainedModel) -> bool:
    """Return True if some layers fold a text into a state, which no row can be taken from again."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return not STATEFUL.isdisjoint(kinds)


def has_latents(model: PreTrainedModel) -> bool:
    """Return True if each pass expands the whole text's keys and values from cached latents."""
    return bool(getattr(model.config.get_text_config(), "kv_lora_rank", None))


def one_text_layers(model: PreTrainedModel) -> str | None:
    """Name the layers that read one text at a time; None where a pass may hold several."""
    latents = "layers with latents (kv_lora_rank)" if has_latents(model) else None
    return "layers that keep a state" if keeps_states(model) else latents


def usable_context(model: PreTrainedModel, subject: str, longest: int, nodes: int) -> int | None:
    """Find the longest text for which our passes equal the model's; None: no such limit.

    Args:
        subject: the model as its user names it, e.g. ``model.id=FOLDER``.
        longest: tokens of the run's longest text; ``nodes``: of its largest draft tree.

    Raises:
        ConfigurationError: some layers keep something else than keys and values, or the run's texts
            go beyond a switch; names the feature.
    """
    config = model.config.get_text_config()
    if config.model_type in _REFUSED:
        raise ConfigurationError(f"{subject} {_REFUSED[config.model_type]}. {ELSE}")
    switches = _switches(config)
    if not switches:
        return None
    switch, feature = min(switches)
    usable = switch - nodes
    if usable < 2:
        raise ConfigurationError(
            f"{subject}: beyond {switch} tokens {feature}, and drafts of {nodes} nodes leave no "
            "room below. Let the method draft less."
        )
    if longest > usable:
        raise ConfigurationError(
            f"{subject}: beyond {switch} tokens {feature}. This run's texts may have {longest}, "
            f"with drafts of {nodes} nodes behind them: type model.context_length={usable}, or "
            "leave out long prompts."
        )
    return usable


def scaled_every(model: PreTrainedModel) -> list[int]:
    """List the token counts after which layers change attention's scale, again and again."""
    config = model.config.get_text_config()
    lengths = []
    if getattr(config, "attn_temperature_tuning", False):
        lengths.append(int(config.floor_scale))
    for rope in _rope_parameters(config):
        if rope.get("llama_4_scaling_beta"):
            lengths.append(int(rope["original_max_position_embeddings"]))
    return lengths


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """List the RoPE settings of the model, or of each kind of its layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _switches(config: Any) -> list[tuple[int, str]]:
    """List text lengths at which a model computes differently, and what changes there."""
    switches = []
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        base_length = rope.get("original_max_position_embeddings")
        base_length = base_length or getattr(config, "original_max_position_embeddings", None)
        if kind == "longrope" and base_length:
            switches.append((int(base_length), "LongRoPE rotates all keys anew, cached ones too"))
        if kind == "dynamic":
            end = int(base_length or config.max_position_embeddings)
            switches.append((end, "dynamic RoPE rotates keys by the length of the text"))
    unrotated = 0 in (getattr(config, "no_rope_layers", None) or ())
    if getattr(config, "attn_temperature_tuning", False) and unrotated:
        scaled = "attention is scaled by a row's number in its pass, which in a tree is no position"
        switches.append((int(config.floor_scale), scaled))
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        switches.append((int(config.attention_chunk_size), "attention is chunked, our masks not"))
    return switches


def is_mixture(model: PreTrainedModel) -> bool:
    """Return True for mixtures of experts, where a rounding at a near tie changes the expert.

    Such a row says nothing; a fault shows in most rows.
    """
    config = model.config.get_text_config()
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(config, key, None) for key in keys)
