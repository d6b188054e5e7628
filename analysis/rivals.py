"""A method against the best of all other labels: ``python -m analysis.rivals RUNS --method NAME``.

For each label of the method in each run under RUNS: its tokens/s over the fastest other label's,
plain decoding and what else stands in the run, other labels of the method not. The interval (95 %)
holds whichever of the others truly is the fastest (Hsu's comparison with the best).

The fastest of several labels on the very cases that are compared owes part of its lead to luck, and
no user knows it beforehand. So a second ratio is over a rival chosen apart: for each case, the
label that was the fastest on all other cases. ``--least R`` exits with 1 unless a label of the
method reaches this second ratio in each run. ``--csv FILE`` writes the table.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.arrays import FloatArray
from specbench.errors import ResultsError, unknown_name
from specbench.results.estimate import Interval
from specbench.results.names import display_name
from specbench.results.statistics.aggregate import DECODE, TIMED_COMMITTED, Pooled, pool
from specbench.results.statistics.multiple import over_best
from specbench.results.statistics.summary import Sample
from specbench.storage import jsonl

_APART = "the best by the other cases"


@dataclass(frozen=True, slots=True)
class Rivalry:
    """A label's speed over the best of the method's rivals.

    Attributes:
        rival: the fastest of them here.
        interval: of the ratio, over whichever is the fastest; None with too few cases.
        apart: the ratio over the rival that the other cases choose, case by case.
        apart_interval: of it; None with too few cases.
    """

    label: str
    rival: str
    ratio: float
    interval: Interval | None
    apart: float
    apart_interval: Interval | None
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
    apart = Sample(_with_chosen_apart(pooled, [run.labels[i] for i in others]), "paired", run.seed)
    found = []
    for i in own:
        ratio = sample.speedup(run.labels[i], run.labels[fastest])[0] or math.nan
        interval = None if speeds is None else over_best(speeds, i, np.array(others)).interval
        labels = run.labels[i], run.labels[fastest]
        over, around = apart.speedup(run.labels[i], _APART)
        found.append(Rivalry(*labels, ratio, interval, over or math.nan, around, sample.n_timed))
    return found


def _with_chosen_apart(pooled: Pooled, rivals: Sequence[str]) -> Pooled:
    """The timed cases with one label more: each case as the rival ran it that the others choose."""
    timed = [
        i
        for i in range(len(pooled.cases))
        if all(t[0, i, DECODE] > 0 for t in pooled.totals.values())
    ]
    pooled = pooled.only(timed)
    tokens, seconds = (
        np.stack([pooled.totals[rival][0, :, column] for rival in rivals])
        for column in (TIMED_COMMITTED, DECODE)
    )
    speeds = _without_each(tokens) / _without_each(seconds)  # [rivals, cases]
    chosen = [pooled.totals[rivals[best]][:, i] for i, best in enumerate(speeds.argmax(axis=0))]
    return replace(pooled, totals=pooled.totals | {_APART: np.stack(chosen, axis=1)})


def _without_each(values: FloatArray) -> FloatArray:
    left: FloatArray = values.sum(axis=1, keepdims=True) - values
    return left


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, searched recursively")
    parser.add_argument("--method", required=True, help="whose labels are compared")
    parser.add_argument("--least", type=float, default=0.0, help="ratio that one label must reach")
    parser.add_argument("--csv", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    runs = load_runs(options.runs)
    found = [rivalries(run, options.method) for run in runs]
    rows = [_row(run, rivalry) for run, those in zip(runs, found, strict=True) for rivalry in those]
    table = Table(caption="ratios of tokens/s, with 95 % intervals")
    shown = [h for h in rows[0] if not h.endswith((" low", " high", "code"))]
    for heading in shown:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row, heading) for heading in shown))
    Console(width=118).print(table)
    if options.csv:
        with jsonl.replacing(options.csv) as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    reached = all(max(row.apart for row in those) >= options.least for those in found)
    return 0 if reached else 1


def _row(run: Run, rivalry: Rivalry) -> dict[str, str | int | float]:
    """Cells by heading; an interval with too few cases has none."""
    row: dict[str, str | int | float] = {"data set": display_name(run.dataset)}
    row |= {"label": rivalry.label, "best of the others": rivalry.rival}
    for name, ratio, interval in (
        ("ratio", rivalry.ratio, rivalry.interval),
        ("apart", rivalry.apart, rivalry.apart_interval),
    ):
        low, high = interval or ("too few", "too few")
        row |= {name: ratio, f"{name} low": low, f"{name} high": high}
    return row | {"cases": rivalry.n_cases, "code": run.code}


def _cell(row: Mapping[str, str | int | float], heading: str) -> Text:
    value = row[heading]
    if not isinstance(value, float):
        return Text(str(value))
    low, high = row[f"{heading} low"], row[f"{heading} high"]
    return Text(f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if isinstance(low, float) else ""))


if __name__ == "__main__":
    sys.exit(main())
