"""How many draft passes fit into one target pass: the r of CARD, the gamma of PEARL."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbench.decoding.structs import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from specbench.decoding.structs import DraftContext
    from specbench.models.draft_model import DraftModel
    from specbench.models.target import Target

_TEXT = 64  # tokens that both have read
_ROUNDS = 5


def latency_ratio(context: DraftContext, knob: str, *, target_rows: int, draft_rows: int) -> int:
    """`passes_per_target_pass` of a run's two models, or what an earlier start of the run measured.

    Args:
        context: what ``setup`` is given; its ``measured`` is read, and gets what is measured.
        knob: whose value it is.
        target_rows: see `passes_per_target_pass`.
        draft_rows: likewise.
    """
    if knob not in context.measured:
        context.measured[knob] = passes_per_target_pass(
            context.target, context.draft_model, target_rows=target_rows, draft_rows=draft_rows
        )
    return context.measured[knob]


def passes_per_target_pass(
    target: Target, draft: DraftModel, *, target_rows: int, draft_rows: int
) -> int:
    """``ceil(t_target / t_draft)``, each the median of a few passes over a short text.

    Both caches are left empty.

    Args:
        target: the target.
        draft: the draft model.
        target_rows: rows of a target pass, the root included; fewer where the target has no room.
        draft_rows: nodes of a draft pass.

    Returns:
        At least 1.
    """
    text = np.zeros(_TEXT, dtype=np.int64)
    # In a union the tree that all parts share may be smaller than a part's own.
    chain = DraftTree.chain(text[: min(target_rows - 1, target.max_nodes)])
    nodes, parents = np.zeros(draft_rows, dtype=np.int64), np.full(draft_rows, -1)
    target.prefill(text)
    draft.begin(text)

    def draft_pass() -> None:
        draft.extend(nodes, parents, own=True)  # as the methods that measure call it
        draft.drop_nodes()

    target_s = _seconds(lambda: target.forward(0, chain), target.device)
    draft_s = _seconds(draft_pass, draft.device)
    target.cache.reset()
    draft.begin(text[:1])
    return max(math.ceil(target_s / draft_s), 1)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _ROUNDS):  # the first one warms up
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
