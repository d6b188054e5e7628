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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.plots.charts import Row, predicted_against_measured
from analysis.plots.style import Drawing, save, styled
from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.estimate import Estimate
from specbench.results.names import display_name
from specbench.results.prediction_error import keep_error
from specbench.results.statistics.summary import summarize
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl

_LIMIT = 0.07
_DOTS = 16  # with names, that can be told apart; of more, methods have the names
_NUMBERS = ["mat", "speedup", "tokens_per_s"]


def residuals(live: Run, replay: Run) -> pd.DataFrame:
    """Return a row for each label but the baseline, in the order of the measured run.

    Columns: ``label``, ``method``, ``speedup_ci`` as measured, ``mat``, ``speedup`` and
    ``tokens_per_s`` as measured and, ending in ``_predicted``, by the replay; ``residual`` of the
    speedup and ``residual_tokens_per_s``.

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
    overall = [
        pd.DataFrame(
            row
            for row in summarize(
                [r for r in run.records if r.case_id in shared], labels, live.baseline
            )
            if row["task"] == OVERALL and row["label"] != live.baseline
        )
        for run in (live, replay)
    ]
    frame = overall[0][["label", "method", "speedup_ci", *_NUMBERS]].merge(
        overall[1][["label", *_NUMBERS]], on="label", suffixes=("", "_predicted")
    )
    frame = frame[frame["speedup"].notna() & frame["speedup_predicted"].notna()]
    frame["residual"] = frame["speedup_predicted"] / frame["speedup"] - 1
    frame["residual_tokens_per_s"] = frame["tokens_per_s_predicted"] / frame["tokens_per_s"] - 1
    return frame


def median_error(frame: pd.DataFrame) -> float:
    """Return the median of the absolute residuals of the speedup."""
    return float(frame["residual"].abs().median())


def surface_error(frame: pd.DataFrame) -> float:
    """Return the root mean square of the logarithms of predicted over measured speedups."""
    return float(np.sqrt(np.mean(np.log1p(frame["residual"]) ** 2)))


def as_record(frame: pd.DataFrame, runs: Sequence[Run]) -> dict[str, Any]:
    """Return what ``--json`` writes; with the code of ``runs``, where all have the same."""
    codes = {run.manifest.code for run in runs}
    names = {"speedup": "measured", "speedup_ci": "measured_ci", "speedup_predicted": "predicted"}
    labels = frame.rename(columns=names)[["label", *names.values(), "residual"]]
    record: dict[str, Any] = {
        "median_error": median_error(frame),
        "surface_error": surface_error(frame),
        "labels": labels.to_dict("records"),
    }
    return record | ({"code": codes.pop()} if len(codes) == 1 else {})


def draw(frame: pd.DataFrame, live: Run) -> Drawing:
    """Return predicted against measured speedups."""
    few = len(frame) <= _DOTS
    rows = [
        Row(
            r.label if few else r.method,
            r.method,
            [Estimate(r.speedup, r.speedup_ci), Estimate(r.speedup_predicted)],
        )
        for r in frame.itertuples()
    ]
    title = f"Predicted speedups miss the measured ones by {median_error(frame):.1%} (median)"
    where = f"{display_name(live.model)} on {display_name(live.dataset)}, {live.hardware}"
    return predicted_against_measured(rows, title, where + ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, 1 where the median error is above the limit, 2 for runs that do not match."""
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
    frame = residuals(live, replay)
    error = median_error(frame)
    shown = ["label", "mat", "mat_predicted", "speedup", "speedup_predicted"]
    errors = ["residual", "residual_tokens_per_s"]
    percent = {name: "{:+.1%}".format for name in errors}
    text = frame[[*shown, *errors]].to_string(
        index=False, float_format="{:.3f}".format, formatters=percent
    )
    sys.stdout.write(
        f"{text}\nmedian absolute residual of the speedup over {len(frame)} labels: {error:.1%} "
        f"(limit: {options.limit:.0%}); error of the surface's predictions: "
        f"{surface_error(frame):.1%}\n"
    )
    if options.keep:
        surface = replay.manifest.surface or {}
        keep_error(surface["model"], surface["machine"], surface_error(frame))
    if options.json is not None:
        jsonl.write_json(options.json, as_record(frame, [live, replay]))
    if options.output is not None:
        with styled():
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
