"""The lossless audit: is a difference from plain greedy decoding a near tie or a bug?

Kernels of different row counts round differently, so a tie between two tokens may go either way.
A differing output is therefore replayed through plain one-token passes: if every emitted token is
(nearly) the maximum there, plain decoding could have produced this output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from specbench.arrays import first_difference
from specbench.decoding.structs import DraftTree
from specbench.decoding.turn import PassTarget
from specbench.results.records import Lossless

# Measured instead in half precision: specbench.models.checks.audit_tolerance.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


def audit_output(
    target: PassTarget,
    prompt: Sequence[int],
    output: Sequence[int],
    reference: Sequence[int],
    tolerance: float,
    *,
    ended_rightly: bool = True,
) -> Lossless:
    """Compare a greedy output with the reference from plain decoding, and explain a difference.

    A difference is a ``near_tie`` if every emitted token is within ``tolerance`` of the maximum of
    a one-token pass, teacher-forced on the method's output; otherwise a ``bug``. An output that did
    not end at an end token or at the limit (``ended_rightly``) is a bug whatever its logits.
    The target's cache is overwritten.
    """
    first = first_difference(output, reference)
    if first is None:
        return Lossless(verdict="equal")
    gap = max_gap(target, prompt, output)
    explained = ended_rightly and gap <= tolerance
    return Lossless(
        verdict="near_tie" if explained else "bug",
        first_diff=first,
        gap=gap if math.isfinite(gap) else None,
    )


@torch.inference_mode()
def max_gap(target: PassTarget, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Largest shortfall of an emitted token below the maximum, by one-token passes."""
    scores = target.prefill(np.asarray(prompt, dtype=np.int64))
    worst = 0.0
    nothing = np.empty(0, dtype=np.int64)
    for i, token in enumerate(output):
        row = scores.logits[-1].double()
        shortfall = float(row.max() - row[token])
        worst = max(worst, shortfall) if shortfall == shortfall else float("inf")
        if i + 1 < len(output):
            scores = target.forward(token, DraftTree.empty())
            target.commit(DraftTree.empty(), nothing)
    return worst
