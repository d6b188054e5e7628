"""The table a run prints: a rendering of ``summary.json``, nothing computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from specbench import durable, records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 118


def print_folder(folder: Path, console: Console | None = None) -> None:
    """Print the table, the warnings and the paths of a folder whose summary is written."""
    if console is None:
        console = Console(soft_wrap=False)
        if not console.is_terminal:
            console = Console(width=_WIDTH, soft_wrap=False)
    summary = durable.read_json(folder / records.SUMMARY)
    console.print(render(summary["rows"], summary.get("caption", "")))
    for note in summary.get("notes", []):
        console.print(f"note: {note}", markup=False, highlight=False)
    files = [name for name in _SHOWN_FILES if (folder / name).exists()]
    console.print(
        f"files: {folder}/ ({', '.join(files)})", markup=False, highlight=False, soft_wrap=True
    )


_SHOWN_FILES = (records.SUMMARY, records.CASES, records.ERRORS, records.STEPS, records.MANIFEST)


def render(rows: Sequence[Mapping[str, Any]], caption: str = "") -> Table:
    """Rows of ``summary.json`` as a rich table, one section per task, the whole run last."""
    from specbench.statistics import task_order  # scipy takes long to import

    table = Table(caption=caption or None, caption_justify="left", show_lines=False)
    for heading, justify in _COLUMNS:
        table.add_column(heading, justify=justify, no_wrap=heading != "speedup [95 %]")
    tasks = sorted({row["task"] for row in rows}, key=task_order)
    for task in tasks:
        chosen = [row for row in rows if row["task"] == task]
        for i, row in enumerate(chosen):
            table.add_row(
                task if i == 0 else "",
                row["label"],
                str(row["n_cases"]),
                _number(row["mat"], 2),
                _number(row["tokens_per_s"], 1),
                _ratio(row["speedup"], row.get("speedup_ci")),
                _ratio(row["geomean_speedup"], row.get("geomean_speedup_ci")),
                _verdicts(row["lossless"]),
                end_section=i == len(chosen) - 1,
            )
    return table


_COLUMNS = (
    ("task", "left"),
    ("label", "left"),
    ("cases", "right"),
    ("MAT", "right"),
    ("tokens/s", "right"),
    ("speedup [95 %]", "right"),
    ("geo. mean [95 %]", "right"),
    ("lossless", "left"),
)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "–"
    if interval is None or any(bound is None for bound in interval):
        return f"{value:.2f}"
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _verdicts(counts: Mapping[str, int]) -> str:
    """``12 equal, 1 near tie``; kinds that did not occur are left out."""
    words = {
        "equal": "equal",
        "near_tie": "near tie",
        "bug": "BUG",
        "not_audited": "not audited",
        "lossy": "lossy",
    }
    parts = [f"{counts[kind]} {word}" for kind, word in words.items() if counts.get(kind)]
    return ", ".join(parts) or "not audited"
