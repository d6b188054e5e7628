"""The attention every target pass runs, registered with transformers under one name.

A registered function without a registered mask builder makes transformers skip its own mask
construction, so the plan below is the only mask there is and costs nothing per layer. Grouped-query
attention runs on the cached key and value heads directly, without repeating them in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from specbench.arrays import IntArray
from specbench.errors import ConfigurationError
from specbench.kernels.architectures import ELSE, WITHOUT_EFFECT, refuse_arguments
from specbench.kernels.static_rows import StaticRows, uses_triton

ATTENTION_NAME = "specbench"
_PIECE = 512  # rows of a prompt whose scores are written out at once


@dataclass(slots=True)
class AttentionPlan:
    """The attention masks of one pass: the keys that each of its rows may attend to."""

    # Additive float mask ``[1 or batch, 1, rows, keys]``; None where no key is hidden from any row
    # (a single row), or where ``causal`` says it all.
    mask: torch.Tensor | None = None
    # plain causal attention over the pass's own rows (a prompt on an empty cache)
    causal: bool = False
    # Additive masks by sliding-window size, for layers that have one and where some key lies
    # outside the window; a missing size means the window hides nothing.
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)
    # For layers that keep a state: ``[rows]`` parents, -1 above the root, where some row does not
    # follow the one before it; and whether the rows are text, which is committed whole.
    parents: IntArray | None = None
    prompt: bool = False
    # For a pass over the rows of several sequences: each one's number of rows, and its plan; keys
    # and values are then lists, and nothing else of this plan counts.
    sequences: tuple[tuple[int, AttentionPlan], ...] = ()
    # Of a pass of fixed shape; keys and values are then whole caches, and nothing else counts.
    static: StaticRows | None = None
    # the masks above on the devices of other layers, by (mask's id, device); likewise
    moved: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def on(self, mask: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy ``mask`` to ``device`` once a pass: a model may be spread over several."""
        if mask.device == device:
            return mask
        key = (id(mask), device)
        if key not in self.moved:
            self.moved[key] = mask.to(device)
        return self.moved[key]


# -- masks of sliding windows, by size, where some key lies outside --------------------------------

Additive = Callable[[torch.Tensor], torch.Tensor]  # what is seen, as an additive mask


def prompt_windows(
    windows: Iterable[int], positions: torch.Tensor, additive: Additive
) -> dict[int, torch.Tensor]:
    """Make the masks ``[1, 1, n, n]`` of a prompt at ``positions [n]`` on an empty cache."""
    reached = [window for window in windows if len(positions) > window]
    if not reached:
        return {}
    behind = positions[:, None] - positions[None, :]
    return {w: additive((behind >= 0) & (behind < w))[None, None] for w in reached}


def windowed_masks(
    windows: Iterable[int],
    text: torch.Tensor,
    uncommitted: torch.Tensor,
    rows: int,
    visible: torch.Tensor | None,
    additive: Additive,
) -> dict[int, torch.Tensor]:
    """Make the masks ``[1, 1, rows, text + uncommitted]`` of a pass after committed text.

    ``text`` are the positions of committed tokens, ``uncommitted`` those of all others, which end
    with the pass's ``rows``; ``visible [rows, uncommitted]``: those that a row sees; None: all.
    """
    masks = {}
    for window in windows:
        if len(text) + len(uncommitted) > window:
            seen = uncommitted[-rows:, None] - torch.cat([text, uncommitted])[None, :] < window
            if visible is not None:
                seen[:, len(text) :] &= visible
            masks[window] = additive(seen)[None, None]
    return masks


