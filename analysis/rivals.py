"""A method against the best of all other labels: ``python -m analysis.rivals RUNS --method NAME``.

For each label of the method in each run under RUNS: its tokens/s over the fastest other label's,
plain decoding and what else stands in the run, other labels of the method not. The interval (95 %)
holds whichever of the others truly is the fastest (Hsu's comparison with the best).
``--least R`` exits with 1 unless a label of the method reaches this ratio in each run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError, unknown_name
from specbench.results.estimate import Interval
from specbench.results.names import display_name
from specbench.results.statistics.aggregate import pool
from specbench.results.statistics.multiple import over_best
from specbench.results.statistics.summary import Sample


@dataclass(frozen=True, slots=True)
class Rivalry:
    """A label's speed over the best of the method's rivals.

    Attributes:
        rival: the fastest of them here.
        interval: of the ratio, over whichever is the fastest; None with too few cases.
    """

    label: str
    rival: str
    ratio: float
    interval: Interval | None
    n_cases: int


def rivalries(run: Run, method: str) -> list[Rivalry]:
    """Each label of a method against the best label of others, in the run's order.

    Raises:
        ResultsError: the run has no times, or none but the method's labels.
        ConfigurationError: the method is not in the run.
    """
    pooled = pool(run.records, run.labels)
    if method not in pooled.methods.values():
        raise unknown_name("--method", method, sorted(set(pooled.methods.values())))
    sample = Sample(pooled, "paired", run.seed)
    own = [i for i, label in enumerate(run.labels) if pooled.methods.get(label) == method]
    others = [i for i in range(len(run.labels)) if i not in own]
    if not others or not sample.n_timed:
        raise ResultsError(f"{run.path} has no times of other methods than {method}.")
    fastest = max(others, key=lambda i: sample.tokens_per_s(run.labels[i]) or 0.0)
    speeds = sample.speeds
    found = []
    for i in own:
        ratio = sample.speedup(run.labels[i], run.labels[fastest])[0] or math.nan
        interval = None if speeds is None else over_best(speeds, i, np.array(others)).interval
        labels = run.labels[i], run.labels[fastest]
        found.append(Rivalry(*labels, ratio, interval, sample.n_timed))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, searched recursively")
    parser.add_argument("--method", required=True, help="whose labels are compared")
    parser.add_argument("--least", type=float, default=0.0, help="ratio that one label must reach")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    table = Table("data set", "label", "best of the others", caption="ratios of tokens/s")
    for heading in ("ratio", "95 %", "cases"):
        table.add_column(heading, justify="right")
    reached = True
    for run in load_runs(options.runs):
        rows = rivalries(run, options.method)
        reached &= max(row.ratio for row in rows) >= options.least
        for row in rows:
            reach = "too few" if row.interval is None else "{:.3f} to {:.3f}".format(*row.interval)
            names = (display_name(run.dataset), row.label, row.rival)
            table.add_row(*map(Text, names), f"{row.ratio:.3f}", reach, str(row.n_cases))
    Console(width=118).print(table)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
