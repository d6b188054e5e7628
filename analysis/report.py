"""Runs as one page for a browser: ``python -m analysis.report RUNS... -o report.html``.

The page stands alone: style and pictures are inside, it has no script, and its content policy
forbids the browser to fetch anything. It says the same as :mod:`analysis.tables` and
:mod:`analysis.figures`, and besides how the methods were set, on what they ran, and what was
claimed. The same records give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from analysis.figures import pictures_of
from analysis.papers import by_reproduction
from analysis.plots.layout import Drawing
from analysis.plots.style import styled
from analysis.runs.captions import disturbed_words
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import Comparison, by_timing, make_comparisons
from analysis.runs.load import Run
from analysis.runs.verdicts import VERDICT_RULE, VERDICT_WORDS
from analysis.tabular.comparison_tables import (
    TITLE_TIMES,
    claimed_cell,
    comparison_table,
    context_cells,
    pairs_table,
)
from analysis.tabular.provenance import environments, settings, sources
from analysis.tabular.table import ResultTable
from specbench.results.decision import DECISION_TEXT
from specbench.results.estimate import ABSENT, Cell, Estimate, numeric_columns
from specbench.results.records import DIFFERS, VERDICTS
from specbench.results.statistics.aggregate import LEFT_OUT_SHARE
from specbench.results.statistics.summary import ESTIMATORS

# Methods or settings of one comparison in the summary.
_MOST = 8
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
    """One reproduction of a paper, or the runs that share model, data and hardware."""

    title: str
    tables: Sequence[ResultTable]
    pictures: Sequence[Picture]


def page(runs: Sequence[Run], estimator: str | None = None) -> str:
    """The whole page; the estimator is that of the summary and of runs of no reproduction."""
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
    environment.filters["numeric"] = numeric_columns
    with styled():
        shown = list(sections(runs, estimator))
    return environment.get_template(TEMPLATE).render(
        lead=lead(recorded or runs),
        warnings=warnings(comparisons),
        summaries=[summary(group) for group in apart],
        sections=shown,
        claims=[claims(group) for group in apart],
        lossless=lossless(comparisons),
        settings=settings(recorded),
        environments=environments(runs),
        sources=sources(runs),
    )


def _titled(title: str, comparisons: Sequence[Comparison]) -> str:
    """The title of a table over comparisons of one timing."""
    return title + TITLE_TIMES[comparisons[0].timing if comparisons else "measured"]


def lead(runs: Sequence[Run]) -> str:
    """What was run, in one sentence."""
    turns = sum(len(run.records) for run in runs)
    words = [f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {turns} recorded turns"]
    if turns:
        models = dict.fromkeys(run.model for run in runs)
        data = dict.fromkeys(run.dataset for run in runs)
        words.append(f"of {', '.join(models)} on {', '.join(data)}")
    return " ".join(words) + "."


def warnings(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """What a reader must know before any number: in a word, and how much of it there is."""
    runs = [run for comparison in comparisons for run in comparison.runs]
    entries = [entry for comparison in comparisons for entry in comparison.entries]
    # All labels of a run lose the same cases.
    lost = {str(entry.run.path): entry.overall for entry in entries}.values()
    timed_all_the_same = sum(row["n_disturbed"] for row in lost if row["disturbed_counted"])
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
        f"Disturbed, timed but for {LEFT_OUT_SHARE:.0%} of their run": timed_all_the_same,
    }
    return [
        *((words, f"turns: {count}") for words, count in of_turns.items() if count),
        *((words, f"{count} of {len(runs)} runs") for words, count in of_runs.items() if count),
        *((words, f"cases: {count}") for words, count in of_cases.items() if count),
        *(
            (f"Disturbed, {c.title}", " ".join(said))
            for c in comparisons
            if (said := disturbed_words(c))
        ),
    ]


def summary(comparisons: Sequence[Comparison]) -> ResultTable:
    """The first table over all comparisons, of one timing; of a sweep the fastest settings."""
    timed = [c for c in comparisons if any(not entry.run.phases for entry in c.drafting)]
    title = _titled("At a glance", comparisons)
    if not timed:
        return ResultTable.of(title, "", [])
    made = comparison_table(*timed, most=_MOST)
    return replace(made.in_short(), title=title, caption="\n".join(_below(made)))


def _below(table: ResultTable) -> list[str]:
    """Of its caption what does not stand in the sections below, too."""
    lines = table.caption.split("\n")
    return lines[lines.index(DECISION_TEXT) :]


def sections(runs: Sequence[Run], estimator: str | None = None) -> Iterator[Section]:
    """The reproductions of the papers first, then every comparison of other runs.

    Drawn one after the other, within :func:`analysis.plots.style.styled`.
    """
    made, others = by_reproduction(runs)
    for reproduction, members in made:
        pictures = [picture(figure) for _, figure in reproduction.figures(members)]
        title = reproduction.place + TITLE_TIMES[members[0].timing]
        yield Section(title, list(reproduction.tables(members)), pictures)
    for comparison in make_comparisons(others, estimator):
        tables = [
            t for t in (comparison_table(comparison), pairs_table(comparison)) if t is not None
        ]
        pictures = [picture(figure) for _, figure in pictures_of(comparison)]
        yield Section(
            comparison.title + TITLE_TIMES[comparison.timing],
            tables,
            pictures,
        )


def picture(figure: Drawing) -> Picture:
    """The figure with its words beside it."""
    # Axes without a name are legends and color bars.
    named = [axes.get_title() or axes.get_ylabel() for axes in figure.axes]
    shows = "; ".join(dict.fromkeys(" ".join(name.split()) for name in named if name))
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    uri = "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()
    return Picture(
        figure.title,
        " ".join(figure.caption.split()),
        shows,
        uri,
        round(figure.get_figwidth() * 96),
    )


def claims(comparisons: Sequence[Comparison]) -> ResultTable:
    """Every label for which something is claimed, beside what was measured, or what predicted."""
    rows: list[dict[str, Cell]] = []
    for comparison in comparisons:
        for entry in comparison.drafting:
            claim = entry.claim
            if claim is None:
                continue
            rows.append(
                {
                    "model and data": comparison.title,
                    "method": comparison.name_of(entry),
                    "MAT [95 %]": entry.measured("mat"),
                    "claimed MAT": claimed_cell(claim, "mat"),
                    "speedup [95 %]": entry.measured("speedup"),
                    **context_cells(entry.overall),
                    "claimed speedup": claimed_cell(claim, "speedup"),
                    "claimed for": f"{claim.model} on {claim.dataset}, {claim.hardware}",
                    "source": f"{claim.title.partition(':')[0]}, {claim.source}",
                    "counted as there": entry.judged() or ABSENT,
                    "verdict": entry.verdict(),
                }
            )
    title = _titled("Claimed and measured", comparisons)
    return ResultTable.of(title, f"{VERDICT_RULE}\n{VERDICT_WORDS}", rows)


def lossless(comparisons: Iterable[Comparison]) -> ResultTable:
    """Turns of every label by verdict."""
    comparisons = list(comparisons)
    found = {kind for c in comparisons for e in c.drafting for kind in e.overall["lossless"]}
    kinds = [*VERDICTS, *({DIFFERS} & found), "lossy"]
    rows: list[dict[str, Cell]] = [
        {
            "model and data": comparison.title,
            "method": comparison.name_of(entry),
            **{
                kind.replace("_", " "): str(entry.overall["lossless"].get(kind, 0))
                for kind in kinds
            },
        }
        for comparison in comparisons
        for entry in comparison.drafting
    ]
    text = (
        "Turns. Equal: the tokens of plain decoding. Near tie: other tokens, but each is within "
        "the number format's tolerance of the likeliest one. Bug: anything else. Not audited: "
        "sampling, or a run without plain decoding. Lossy: the verifier does not aim at plain "
        "decoding's distribution."
    )
    return ResultTable.of("Losslessness", text, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("report", "Runs as one page for a browser.")
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", default=Path("report.html"))
    add("--estimator", choices=ESTIMATORS, help="default: the one each run was made with")
    return with_runs(parser.parse_args(arguments), _write)


def _write(runs: Sequence[Run], options: argparse.Namespace) -> int:
    text = page(runs, options.estimator)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.output}: {len(text.encode()) / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
