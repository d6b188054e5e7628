"""What a target pass costs on a machine: measured once, then predicted for any draft.

A surface holds raw times of passes over a grid of rows and cached tokens (``tree``), of batch
passes over k rows of w + 1 tokens (``batch``, as in N-Grammys' Figure 1, arXiv 2411.03786), and of
the prompt's pass (``prefill``). The medians are made monotone: a pass with more rows or more
cached tokens is not predicted to be cheaper, whatever the noise said. Between grid points the
prediction is linear in every axis, beyond them it goes on with the last slope (``covers`` tells).

Free of torch: replay and tuning read surfaces on machines that have neither the model nor its GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import isotonic_regression

from specbench.arrays import BoolArray, FloatArray
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.results.manifest import ROWS, RowTimes
from specbench.results.prediction_error import stated_error
from specbench.storage import jsonl
from specbench.system.noted import Machine

FORMAT = "specbench-surface"
VERSION = 1
FREE = 0.10  # a draft is free while its pass costs at most this much more than the 1-row pass

_SWEEPS = 100  # of Dykstra's projections; a few suffice
_SETTLED = 1e-9  # change in a sweep at which they stop


class _Samples(TypedDict):
    axes: Mapping[str, list[int]]
    samples_s: list[Any]  # nested, one level per axis


@dataclass(frozen=True)
class Grid:
    """Times over a grid, with a monotone fit.

    Attributes:
        axes: the grid's values by name, each ascending.
        samples: seconds, one axis of the array per axis of the grid and the repeats last.
        fitted: the medians made monotone along every axis.
        error: relative error of a prediction between grid points: the root mean square of what
            leaving an inner point out costs and of the medians' own spread.
    """

    axes: Mapping[str, tuple[int, ...]]
    samples: FloatArray
    fitted: FloatArray = field(init=False)
    error: float = field(init=False)

    def __post_init__(self) -> None:
        shape = tuple(len(values) for values in self.axes.values())
        if self.samples.shape[:-1] != shape or not self.samples.size:
            raise ValueError(f"samples have the shape {self.samples.shape}, the axes {shape}")
        if any(list(v) != sorted(set(v)) for v in self.axes.values()):
            raise ValueError("an axis is not ascending")
        if not np.isfinite(self.samples).all() or (self.samples <= 0).any():
            raise ValueError("a time is not a positive number")
        # In logarithms, so that a percent counts the same in a short pass and in a long one.
        medians = np.log(np.median(self.samples, axis=-1))
        object.__setattr__(self, "fitted", np.exp(monotone_fit(medians)))
        object.__setattr__(self, "error", float(np.hypot(self._gap_error(), self._noise())))

    def predict(self, *coordinates: FloatArray) -> FloatArray:
        """Seconds at points given by one array per axis, in the axes' order.

        Linear between grid points and beyond them; an axis of one value does not matter.
        """
        points = np.stack([np.asarray(c, dtype=float) for c in coordinates], axis=-1)
        kept = [i for i, values in enumerate(self.axes.values()) if len(values) > 1]
        if not kept:
            return np.full(len(points), float(self.fitted.squeeze()))
        axes = [np.asarray(v, dtype=float) for v in self.axes.values() if len(v) > 1]
        found: FloatArray = RegularGridInterpolator(
            axes,
            self.fitted.reshape([len(axis) for axis in axes]),
            bounds_error=False,
            fill_value=None,
        )(points[:, kept])
        # Going on below the smallest value must not end in a pass that takes no time.
        bounded: FloatArray = np.maximum(found, self.fitted.min() / 2)
        return bounded

    def covers(self, *coordinates: FloatArray) -> BoolArray:
        """Whether each point lies inside the grid."""
        inside = [
            (np.asarray(c) >= values[0]) & (np.asarray(c) <= values[-1])
            for c, values in zip(coordinates, self.axes.values(), strict=True)
        ]
        within: BoolArray = np.logical_and.reduce(inside)
        return within

    def _noise(self) -> float:
        """Relative standard error of a median, pooled: 1.25 times a mean's."""
        repeats = self.samples.shape[-1]
        if repeats < 2:
            return 0.0
        middle = np.median(self.samples, axis=-1, keepdims=True)
        spread = 1.4826 * np.median(np.abs(self.samples / middle - 1.0), axis=-1)
        return float(np.sqrt(np.mean((1.25 * spread) ** 2 / repeats)))

    def _gap_error(self) -> float:
        """What the prediction misses a left-out inner grid value by, halved.

        Without the value the gap is about twice as wide as any that predictions fall into; the
        error of linear interpolation grows at least in proportion.
        """
        misses = []
        for axis, values in enumerate(self.axes.values()):
            moved = np.moveaxis(self.fitted, axis, 0)
            for i in range(1, len(values) - 1):
                share = (values[i] - values[i - 1]) / (values[i + 1] - values[i - 1])
                guess = (1 - share) * moved[i - 1] + share * moved[i + 1]
                misses.append((guess / moved[i] - 1.0).ravel() / 2)
        return float(np.sqrt(np.mean(np.concatenate(misses) ** 2))) if misses else 0.0

    def to_json(self) -> _Samples:
        axes = {name: [int(v) for v in values] for name, values in self.axes.items()}
        return {"axes": axes, "samples_s": self.samples.tolist()}

    @staticmethod
    def from_json(node: _Samples) -> Grid:
        axes = {name: tuple(int(v) for v in values) for name, values in node["axes"].items()}
        return Grid(axes, np.asarray(node["samples_s"], dtype=np.float64))


