"""Tables of runs, with the claimed values beside: ``python -m analysis.tables RUNS...``.

Runs of an experiment become the table or figure of the paper that it stands for
(:mod:`analysis.papers`); of other runs, those that agree in model, data and hardware share one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from analysis.papers import by_reproduction
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import (
    ComparedLabel,
    Comparison,
    by_timing,
    make_comparisons,
    run_names,
)
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import comparison_table, pairs_table
from analysis.tabular.table import ResultTable, csv_cell, to_csv, to_latex, to_markdown, to_rich
from specbench.results.statistics.summary import ESTIMATORS
from specbench.results.summary_schema import SummaryRow, interval
from specbench.results.tasks import OVERALL

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 260


_COLUMNS = (
    "run model dtype dataset hardware synthetic task label method state_scope n_cases n_timed "
    "n_dropped n_disturbed mat mat_low mat_high tokens_per_s end_to_end_tokens_per_s estimator "
    "speedup speedup_low speedup_high speedup_without_rule geomean_speedup geomean_low "
    "geomean_high speedup_eager speedup_eager_low speedup_eager_high speedup_graph "
    "speedup_graph_low speedup_graph_high bandwidth_share equal near_tie bug not_audited "
    "claimed_speedup claimed_mat claimed_model claimed_hardware claimed_source verdict"
)


def records_csv(comparisons: Sequence[Comparison]) -> str:
    """A line per run, label and task, for a program; numbers with six significant digits."""
    names = run_names(run for comparison in comparisons for run in comparison.runs)
    frame = pd.DataFrame(
        {"run": names[entry.run.path], **_csv_cells(entry, task, row)}
        for comparison in comparisons
        for entry in comparison.entries
        for task, row in entry.rows.items()
    )
    columns = _COLUMNS.split()
    frame = frame.map(lambda cell: csv_cell(cell) if isinstance(cell, str) else cell)
    return str(frame.to_csv(index=False, columns=columns, lineterminator="\n", float_format="%.6g"))


def _csv_cells(entry: ComparedLabel, task: str, row: SummaryRow) -> dict[str, object]:
    run, claim = entry.run, entry.claim
    bounds = {
        f"{key.removesuffix('_speedup')}_{end}": bound
        for key in ("mat", "speedup", "geomean_speedup", "speedup_eager", "speedup_graph")
        for end, bound in zip(("low", "high"), interval(row, key) or (None, None), strict=True)
    }
    return {
        **row,
        **row["lossless"],
        **bounds,
        "speedup_without_rule": entry.without_rule if task == OVERALL else None,
        "model": run.model,
        "dtype": run.dtype,
        "dataset": run.dataset,
        "hardware": run.hardware,
        "synthetic": run.synthetic,
        "claimed_speedup": claim and claim.value("speedup", task),
        "claimed_mat": claim and claim.value("mat", task),
        "claimed_model": claim and claim.model,
        "claimed_hardware": claim and claim.hardware,
        "claimed_source": claim and f"{claim.title}, {claim.source}",
        "verdict": entry.verdict(task),
    }


_SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("tables", "Tables of runs, claimed values beside.")
    add = parser.add_argument
    add("--markdown", action="store_true", help="print Markdown")
    add("--csv", action="store_true", help="print CSV, numbers and bounds in columns of their own")
    add("--latex", action="store_true", help="print LaTeX (booktabs)")
    add("-o", "--output", type=Path, metavar="DIR", help="write files instead (default: all three)")
    add(
        "--pairs", action="store_true", help="also compare each method with ar and with the fastest"
    )
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    return with_runs(parser.parse_args(arguments), _show)


def _show(runs: Sequence[Run], options: argparse.Namespace) -> int:
    made, others = by_reproduction(runs)
    # By file name; the runs that belong to no reproduction share one.
    files: dict[str, dict[str, str]] = {}
    shown: list[ResultTable] = []
    for reproduction, members in made:
        tables = list(reproduction.tables(members))
        shown += tables
        twice = reproduction.name in files  # the measured runs have the name
        stem = f"{reproduction.name}_{members[0].timing}" if twice else reproduction.name
        files[stem] = _texts(tables, to_csv(tables))
    for group in by_timing(others):
        comparisons = make_comparisons(group, options.estimator)
        tables = [comparison_table(comparison) for comparison in comparisons]
        if options.pairs:
            tables += filter(None, map(pairs_table, comparisons))
        shown += tables
        stem = "tables_predicted" if group[0].timing == "predicted" else "tables"
        files[stem] = _texts(tables, records_csv(comparisons))
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


if __name__ == "__main__":
    sys.exit(main())
