"""Tables of runs, with the claimed values beside: ``python -m analysis.tables RUNS...``.

Runs of an experiment become the table or figure of the paper that it stands for
(:mod:`analysis.papers`); of other runs, those that agree in model, data and hardware share one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console

from analysis.papers import by_reproduction
from analysis.runs.command import with_runs
from analysis.runs.comparisons import ComparedLabel, Comparison, make_comparisons, run_names
from analysis.tabular.comparison_tables import comparison_table, pairs_table
from analysis.tabular.table import ResultTable, to_csv, to_latex, to_markdown, to_rich
from specbench.results.records import VERDICTS
from specbench.results.statistics import ESTIMATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.runs.load import Run
    from specbench.results.statistics import Interval
    from specbench.results.summary_schema import SummaryRow

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 260


def records_csv(groups: Sequence[Comparison]) -> str:
    """A line per run, label and task, for a program; numbers with six significant digits."""
    names = run_names(run for group in groups for run in group.runs)
    frame = pd.DataFrame(
        {"run": names[entry.run.path], **_csv_cells(entry, task, row)}
        for group in groups
        for entry in group.entries
        for task, row in entry.rows.items()
    )
    return str(frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


def _csv_cells(entry: ComparedLabel, task: str, row: SummaryRow) -> dict[str, object]:
    run, claim, lossless = entry.run, entry.claim, row["lossless"]
    return {
        "model": run.model,
        "dtype": run.dtype,
        "dataset": run.dataset,
        "hardware": run.hardware,
        "synthetic": run.synthetic,
        "task": task,
        "label": entry.label,
        "method": row["method"],
        "state_scope": row["state_scope"],
        "n_cases": row["n_cases"],
        "n_dropped": row["n_dropped"],
        "n_disturbed": row["n_disturbed"],
        "mat": row["mat"],
        **_bounds("mat", row["mat_ci"]),
        "tokens_per_s": row["tokens_per_s"],
        "end_to_end_tokens_per_s": row["end_to_end_tokens_per_s"],
        "estimator": row["estimator"],
        "speedup": row["speedup"],
        **_bounds("speedup", row["speedup_ci"]),
        "geomean_speedup": row["geomean_speedup"],
        **_bounds("geomean", row["geomean_speedup_ci"]),
        "speedup_eager": row["speedup_eager"],
        **_bounds("speedup_eager", row["speedup_eager_ci"]),
        "speedup_graph": row["speedup_graph"],
        **_bounds("speedup_graph", row["speedup_graph_ci"]),
        "bandwidth_share": row["bandwidth_share"],
        **{kind: lossless[kind] for kind in VERDICTS},
        "claimed_speedup": claim and claim.value("speedup", task),
        "claimed_mat": claim and claim.value("mat", task),
        "claimed_model": claim and claim.model,
        "claimed_hardware": claim and claim.hardware,
        "claimed_source": claim and f"{claim.title}, {claim.source}",
        "verdict": entry.verdict(task),
    }


def _bounds(name: str, interval: Interval | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


_SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    options = _parser().parse_args(arguments)
    return with_runs(options, lambda runs: _show(runs, options))


def _show(runs: Sequence[Run], options: argparse.Namespace) -> int:
    made, others = by_reproduction(runs)
    # By file name; the runs that belong to no artifact share one.
    files: dict[str, dict[str, str]] = {}
    shown: list[ResultTable] = []
    for artifact, members in made:
        tables = list(artifact.tables(members))
        shown += tables
        files[artifact.name] = _texts(tables, to_csv(tables))
    groups = make_comparisons(others, options.estimator)
    if groups:
        tables = [comparison_table(group) for group in groups]
        if options.pairs:
            tables += filter(None, map(pairs_table, groups))
        shown += tables
        files["tables"] = _texts(tables, records_csv(groups))
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
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        for table in shown:
            console.print(to_rich(table))
    return 0


def _texts(tables: Sequence[ResultTable], as_csv: str) -> dict[str, str]:
    return {"markdown": to_markdown(tables), "csv": as_csv, "latex": to_latex(tables)}


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
