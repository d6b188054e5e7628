"""How far predicted speedups are from measured ones, and the intervals that say so.

A cost surface prices passes by themselves; in a run they stand between a drafter's work and other
methods' passes. What that is worth is measured: settings are run live and replayed on the same
questions (``python -m scripts.bench predicted_pairs``), and the logarithm of predicted over live is
each one's error. Part of it is the choice of questions and the clock's noise on them; the rest is
the prediction's own and goes into every interval of a predicted speedup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from specbench import paths
from specbench.arrays import FloatArray
from specbench.errors import ResultsError, first_line
from specbench.replay.cost_surface import CostSurface
from specbench.storage import jsonl

KEPT = paths.PROJECT / "surfaces" / "prediction_errors.json"
# Where nothing was measured: twice what was on the first machine, over 18 settings.
UNKNOWN = 0.15
LEVEL = 0.95
FEWEST = 5  # pairs below which nothing is concluded
_NORMAL = float(stats.norm.ppf((1 + LEVEL) / 2))


@dataclass(frozen=True, slots=True)
class PredictionError:
    """The error of predicted speedups, as logarithms: 0.1 is about 10 %.

    Attributes:
        pairs: settings that were run and predicted; 0: none on this machine, so it is `UNKNOWN`.
        bias: mean error; above 0 predictions are too fast.
        rms: root mean square beyond what questions and noise explain, the bias in it.
        coverage: share of pairs whose live speedup lies in the interval that the pairs of all other
            methods give; ``coverage_by_pair``: that all other pairs give.
        date, commit, record: of the measurement.
    """

    pairs: int = 0
    bias: float = 0.0
    rms: float = UNKNOWN
    coverage: float | None = None
    coverage_by_pair: float | None = None
    date: str = ""
    commit: str = ""
    record: str = ""

    def within(self, surface: float = 0.0) -> float:
        """A standard error for intervals: a normal one that reaches as far as Student's does.

        Args:
            surface: relative error that the surface itself claims for its passes, if it is larger.
        """
        reach = _reach(self.pairs) / _NORMAL if self.pairs else 1.0
        return max(self.rms * reach, surface)

    @property
    def words(self) -> str:
        """What intervals hold, and how it is known."""
        if not self.pairs:
            return (
                f"intervals hold a prediction error of {self.rms:.0%}, a cautious guess: no "
                "settings were run and predicted with this model on the surface's machine "
                "(python -m scripts.bench predicted_pairs)"
            )
        return (
            f"intervals hold the predictions' error, {self.rms:.1%} (root mean square; mean "
            f"{self.bias:+.1%}), measured over {self.pairs} settings that were run and predicted "
            f"on the surface's machine on {self.date}"
        )


def fitted(
    errors: Sequence[float], noise: Sequence[float], groups: Sequence[str]
) -> PredictionError:
    """What pairs say of predictions.

    Args:
        errors: logarithms of predicted over live speedups.
        noise: standard error of each, of the questions and the clock.
        groups: the method of each; settings of one method err alike.

    Raises:
        ResultsError: there are too few pairs, or of one method alone.
    """
    if len(errors) < FEWEST or len(set(groups)) < 2:
        raise ResultsError(
            f"{len(errors)} settings of {len(set(groups))} methods do not tell how far predictions "
            f"are from live runs: measure at least {FEWEST} of at least 2."
        )
    e, s, names = np.asarray(errors), np.asarray(noise), np.asarray(groups)
    return PredictionError(
        pairs=len(e),
        bias=float(e.mean()),
        rms=_beyond(e, s),
        coverage=_covered(e, s, [names != name for name in names]),
        coverage_by_pair=_covered(e, s, [np.arange(len(e)) != i for i in range(len(e))]),
    )


def _beyond(errors: FloatArray, noise: FloatArray) -> float:
    """The root mean square of errors less what noise adds to it."""
    return math.sqrt(max(0.0, float(np.mean(errors**2) - np.mean(noise**2))))


def _reach(pairs: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, pairs))


def _covered(errors: FloatArray, noise: FloatArray, others: Sequence[Any]) -> float:
    """Share of errors inside the interval that the others of each give."""
    inside = [
        abs(error) <= _reach(int(kept.sum())) * math.hypot(_beyond(errors[kept], noise[kept]), own)
        for error, own, kept in zip(errors, noise, others, strict=True)
    ]
    return float(np.mean(inside))


def machine_key(surface: CostSurface) -> dict[str, Any]:
    """What an error holds for: the surface's model and machine."""
    hardware = surface.machine["hardware"]
    model = surface.model
    return {
        **{key: model.get(key) for key in ("name", "dtype", "device", "threads")},
        **({"weights": model["weights"]} if model.get("weights") else {}),
        "cpu": hardware.get("cpu"),
        "gpus": [gpu["name"] for gpu in hardware.get("gpus") or []],
    }


def known_error(surface: CostSurface, path: Path | None = None) -> PredictionError:
    """The error that was measured with the surface's model on its machine, else `UNKNOWN`.

    Raises:
        ResultsError: the file of errors is damaged.
    """
    path = KEPT if path is None else path
    key = machine_key(surface)
    found = [error for where, error in _read(path) if where == key]
    return found[-1] if found else PredictionError()


def keep_error(surface: CostSurface, error: PredictionError, path: Path | None = None) -> None:
    """Note an error in the file where predictions find it, in place of an earlier one."""
    path = KEPT if path is None else path
    key = machine_key(surface)
    others = [(where, known) for where, known in _read(path) if where != key]
    lines = [{"of": where, **asdict(known)} for where, known in [*others, (key, error)]]
    jsonl.write_json(path, {"errors": lines})


def _read(path: Path) -> list[tuple[Mapping[str, Any], PredictionError]]:
    if not path.is_file():
        return []
    names = [field.name for field in fields(PredictionError)]
    try:
        return [
            (line["of"], PredictionError(**{name: line[name] for name in names}))
            for line in jsonl.read_json(path)["errors"]
        ]
    except (LookupError, TypeError) as error:
        raise ResultsError(f"{path} is damaged ({first_line(error)}).") from error