class Drafting(TypedDict):
    """What a method's draft of a step took.

    Attributes:
        context: tokens of the prompt.
        step_us: microseconds of propose and observe; or ``skipped``: why they were not measured.
    """

    label: str
    method: str
    context: int
    step_us: NotRequired[float]
    skipped: NotRequired[str]


@dataclass(frozen=True)
class CostSurface:
    """The measured cost of a model's passes on one machine.

    Attributes:
        model: name, id, dtype, device and more of what was measured.
        machine: where that was.
        prefill: seconds over ``context`` (tokens of the prompt).
        tree: seconds over ``rows`` (root and draft nodes) and ``context`` (cached tokens).
        batch: seconds over ``k``, ``w`` and ``context``; None where it was not measured.
        texts: seconds over ``texts`` read at once, ``rows`` of each and ``context``; likewise.
        drafting: per method and context.
    """

    model: Mapping[str, Any]
    machine: Machine
    prefill: Grid
    tree: Grid
    batch: Grid | None = None
    texts: Grid | None = None
    drafting: Sequence[Drafting] = ()

    def pass_s(self, k: FloatArray, width: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds of passes; ``k`` is 1 for trees, whose ``width`` counts root and nodes.

        Raises:
            NeedsNotMet: there is a batch pass, and the surface has none.
        """
        seconds = self.tree.predict(width, context)
        wide = k > 1
        if wide.any():
            seconds[wide] = self.batch_passes().predict(k[wide], width[wide] - 1, context[wide])
        return seconds

    def batch_passes(self) -> Grid:
        """The grid of the batch layout's passes.

        Raises:
            NeedsNotMet: the surface has none.
        """
        if self.batch is None:
            raise NeedsNotMet(
                f"the surface of {self.model.get('name')} has no batch passes, and a method of "
                "this run drafts in the batch layout. Measure a surface with runner.batch_k "
                "and runner.batch_w, or choose the method's tree layout."
            )
        return self.batch

    def joint_pass_s(self, texts: FloatArray, rows: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds of passes over ``rows`` of so many texts together, behind ``context`` each.

        Raises:
            ConfigurationError: the surface has no such passes.
        """
        seconds = self.tree.predict(rows, context)
        several = texts > 1
        if several.any():
            if self.texts is None:
                raise ConfigurationError(
                    f"the surface of {self.model.get('name')} has no passes of several texts. "
                    "Measure one: python run.py runner=cost"
                )
            each = (texts[several], (rows / texts)[several], context[several])
            seconds[several] = self.texts.predict(*each)
        return seconds

    def covered(self, k: FloatArray, width: FloatArray, context: FloatArray) -> float:
        """Share of passes that lie inside the measured grids."""
        inside = self.tree.covers(width, context)
        if self.batch is not None:
            inside = np.where(k > 1, self.batch.covers(k, width - 1, context), inside)
        return float(inside.mean()) if len(inside) else 1.0

    @functools.cached_property
    def stated_error(self) -> tuple[float, str]:
        """The error of speedups that it predicts, and words: see `prediction_error`."""
        return stated_error(self.model, self.machine, self.tree.error)

    def prefill_s(self, n_prompt: int) -> float:
        return float(self.prefill.predict(np.array([n_prompt], dtype=np.float64))[0])

    def nodes_within_budget(self, context: int, free: float = FREE) -> int:
        """Draft nodes that ride along for at most ``free`` of the 1-row pass's time."""
        rows = np.arange(1, self.tree.axes["rows"][-1] + 1)
        seconds = self.tree.predict(rows.astype(np.float64), np.full(len(rows), float(context)))
        return int(np.flatnonzero(seconds <= (1.0 + free) * seconds[0])[-1])

    def row_times(self, context: int = 256) -> RowTimes:
        """Seconds of a pass by its rows, behind about ``context`` tokens."""
        nearest = min(self.tree.axes["context"], key=lambda tokens: abs(tokens - context))
        rows = np.array([n for n in ROWS if n <= self.tree.axes["rows"][-1]], np.float64)
        seconds = self.tree.predict(rows, np.full(len(rows), float(nearest)))
        return {
            "context": nearest,
            "seconds": {f"{n:.0f}": float(s) for n, s in zip(rows, seconds, strict=True)},
        }

    def write(self, path: Path) -> None:
        value = {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(self.model),
            "machine": self.machine,
            "prefill": self.prefill.to_json(),
            "tree": self.tree.to_json(),
            "batch": None if self.batch is None else self.batch.to_json(),
            "texts": None if self.texts is None else self.texts.to_json(),
            "drafting": list(self.drafting),
        }
        jsonl.write_json(path, value)

    @staticmethod
    def read(path: Path) -> CostSurface:
        """Read a saved surface.

        Raises:
            ConfigurationError: there is no such file, or it is not a surface of this version.
        """
        if not path.is_file():
            raise ConfigurationError(
                f"there is no surface {path}. Name a file below surfaces/, or measure one: "
                "python run.py runner=cost"
            )
        node = jsonl.read_json(path)
        try:
            if (node["format"], node["version"]) != (FORMAT, VERSION):
                raise ValueError(f"it is {node['format']} of version {node['version']}")
            return CostSurface(
                model=node["model"],
                machine=node["machine"],
                prefill=Grid.from_json(node["prefill"]),
                tree=Grid.from_json(node["tree"]),
                batch=None if node["batch"] is None else Grid.from_json(node["batch"]),
                # Surfaces measured before several texts were have none.
                texts=None if node.get("texts") is None else Grid.from_json(node["texts"]),
                drafting=node["drafting"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is damaged or no cost surface of version {VERSION} ({error}). "
                "Measure one: python run.py runner=cost"
            ) from error


def monotone_fit(values: FloatArray) -> FloatArray:
    """The array closest to ``values`` (least squares) that decreases along no axis.

    Dykstra's alternating projections: along one axis the projection is isotonic regression, and
    the corrections carried from sweep to sweep lead to the projection onto all axes at once.
    """
    fit = np.array(values, dtype=np.float64)
    corrections = [np.zeros_like(fit) for _ in range(fit.ndim)]
    for _ in range(_SWEEPS):
        before = fit.copy()
        for axis, correction in enumerate(corrections):
            wanted = fit + correction
            fit = np.apply_along_axis(lambda line: isotonic_regression(line).x, axis, wanted)
            corrections[axis] = wanted - fit
        if np.abs(fit - before).max() <= _SETTLED:
            break
    return fit
