"""The numbers of a run's tables: each one's name, heading, unit, digits, help and function, once.

`summarize` fills the rows of ``summary.json`` from :data:`METRICS`; console, tables, CSV files, the
report, W&B and docs/metrics.md take headings, digits and help from it. A metric's name is its key
everywhere; its interval's key is ``NAME_ci``. The words for standings are here for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from specbench.results.estimate import INTERVAL, Interval

Measured: TypeAlias = tuple[float | None, Interval | None]  # a number and its 95 % interval


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that every row of ``summary.json`` has.

    Attributes:
        name: its key; ``heading``: of its column; ``unit``: "" of a ratio.
        digits: after the point, in text.
        has_interval: whether ``NAME_ci`` stands beside it.
        help: one sentence, for the documentation and the report.
        function: of a sample of cases and a label: the number and its interval.
    """

    name: str
    heading: str
    unit: str
    digits: int
    has_interval: bool
    help: str
    function: Callable[[Any, str], Measured]  # of a `statistics.summary.Sample`, which imports this

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
        "tokens/step",
        2,
        True,
        "Mean accepted tokens: Σ(n_new − 1) / Σ steps, summed over all cases before dividing. "
        "AR decoding has 1.00.",
        lambda sample, label: sample.mat(label),
    ),
    Metric(
        "mat_per_request",
        "MAT per request",
        "tokens/step",
        2,
        False,
        "The plain mean over turns of (n_new − 1) / steps: short answers count as much as long.",
        lambda sample, label: sample.mat_per_request(label),
    ),
    Metric(
        "mat_token_weighted",
        "MAT by tokens",
        "tokens/step",
        2,
        False,
        "The mean over turns of (n_new − 1) / steps, each weighted by n_new − 1. Never below MAT.",
        lambda sample, label: sample.mat_token_weighted(label),
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "tokens/s",
        1,
        True,
        "Σ(n_new − 1) / Σ decode_s over the timed cases; other estimators have their own speed.",
        lambda sample, label: sample.tokens_per_s(label),
    ),
    Metric(
        "end_to_end_tokens_per_s",
        "end-to-end tokens/s",
        "tokens/s",
        1,
        False,
        "Σ n_new / Σ wall_s: the prompt's pass is in the time and its token among the new ones.",
        lambda sample, label: sample.end_to_end_tokens_per_s(label),
    ),
    Metric(
        "speedup",
        "speedup",
        "",
        2,
        True,
        "tokens/s of the method over tokens/s of AR decoding, on the same cases of the same run.",
        lambda sample, label: sample.speedup(label, sample.baseline),
    ),
    Metric(
        "geomean_speedup",
        "geo. mean",
        "",
        2,
        True,
        "The geometric mean over cases of each case's speedup.",
        lambda sample, label: sample.geomean_speedup(label),
    ),
    Metric(
        "end_to_end_speedup",
        "end-to-end",
        "",
        2,
        True,
        "The ratio of end-to-end tokens/s: the speedup with the prompt's pass in the time.",
        lambda sample, label: sample.end_to_end_speedup(label),
    ),
    Metric(
        "speedup_eager",
        "over eager ar",
        "",
        2,
        True,
        "Speedup over AR decoding whose kernels are launched one by one, as most papers compare.",
        lambda sample, label: sample.speedup_over_engine(label, "eager"),
    ),
    Metric(
        "speedup_graph",
        "over graph ar",
        "",
        2,
        True,
        "Speedup over AR decoding whose passes are replayed as CUDA graphs.",
        lambda sample, label: sample.speedup_over_engine(label, "graph"),
    ),
    Metric(
        "bandwidth_share",
        "bandwidth share",
        "",
        2,
        False,
        "The part of the memory's read speed that AR decoding reaches with its weights.",
        lambda sample, label: sample.bandwidth_share(label),
    ),
    Metric(
        "joules_per_token",
        "J/token",
        "J/token",
        2,
        False,
        "Energy per new token, prefill included, over turns whose energy was measured.",
        lambda sample, label: sample.joules_per_token(label),
    ),
)
METRIC: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def standing_word(verdict: str) -> str:
    """Name a standing of ``summary.json`` as every table, legend, report and W&B run does."""
    return "too few cases" if verdict == "too few" else verdict
