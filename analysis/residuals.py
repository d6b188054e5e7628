"""Compare predicted speedups with measured ones: ``python -m analysis.residuals LIVE REPLAY``.

LIVE is a measured run, REPLAY a replay of its outputs with a cost surface; labels are matched by
name over the cases that both have. A residual is predicted over measured minus one; the surface's
error is the root mean square of their logarithms. Exit code 1 if the median of the residuals'
sizes exceeds ``--limit``. ``--keep`` saves the error for the intervals of predicted speedups,
``-o DIR`` draws the residuals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.plots.charts import Point, Series, predicted_against_measured
from analysis.plots.style import Drawing, save
from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.names import display_name
from specbench.results.prediction_error import keep_error
from specbench.results.statistics.summary import summarize
from specbench.results.tasks import OVERALL

_DOTS = 16  # named dots that a reader can distinguish; with more, dots are named by method
_SHOWN = ["label", "mat", "mat_predicted", "speedup", "speedup_predicted", "residual"]


def residuals(live: Run, replay: Run) -> pd.DataFrame:
    """Return a row for each label but the baseline, in the order of the measured run.

    Columns: ``label``, ``method``, ``speedup_ci`` as measured, ``mat`` and ``speedup`` as measured
    and, ending in ``_predicted``, by the replay; ``residual`` of the speedup.

    Raises:
        ResultsError: the runs do not belong together.
    """
    for run, timing in ((live, "measured"), (replay, "predicted")):
        if (timings := {record.timing for record in run.records}) != {timing}:
            raise ResultsError(
                f"{run.path} must have {timing} times, got {' and '.join(sorted(timings))}. Name "
                "the live run first, then its replay with runner.surface=FILE."
            )
    labels, baseline = [x for x in live.labels if x in replay.labels], live.baseline
    shared = {r.case_id for r in live.records} & {r.case_id for r in replay.records}
    if baseline not in labels or len(labels) < 2 or not shared:
        raise ResultsError(
            f"{live.path} and {replay.path} have no common cases with the baseline and a method: "
            "replay the live run with the same method= and compare=."
        )
    measured, predicted = (
        pd.DataFrame(
            row
            for row in summarize([r for r in run.records if r.case_id in shared], labels, baseline)
            if row["task"] == OVERALL and row["label"] != baseline
        )
        for run in (live, replay)
    )
    frame = measured[["label", "method", "speedup_ci", "mat", "speedup"]].merge(
        predicted[["label", "mat", "speedup"]], on="label", suffixes=("", "_predicted")
    )
    frame = frame.dropna(subset=["speedup", "speedup_predicted"])
    return frame.assign(residual=frame["speedup_predicted"] / frame["speedup"] - 1)


def median_error(frame: pd.DataFrame) -> float:
    """Return the median of the absolute residuals of the speedup."""
    return float(frame["residual"].abs().median())


def surface_error(frame: pd.DataFrame) -> float:
    """Return the root mean square of the logarithms of predicted over measured speedups."""
    return float(np.sqrt(np.mean(np.log1p(frame["residual"]) ** 2)))


def draw(frame: pd.DataFrame, live: Run) -> Drawing:
    """Draw predicted against measured speedups."""
    names = frame["label"] if len(frame) <= _DOTS else frame["method"]
    rows = [
        Series(name, r.method, [Point(r.speedup, r.speedup_predicted, across=r.speedup_ci)])
        for name, r in zip(names, frame.itertuples(), strict=True)
    ]
    title = f"Predicted speedups miss the measured ones by {median_error(frame):.1%} (median)"
    where = f"{display_name(live.model)} on {display_name(live.dataset)}, {live.hardware}"
    return predicted_against_measured(rows, title, where + ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 if the median error exceeds the limit, 2 for runs that do not match."""
    parser = parser_of(__doc__, "analysis.residuals")
    parser.add_argument("live", help="folder of the measured run")
    parser.add_argument("replay", help="folder of its replay with a cost surface")
    parser.add_argument("--limit", type=float, default=0.07, help="of the median error")
    parser.add_argument("--keep", action="store_true", help="note the error for the surface")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="draw them, into DIR")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    live, replay = _only_run(options.live), _only_run(options.replay)
    frame = residuals(live, replay)
    error, missed = median_error(frame), surface_error(frame)
    text = frame[_SHOWN].to_string(
        index=False, float_format="{:.3f}".format, formatters={"residual": "{:+.1%}".format}
    )
    sys.stdout.write(
        f"{text}\nmedian absolute residual of the speedup over {len(frame)} labels: {error:.1%} "
        f"(limit: {options.limit:.0%}); error of the surface's predictions: {missed:.1%}\n"
    )
    if options.keep:
        surface = replay.manifest.surface or {}
        keep_error(surface["model"], surface["machine"], missed)
    if options.output is not None:
        for path in save(draw(frame, live), options.output, "predicted_and_measured"):
            sys.stdout.write(f"{path}\n")
    return 0 if error <= options.limit else 1


def _only_run(path: str) -> Run:
    runs = load_runs([path])
    if len(runs) != 1:
        raise ResultsError(f"{path} holds {len(runs)} runs; name the folder of one.")
    return runs[0]


if __name__ == "__main__":
    sys.exit(main())
