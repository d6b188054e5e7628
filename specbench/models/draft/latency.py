"""How many passes of a draft model fit into one of the target's."""

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

_TIMED_TEXT = np.zeros(64, dtype=np.int64)  # what both models have read while passes are timed
_TIMED_PASSES = 5


def latency_ratio(
    target: Target,
    draft: DraftModel,
    measured: dict[str, int],
    knob: str,
    target_rows: int,
    draft_rows: int,
) -> int:
    """Draft passes that fit into one target pass: the r of CARD, the gamma of PEARL.

    ``measured`` holds what an earlier start of the run found for ``knob``, or gets what is measured
    now (`passes_per_target_pass`).
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
    chain = DraftTree.chain(np.zeros(min(target_rows - 1, target.max_nodes), dtype=np.int64))
    nodes, parents = np.zeros(draft_rows, dtype=np.int64), np.full(draft_rows, -1)

    def draft_pass() -> None:
        draft.extend(nodes, parents, own=True)  # as the methods that ask call it
        draft.drop_nodes()

    def median_seconds(run: Callable[[], object], device: torch.device) -> float:
        """The first call warms up."""
        return median([seconds(run, device) for _ in range(1 + _TIMED_PASSES)][1:])

    target.prefill(_TIMED_TEXT)
    target_s = median_seconds(lambda: target.forward(0, chain), target.device)
    target.cache.reset()
    draft.begin(_TIMED_TEXT)
    draft_s = median_seconds(draft_pass, draft.device)
    draft.begin(_TIMED_TEXT[:1])
    return max(math.ceil(target_s / draft_s), 1)
