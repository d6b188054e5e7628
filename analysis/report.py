"""Runs as one page for a browser: ``python -m analysis.report RUNS... -o report.html``.

The page is self-contained: it holds style, pictures and CSV files, has no script, and its content
policy forbids the browser to fetch anything. It shows the same as :mod:`analysis.tables` and
:mod:`analysis.figures`: warnings first, then which method to take, one table and one
picture for each comparison, its conditions, and the run folders. The same records give the same
bytes.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jinja2

from analysis.figures import pictures_of
from analysis.frame import records_sheet
from analysis.papers import by_reproduction
from analysis.plots.style import Drawing
from analysis.runs.captions import conditions_of, warnings_of
from analysis.runs.cli import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, make_comparisons, run_names
from analysis.runs.leaders import verdict_of, wrong_texts_of
from analysis.runs.load import Run, last_parts
from analysis.tabular.comparison_tables import TITLE_TIMES, comparison_table, load_table
from analysis.tabular.table import ResultTable, csv_text
from specbench.results.cells import NumberCell, numeric_columns
from specbench.results.conditions import DEFINITIONS, join_conditions
from specbench.results.headline_table import SPEEDUP
from specbench.results.names import display_name
from specbench.results.records import OWN_ENGINE

TEMPLATE = "report.html.jinja"


def page(runs: Sequence[Run]) -> str:
    """Return the whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["measured"] = lambda cell: isinstance(cell, NumberCell)
    environment.filters["numeric"] = numeric_columns
    recorded = [run for run in runs if run.records]
    names = run_names(runs)
    folders = [
        {
            "folder": names[run.path],
            "command": last_parts(run.manifest.command),
            "seed": str(run.seed),
            "commit": run.code.removeprefix("commit "),
        }
        for run in runs
    ]
    warned = [text for comparison in make_comparisons(recorded) for text in _warnings(comparison)]
    return environment.get_template(TEMPLATE).render(
        **_head(recorded or runs),
        warnings=list(dict.fromkeys(warned)),
        sections=list(_sections(runs)),
        definitions=DEFINITIONS,
        folders=folders,
    )


def _head(runs: Sequence[Run]) -> dict[str, str]:
    """Describe the runs in one sentence, with days, machines and commits of the measurements."""
    records = [record for run in runs for record in run.records]
    lead = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {len(records):,} recorded turns"
    if records:
        models = dict.fromkeys(display_name(run.model) for run in runs)
        data = dict.fromkeys(display_name(run.dataset) for run in runs)
        lead += f" of {', '.join(models)} on {', '.join(data)}"
    days = sorted({record.started_at[:10] for record in records} - {""})
    when = " to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "Date not recorded"
    machines = dict.fromkeys(run.hardware for run in runs)
    codes = [*dict.fromkeys(run.code for run in runs)]
    code = codes[0] if len(codes) == 1 else f"{len(codes)} states of the code"
    return {"lead": f"{lead}.", "place": f"{when}. {'; '.join(machines)}. {code.capitalize()}."}


def _warnings(comparison: ComparedRuns) -> list[str]:
    """List the warnings to read before any number of a comparison, wrong outputs first."""
    notes = ["Incomplete run."] if any(not run.complete for run in comparison.runs) else []
    if comparison.timing == "none":
        notes.append("Replayed without times: steps only.")
    return [*wrong_texts_of(comparison), *notes, *(w.text for w in warnings_of(comparison))]


def _sections(runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    """Yield the page's sections: reproductions of papers, then every other comparison."""
    reproduced, others = by_reproduction(runs)
    for reproduction, members in reproduced:
        comparisons = make_comparisons([run for run in members if run.records])
        tables = [table.in_short() for table in reproduction.tables(members)]
        figures = [figure for _, figure in reproduction.figures(members)]
        title = reproduction.title + TITLE_TIMES[members[0].timing]
        yield _section(title, "", tables, figures, comparisons)
    for comparison in make_comparisons(others):
        run = comparison.runs[0]
        engine = run.engine if run.engine != OWN_ENGINE else ""
        users = f"{run.concurrency} users at once" if run.concurrency > 1 else ""
        title = ", ".join(filter(None, [comparison.printed_title, engine, users]))
        figures = [figure for _, figure in itertools.islice(pictures_of(comparison), 1)]
        title += TITLE_TIMES[comparison.timing]
        tables = [_decision_table(comparison)]
        yield _section(title, verdict_of(comparison), tables, figures, [comparison])


def _section(
    title: str,
    sentence: str,
    tables: Sequence[ResultTable],
    figures: Sequence[Drawing],
    comparisons: Sequence[ComparedRuns],
) -> dict[str, object]:
    numbers = csv_text(records_sheet(comparisons)) if comparisons else ""
    return {
        "title": title,
        "sentence": sentence,
        "tables": tables,
        "pictures": [_picture(figure) for figure in figures],
        "csv": _address("text/csv;charset=utf-8", numbers.encode()) if numbers else "",
        "conditions": join_conditions(map(conditions_of, comparisons)),
    }


def _decision_table(comparison: ComparedRuns) -> ResultTable:
    """Tabulate the methods, the fastest first; with several users, whether drafting pays."""
    load = load_table([comparison]) if comparison.runs[0].concurrency > 1 else None
    if load is not None:
        return load
    table = comparison_table(comparison).in_short()
    cells = table.frame[SPEEDUP if SPEEDUP in table.frame else "MAT"]
    values = [(isinstance(cell, NumberCell) and cell.value) or 0.0 for cell in cells]
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return replace(table, frame=table.frame.iloc[order])


def _picture(figure: Drawing) -> dict[str, object]:
    """Return a figure (SVG, as a ``data:`` address), its width in CSS pixels, title and axes."""
    # Axes without a name are legends and color bars.
    named = [axes.get_title() or axes.get_ylabel() or axes.get_xlabel() for axes in figure.axes]
    axes = "; ".join(dict.fromkeys(" ".join(name.split()) for name in named if name))
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    uri, width = _address("image/svg+xml", out.getvalue()), round(figure.get_figwidth() * 96)
    return {"title": figure.title, "axes": axes, "uri": uri, "width": width}


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("report", "Runs as one page for a browser.")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="RUNS/report.html")
    return with_runs(parser.parse_args(arguments), _write)


def _write(runs: Sequence[Run], options: argparse.Namespace) -> int:
    output = options.output or options.runs[0] / "report.html"
    text = page(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{output}: {len(text.encode()) / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
