"""The attention every target pass runs, registered with transformers under one name.

A registered function without a registered mask builder makes transformers skip its own mask
construction, so the plan below is the only mask there is and costs nothing per layer. Grouped-query
attention runs on the cached key and value heads directly, without repeating them in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "specbench"


@dataclass(slots=True)
class AttentionPlan:
    """How the rows of one pass may look at the keys.

    Attributes:
        mask: additive float mask ``[1 or batch, 1, rows, keys]``; None where no key is hidden from
            any row (a single row), or where ``causal`` says it all.
        causal: plain causal attention over the pass's own rows (a prompt on an empty cache).
        windowed: additive masks by sliding-window size, for layers that have one and where some
            key lies outside the window; a missing size means the window hides nothing.
    """

    mask: torch.Tensor | None = None
    causal: bool = False
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention under ``plan``.

    Args:
        module: the attention module; not used.
        query: ``[batch, heads, rows, head_dim]``.
        key: ``[batch, kv_heads, keys, head_dim]``, cached keys first.
        value: same shape as ``key``.
        attention_mask: unused; the plan carries the mask.
        scaling: factor on the scores.
        sliding_window: the layer's window, or None.
        plan: the pass's plan; None (a call from outside the engine) means causal.

    Returns:
        ``[batch, rows, heads, head_dim]`` and None (no attention weights).
    """
    plan = plan or AttentionPlan(mask=attention_mask, causal=attention_mask is None)
    mask, causal = plan.mask, plan.causal and query.shape[2] > 1
    if sliding_window is not None and sliding_window in plan.windowed:
        mask, causal = plan.windowed[sliding_window], False
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def install(model: PreTrainedModel) -> None:
    """Make ``model`` use this attention; undone by ``model.set_attn_implementation(...)``."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    model.set_attn_implementation(ATTENTION_NAME)


def window_sizes(model: PreTrainedModel) -> tuple[int, ...]:
    """The sliding-window sizes that ``model``'s layers hand to attention, without repeats."""
    config = model.config.get_text_config()
    size = getattr(config, "sliding_window", None)
    if size is None or getattr(config, "use_sliding_window", True) is False:
        return ()
    kinds = getattr(config, "layer_types", None)
    return (int(size),) if kinds is None or "sliding_attention" in kinds else ()
