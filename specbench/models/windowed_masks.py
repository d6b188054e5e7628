"""Masks of sliding windows, by window size, for a pass in which some of them hide something."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Additive = Callable[[torch.Tensor], torch.Tensor]  # what is seen, as an additive mask


def prompt_windows(
    windows: Iterable[int], positions: torch.Tensor, additive: Additive
) -> dict[int, torch.Tensor]:
    """Of a prompt at ``positions [n]`` on an empty cache: ``[1, 1, n, n]`` each."""
    reached = [window for window in windows if len(positions) > window]
    if not reached:
        return {}
    behind = positions[:, None] - positions[None, :]
    return {w: additive((behind >= 0) & (behind < w))[None, None] for w in reached}


def windowed_masks(
    windows: Iterable[int],
    text: torch.Tensor,
    own: torch.Tensor,
    rows: int,
    visible: torch.Tensor | None,
    additive: Additive,
) -> dict[int, torch.Tensor]:
    """Of a pass behind committed text: ``[1, 1, rows, text + own]`` each.

    ``text`` are the positions of committed tokens and ``own`` of all others, the last of which are
    the pass's ``rows``; ``visible [rows, own]`` says which of ``own`` a row sees; None: all.
    """
    masks = {}
    for window in windows:
        if len(text) + len(own) > window:
            seen = own[-rows:, None] - torch.cat([text, own])[None, :] < window
            if visible is not None:
                seen[:, len(text) :] &= visible
            masks[window] = additive(seen)[None, None]
    return masks
