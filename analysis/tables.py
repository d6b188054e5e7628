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

from analysis.papers import by_reproduction
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import (
    ComparedLabel,
    Comparison,
    by_timing,
    make_comparisons,
    run_names,
)
from analysis.runs.leaders import standings
from analysis.runs.load import Run
from analysis.runs.settings import typed_value, varied_knobs
from analysis.tabular.comparison_tables import comparison_table, pairs_table, task_table
from analysis.tabular.latex import to_latex
from analysis.tabular.table import (
    ResultTable,
    column_name,
    csv_text,
    sheet,
    to_markdown,
    to_rich,
)
from specbench.errors import ResultsError
from specbench.results.statistics.summary import ESTIMATORS
from specbench.results.summary_schema import Standing, SummaryRow, interval
from specbench.results.tasks import OVERALL

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 500

# KNOBS: those in which labels of one name differ.
_COLUMNS = (
    "run model dtype dataset hardware synthetic timing task label KNOBS method state_scope n_cases "
    "n_timed n_dropped n_disturbed mat mat_low mat_high tokens_per_s tokens_per_s_low "
    "tokens_per_s_high end_to_end_tokens_per_s estimator speedup speedup_low speedup_high "
    "speedup_without_rule end_to_end_speedup end_to_end_speedup_low end_to_end_speedup_high "
    "against_the_best p_against_the_best geomean_speedup geomean_speedup_low "
    "geomean_speedup_high speedup_eager speedup_eager_low speedup_eager_high speedup_graph "
    "speedup_graph_low speedup_graph_high bandwidth_share equal near_tie bug not_audited "
    "claimed_speedup claimed_mat claimed_model claimed_hardware claimed_source verdict"
)
# Of them, those that name a line.
_WHERE = ("run", "model", "dataset", "task", "label")
# Numbers of a row with bounds beside them.
_WITH_BOUNDS = (
    "mat", "tokens_per_s", "speedup", "end_to_end_speedup", "geomean_speedup", "speedup_eager",
    "speedup_graph",
)  # fmt: skip


def records_sheet(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """A line per run, label and task, for a program."""
    names = run_names(run for comparison in comparisons for run in comparison.runs)
    stands = {k: v for comparison in comparisons for k, v in standings(comparison).items()}
    knobs = [knob_columns(comparison) for comparison in comparisons]
    varied = list(dict.fromkeys(knob for each in knobs for own in each for knob in own))
    varied += ["settings"] if any(comparison.told for comparison in comparisons) else []
    frame = pd.DataFrame(
        {
            "run": names[entry.run.path],
            **own,
            **({"settings": comparison.told} if comparison.told else {}),
            **_csv_cells(entry, task, row, stands.get((entry.run.path, entry.label))),
        }
        for comparison, each in zip(comparisons, knobs, strict=True)
        for entry, own in zip(comparison.entries, each, strict=True)
        for task, row in entry.rows.items()
    )
    before, after = (part.split() for part in _COLUMNS.split("KNOBS"))
    return frame[[*before, *varied, *after]]


def knob_columns(comparison: Comparison) -> list[dict[str, str]]:
    """Of each entry the knobs in which those of its label differ, by column."""
    found = varied_knobs([(entry.run, entry.label) for entry in comparison.entries])
    taken = _COLUMNS.split()
    return [
        {f"method.{k}" if k in taken else k: typed_value(v) for k, v in own.items()}
        for own in found
    ]


def _csv_cells(
    entry: ComparedLabel, task: str, row: SummaryRow, standing: Standing | None
) -> dict[str, object]:
    run, claim = entry.run, entry.claim
    bounds = {
        f"{key}_{end}": bound
        for key in _WITH_BOUNDS
        for end, bound in zip(("low", "high"), interval(row, key) or (None, None), strict=True)
    }
    return {
        **row,
        **row["lossless"],
        **bounds,
        "speedup_without_rule": entry.without_rule if task == OVERALL else None,
        "against_the_best": standing["verdict"] if standing and task == OVERALL else None,
        "p_against_the_best": standing["p"] if standing and task == OVERALL else None,
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
        kept = [name for name in [*_WHERE, *with_bounds] if name in self.records]
        return _Page(tables, self.records[list(dict.fromkeys(kept))])


def show(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Print the runs' tables, or write them where the options of :func:`parser` say."""
    # By file name; the runs that belong to no reproduction share one.
    pages: dict[str, _Page] = {}
    made, others = by_reproduction(runs)
    for reproduction, members in made:
        twice = reproduction.name in pages  # the measured runs have the name
        stem = f"{reproduction.name}_{members[0].timing}" if twice else reproduction.name
        pages[stem] = _Page(list(reproduction.tables(members)))
    for group in by_timing(others):
        comparisons = make_comparisons(group, options.estimator)
        tables = [comparison_table(*comparisons)]
        if options.tasks:
            tables += [task_table(c, f"{c.title}: by task") for c in comparisons]
        if options.pairs:
            tables += filter(None, map(pairs_table, comparisons))
        stem = "tables_predicted" if group[0].timing == "predicted" else "tables"
        if stem in pages:  # of measured runs; these are steps without times
            stem = "tables_steps"
        pages[stem] = _Page(tables, records_sheet(comparisons))
    if options.columns is not None:
        names = _names(options.columns, pages.values())
        pages = {stem: page.only(names) for stem, page in pages.items()}
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
        sys.stdout.write("\n".join(_text(name, [*pages.values()], wide) for name in wanted))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        for table in _tables(pages.values(), wide):
            console.print(to_rich(table), "")
    return 0


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
