"""Tables of runs, with the claimed values beside: ``python -m analysis.tables RUNS...``.

Runs of an experiment become the table or figure of the paper that it stands for
(:mod:`analysis.papers`); of other runs, those that agree in model, data and hardware share one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.frame import WHERE, records_sheet
from analysis.runs.captions import conditions_of, warnings_of
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, by_timing, make_comparisons
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import (
    comparison_table,
    engine_table,
    load_table,
    pairs_table,
    task_table,
)
from analysis.tabular.table import (
    ResultTable,
    column_name,
    csv_text,
    sheet,
    to_latex,
    to_markdown,
    to_rich,
)
from specbench.errors import ResultsError
from specbench.results.statistics.summary import ESTIMATORS

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 500

_SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    return with_runs(parser().parse_args(arguments), show)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = runs_parser("tables", "Tables of runs: which method to take; more on request.")
    add = made.add_argument
    add("--wide", action="store_true", help="all columns, claimed values among them")
    add("--columns", metavar="A,B,...", help="these columns; names as in CSV files")
    add("--tasks", action="store_true", help="also MAT and speedup by task")
    add(
        "--pairs", action="store_true", help="also compare each method with ar and with the fastest"
    )
    add("--markdown", action="store_true", help="print Markdown")
    add("--csv", action="store_true", help="print CSV: all columns, numbers and bounds apart")
    add("--latex", action="store_true", help="print LaTeX (booktabs)")
    add("-o", "--output", type=Path, metavar="DIR", help="write files instead (default: all three)")
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    return made


@dataclass(frozen=True)
class _Page:
    """The tables of one file; of runs of no reproduction their lines for a program, too."""

    tables: list[ResultTable]
    records: pd.DataFrame | None = None

    @cached_property
    def sheet(self) -> pd.DataFrame:
        return sheet(self.tables) if self.records is None else self.records

    @property
    def columns(self) -> list[str]:
        """What ``--columns`` may name."""
        records = () if self.records is None else map(str, self.records)
        names = [column_name(str(h)) for table in self.tables for h in table.frame]
        names += [name for name in records if not name.endswith(("_low", "_high"))]
        return list(dict.fromkeys(names))

    def only(self, names: Sequence[str]) -> _Page:
        by_name = [{column_name(str(h)): str(h) for h in t.frame} for t in self.tables]
        chosen = zip(self.tables, by_name, strict=True)
        tables = [t.only([found[name] for name in names if name in found]) for t, found in chosen]
        if self.records is None:
            return _Page(tables)
        with_bounds = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
        kept = [name for name in [*WHERE, *with_bounds] if name in self.records]
        return _Page(tables, self.records[list(dict.fromkeys(kept))])


def show(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Print the runs' tables, or write them where the options of :func:`parser` say."""
    # By file name; the runs that belong to no reproduction share one.
    pages: dict[str, _Page] = {}
    compared: list[ComparedRuns] = []
    others = [run for run in runs if run.records]
    if any(run.experiment for run in runs):
        from analysis.papers import by_reproduction  # with matplotlib, which takes a second

        made, others = by_reproduction(runs)
        for reproduction, members in made:
            twice = reproduction.name in pages  # the measured runs have the name
            stem = f"{reproduction.name}_{members[0].timing}" if twice else reproduction.name
            pages[stem] = _Page(reproduction.tables(members))
    for group in by_timing(others):
        comparisons = make_comparisons(group, options.estimator)
        by_engine: dict[str, list[ComparedRuns]] = {}
        for comparison in comparisons:
            if comparison.runs[0].concurrency == 1:  # else the table of loads has it
                by_engine.setdefault(comparison.runs[0].engine, []).append(comparison)
        tables = [comparison_table(*alike) for alike in by_engine.values()]
        tables += filter(None, [engine_table(comparisons), load_table(comparisons)])
        compared += comparisons
        if options.tasks:
            by_task = (task_table(c, f"{c.title}: by task") for c in comparisons)
            tables += [table for table in by_task if table.rows]
        if options.pairs:
            tables += filter(None, map(pairs_table, comparisons))
        stem = "tables_predicted" if group[0].timing == "predicted" else "tables"
        if stem in pages:  # of measured runs; these are steps without times
            stem = "tables_steps"
        pages[stem] = _Page(tables, records_sheet(comparisons))
    if options.columns is not None:
        names = _names(options.columns, pages.values())
        pages = {s: page.only(names) for s, page in pages.items() if {*names} & {*page.columns}}
    wide = options.wide or options.columns is not None
    wanted = [name for name in _SUFFIXES if getattr(options, name)]
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for stem, page in pages.items():
            for name in wanted or _SUFFIXES:
                path = options.output / f"{stem}.{_SUFFIXES[name]}"
                path.write_text(_text(name, [page], wide), encoding="utf-8")
                sys.stdout.write(f"{path}\n")
    elif wanted:
        all_pages = [*pages.values()]
        sys.stdout.write("\n".join(_text(name, all_pages, wide) for name in wanted))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        for table in _tables(pages.values(), wide):
            console.print(to_rich(table), "")
        if options.wide:
            for comparison in compared:
                _print_conditions(comparison, console)
    return 0


def _print_conditions(comparison: ComparedRuns, console: Console) -> None:
    """Print what a comparison's numbers stand on, and all of its warnings."""
    grid = Table.grid(padding=(0, 2))
    for name, line in conditions_of(comparison).items():
        grid.add_row(Text(name), Text(line))
    console.print(Text(comparison.title, style="bold"), grid)
    for warned in warnings_of(comparison):
        console.print(Text(f"! {warned.text}"))
    console.print()


def _names(typed: str, pages: Iterable[_Page]) -> list[str]:
    """The columns that ``--columns`` names.

    Raises:
        ResultsError: one of them is in no page.
    """
    names = [name.strip() for name in typed.split(",") if name.strip()]
    valid = list(dict.fromkeys(name for page in pages for name in page.columns))
    for name in names or [typed]:
        if name not in valid:
            raise ResultsError(
                f"--columns {name}: no such column. There are: {', '.join(valid)}. Without "
                "--columns the first six are shown, with --wide all."
            )
    return names


def _tables(pages: Iterable[_Page], wide: bool) -> list[ResultTable]:
    return [t.in_full() if wide else t.in_short() for page in pages for t in page.tables]


def _text(form: str, pages: Sequence[_Page], wide: bool) -> str:
    if form == "csv":
        return csv_text(pd.concat([page.sheet for page in pages]))
    tables = _tables(pages, wide)
    return to_markdown(tables) if form == "markdown" else to_latex(tables)


if __name__ == "__main__":
    sys.exit(main())
