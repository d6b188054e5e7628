"""Tables on a terminal; the one of a run is ``summary.json`` printed, nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.results.estimate import Estimate, numeric_columns
from specbench.results.records import CASES, DISTURBED, ERRORS, MANIFEST, STEPS, SUMMARY
from specbench.results.summary_schema import Pair, Summary, SummaryRow
from specbench.results.wording import (
    PAIRS_TEXT,
    case_words,
    leader_words,
    p_words,
    pair_words,
    verdict_words,
)
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

if TYPE_CHECKING:
    import pandas as pd

# Wide enough for all columns where the output is a file or a pipe.
_WIDTH = 160
_SHOWN_FILES = (SUMMARY, CASES, ERRORS, DISTURBED, STEPS, MANIFEST)
# What fits on a screen: the pairs of seven labels.
_MOST_PAIRS = 21


def rich_table(frame: pd.DataFrame, title: str = "", caption: str = "") -> Table:
    """A frame of text and estimates for a terminal; columns of numbers stand to the right."""
    # Text, because brackets in a plain string would be taken for markup.
    table = Table(title=Text(title) if title else None, caption_justify="left")
    table.caption = Text(caption) if caption else None
    for heading, right in zip(frame, numeric_columns(frame), strict=True):
        table.add_column(Text(str(heading)), justify="right" if right else "left")
    for row in frame.itertuples(index=False, name=None):
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def print_folder(folder: Path, console: Console | None = None) -> None:
    """Print the table, the warnings and the paths of a folder whose summary is written."""
    if console is None:
        console = Console(soft_wrap=False)
        if not console.is_terminal:
            console = Console(width=_WIDTH, soft_wrap=False)
    summary = cast("Summary", jsonl.read_json(folder / SUMMARY))
    console.print(render(summary["rows"], summary.get("caption", "")))
    pairs = summary.get("pairs") or []
    if 0 < len(pairs) <= _MOST_PAIRS:
        console.print(render_pairs(pairs))
    elif pairs:
        console.print(f"{len(pairs)} pairs are compared in {folder / SUMMARY}", markup=False)
    if pairs and (leaders := summary.get("leaders")):
        console.print(f"fastest method: {leader_words(leaders)}", markup=False, highlight=False)
    for note in summary.get("notes", []):
        console.print(f"note: {note}", markup=False, highlight=False)
    files = [name for name in _SHOWN_FILES if (folder / name).exists()]
    console.print(
        f"files: {folder}/ ({', '.join(files)})", markup=False, highlight=False, soft_wrap=True
    )


def render(rows: Sequence[SummaryRow], caption: str = "") -> Table:
    """Rows of ``summary.json`` as a rich table, one section per task, the whole run last."""
    import pandas as pd  # it and scipy take long to import

    from specbench.results.statistics.summary import task_order

    shown = sorted(rows, key=lambda row: task_order(row["task"]))
    energy = any(row.get("joules_per_token") is not None for row in rows)
    tasks = [row["task"] for row in shown]
    begins = [task != before for task, before in zip(tasks, [None, *tasks], strict=False)]
    frame = pd.DataFrame(
        [
            {"task": row["task"] if new else "", **_cells(row, energy)}
            for row, new in zip(shown, begins, strict=True)
        ],
        dtype=object,
    )
    table = rich_table(frame, caption=caption)
    for column, heading in zip(table.columns, frame, strict=True):
        column.no_wrap = "[95 %]" not in str(heading)
    for line, end in zip(table.rows, [*begins[1:], True], strict=False):
        line.end_section = end
    return table


def _cells(row: SummaryRow, energy: bool) -> dict[str, str | Estimate]:
    # Summaries from before some of the columns lack them.
    known = cast("JsonObject", row).get
    return {
        "label": row["label"],
        "cases": case_words(row),
        "MAT": Estimate(row["mat"]),
        "tokens/s": Estimate(row["tokens_per_s"], digits=1),
        "speedup [95 %]": Estimate(row["speedup"], known("speedup_ci")),
        "geo. mean [95 %]": Estimate(row["geomean_speedup"], known("geomean_speedup_ci")),
        "/ eager ar": Estimate(known("speedup_eager")),
        "/ graph ar": Estimate(known("speedup_graph")),
        "bandwidth": Estimate(known("bandwidth_share")),
        "lossless": verdict_words(row["lossless"]),
        **({"J/token": Estimate(known("joules_per_token"))} if energy else {}),
    }


def render_pairs(pairs: Sequence[Pair]) -> Table:
    """``pairs`` of ``summary.json`` as a rich table: who is faster, who ties, what stays unseen."""
    import pandas as pd

    frame = pd.DataFrame(
        [
            {
                "first": pair["first"],
                "second": pair["second"],
                "ratio [95 %]": Estimate(pair["ratio"], pair["ratio_ci"], digits=3),
                "p": p_words(pair["p_holm"]),
                "first is": pair_words(pair),
                "detectable": Estimate(pair["detectable"], digits=3),
            }
            for pair in pairs
        ],
        dtype=object,
    )
    return rich_table(frame, caption=PAIRS_TEXT.format(margin=pairs[0]["margin"]))
