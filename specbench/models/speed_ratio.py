"""How many draft passes fit into one target pass: the r of CARD, the gamma of PEARL."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import torch

from specbench.decoding.device import seconds
from specbench.decoding.models import DraftLM, TargetInfo
from specbench.decoding.structs import DraftContext

TEXT = 64  # tokens that both have read
_ROUNDS = 5


def latency_ratio(context: DraftContext, knob: str, *, target_rows: int, draft_rows: int) -> int:
    """`passes_per_target_pass` of a run's two models, or what an earlier start of the run measured.

    That is what ``context.measured`` holds for ``knob``, or gets.
    """
    if knob not in context.measured:
        target, draft = context.target, context.draft_model
        assert target is not None and draft is not None, "a draft model is there in live runs alone"
        context.measured[knob] = passes_per_target_pass(target, draft, target_rows, draft_rows)
    return context.measured[knob]


def passes_per_target_pass(
    target: TargetInfo, draft: DraftLM, target_rows: int, draft_rows: int
) -> int:
    """``ceil(t_target / t_draft)``, at least 1, of passes with so many rows; empties both caches.

    The root is one of ``target_rows``; they are fewer where the target has no room.
    """
    # In a union the tree that all parts share may be smaller than a part's own.
    target_s = target.pass_s(min(target_rows, target.max_nodes + 1))
    return max(math.ceil(target_s / draft.pass_s(draft_rows)), 1)


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of a few calls, each waited for; the first one warms up."""
    return median([seconds(run, device) for _ in range(1 + _ROUNDS)][1:])
