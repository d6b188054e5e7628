"""The table a run prints: a rendering of ``summary.json``, nothing computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

from specbench.results import records
from specbench.storage import jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 160

Justify: TypeAlias = Literal["left", "right"]


def print_folder(folder: Path, console: Console | None = None) -> None:
    """Print the table, the warnings and the paths of a folder whose summary is written."""
    if console is None:
        console = Console(soft_wrap=False)
        if not console.is_terminal:
            console = Console(width=_WIDTH, soft_wrap=False)
    summary = jsonl.read_json(folder / records.SUMMARY)
    console.print(render(summary["rows"], summary.get("caption", "")))
    pairs = summary.get("pairs") or []
    if 0 < len(pairs) <= _MOST_PAIRS:
        console.print(render_pairs(pairs))
    elif pairs:
        console.print(f"{len(pairs)} pairs are compared in {folder / records.SUMMARY}")
    for note in summary.get("notes", []):
        console.print(f"note: {note}", markup=False, highlight=False)
    files = [name for name in _SHOWN_FILES if (folder / name).exists()]
    console.print(
        f"files: {folder}/ ({', '.join(files)})", markup=False, highlight=False, soft_wrap=True
    )


_SHOWN_FILES = (
    records.SUMMARY,
    records.CASES,
    records.ERRORS,
    records.DISTURBED,
    records.STEPS,
    records.MANIFEST,
)
# What fits on a screen: the pairs of seven labels.
_MOST_PAIRS = 21


def render(rows: Sequence[Mapping[str, Any]], caption: str = "") -> Table:
    """Rows of ``summary.json`` as a rich table, one section per task, the whole run last."""
    from specbench.results.statistics import task_order  # scipy takes long to import

    table = Table(caption=caption or None, caption_justify="left", show_lines=False)
    energy = any(row.get("joules_per_token") is not None for row in rows)
    for heading, justify in (*_COLUMNS, *([_ENERGY] if energy else [])):
        table.add_column(heading, justify=justify, no_wrap="[95 %]" not in heading)
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
                # Summaries from before these columns lack them.
                *(_number(row.get(key), 2) for key in _FOOTING),
                _verdicts(row["lossless"]),
                *([_number(row["joules_per_token"], 2)] if energy else []),
                end_section=i == len(chosen) - 1,
            )
    return table


def render_pairs(pairs: Sequence[Mapping[str, Any]]) -> Table:
    """``pairs`` of ``summary.json`` as a rich table: who is faster, who ties, what stays unseen."""
    table = Table(
        caption="Ratio of decode speeds, geometric mean over cases. p: sign-flip permutation test, "
        "corrected for the number of pairs (Holm). tie: the whole interval within "
        f"{pairs[0]['margin']:.0%}. detectable: smallest ratio shown with a power of 80 %.",
        caption_justify="left",
    )
    for heading, justify in _PAIR_COLUMNS:
        table.add_column(heading, justify=justify)
    for pair in pairs:
        table.add_row(
            pair["first"],
            pair["second"],
            _ratio(pair["ratio"], pair["ratio_ci"], digits=3),
            _number(pair["p_holm"], 4),
            pair["verdict"],
            _number(pair["detectable"], 3),
        )
    return table


_COLUMNS: tuple[tuple[str, Justify], ...] = (
    ("task", "left"),
    ("label", "left"),
    ("cases", "right"),
    ("MAT", "right"),
    ("tokens/s", "right"),
    ("speedup [95 %]", "right"),
    ("geo. mean [95 %]", "right"),
    ("/ eager ar", "right"),
    ("/ graph ar", "right"),
    ("bandwidth", "right"),
    ("lossless", "left"),
)
_FOOTING = ("speedup_eager", "speedup_graph", "bandwidth_share")
_ENERGY: tuple[str, Justify] = ("J/token", "right")
_PAIR_COLUMNS: tuple[tuple[str, Justify], ...] = (
    ("first", "left"),
    ("second", "left"),
    ("ratio [95 %]", "right"),
    ("p (Holm)", "right"),
    ("first is", "left"),
    ("detectable", "right"),
)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or interval is None or any(bound is None for bound in interval):
        return _number(value, digits)
    low, high = (f"{bound:.{digits}f}" for bound in interval)
    return f"{value:.{digits}f} [{low}, {high}]"


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