# -- attention -------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor | Sequence[torch.Tensor],
    value: torch.Tensor | Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute scaled dot-product attention under ``plan``.

    Args:
        module: transformers hands it over; named in refusals; None where nothing is refused.
        query: ``[batch, heads, rows, head_dim]``.
        key, value: ``[batch, kv_heads, keys, head_dim]``, cached ones first; one for each of
            ``plan.sequences``, where it has any.
        attention_mask: of a call from outside the engine, which brings no plan; None: causal.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before the mask (Gemma-2).
        s_aux: ``[heads]`` attention sinks: the score of one more key whose value is 0 (gpt-oss).

    Returns:
        ``[batch, rows, heads, head_dim]`` and None (no attention weights).

    Raises:
        ConfigurationError: the layer asks for something that is not computed here.
    """
    if module is not None and not others.keys() <= WITHOUT_EFFECT:
        refuse_arguments(module, others)
    plan = plan or AttentionPlan(mask=attention_mask, causal=attention_mask is None)
    if plan.sequences:
        # Sequence by sequence over its own keys: each gets what it would get alone.
        parts = query.split([rows for rows, _ in plan.sequences], 2)
        options = (None, scaling, sliding_window, softcap, s_aux)
        attended = [
            attend(module, part, keys, values, *options, plan)[0]
            for part, keys, values, (_, plan) in zip(parts, key, value, plan.sequences, strict=True)
        ]
        return torch.cat(attended, 1), None
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    scaling = scaling or query.shape[3] ** -0.5
    if plan.static is not None:
        # Latents are expanded in every pass, and their keys and values differ in width.
        fits = plan.static.triton and uses_triton(query)
        if fits and key.shape == value.shape and key[0].is_contiguous():
            from specbench.kernels import row_kernels

            rows = query.transpose(1, 2)
            args = (plan.static, scaling, sliding_window, softcap, s_aux)
            return row_kernels.attend(rows, key, value, *args), None
        additive = plan.static.mask(key.shape[2], sliding_window or 0, query.dtype)
        plan, sliding_window = AttentionPlan(mask=additive), None
    causal, mask = plan.causal and query.shape[2] > 1, plan.mask
    if sliding_window is not None and sliding_window in plan.windowed:
        mask, causal = plan.windowed[sliding_window], False
    if mask is not None:
        mask = plan.on(mask, query.device)
    groups = query.shape[1] // key.shape[1]
    if softcap is not None or s_aux is not None:
        return _written_out(query, key, value, mask, causal, scaling, softcap, s_aux), None
    kernel = torch.nn.functional.scaled_dot_product_attention
    if groups > 1 and not query.is_cpu and not causal:
        # CUDA's fast kernels take either grouped heads or a mask. The queries that share a key
        # head can as well be more rows of one head.
        folded = folded_heads(query, key.shape[1])
        folded_mask = None if mask is None else mask.repeat(1, 1, groups, 1)
        out = kernel(folded, key, value, attn_mask=folded_mask, scale=scaling)
        return unfolded_heads(out, groups), None
    out = kernel(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2).contiguous(), None


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with capped scores or sinks step by step: torch has no kernel for them.

    As transformers has it, with the softmax in float32 whatever the dtype where scores are capped,
    and otherwise in their own. Long prompts are read in pieces: each row is computed alone, and
    the scores of all rows would be as many as heads times rows times keys.
    """
    batch, heads, rows = query.shape[:3]
    if rows > _PIECE:
        pieces = []
        for first in range(0, rows, _PIECE):
            part = slice(first, min(first + _PIECE, rows))
            seen = slice(part.stop if causal else None)
            masked = None if mask is None else mask[..., part, seen]
            read = (query[:, :, part], key[:, :, seen], value[:, :, seen], masked)
            pieces.append(_written_out(*read, causal, scaling, softcap, sinks))
        return torch.cat(pieces, 1)
    # Rows of a key head's queries side by side: keys and values are not repeated.
    scores = folded_heads(query, key.shape[1]) @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, heads, rows, -1)
    keys = scores.shape[3]
    if causal:
        ahead = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(1 + keys - rows)
        scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, -1, rows, 1)
        scores = torch.cat([scores, column], 3)
    weights = torch.softmax(scores, -1, dtype=None if softcap is None else torch.float32)
    weights = weights[..., :keys].to(query.dtype).reshape(batch, key.shape[1], -1, keys)
    out = (weights @ value).view(batch, heads, rows, -1)
    return out.transpose(1, 2).contiguous()


def folded_heads(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View ``query [batch, heads, rows, head_dim]`` as rows of the key heads they look at.

    Neighbouring heads share a key head: ``[batch, kv_heads, heads / kv_heads * rows, head_dim]``.
    """
    return query.reshape(query.shape[0], kv_heads, -1, query.shape[3])


def unfolded_heads(out: torch.Tensor, groups: int) -> torch.Tensor:
    """Turn attention's output for `folded_heads` into ``[batch, rows, heads, head_dim]``.

    Kernels lay it out in different ways, the memory-efficient one with rows before heads, so that
    it cannot be viewed as one row a head.
    """
    batch, kv_heads, folded, size = out.shape
    by_group: torch.Tensor = out.unflatten(2, (groups, folded // groups)).permute(0, 3, 1, 2, 4)
    return by_group.reshape(batch, folded // groups, kv_heads * groups, size)


def install(model: PreTrainedModel) -> None:
    """Make ``model`` use this attention; undone by ``model.set_attn_implementation(...)``.

    Raises:
        ConfigurationError: its layers have no place for another attention.
    """
    AttentionInterface.register(ATTENTION_NAME, attend)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ConfigurationError(
            f"{type(model).__name__} computes attention itself, and transformers can put no other "
            f"in its place. {ELSE}"
        )
