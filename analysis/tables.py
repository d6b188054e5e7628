"""Tables of runs, with the claimed values beside: ``python -m analysis.tables RUNS...``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from analysis.claims import NOT_RUN, Claim
from analysis.groups import Entry, Group, caption, make_groups, verdict_words
from analysis.load import usable_runs
from analysis.render import Sheet, to_latex, to_markdown, to_rich
from specbench.statistics import ESTIMATORS, compare_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 200
_ABSENT = "–"
_TASK_NAMES = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Sum",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
}


def sheet(group: Group) -> Sheet:
    """The wide form that papers use: a row per label, a column per task."""
    several_runs = len(group.runs) > 1
    tasks = group.tasks if len(group.tasks) > 1 else []
    headings = [
        *(["run"] if several_runs else []),
        "method",
        *(_TASK_NAMES.get(task, task) for task in tasks),
        "MAT [95 %]",
        "tokens/s",
        "speedup [95 %]",
        "geo. mean [95 %]",
        "cases",
        "lossless",
        "claimed speedup / MAT",
        "verdict",
    ]
    rows, notes = [], []
    for entry in group.entries:
        row = entry.overall
        rows.append(
            [
                *([entry.run.path.name] if several_runs else []),
                entry.label,
                *(_number(entry.rows[t]["speedup"] if t in entry.rows else None) for t in tasks),
                _ratio(row["mat"], row["mat_ci"]),
                _number(row["tokens_per_s"], 1),
                _ratio(row["speedup"], row["speedup_ci"]),
                _ratio(row["geomean_speedup"], row["geomean_speedup_ci"]),
                str(row["n_cases"]),
                verdict_words(row["lossless"]),
                _claimed(entry.claim),
                entry.verdict(),
            ]
        )
        if entry.claim is not None:
            notes.append(f"{entry.label}: claimed by {entry.claim.describe()}.")
    for claim in group.not_run:
        by_task = [_number(claim.value("speedup", task)) for task in tasks]
        # Per-task numbers of a claim would be taken for measured ones here.
        blank = [_ABSENT] * len(by_task)
        name = [_ABSENT] if several_runs else []
        rows.append(
            [*name, claim.method, *blank, *[_ABSENT] * 4, "0", _ABSENT, _claimed(claim), NOT_RUN]
        )
        notes.append(f"{claim.method}: claimed by {claim.describe()}.")
    return Sheet(group.title, caption(group), headings, rows, list(dict.fromkeys(notes)))


def pairs_sheet(group: Group) -> Sheet | None:
    """Every label of a run against every other; None where no run has two."""
    rows = []
    for run in group.runs:
        for pair in compare_pairs(run.records, run.labels, seed=run.seed):
            rows.append(
                [
                    *([run.path.name] if len(group.runs) > 1 else []),
                    pair["first"],
                    pair["second"],
                    _ratio(pair["ratio"], pair["ratio_ci"], digits=3),
                    f"{pair['p']:.4f}",
                    f"{pair['p_holm']:.4f}",
                    pair["verdict"],
                    _number(pair["detectable"], 3),
                    str(pair["n_cases"]),
                ]
            )
    if not rows:
        return None
    margin = f"{pair['margin']:.0%}"
    text = (
        "Geometric mean over cases of the first's decode speed over the second's. p: two-sided "
        "sign-flip permutation test; Holm: corrected for the run's number of pairs. tie: the 95 % "
        f"interval lies within {margin}. detectable: smallest ratio shown with a power of 80 %."
    )
    headings = [
        "first",
        "second",
        "ratio [95 %]",
        "p",
        "p (Holm)",
        "first is",
        "detectable",
        "cases",
    ]
    if len(group.runs) > 1:
        headings.insert(0, "run")
    return Sheet(f"{group.title}: pairs", text, headings, rows, [])


def _number(value: float | None, digits: int = 2) -> str:
    return _ABSENT if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    text = _number(value, digits)
    if value is None or interval is None:
        return text
    return f"{text} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def _claimed(claim: Claim | None) -> str:
    if claim is None:
        return _ABSENT
    words = f"{claim.qualifier} " if claim.qualifier else ""
    return f"{words}{_number(claim.value('speedup'))} / {_number(claim.value('mat'))}"


def to_csv(groups: Sequence[Group]) -> str:
    """For a program: a line per run, label and task; numbers with six significant digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "run", "model", "dtype", "dataset", "hardware", "synthetic", "task", "label", "method",
            "state_scope", "n_cases", "n_dropped", "n_disturbed", "mat", "mat_low", "mat_high",
            "tokens_per_s", "end_to_end_tokens_per_s", "estimator", "speedup", "speedup_low",
            "speedup_high", "geomean_speedup", "geomean_low", "geomean_high", "equal", "near_tie",
            "bug", "not_audited", "claimed_speedup", "claimed_mat", "claimed_model",
            "claimed_hardware", "claimed_source", "verdict",
        ]
    )  # fmt: skip
    for group in groups:
        for entry in group.entries:
            for task, row in entry.rows.items():
                writer.writerow(_csv_row(entry, task, row))
    return out.getvalue()


