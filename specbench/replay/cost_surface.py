"""The verification cost of a machine: pass times measured once, then predicted for any draft.

A surface holds raw times of passes over grids. Their medians are made monotone: a pass with more
rows or more cached tokens is never predicted to be cheaper. Predictions are linear between grid
points and keep the last slope beyond them. Free of torch: replay reads surfaces on machines
that have neither the model nor its GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import isotonic_regression

from specbench.arrays import BoolArray, FloatArray
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.results.manifest import ROWS, RowTimes
from specbench.results.prediction_error import stated_error
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject
from specbench.system.hardware import Machine

FORMAT = "specbench-surface"
VERSION = 1
GRIDS = ("prefill", "tree", "batch", "texts")
FREE = 0.10  # a draft is free while its pass costs at most this much more than the 1-row pass

_SWEEPS = 100  # most sweeps of Dykstra's projections; a few suffice
_SETTLED = 1e-9  # change in a sweep below which they stop


@dataclass(frozen=True)
class Grid:
    """Times over a grid, with a monotone fit.

    Attributes:
        axes: the grid's values by name, each ascending.
        samples: seconds, one axis of the array per axis of the grid and the repeats last.
        fitted: the medians made monotone along every axis.
        error: pooled relative standard error of the medians.
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
        # In logarithms, so that a percent counts the same for short and long passes.
        medians = np.median(self.samples, axis=-1)
        object.__setattr__(self, "fitted", np.exp(monotone_fit(np.log(medians))))
        deviations = np.abs(self.samples / medians[..., None] - 1.0)
        spread = 1.4826 * np.median(deviations, axis=-1)  # a normal law's standard deviation
        # A median's standard error is 1.25 times a mean's.
        errors = (1.25 * spread) ** 2 / self.samples.shape[-1]
        object.__setattr__(self, "error", float(np.sqrt(np.mean(errors))))

    def predict(self, *coordinates: FloatArray) -> FloatArray:
        """Predict seconds at points given by one array per axis, in the axes' order."""
        points = np.stack([np.asarray(c, dtype=float) for c in coordinates], axis=-1)
        varied = [i for i, values in enumerate(self.axes.values()) if len(values) > 1]
        if not varied:
            return np.full(len(points), float(self.fitted.squeeze()))
        axes = [np.asarray(v, dtype=float) for v in self.axes.values() if len(v) > 1]
        grid = RegularGridInterpolator(
            axes, self.fitted.squeeze(), bounds_error=False, fill_value=None
        )
        seconds = grid(points[:, varied])
        # Extrapolation below the smallest value must not predict a pass that takes no time.
        bounded: FloatArray = np.maximum(seconds, self.fitted.min() / 2)
        return bounded

    def covers(self, *coordinates: FloatArray) -> BoolArray:
        inside = [
            (np.asarray(c) >= values[0]) & (np.asarray(c) <= values[-1])
            for c, values in zip(coordinates, self.axes.values(), strict=True)
        ]
        within: BoolArray = np.logical_and.reduce(inside)
        return within

    def to_json(self) -> JsonObject:
        axes = {name: list(map(int, values)) for name, values in self.axes.items()}
        return {"axes": axes, "samples_s": self.samples.tolist()}

    @staticmethod
    def from_json(node: JsonObject) -> Grid:
        axes = {name: tuple(map(int, values)) for name, values in node["axes"].items()}
        return Grid(axes, np.asarray(node["samples_s"], dtype=np.float64))


