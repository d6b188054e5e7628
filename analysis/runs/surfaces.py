"""The cost surface of a run: how long a target pass takes, by rows and cached tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specbench.arrays import FloatArray
from specbench.paths import PROJECT
from specbench.results.estimate import Estimate
from specbench.results.manifest import RunManifest
from specbench.results.statistics.roofline import number_format, row_prices
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

_RESAMPLES = 2000
_CONTEXT = 256  # cached tokens of the passes whose cost is shown, or the nearest that were timed


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

    @property
    def has_slowdowns(self) -> bool:
        """Whether batch passes were timed, one of a single token among them."""
        batch = self.passes.get("batch")
        return batch is not None and 1 in batch.axes["k"] and 0 in batch.axes["w"]

    def slowdowns(self, context: int, seed: int) -> dict[tuple[int, int], Estimate]:
        """By (k, w): time of a batch pass over a pass of one token at the same context.

        The interval is the bootstrap's, of the ratio of medians over the repeated passes.
        """
        batch = self.passes["batch"]
        ks, ws = batch.axes["k"], batch.axes["w"]
        samples = batch.samples_s[:, :, batch.axes["context"].index(context), :]
        repeats = batch.repeats
        drawn = np.random.default_rng(seed).integers(0, repeats, (_RESAMPLES, repeats))
        one = samples[ks.index(1), ws.index(0)]
        cells = {}
        for i, k in enumerate(ks):
            for j, w in enumerate(ws):
                ratios = np.median(samples[i, j][drawn], axis=-1) / np.median(one[drawn], axis=-1)
                low, high = np.quantile(ratios, (0.025, 0.975))
                known = repeats > 1 and (k, w) != (1, 0)
                value = float(np.median(samples[i, j]) / np.median(one))
                cells[k, w] = Estimate(value, (float(low), float(high)) if known else None)
        return cells

    def cost_of_rows(self, context: int) -> dict[int, float]:
        """By tokens of a tree pass, its time over a pass of one token, at so many cached tokens.

        The medians made monotone, as predictions have them: more tokens never cost less.
        """
        from scipy.optimize import isotonic_regression  # takes long to import

        tree = self.passes["tree"]
        column = tree.axes["context"].index(context)
        medians = np.median(tree.samples_s, axis=-1)[:, column]
        fitted = np.exp(isotonic_regression(np.log(medians)).x)
        ratios = fitted / fitted[0]
        return dict(zip(tree.axes["rows"], ratios.tolist(), strict=True))


def cost_of_pass(manifest: RunManifest) -> tuple[dict[int, float], dict[str, object]]:
    """What a pass of so many tokens costs, as the run timed it or by the surface of its replay.

    Where the surface's file has gone or changed, the same one in ``surfaces/`` serves. Nothing
    without it.

    Returns:
        Time over that of one token by tokens, and the words that say at which context and by
        which file.
    """
    times = manifest.model and manifest.model.row_times
    if times and not manifest.surface:
        return row_prices(manifest), {"context": times["context"], "source": "timed in the run"}
    runner = manifest.config.get("runner") or {}
    if not runner.get("surface"):
        return {}, {}
    for path in (PROJECT / str(runner["surface"]), *_shipped()):
        if path.is_file() and file_sha256(path)[:16] == runner.get("surface_sha"):
            return _cost(path)
    return {}, {}


def _shipped() -> list[Path]:
    return sorted((PROJECT / "surfaces").glob("*.json"))


def _cost(path: Path) -> tuple[dict[int, float], dict[str, object]]:
    surface = Surface.read(path)
    contexts = surface.passes["tree"].axes["context"]
    context = min(contexts, key=lambda tokens: abs(tokens - _CONTEXT))
    return surface.cost_of_rows(context), {"context": context, "source": path.name}


def cost_on(
    processor: str | None, model: str, dtype: str
) -> tuple[dict[int, float], dict[str, object]]:
    """As :func:`cost_of_pass`, by the first file in ``surfaces/`` of processor, model and dtype."""
    for path in _shipped():
        measured = jsonl.read_json(path)
        if "model" not in measured:  # the errors of predictions lie beside the surfaces
            continue
        found, hardware = measured["model"], measured["machine"].get("hardware") or {}
        on_gpu = str(found.get("device")).startswith("cuda")
        name = hardware["gpus"][0]["name"] if on_gpu else hardware.get("cpu")
        if (name, found["name"], number_format(found)) == (processor, model, dtype):
            return _cost(path)
    return {}, {}
