"""Summarise runs that repeat each other, each in a process of its own, as one run.

    python -m analysis.pooled RUNS --out FOLDER                        # FOLDER/summary.json
    python -m analysis.pooled RUNS --without translation --out FOLDER  # of the other tasks

The runs differ in their seed, and so in the order of cases and labels, and in nothing else. They
count as repeats of one run: intervals hold what prompts and what runs do, and two methods are
compared within each run. A label that one of them left out is left out of all, with the reason.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.comparisons import conditions
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.conditions import warnings
from specbench.results.records import SUMMARY
from specbench.results.run_summary import compare_labels
from specbench.storage.jsonl import JsonObject, write_json


def pooled(runs: Sequence[Run], without: Sequence[str] = ()) -> JsonObject:
    """Summarise runs as ``summary.json`` does one, ``without`` the cases of some tasks.

    Raises:
        ResultsError: fewer than two, or they differ in labels, cases or conditions; or no case is
            of such a task.
    """
    if len(runs) < 2:
        raise ResultsError(f"{len(runs)} run: name the folder of two or more finished ones.")
    first, *others = runs = sorted(runs, key=lambda run: run.seed)
    for run in others:
        for name, value in _shared(run).items():
            if value != _shared(first)[name]:
                raise ResultsError(f"{run.path} has other {name} than {first.path}.")
    tasks = {r.task for r in first.records}
    if unknown := sorted(set(without) - tasks):
        raise ResultsError(f"no case is of {', '.join(unknown)}; tasks: {', '.join(sorted(tasks))}")
    left_out = {
        f"{label}, by {run.path.name}": why for run in runs for label, why in run.left_out.items()
    }
    labels = [label for label in first.labels if all(label not in run.left_out for run in runs)]
    records = [
        r.replace(repeat=i)
        for i, run in enumerate(runs)
        for r in run.records
        if r.task not in without and r.label in labels
    ]
    baseline = first.baseline if first.baseline in labels else None
    compared = compare_labels(records, labels, baseline, first.seed, first.estimator)
    errors = [error for run in runs for error in run.errors]
    warned = warnings(records, first.manifest, compared["rows"], errors, left_out)
    return {
        "code": first.manifest.code,
        "runs": [run.manifest.run_key for run in runs],
        **compared,
        "warnings": [warning.to_json() for warning in warned],
    }


def _shared(run: Run) -> JsonObject:
    return {
        "labels": {*run.labels, *run.left_out},
        "cases": {record.case_id for record in run.records},
        "conditions": conditions(run),
        "code": run.manifest.code,
    }


def main() -> int:
    """Write the summary; return 0."""
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--without", nargs="+", default=[], metavar="TASK", help="leave it out")
    parser.add_argument("--out", type=Path, required=True, help="folder of the summary")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / SUMMARY, pooled(load_runs(options.runs), options.without))
    print(options.out / SUMMARY)
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
