"""What a run says at its end: ``summary.json`` printed, nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rich.console import Console

from specbench.errors import first_line
from specbench.results.decision import DECISION, decision_cells
from specbench.results.fitted_table import FittedTable, columns_of, in_short
from specbench.results.records import (
    CASES,
    CHANGES,
    DISTURBED,
    DONE,
    ERRORS,
    MANIFEST,
    REPEAT,
    STEPS,
    SUMMARY,
)
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.results.wording import DECISION_TEXT
from specbench.storage import jsonl

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 160
_SHOWN_FILES = (SUMMARY, CASES, ERRORS, DISTURBED, STEPS, MANIFEST, REPEAT, CHANGES)


def print_folder(folder: Path, console: Console | None = None) -> None:
    """Print the table, the warnings and the paths of a folder whose summary is written."""
    if console is None:
        console = Console(soft_wrap=False)
        if not console.is_terminal:
            console = Console(width=_WIDTH, soft_wrap=False)
    summary = cast("Summary", jsonl.read_json(folder / SUMMARY))
    try:
        print_summary(summary, console)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise jsonl.RecordError(
            f"{folder / SUMMARY} is not a summary of a run ({first_line(error)}). Delete "
            f"{folder / DONE} and repeat the run's command, which writes it anew."
        ) from error
    written = (name for name in _SHOWN_FILES if (folder / name).exists())
    files = [name for name in written if (folder / name).stat().st_size]
    for line in (
        f"by task: python -m analysis.tables {folder} --tasks; all columns: --wide; pairs: --pairs",
        f"files: {folder}/ ({', '.join(files)})",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_summary(summary: Summary, console: Console) -> None:
    """The first table and the notes below it."""
    from specbench.results.statistics.batched import BATCHED_TEXT, batched_cells
    from specbench.results.statistics.served import (
        LATENCY_TEXT,
        SERVED_TEXT,
        latency_cells,
        served_cells,
        served_notes,
    )

    if verdict := summary.get("verdict"):
        console.print(f"{verdict}\n", markup=False, highlight=False, style="bold")
    served = summary.get("served", [])
    tables = [render(summary)]
    if served:
        lines = [served_cells(row) for row in served]
        # Of several users what all of them get comes first.
        first = any(row["concurrency"] > 1 for row in served)
        tables.insert(0 if first else 1, FittedTable(columns_of(lines), "", SERVED_TEXT))
        waits = columns_of([latency_cells(row) for row in served])
        tables.append(FittedTable(waits, "", LATENCY_TEXT))
    if batched := summary.get("batched", []):
        lines = [batched_cells(row) for row in batched]
        tables.append(FittedTable(columns_of(lines), "", BATCHED_TEXT))
    for table in tables:
        console.print(table)
    for note in [*served_notes(served), *summary.get("notes", [])]:
        console.print(f"note: {note}", markup=False, highlight=False)


def render(summary: Summary) -> FittedTable:
    """The whole run's rows of ``summary.json`` as the first table."""
    found = summary["against_best"]
    rows = [row for row in summary["rows"] if row["task"] == OVERALL]
    cells = [
        {"method": row["label"], **decision_cells(row, found.get(row["label"]))} for row in rows
    ]
    text = "\n".join(filter(None, [summary.get("caption", ""), DECISION_TEXT]))
    return FittedTable(in_short(columns_of(cells), ["method", *DECISION]), "", text)
