"""How many draft passes fit into one target pass: the r of CARD, the gamma of PEARL."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from specbench.decoding.device import seconds
from specbench.decoding.structs import DraftTree
from specbench.models.draft.model import DraftModel
from specbench.models.target import Target

_TEXT = np.zeros(64, dtype=np.int64)  # what both have read
_ROUNDS = 5


def latency_ratio(
    target: Target,
    draft: DraftModel,
    measured: dict[str, int],
    knob: str,
    target_rows: int,
    draft_rows: int,
) -> int:
    """`passes_per_target_pass`, or what an earlier start of the run found for ``knob``.

    That is what ``measured`` holds, or gets.
    """
    if knob not in measured:
        measured[knob] = passes_per_target_pass(target, draft, target_rows, draft_rows)
    return measured[knob]


def passes_per_target_pass(
    target: Target, draft: DraftModel, target_rows: int, draft_rows: int
) -> int:
    """``ceil(t_target / t_draft)``, at least 1, of passes with so many rows; empties both caches.

    The root is one of ``target_rows``; they are fewer where the target has no room.
    """
    # In a union the tree that all parts share may be smaller than a part's own.
    chain = DraftTree.chain(_TEXT[:1].repeat(min(target_rows - 1, target.max_nodes)))
    nodes, parents = _TEXT[:1].repeat(draft_rows), np.full(draft_rows, -1)

    def draft_pass() -> None:
        draft.extend(nodes, parents, own=True)  # as the methods that ask call it
        draft.drop_nodes()

    target.prefill(_TEXT)
    target_s = _median_seconds(lambda: target.forward(0, chain), target.device)
    target.cache.reset()
    draft.begin(_TEXT)
    draft_s = _median_seconds(draft_pass, draft.device)
    draft.begin(_TEXT[:1])
    return max(math.ceil(target_s / draft_s), 1)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of a few calls, each waited for; the first one warms up."""
    return median([seconds(run, device) for _ in range(1 + _ROUNDS)][1:])
