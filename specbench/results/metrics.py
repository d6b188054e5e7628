"""The numbers of a run's tables: each one's name, heading, unit and definition, once.

A metric's name is its key in ``summary.json`` and everywhere else, and the method of
`specbench.results.statistics.summary.Sample` that computes it; its interval's key is ``NAME_ci``.
Console, tables, CSV files, the report, W&B and docs/metrics.md take headings and help from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from specbench.results.estimate import INTERVAL, Interval

Measured: TypeAlias = tuple[float | None, Interval | None]  # a number and its 95 % interval


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that every row of ``summary.json`` has.

    Attributes:
        name: its key; ``heading``: of its column.
        help: one sentence, for the documentation and the report.
        has_interval: whether ``NAME_ci`` stands beside it.
        unit: "" of a ratio.
    """

    name: str
    heading: str
    help: str
    has_interval: bool = True
    unit: str = ""

    @property
    def interval_name(self) -> str:
        """The key of its interval."""
        return f"{self.name}_ci"

    @property
    def column(self) -> str:
        """The heading of a table's column, which says whether intervals stand there."""
        return self.heading + INTERVAL if self.has_interval else self.heading


METRICS = (
    Metric(
        "mat",
        "MAT",
        "Mean accepted tokens: Σ(n_new − 1) / Σ steps, summed over all cases before dividing. "
        "AR decoding has 1.00.",
        unit="tokens/step",
    ),
    Metric(
        "mat_per_request",
        "MAT per request",
        "The plain mean over turns of (n_new − 1) / steps: short answers count as much as long.",
        has_interval=False,
        unit="tokens/step",
    ),
    Metric(
        "mat_token_weighted",
        "MAT by tokens",
        "The mean over turns of (n_new − 1) / steps, each weighted by n_new − 1. Never below MAT.",
        has_interval=False,
        unit="tokens/step",
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "Σ(n_new − 1) / Σ decode_s over the timed cases; other estimators have their own speed.",
        unit="tokens/s",
    ),
    Metric(
        "end_to_end_tokens_per_s",
        "end-to-end tokens/s",
        "Σ n_new / Σ wall_s: the prompt's pass is in the time and its token among the new ones.",
        has_interval=False,
        unit="tokens/s",
    ),
    Metric(
        "speedup",
        "speedup",
        "tokens/s of the method over tokens/s of AR decoding, on the same cases of the same run.",
    ),
    Metric(
        "geomean_speedup",
        "geo. mean",
        "The geometric mean over cases of each case's speedup.",
    ),
    Metric(
        "end_to_end_speedup",
        "end-to-end",
        "The ratio of end-to-end tokens/s: the speedup with the prompt's pass in the time.",
    ),
    Metric(
        "speedup_eager",
        "over eager ar",
        "Speedup over AR decoding whose kernels are launched one by one, as most papers compare.",
    ),
    Metric(
        "speedup_graph",
        "over graph ar",
        "Speedup over AR decoding whose passes are replayed as CUDA graphs.",
    ),
    Metric(
        "bandwidth_share",
        "bandwidth share",
        "The part of the memory's read speed that AR decoding reaches with its weights.",
        has_interval=False,
    ),
    Metric(
        "joules_per_token",
        "J/token",
        "Energy per new token, prefill included, over turns whose energy was measured.",
        has_interval=False,
        unit="J/token",
    ),
)
METRIC: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def standing_word(verdict: str, unit: str = "cases") -> str:
    """Name a standing of ``summary.json`` as every table, legend, report and W&B run does."""
    return f"too few {unit}" if verdict == "too few" else verdict