def _csv_row(entry: Entry, task: str, row: Mapping[str, Any]) -> list[str]:
    run, claim = entry.run, entry.claim
    lossless = row["lossless"]
    claimed: list[Any] = [None] * 5
    if claim is not None:
        source = f"{claim.title}, {claim.source}"
        numbers = [claim.value(metric, task) for metric in ("speedup", "mat")]
        claimed = [*numbers, claim.model, claim.hardware, source]
    cells = [
        run.path.name, run.model, run.dtype, run.dataset, run.hardware, run.synthetic, task,
        entry.label, row["method"], row["state_scope"], row["n_cases"], row["n_dropped"],
        row["n_disturbed"], row["mat"], *(row["mat_ci"] or (None, None)), row["tokens_per_s"],
        row["end_to_end_tokens_per_s"], row["estimator"], row["speedup"],
        *(row["speedup_ci"] or (None, None)), row["geomean_speedup"],
        *(row["geomean_speedup_ci"] or (None, None)), lossless["equal"], lossless["near_tie"],
        lossless["bug"], lossless["not_audited"], *claimed, entry.verdict(task),
    ]  # fmt: skip
    return ["" if c is None else f"{c:.6g}" if isinstance(c, float) else str(c) for c in cells]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    options = _parser().parse_args(arguments)
    try:
        runs, hidden = usable_runs(options.runs, options.incomplete)
    except Exception as error:
        # The project's own errors carry their exit code and a message meant for the user.
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        sys.stderr.write(f"error: {error}\n")
        return int(code)
    for run in hidden:
        sys.stderr.write(f"not shown, because incomplete: {run.path}\n")
    groups = make_groups(runs, options.estimator)
    pages = [sheet(group) for group in groups]
    if options.pairs:
        pages += [page for page in map(pairs_sheet, groups) if page is not None]
    texts = {
        "markdown": lambda: to_markdown(pages),
        "csv": lambda: to_csv(groups),
        "latex": lambda: to_latex(pages),
    }
    wanted = [name for name in texts if getattr(options, name)]
    if options.output is not None:
        suffixes = {"markdown": "md", "csv": "csv", "latex": "tex"}
        options.output.mkdir(parents=True, exist_ok=True)
        for name in wanted or texts:
            path = options.output / f"tables.{suffixes[name]}"
            path.write_text(texts[name](), encoding="utf-8")
            sys.stdout.write(f"{path}\n")
    elif wanted:
        sys.stdout.write("\n".join(texts[name]() for name in wanted))
    else:
        _print(pages)
    return 0


def _print(pages: Sequence[Sheet]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for page in pages:
        console.print(to_rich(page))
        for note in page.notes:
            console.print(f"  {note}", markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tables", description="Tables of runs, claimed values beside."
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them")
    add("--markdown", action="store_true", help="print Markdown")
    add("--csv", action="store_true", help="print CSV: a line per run, label and task")
    add("--latex", action="store_true", help="print LaTeX (booktabs)")
    add("-o", "--output", type=Path, metavar="DIR", help="write files instead (default: all three)")
    add("--pairs", action="store_true", help="also compare every label with every other")
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    add("--incomplete", action="store_true", help="also show runs that have not reached their end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
