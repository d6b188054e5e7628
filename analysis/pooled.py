"""One summary of runs that are repeats of each other, each in a process of its own.

    python -m analysis.pooled RUNS --out FOLDER                        # FOLDER/summary.json
    python -m analysis.pooled RUNS --without translation --out FOLDER  # of the other tasks

The runs differ in their seed, and so in the order of cases and labels, and in nothing else. They
count as repeats of one run: intervals hold what prompts and what runs do, and two methods are
compared within each run.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.comparisons import conditions
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.records import SUMMARY
from specbench.results.statistics.pairs import compare_pairs, leaders_of, standings_of
from specbench.results.statistics.summary import summarize
from specbench.storage.jsonl import JsonObject, write_json


def pooled(runs: Sequence[Run], without: Sequence[str] = ()) -> JsonObject:
    """What ``summary.json`` says of a run, over all of them, ``without`` the cases of some tasks.

    Raises:
        ResultsError: fewer than two, or they differ in labels, cases or conditions; or no case is
            of such a task.
    """
    if len(runs) < 2:
        raise ResultsError(f"{len(runs)} run: name the folder of two or more finished ones.")
    runs = sorted(runs, key=lambda run: run.seed)
    first = runs[0]
    for run in runs[1:]:
        for what, own, theirs in (
            ("labels", sorted(run.labels), sorted(first.labels)),
            ("cases", {r.case_id for r in run.records}, {r.case_id for r in first.records}),
            ("conditions", conditions(run), conditions(first)),
            ("code", run.manifest.code, first.manifest.code),
        ):
            if own != theirs:
                raise ResultsError(f"{run.path} has other {what} than {first.path}.")
    tasks = {r.task for r in first.records}
    if unknown := sorted(set(without) - tasks):
        raise ResultsError(f"no case is of {', '.join(unknown)}; tasks: {', '.join(sorted(tasks))}")
    records = [
        replace(r, repeat=i)
        for i, run in enumerate(runs)
        for r in run.records
        if r.task not in without
    ]
    how = (first.labels, first.baseline, first.seed, first.estimator)
    pairs = compare_pairs(records, *how)
    return {
        "code": first.manifest.code,
        "runs": [run.manifest.run_key for run in runs],
        "rows": summarize(records, *how),
        "pairs": pairs,
        "leaders": leaders_of(pairs),
        "against_best": standings_of(pairs),
    }


def main() -> int:
    """Write the summary; 0."""
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--without", nargs="+", default=[], metavar="TASK", help="leave it out")
    parser.add_argument("--out", type=Path, required=True, help="folder of the summary")
    options = parser.parse_args()
    made = pooled(load_runs(options.runs), options.without)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / SUMMARY, made)
    print(options.out / SUMMARY)
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
