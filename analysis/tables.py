"""Tables of runs, with the claimed values beside: ``python -m analysis.tables RUNS...``.

Runs of an experiment become the table or figure of the paper that it stands for
(:mod:`analysis.papers`); of other runs, those that agree in model, data and hardware share one.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from analysis.papers import by_reproduction
from analysis.runs.command import with_runs
from analysis.runs.comparisons import ComparedLabel, Comparison, make_comparisons, run_names
from analysis.tabular.comparison_tables import pairs_sheet, sheet
from analysis.tabular.table import ResultTable, to_csv, to_latex, to_markdown, to_rich
from specbench.results.statistics import ESTIMATORS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.runs.load import Run

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 260


def records_csv(groups: Sequence[Comparison]) -> str:
    """A line per run, label and task, for a program; numbers with six significant digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "run", "model", "dtype", "dataset", "hardware", "synthetic", "task", "label", "method",
            "state_scope", "n_cases", "n_dropped", "n_disturbed", "mat", "mat_low", "mat_high",
            "tokens_per_s", "end_to_end_tokens_per_s", "estimator", "speedup", "speedup_low",
            "speedup_high", "geomean_speedup", "geomean_low", "geomean_high", "speedup_eager",
            "speedup_eager_low", "speedup_eager_high", "speedup_graph", "speedup_graph_low",
            "speedup_graph_high", "bandwidth_share", "equal", "near_tie", "bug", "not_audited",
            "claimed_speedup", "claimed_mat", "claimed_model", "claimed_hardware", "claimed_source",
            "verdict",
        ]
    )  # fmt: skip
    names = run_names(run for group in groups for run in group.runs)
    for group in groups:
        for entry in group.entries:
            for task, row in entry.rows.items():
                writer.writerow([names[entry.run.path], *_csv_cells(entry, task, row)])
    return out.getvalue()


def _csv_cells(entry: ComparedLabel, task: str, row: Mapping[str, Any]) -> list[str]:
    run, claim = entry.run, entry.claim
    lossless = row["lossless"]
    claimed: list[Any] = [None] * 5
    if claim is not None:
        source = f"{claim.title}, {claim.source}"
        numbers = [claim.value(metric, task) for metric in ("speedup", "mat")]
        claimed = [*numbers, claim.model, claim.hardware, source]
    cells = [
        run.model, run.dtype, run.dataset, run.hardware, run.synthetic, task,
        entry.label, row["method"], row["state_scope"], row["n_cases"], row["n_dropped"],
        row["n_disturbed"], row["mat"], *(row["mat_ci"] or (None, None)), row["tokens_per_s"],
        row["end_to_end_tokens_per_s"], row["estimator"], row["speedup"],
        *(row["speedup_ci"] or (None, None)), row["geomean_speedup"],
        *(row["geomean_speedup_ci"] or (None, None)), row["speedup_eager"],
        *(row["speedup_eager_ci"] or (None, None)), row["speedup_graph"],
        *(row["speedup_graph_ci"] or (None, None)), row["bandwidth_share"], lossless["equal"],
        lossless["near_tie"], lossless["bug"], lossless["not_audited"], *claimed,
        entry.verdict(task),
    ]  # fmt: skip
    return ["" if c is None else f"{c:.6g}" if isinstance(c, float) else str(c) for c in cells]


_SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    options = _parser().parse_args(arguments)
    return with_runs(options, lambda runs: _show(runs, options))


def _show(runs: Sequence[Run], options: argparse.Namespace) -> int:
    made, others = by_reproduction(runs)
    # By file name; the runs that belong to no artifact share one.
    files: dict[str, dict[str, str]] = {}
    pages: list[ResultTable] = []
    for artifact, members in made:
        sheets = list(artifact.tables(members))
        pages += sheets
        files[artifact.name] = _texts(sheets, to_csv(sheets))
    groups = make_comparisons(others, options.estimator)
    if groups:
        sheets = [sheet(group) for group in groups]
        if options.pairs:
            sheets += [page for page in map(pairs_sheet, groups) if page is not None]
        pages += sheets
        files["tables"] = _texts(sheets, records_csv(groups))
    wanted = [name for name in _SUFFIXES if getattr(options, name)]
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for stem, texts in files.items():
            for name in wanted or _SUFFIXES:
                path = options.output / f"{stem}.{_SUFFIXES[name]}"
                path.write_text(texts[name], encoding="utf-8")
                sys.stdout.write(f"{path}\n")
    elif wanted:
        sys.stdout.write("\n".join(texts[name] for name in wanted for texts in files.values()))
    else:
        _print(pages)
    return 0


def _texts(pages: Sequence[ResultTable], as_csv: str) -> dict[str, str]:
    return {"markdown": to_markdown(pages), "csv": as_csv, "latex": to_latex(pages)}


def _print(pages: Sequence[ResultTable]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for page in pages:
        console.print(to_rich(page))
        for note in page.foot:
            console.print(f"  {note}", markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tables", description="Tables of runs, claimed values beside."
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them")
    add("--markdown", action="store_true", help="print Markdown")
    add("--csv", action="store_true", help="print CSV, numbers and bounds in columns of their own")
    add("--latex", action="store_true", help="print LaTeX (booktabs)")
    add("-o", "--output", type=Path, metavar="DIR", help="write files instead (default: all three)")
    add("--pairs", action="store_true", help="also compare every label with every other")
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    add("--incomplete", action="store_true", help="also show runs that have not reached their end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
