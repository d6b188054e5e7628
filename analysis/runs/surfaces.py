"""The cost surface of a run: how long a target pass takes, by rows and cached tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specbench.arrays import FloatArray
from specbench.results.estimate import Estimate
from specbench.storage import jsonl

_RESAMPLES = 2000


@dataclass(frozen=True)
class PassTimes:
    """Times of one kind of pass over a grid.

    Attributes:
        axes: values by name, in the order of the samples' axes.
        samples_s: seconds ``[*axes, repeats]``.
    """

    axes: Mapping[str, Sequence[int]]
    samples_s: FloatArray

    @property
    def repeats(self) -> int:
        return int(self.samples_s.shape[-1])


@dataclass(frozen=True)
class Surface:
    """``surface.json`` of a run, as far as tables and figures show it.

    Attributes:
        passes: by kind: ``prefill`` over ``context``, ``tree`` over ``rows`` and ``context``,
            ``batch`` over ``k``, ``w`` and ``context``; what was not measured is missing.
        drafting_us: microseconds of propose and observe in a step, by label and context.
    """

    passes: Mapping[str, PassTimes]
    drafting_us: Mapping[tuple[str, int], float]

    @classmethod
    def read(cls, path: Path) -> Surface:
        file = jsonl.read_json(path)
        kinds = [kind for kind in ("prefill", "tree", "batch") if file.get(kind)]
        times = {
            kind: PassTimes(file[kind]["axes"], np.asarray(file[kind]["samples_s"], dtype=float))
            for kind in kinds
        }
        drafting = {
            (row["label"], row["context"]): float(row["step_us"])
            for row in file.get("drafting") or ()
            if "step_us" in row
        }
        return cls(times, drafting)

    def slowdowns(self, context: int, seed: int) -> dict[tuple[int, int], Estimate]:
        """Compute by (k, w) a batch pass's time over a pass of one token at the same context.

        The interval is the bootstrap's, of the ratio of medians over the repeated passes.
        """
        batch = self.passes["batch"]
        ks, ws = batch.axes["k"], batch.axes["w"]
        samples = batch.samples_s[:, :, batch.axes["context"].index(context), :]
        repeats = batch.repeats
        drawn = np.random.default_rng(seed).integers(0, repeats, (_RESAMPLES, repeats))
        medians, resampled = np.median(samples, axis=-1), np.median(samples[..., drawn], axis=-1)
        one = ks.index(1), ws.index(0)
        low, high = np.quantile(resampled / resampled[one], (0.025, 0.975), axis=-1)
        cells = {}
        for i, k in enumerate(ks):
            for j, w in enumerate(ws):
                known = repeats > 1 and (k, w) != (1, 0)
                interval = (float(low[i, j]), float(high[i, j])) if known else None
                cells[k, w] = Estimate(float(medians[i, j] / medians[one]), interval)
        return cells