@dataclass(frozen=True)
class CostSurface:
    """The measured cost of a model's passes on one machine.

    Attributes:
        prefill: seconds over ``context`` (tokens of the prompt).
        tree: seconds over ``rows`` (root and draft nodes) and ``context`` (cached tokens).
        batch: seconds over ``k``, ``w`` and ``context``: k rows of w + 1 tokens, as in N-Grammys'
            Figure 1 (arXiv 2411.03786).
        texts: seconds over ``texts`` (sequences of a batch), ``rows`` of each and ``context``.
    """

    model: Mapping[str, Any]
    machine: Machine
    prefill: Grid
    tree: Grid
    batch: Grid | None = None
    texts: Grid | None = None

    def pass_s(self, k: FloatArray, width: FloatArray, context: FloatArray) -> FloatArray:
        """Predict passes; ``k`` is 1 for trees, whose ``width`` counts root and nodes."""
        seconds = self.tree.predict(width, context)
        wide = k > 1
        if wide.any():
            seconds[wide] = self.batch_passes().predict(k[wide], width[wide] - 1, context[wide])
        return seconds

    def batch_passes(self) -> Grid:
        """Return the grid of the batch layout's passes (NeedsNotMet without one)."""
        if self.batch is None:
            raise NeedsNotMet(
                f"the surface of {self.model.get('name')} has no batch passes, and a method of "
                "this run drafts in the batch layout. Measure a surface with runner.batch_k "
                "and runner.batch_w, or choose the method's tree layout."
            )
        return self.batch

    def joint_pass_s(self, sizes: FloatArray, rows: FloatArray, context: FloatArray) -> FloatArray:
        """Predict passes over ``rows`` in all of ``sizes`` sequences, after ``context`` each."""
        seconds = self.tree.predict(rows, context)
        several = sizes > 1
        if several.any():
            if self.texts is None:
                raise ConfigurationError(
                    f"the surface of {self.model.get('name')} has no passes of several texts. "
                    "Measure one: python run.py runner=cost"
                )
            points = (sizes[several], (rows / sizes)[several], context[several])
            seconds[several] = self.texts.predict(*points)
        return seconds

    def covered(self, k: FloatArray, width: FloatArray, context: FloatArray) -> float:
        inside = self.tree.covers(width, context)
        if self.batch is not None:
            inside = np.where(k > 1, self.batch.covers(k, width - 1, context), inside)
        return float(inside.mean()) if len(inside) else 1.0

    @functools.cached_property
    def stated_error(self) -> tuple[float, str]:
        """The error of predicted speedups, and a sentence on it: see `prediction_error`."""
        return stated_error(self.model, self.machine, self.tree.error)

    def prefill_s(self, n_prompt: int) -> float:
        return float(self.prefill.predict(np.array([n_prompt], dtype=np.float64))[0])

    def nodes_within_budget(self, context: int, free: float = FREE) -> int:
        """Count the draft nodes that cost at most ``free`` of the 1-row pass's time."""
        rows = np.arange(1, self.tree.axes["rows"][-1] + 1)
        seconds = self.tree.predict(rows.astype(np.float64), np.full(len(rows), float(context)))
        return int(np.flatnonzero(seconds <= (1.0 + free) * seconds[0])[-1])

    def row_times(self, context: int = 256) -> RowTimes:
        """Predict a pass by its rows, after about ``context`` tokens."""
        nearest = min(self.tree.axes["context"], key=lambda tokens: abs(tokens - context))
        rows = np.array([n for n in ROWS if n <= self.tree.axes["rows"][-1]], np.float64)
        predicted = self.tree.predict(rows, np.full(len(rows), float(nearest)))
        seconds = {f"{n:.0f}": float(s) for n, s in zip(rows, predicted, strict=True)}
        return {"context": nearest, "seconds": seconds}

    def write(self, path: Path) -> None:
        node = {"format": FORMAT, "version": VERSION, "model": dict(self.model)}
        grids = {name: getattr(self, name) for name in GRIDS}
        node |= {name: grid and grid.to_json() for name, grid in grids.items()}
        jsonl.write_json(path, node | {"machine": self.machine})

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
            fields: dict[str, Any] = {key: node[key] for key in ("model", "machine")}
            fields |= {key: Grid.from_json(node[key]) for key in GRIDS if node.get(key)}
            return CostSurface(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is damaged or not a cost surface of version {VERSION} ({error}). "
                "Measure one: python run.py runner=cost"
            ) from error


def monotone_fit(values: FloatArray) -> FloatArray:
    """Find the array closest to ``values`` (least squares) that decreases along no axis.

    Dykstra's alternating projections; along one axis the projection is isotonic regression.
    """
    fit = np.array(values, dtype=np.float64)
    corrections = [np.zeros_like(fit) for _ in range(fit.ndim)]
    for _ in range(_SWEEPS):
        before = fit.copy()
        for axis, correction in enumerate(corrections):
            target = fit + correction
            fit = np.apply_along_axis(lambda line: isotonic_regression(line).x, axis, target)
            corrections[axis] = target - fit
        if np.abs(fit - before).max() <= _SETTLED:
            break
    return fit
