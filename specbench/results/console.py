"""Print ``summary.json`` at the end of a run; nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rich.console import Console

from specbench.errors import first_line
from specbench.results.conditions import Warned
from specbench.results.fitted_table import FittedTable, columns_of, in_short
from specbench.results.headline_table import DECISION, decision_cells, no_drafts_text
from specbench.results.manifest import BASELINE
from specbench.results.records import DONE, SUMMARY
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 160
_TEXT = "MAT: tokens per pass of the model. [95 %]: for other prompts like these, not other days."
_AUDITED = " Outputs: compared with plain decoding, token by token."
_HEAD = ("model", "data", "cases", "hardware", "engine")  # conditions above the table


def print_folder(folder: Path, console: Console | None = None, *, brief: bool = False) -> None:
    """Print the sentence, the table, the warnings that decide and the folder of a finished run.

    Args:
        folder: whose summary is written.
        console: to print to; standard output by default, wide where that is a file or a pipe.
        brief: only one line, for a job of a sweep, whose table comes last.
    """
    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
    summary = cast("Summary", jsonl.read_json(folder / SUMMARY))
    plain: Any = {"markup": False, "highlight": False, "soft_wrap": True}
    try:
        if brief:
            console.print(f"{folder}: {summary['verdict'] or 'done'}", **plain)
            return
        print_summary(summary, console)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise jsonl.RecordError(
            f"{folder / SUMMARY} is not a summary of a run ({first_line(error)}). Delete "
            f"{folder / DONE} and repeat the run's command, which rewrites it."
        ) from error
    console.print(f"all notes   python -m analysis.tables {folder} --wide", **plain)
    console.print(f"a page      python -m analysis.report {folder}", **plain)


def print_summary(summary: Summary, console: Console) -> None:
    """Print the sentence, the first table and the warnings that decide."""
    from specbench.results.statistics.batched import BATCHED_TEXT, batched_cells
    from specbench.results.statistics.served import load_rows

    plain: Any = {"markup": False, "highlight": False}
    conditions = summary["conditions"]
    head = "; ".join(conditions[name] for name in _HEAD if name in conditions)
    console.print(head, **plain, style="dim")
    if verdict := summary["verdict"]:
        console.print(verdict, **plain, style="bold")
    for warned in (Warned(**line) for line in summary["warnings"]):
        if warned.decides:
            console.print(f"! {warned.text}", **plain)
    console.print()
    served = summary.get("served", [])
    # For several users the decision is about all of them together.
    if not any(row["concurrency"] > 1 for row in served):
        console.print(render(summary))
    if rows := load_rows(served):
        console.print(FittedTable(columns_of(rows)))
    if batched := [batched_cells(row) for row in summary.get("batched", [])]:
        console.print(FittedTable(columns_of(batched), "", BATCHED_TEXT))
    console.print()


def render(summary: Summary) -> FittedTable:
    """Make the first table of the whole run's rows of ``summary.json``."""
    overall = [row for row in summary["rows"] if row["task"] == OVERALL]
    rows = sorted(overall, key=lambda row: (row["method"] == BASELINE, -(row["speedup"] or 0.0)))
    faster = {pair["first"]: pair["verdict"] == "faster" for pair in summary["pairs"][::-1]}
    unit = "groups" if summary.get("batched") else "cases"
    warned = [w["values"] for w in summary["warnings"] if w["code"] == "NO_DRAFT"]
    idle = {values["label"]: values.get("why", no_drafts_text(None)) for values in warned}
    cells = []
    for row in rows:
        label, interval = row["label"], row["speedup_ci"]
        name = f"{label} ({idle[label]})" if label in idle else label
        # A single method is in no pair: the interval of its speedup decides.
        shown = faster.get(label, interval is not None and interval[0] > 1)
        standing = summary["against_best"].get(label)
        cells.append({"method": name, **decision_cells(row, standing, faster=shown, unit=unit)})
    columns = in_short(columns_of(cells), ["method", *DECISION])
    audited = any(row["lossless"][kind] for row in rows for kind in ("equal", "near_tie", "bug"))
    return FittedTable(columns, "", _TEXT + (_AUDITED if audited else ""))
