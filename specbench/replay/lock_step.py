"""What texts cost that are decoded in lock-step, by a cost surface.

A step of a group reads the rows of all texts that are not over yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.arrays import FloatArray
from specbench.replay.cost_surface import CostSurface


@dataclass(frozen=True, slots=True)
class TextSteps:
    """A text of a group.

    Attributes:
        passes: ``[steps, 3]`` k, width and context of each, see ``RecordedTarget.passes``.
        prefill_s, setup_s: of its prompt's pass, and of its drafter outside the steps.
        drafting_s: of its drafter in the steps, all together.
    """

    passes: FloatArray
    prefill_s: float
    setup_s: float
    drafting_s: float


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Predicted seconds of a group.

    Attributes:
        prefill_s, setup_s: of all texts.
        step_s: of each step; a text with n steps ends with the n-th.
        full_s: of the steps in which all texts run.
        covered: share of the passes that lie inside the surface's grid.
    """

    prefill_s: float
    setup_s: float
    step_s: FloatArray
    full_s: float
    covered: float


def group_times(texts: Sequence[TextSteps], surface: CostSurface) -> GroupTimes:
    """Schedule the texts' steps, one of each at a time, and price them.

    Raises:
        ConfigurationError: the surface has no passes of several texts.
    """
    counts = np.array([len(text.passes) for text in texts])
    steps = int(counts.max(initial=0))
    running, rows, context, drafting = np.zeros((4, steps))
    for text, n in zip(texts, counts, strict=True):
        if n:
            k, width, cached = text.passes.T
            running[:n] += 1
            # A batch layout is read as the tree that it is.
            rows[:n] += np.where(k > 1, 1 + k * (width - 1), width)
            context[:n] += cached
            drafting[:n] += text.drafting_s / n
    passes = (running, rows, context / running)
    step_s = surface.joint_pass_s(*passes) + drafting
    return GroupTimes(
        math.fsum(text.prefill_s for text in texts),
        math.fsum(text.setup_s for text in texts),
        step_s,
        math.fsum(step_s[: int(counts.min(initial=steps))]),
        surface.joint_covered(*passes),
    )
