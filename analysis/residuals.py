"""Predicted speedups beside measured ones: ``python -m analysis.residuals LIVE REPLAY``.

LIVE is a measured run, REPLAY a replay of its outputs with a cost surface; labels are matched by
name over the cases that both have. A residual is predicted over measured minus one; the surface's
error is the root mean square of their logarithms. Exit code 1 where the median of the residuals'
sizes exceeds ``--limit``. ``--keep`` notes the error where intervals of predicted speedups find it,
``-o DIR`` draws the residuals, ``--json FILE`` writes them down.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.plots.layout import Drawing, save, shown
from analysis.plots.ranking import Agreement, predicted_against_measured
from analysis.plots.style import styled
from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.estimate import Estimate, Interval
from specbench.results.names import display_name
from specbench.results.prediction_error import keep_error
from specbench.results.statistics.summary import summarize
from specbench.results.summary_schema import SummaryRow, interval, number
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl

_LIMIT = 0.07
_DOTS = 16  # with names, that can be told apart; of more, methods have the names


@dataclass(frozen=True, slots=True)
class Residual:
    """A label of both runs: its numbers as measured, and as the replay predicts them.

    ``interval``: 95 %, of the measured speedup.
    """

    label: str
    method: str
    interval: Interval | None
    mat: tuple[float, float]
    speedup: tuple[float, float]
    tokens_per_s: tuple[float, float]

    @property
    def of_speedup(self) -> float:
        return self.speedup[1] / self.speedup[0] - 1.0

    @property
    def of_tokens_per_s(self) -> float:
        return self.tokens_per_s[1] / self.tokens_per_s[0] - 1.0


def residuals(live: Run, replay: Run) -> list[Residual]:
    """Residuals of every label but the baseline, in the order of the measured run.

    Raises:
        ResultsError: the runs do not belong together.
    """
    for run, wanted in ((live, "measured"), (replay, "predicted")):
        kinds = {record.timing for record in run.records}
        if kinds != {wanted}:
            raise ResultsError(
                f"{run.path} has {' and '.join(sorted(kinds))} times, not {wanted} ones. Name the "
                "live run first, then its replay with runner.surface=FILE."
            )
    labels = [label for label in live.labels if label in replay.labels]
    shared = {r.case_id for r in live.records} & {r.case_id for r in replay.records}
    if live.baseline not in labels or len(labels) < 2 or not shared:
        raise ResultsError(
            f"{live.path} and {replay.path} have no common cases with the baseline and a method: "
            "replay the live run with the same method= and compare=."
        )
    measured, predicted = (_overall(run, labels, live.baseline, shared) for run in (live, replay))
    pairs = [(measured[name], predicted[name]) for name in labels if name != live.baseline]
    return [
        Residual(
            first["label"],
            first["method"],
            interval(first, "speedup"),
            *(
                (number(first, key) or 0.0, number(second, key) or 0.0)
                for key in ("mat", "speedup", "tokens_per_s")
            ),
        )
        for first, second in pairs
        if first["speedup"] and second["speedup"]
    ]


def _overall(
    run: Run, labels: Sequence[str], baseline: str, cases: Set[str]
) -> dict[str, SummaryRow]:
    rows = summarize([r for r in run.records if r.case_id in cases], labels, baseline)
    return {row["label"]: row for row in rows if row["task"] == OVERALL}


def median_error(residuals_of: Sequence[Residual]) -> float:
    """Median of the absolute residuals of the speedup."""
    return float(np.median([abs(residual.of_speedup) for residual in residuals_of]))


def surface_error(residuals_of: Sequence[Residual]) -> float:
    """Root mean square of the logarithms of predicted over measured speedups."""
    return float(np.sqrt(np.mean([np.log1p(each.of_speedup) ** 2 for each in residuals_of])))


def render(residuals_of: Sequence[Residual]) -> Table:
    """The residuals as a table."""
    table = Table("label", caption="a residual is predicted over measured, minus one")
    for heading in (
        "MAT live", "MAT replay", "speedup measured", "predicted", "residual", "residual, tokens/s",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for each in residuals_of:
        numbers = [f"{value:.3f}" for value in (*each.mat, *each.speedup)]
        errors = [f"{error:+.1%}" for error in (each.of_speedup, each.of_tokens_per_s)]
        table.add_row(Text(each.label), *numbers, *errors)
    return table


def as_record(residuals_of: Sequence[Residual], runs: Sequence[Run]) -> dict[str, Any]:
    """What ``--json`` writes: speedups of each label, residuals, and the median of their sizes.

    With the code of ``runs``, where all have the same.
    """
    codes = {run.manifest.code for run in runs}
    labels = [
        {
            "label": each.label,
            "measured": each.speedup[0],
            "measured_ci": each.interval,
            "predicted": each.speedup[1],
            "residual": each.of_speedup,
        }
        for each in residuals_of
    ]
    made: dict[str, Any] = {
        "median_error": median_error(residuals_of),
        "surface_error": surface_error(residuals_of),
        "labels": labels,
    }
    return made | ({"code": codes.pop()} if len(codes) == 1 else {})


def draw(residuals_of: Sequence[Residual], live: Run) -> Drawing:
    """Predicted against measured speedups."""
    few = len(residuals_of) <= _DOTS
    rows = [
        Agreement(
            shown(r.label if few else r.method),
            r.method,
            Estimate(r.speedup[0], r.interval),
            r.speedup[1],
        )
        for r in residuals_of
    ]
    where = f"{display_name(live.model)} on {display_name(live.dataset)}"
    words = f"Median absolute error: {median_error(residuals_of):.1%}. Hardware: {live.hardware}."
    return predicted_against_measured(rows, f"Predicted and measured speedup ({where})", words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("live", help="folder of the measured run")
    parser.add_argument("replay", help="folder of its replay with a cost surface")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="of the median error")
    parser.add_argument("--keep", action="store_true", help="note the error for the surface")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="draw them, into DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them into FILE")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    live, replay = _only_run(options.live), _only_run(options.replay)
    rows = residuals(live, replay)
    error = median_error(rows)
    console = Console(width=118)
    console.print(render(rows))
    console.print(
        f"median absolute residual of the speedup over {len(rows)} labels: {error:.1%} "
        f"(limit: {options.limit:.0%}); error of the surface's predictions: "
        f"{surface_error(rows):.1%}",
        highlight=False,
    )
    if options.keep:
        surface = replay.manifest.surface or {}
        keep_error(surface["model"], surface["machine"], surface_error(rows))
    if options.json is not None:
        jsonl.write_json(options.json, as_record(rows, [live, replay]))
    if options.output is not None:
        with styled():
            for path in save(draw(rows, live), options.output, "predicted_and_measured"):
                console.print(str(path), highlight=False, soft_wrap=True)
    return 0 if error <= options.limit else 1


def _only_run(path: str) -> Run:
    found = load_runs([path])
    if len(found) != 1:
        raise ResultsError(f"{path} holds {len(found)} runs; name the folder of one.")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
