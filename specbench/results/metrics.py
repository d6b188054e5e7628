"""The numbers of a run's tables: each one's name, heading, unit and definition, once.

A metric's name is its key in ``summary.json`` and everywhere else; its interval's is ``NAME_ci``.
:meth:`specbench.results.statistics.summary.Sample.row` computes it; console, tables, CSV files, the
report, W&B and docs/metrics.md take headings and help from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from specbench.results.cells import INTERVAL, Interval

Measured: TypeAlias = tuple[float | None, Interval | None]  # a number and its 95 % interval


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that every row of ``summary.json`` has."""

    name: str  # its key
    heading: str
    unit: str = ""  # of a ratio none
    has_interval: bool = True  # as ``NAME_ci``

    @property
    def help(self) -> str:
        """Its definition, in a sentence for the documentation and the report."""
        return _HELP[self.name]

    @property
    def interval_name(self) -> str:
        """The key of its interval."""
        return f"{self.name}_ci"

    @property
    def column(self) -> str:
        """The heading of a table's column, which says whether it has intervals."""
        return self.heading + INTERVAL if self.has_interval else self.heading


_HELP = {
    "mat": "Mean accepted tokens: Σ(n_new − 1) / Σ steps, summed over all cases before dividing. "
    "AR decoding has 1.00.",
    "mat_per_request": "The plain mean over turns of (n_new − 1) / steps: short answers count as "
    "much as long.",
    "mat_token_weighted": "The mean over turns of (n_new − 1) / steps, each weighted by n_new − 1. "
    "Never below MAT.",
    "tokens_per_s": "Σ(n_new − 1) / Σ decode_s over the timed cases; other estimators have their "
    "own speed.",
    "end_to_end_tokens_per_s": "Σ n_new / Σ wall_s: the prompt's pass is in the time and its token "
    "among the new ones.",
    "speedup": "tokens/s of the method over tokens/s of AR decoding, on the same cases of the same "
    "run.",
    "geomean_speedup": "The geometric mean over cases of each case's speedup.",
    "end_to_end_speedup": "The ratio of end-to-end tokens/s: the speedup with the prompt's pass in "
    "the time.",
    "speedup_eager": "Speedup over AR decoding whose kernels are launched one by one, as most "
    "papers compare.",
    "speedup_graph": "Speedup over AR decoding whose passes are replayed as CUDA graphs.",
    "bandwidth_share": "The part of the memory's read speed that AR decoding reaches with its "
    "weights.",
    "joules_per_token": "Energy per new token, prefill included, over turns whose energy was "
    "measured.",
}

METRICS = (
    Metric("mat", "MAT", "tokens/step"),
    Metric("mat_per_request", "MAT per request", "tokens/step", has_interval=False),
    Metric("mat_token_weighted", "MAT by tokens", "tokens/step", has_interval=False),
    Metric("tokens_per_s", "tokens/s", "tokens/s"),
    Metric("end_to_end_tokens_per_s", "end-to-end tokens/s", "tokens/s", has_interval=False),
    Metric("speedup", "speedup"),
    Metric("geomean_speedup", "geo. mean"),
    Metric("end_to_end_speedup", "end-to-end"),
    Metric("speedup_eager", "over eager ar"),
    Metric("speedup_graph", "over graph ar"),
    Metric("bandwidth_share", "bandwidth share", has_interval=False),
    Metric("joules_per_token", "J/token", "J/token", has_interval=False),
)
METRIC: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def standing_word(verdict: str, unit: str = "cases") -> str:
    """Name a standing of ``summary.json`` as every table, legend, report and W&B run does."""
    return f"too few {unit}" if verdict == "too few" else verdict
