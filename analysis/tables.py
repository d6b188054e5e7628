"""Tables of runs with the papers' claims: ``python -m analysis.tables RUNS...``.

Runs of an experiment become the table or figure of the paper that it reproduces
(:mod:`analysis.papers`); other runs with the same model, data and hardware share a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.frame import records_sheet
from analysis.runs.captions import conditions_of, warnings_of
from analysis.runs.cli import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, by_timing, make_comparisons
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import (
    comparison_table,
    engine_table,
    load_table,
    pairs_table,
)
from analysis.tabular.macro_table import macro_table
from analysis.tabular.table import (
    ResultTable,
    csv_text,
    sheet,
    to_latex,
    to_markdown,
    to_rich,
)
from specbench.results.statistics.summary import ESTIMATORS

_WIDTH = 500  # of a file or a pipe: room for all columns
_SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}
_STEMS = {"measured": "tables", "predicted": "tables_predicted", "none": "tables_steps"}
# The tables of one file, and their lines for a program.
Page: TypeAlias = tuple[list[ResultTable], pd.DataFrame]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code (2: nothing to show, or a damaged file)."""
    return with_runs(parser().parse_args(arguments), show)


def parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = runs_parser("tables", "Tables of runs: which method to take; more on request.")
    add = parser.add_argument
    add("--wide", action="store_true", help="all columns, claimed values among them")
    add(
        "--pairs", action="store_true", help="also compare each method with ar and with the fastest"
    )
    add("--macro", action="store_true", help="also average over data sets, a run of each")
    add("--markdown", action="store_true", help="print Markdown")
    add("--csv", action="store_true", help="print CSV: all columns, numbers and bounds apart")
    add("--latex", action="store_true", help="print LaTeX (booktabs)")
    add("-o", "--output", type=Path, metavar="DIR", help="write files instead (default: all three)")
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    return parser


def show(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Print the runs' tables, or write them to the folder of the options of :func:`parser`."""
    pages: dict[str, Page] = {}  # by file name; runs of no reproduction share one
    compared: list[ComparedRuns] = []
    others = [run for run in runs if run.records]
    if any(run.experiment for run in runs):
        from analysis.papers import by_reproduction  # with matplotlib, which takes a second

        reproductions, others = by_reproduction(runs)
        for reproduction, members in reproductions:
            name, tables = reproduction.name, reproduction.tables(members)
            twice = name in pages  # the measured runs have the name
            pages[f"{name}_{members[0].timing}" if twice else name] = tables, sheet(tables)
    for group in by_timing(others):
        comparisons = make_comparisons(group, options.estimator)
        compared += comparisons
        tables = [*_tables_of(comparisons, options.pairs)]
        tables += [macro_table(comparisons)] if options.macro else []
        pages[_STEMS[group[0].timing]] = tables, records_sheet(comparisons)
    forms = [name for name in _SUFFIXES if getattr(options, name)]
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for stem, page in pages.items():
            for form in forms or _SUFFIXES:
                path = options.output / f"{stem}.{_SUFFIXES[form]}"
                path.write_text(_text(form, [page], options.wide), encoding="utf-8")
                sys.stdout.write(f"{path}\n")
    elif forms:
        sys.stdout.write("\n".join(_text(f, [*pages.values()], options.wide) for f in forms))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        for table in _shown(pages.values(), options.wide):
            console.print(to_rich(table), "")
        for comparison in compared if options.wide else ():
            _print_conditions(comparison, console)
    return 0


def _tables_of(comparisons: Sequence[ComparedRuns], pairs: bool) -> Iterable[ResultTable]:
    by_engine: dict[str, list[ComparedRuns]] = {}
    for comparison in comparisons:
        if comparison.runs[0].concurrency == 1:  # higher loads are in the table of loads
            by_engine.setdefault(comparison.runs[0].engine, []).append(comparison)
    yield from (comparison_table(*alike) for alike in by_engine.values())
    more = [engine_table(comparisons), load_table(comparisons)]
    yield from filter(None, more + [pairs_table(c) for c in comparisons if pairs])


def _print_conditions(comparison: ComparedRuns, console: Console) -> None:
    """Print a comparison's conditions and all of its warnings."""
    grid = Table.grid(padding=(0, 2))
    for name, line in conditions_of(comparison).items():
        grid.add_row(Text(name), Text(line))
    console.print(Text(comparison.title, style="bold"), grid)
    for warned in warnings_of(comparison):
        console.print(Text(f"! {warned.text}"))
    console.print()


def _shown(pages: Iterable[Page], wide: bool) -> list[ResultTable]:
    return [t.in_full() if wide else t.in_short() for tables, _ in pages for t in tables]


def _text(form: str, pages: Sequence[Page], wide: bool) -> str:
    if form == "csv":
        return csv_text(pd.concat([lines for _, lines in pages]))
    return (to_markdown if form == "markdown" else to_latex)(_shown(pages, wide))


if __name__ == "__main__":
    sys.exit(main())
