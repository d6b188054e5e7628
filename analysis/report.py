"""Runs as one page for a browser: ``python -m analysis.report RUNS... -o report.html``.

The page stands alone: style, pictures and CSV files are inside, it has no script, and its content
policy forbids the browser to fetch anything. It says the same as :mod:`analysis.tables` and
:mod:`analysis.figures`: first which method to take and one figure, then the rest, folded. The same
records give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from analysis.figures import pictures_of
from analysis.papers import by_reproduction
from analysis.plots.layout import Drawing
from analysis.plots.style import styled
from analysis.runs.captions import (
    compared_budgets,
    disturbed_text,
    slow_baseline_words,
    verdict_totals,
)
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, by_timing, make_comparisons
from analysis.runs.leaders import leaders_of, shown_faster
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import TITLE_TIMES, comparison_table, pairs_table
from analysis.tabular.overviews import claims_table, leaders_table, lossless_table, titled
from analysis.tabular.provenance import environments, settings, sources, uncommitted
from analysis.tabular.records_sheet import records_sheet
from analysis.tabular.table import ResultTable, column_name, csv_text, sheet
from specbench.results.estimate import ABSENT, Estimate, numeric_columns
from specbench.results.names import display_name
from specbench.results.records import TIMINGS
from specbench.results.statistics.aggregate import LEFT_OUT_SHARE
from specbench.results.statistics.summary import ESTIMATORS
from specbench.results.wording import DECISION_TEXT, DEFINITIONS, citation, parted, verdict_words

# Methods or settings of one comparison in the first table.
_MOST = 8
# Comparisons whose methods are all in the first table; of more a row each.
_IN_FULL = 3
_SLOW = "Slow baseline: a part of each speedup is the slowness of plain decoding"
TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class Picture:
    """A figure for a page: its words beside it, not in it, so that a screen reads them.

    Attributes:
        shows: what its axes are.
        uri: the drawing (SVG) as a ``data:`` address.
        width: in CSS pixels, as drawn.
    """

    title: str
    caption: str
    shows: str
    uri: str
    width: int


@dataclass(frozen=True)
class Section:
    """One reproduction of a paper, or the runs that share model, data and hardware.

    Attributes:
        place: what it is called in a table.
        first: the picture that stands at the page's head instead of here.
    """

    title: str
    place: str
    runs: Sequence[Run]
    tables: Sequence[ResultTable]
    pictures: Sequence[Picture]
    first: Picture | None = None


@dataclass(frozen=True)
class FirstTable:
    """Which method to take, by comparisons of one timing.

    Attributes:
        shown: the table that is in the open; ``further``: every method, where that one has but the
            fastest.
        sections: of each row of ``shown`` the number of its section from 1; none where methods are
            rows.
        records: all numbers, as CSV.
    """

    shown: ResultTable
    further: ResultTable | None
    sections: Sequence[int]
    records: str


def page(runs: Sequence[Run], estimator: str | None = None) -> str:
    """The whole page; the estimator holds for the first table and for runs of no reproduction."""
    recorded = [run for run in runs if run.records]
    apart = [make_comparisons(group, estimator) for group in by_timing(recorded)]
    comparisons = [comparison for group in apart for comparison in group]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["measured"] = lambda cell: isinstance(cell, Estimate)
    environment.filters |= {
        "numeric": numeric_columns,
        "parted": parted,
        "csv": lambda table: _csv_address(csv_text(sheet([table]))),
        "file": lambda title: f"{column_name(title)}.csv",
    }
    with styled():
        shown = first_picture_apart(list(sections(runs, estimator)))
    return environment.get_template(TEMPLATE).render(
        lead=lead(recorded or runs),
        when_and_where=when_and_where(recorded or runs),
        warnings=warnings(comparisons),
        disturbed=[(c.printed_title, text) for c in comparisons if (text := disturbed_text(c))],
        firsts=[first_table(group, shown, len(comparisons) <= _IN_FULL) for group in apart],
        definitions=DEFINITIONS,
        sections=shown,
        claims=[claims_table(group) for group in apart],
        lossless=lossless_table(comparisons),
        verdicts=verdict_words(verdict_totals(e for c in comparisons for e in c.drafting)),
        settings=settings(recorded),
        environments=environments(runs),
        sources=sources(runs),
        code=uncommitted(runs),
        citation=citation(),
    )


def lead(runs: Sequence[Run]) -> str:
    """What was run, in one sentence."""
    turns = sum(len(run.records) for run in runs)
    words = [f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {turns:,} recorded turns"]
    if turns:
        models = dict.fromkeys(display_name(run.model) for run in runs)
        data = dict.fromkeys(display_name(run.dataset) for run in runs)
        words.append(f"of {', '.join(models)} on {', '.join(data)}")
    return " ".join(words) + "."


def when_and_where(runs: Sequence[Run]) -> str:
    """Days and machines of the measurements, and the code; what was not recorded is left out."""
    days = sorted({record.started_at[:10] for run in runs for record in run.records} - {""})
    machines = dict.fromkeys(run.hardware for run in runs)
    codes = dict.fromkeys(run.code for run in runs)
    when = " to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "Date not recorded"
    few = [*codes] if len(codes) <= _IN_FULL else [f"{len(codes)} states of the code"]
    return f"{when}. {'; '.join(machines)}. {'; '.join(few).capitalize()}."


def warnings(comparisons: Sequence[ComparedRuns]) -> list[tuple[str, str]]:
    """What a reader must know before any number: in a word, and how much of it there is."""
    runs = [run for comparison in comparisons for run in comparison.runs]
    entries = [entry for comparison in comparisons for entry in comparison.entries]
    # All labels of a run lose the same cases.
    lost = {str(entry.run.path): entry.overall for entry in entries}.values()
    timed_all_the_same = sum(row["n_disturbed"] for row in lost if row["disturbed_counted"])
    slow = sum(
        any(words.startswith("SLOW") for words in slow_baseline_words(comparison))
        for comparison in comparisons
    )
    of_turns = {
        "BUG: output that is not plain decoding's": sum(
            entry.overall["lossless"]["bug"] for entry in entries
        ),
        "Lossy verifier": sum(entry.overall["lossless"].get("lossy", 0) for entry in entries),
    }
    of_runs = {
        "Synthetic records, not a measurement": sum(run.synthetic for run in runs),
        "Times predicted by a cost surface, not measured": sum(
            run.timing == "predicted" for run in runs
        ),
        "Replay without times, steps only": sum(run.timing == "none" for run in runs),
        "Imported, not run here": sum(run.imported is not None for run in runs),
        "Incomplete": sum(not run.complete for run in runs),
    }
    of_cases = {
        "Left out for all labels because one failed": sum(row["n_dropped"] for row in lost),
        "Disturbed, left out of everything timed": sum(row["n_disturbed"] for row in lost)
        - timed_all_the_same,
        f"Disturbed, and timed: over {LEFT_OUT_SHARE:.0%} of their run": timed_all_the_same,
    }
    return [
        *((words, f"turns: {count}") for words, count in of_turns.items() if count),
        *((words, f"{count} of {len(runs)} runs") for words, count in of_runs.items() if count),
        *((words, f"cases: {count}") for words, count in of_cases.items() if count),
        *([(_SLOW, f"{slow} of {len(comparisons)} comparisons")] if slow else []),
    ]


def first_table(
    comparisons: Sequence[ComparedRuns], sections: Sequence[Section], in_full: bool
) -> FirstTable:
    """Which method to take, for comparisons of one timing; of a sweep the fastest settings.

    Every method of them ``in_full``, else a row for each comparison.
    """
    records = _csv_address(csv_text(records_sheet(comparisons)))
    timed = [c for c in comparisons if any(not entry.run.phases for entry in c.drafting)]
    if not timed:
        return FirstTable(ResultTable.of("", "", []), None, [], records)
    made = comparison_table(*timed, most=_MOST)
    budgets = dict.fromkeys(map(compared_budgets, timed)) if in_full else ()
    methods = replace(
        made.in_short(),
        title=titled("Methods", timed),
        caption="\n".join([*filter(None, budgets), *_below(made)]),
    )
    drafting = [comparison for comparison in timed if leaders_of(comparison)]
    if in_full or not drafting:
        return FirstTable(methods, None, [], records)
    numbers = [_section_of(comparison, sections) for comparison in drafting]
    places = [sections[number - 1].place if number else ABSENT for number in numbers]
    fastest = leaders_table(drafting, places)
    if drafting and drafting[0].timing != "none":
        fastest = replace(fastest, head=[_how_many(drafting)])
    return FirstTable(fastest, methods, numbers, records)


def _how_many(comparisons: Sequence[ComparedRuns]) -> str:
    """In how many of many comparisons a method gains, in a sentence."""
    faster = sum(bool(shown_faster(comparison)) for comparison in comparisons)
    return (
        f"In {faster} of {len(comparisons)} comparisons a method is shown faster than plain "
        "decoding."
    )


def _section_of(comparison: ComparedRuns, sections: Sequence[Section]) -> int:
    """The number of the first section with runs of the comparison; 0 where none has."""
    folders = {run.path for run in comparison.runs}
    found = (n for n, s in enumerate(sections, 1) if folders & {run.path for run in s.runs})
    return next(found, 0)


def _below(table: ResultTable) -> list[str]:
    """The part of its caption that neither the sections below nor the definitions hold."""
    lines = table.caption.split("\n")
    return lines[lines.index(DECISION_TEXT) + 1 :]


def sections(runs: Sequence[Run], estimator: str | None = None) -> Iterator[Section]:
    """The reproductions of the papers first, then every comparison of other runs.

    Drawn one after the other, within :func:`analysis.plots.style.styled`.
    """
    made, others = by_reproduction(runs)
    for reproduction, members in made:
        pictures = [picture(figure) for _, figure in reproduction.figures(members)]
        title = reproduction.place + TITLE_TIMES[members[0].timing]
        yield Section(
            title, reproduction.place, members, list(reproduction.tables(members)), pictures
        )
    for comparison in make_comparisons(others, estimator):
        tables = [comparison_table(comparison), pairs_table(comparison)]
        pictures = [picture(figure) for _, figure in pictures_of(comparison)]
        yield Section(
            comparison.printed_title + TITLE_TIMES[comparison.timing],
            comparison.printed_title,
            comparison.runs,
            [table for table in tables if table is not None],
            pictures,
        )


def first_picture_apart(made: list[Section]) -> list[Section]:
    """The sections, of which the one with most measured turns gives its first picture away."""

    def weight(section: Section) -> tuple[int, int]:
        measured = -TIMINGS.index(section.runs[0].timing)
        return measured, sum(len(run.records) for run in section.runs)

    drawn = [section for section in made if section.pictures]
    if not drawn:
        return made
    chosen = max(drawn, key=weight)
    first, *others = chosen.pictures
    made[made.index(chosen)] = replace(chosen, first=first, pictures=others)
    return made


def picture(figure: Drawing) -> Picture:
    """The figure with its words beside it."""
    # Axes without a name are legends and color bars.
    named = [axes.get_title() or axes.get_ylabel() or axes.get_xlabel() for axes in figure.axes]
    shows = "; ".join(dict.fromkeys(" ".join(name.split()) for name in named if name))
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    uri, width = _address("image/svg+xml", out.getvalue()), round(figure.get_figwidth() * 96)
    return Picture(figure.title, " ".join(figure.caption.split()), shows, uri, width)


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _csv_address(text: str) -> str:
    return _address("text/csv;charset=utf-8", text.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("report", "Runs as one page for a browser.")
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="default: RUNS/report.html")
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    return with_runs(parser.parse_args(arguments), _write)


def _write(runs: Sequence[Run], options: argparse.Namespace) -> int:
    output = options.output or options.runs[0] / "report.html"
    text = page(runs, options.estimator)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{output}: {len(text.encode()) / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
