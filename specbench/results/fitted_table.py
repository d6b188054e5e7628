"""Tables for a terminal, at whatever width it has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from specbench.results.estimate import ABSENT, Cell, Estimate, numeric_columns

if TYPE_CHECKING:
    import pandas as pd

INTERVAL = " [95 %]"  # of a heading whose cells have intervals

_GAP = 2  # between columns
_READABLE = 100  # characters in a line of prose
_LONGEST_WORD = 16  # longer names are broken
# Of these columns a table is about; they stay where others find no room.
_KEPT = ("MAT", "speedup")


# A frame, or cells by heading: a run's end has a few rows, and pandas takes long to import.
Columns: TypeAlias = "pd.DataFrame | Mapping[str, Sequence[Cell]]"


def columns_of(rows: Sequence[Mapping[str, Cell]]) -> dict[str, list[Cell]]:
    """The cells of ``rows`` by heading; what a row lacks is absent there."""
    headings = dict.fromkeys(heading for row in rows for heading in row)
    return {heading: [row.get(heading, ABSENT) for row in rows] for heading in headings}


def in_short(columns: Columns, headings: Sequence[str]) -> dict[str, list[Cell]]:
    """Some of the columns; ``MAT`` of one with ``MAT [95 %]``: without the interval."""
    return {
        heading: [*columns[heading]]
        if heading in columns
        else [_without_interval(cell) for cell in columns[heading + INTERVAL]]
        for heading in headings
    }


def _without_interval(cell: Cell) -> Cell:
    return cell.alone if isinstance(cell, Estimate) else cell


@dataclass(frozen=True)
class FittedTable:
    """Columns of cells for a terminal.

    Numbers are never broken or cut. Text is folded; where even that is too wide, the last columns
    are left out, and a line below says which.

    Attributes:
        groups: so many leading columns stand as a line of their own above the rows that share them.
    """

    columns: Columns
    title: str = ""
    caption: str = ""
    groups: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {str(name): [*self.columns[name]] for name in self.columns}
        names = [*cells]
        body = {name: cells[name] for name in names[self.groups :]}
        widths, left_out = _fit(body, options.max_width)
        rows = [*zip(*(body[name] for name in widths), strict=True)]
        if self.title:
            yield Text(self.title, style="bold")
        if not self.groups:
            yield _lines(rows, body, widths)
        else:
            yield _lines([], body, widths)
            by_head: dict[str, list[tuple[Cell, ...]]] = {}
            heads = zip(*(cells[name] for name in names[: self.groups]), strict=True)
            for head, row in zip(heads, rows, strict=True):
                by_head.setdefault(", ".join(map(str, head)), []).append(row)
            for number, (head_line, members) in enumerate(by_head.items()):
                yield Text(f"\n{head_line}" if number else head_line, style="bold")
                yield _lines(members, body, widths, head=False)
        page = max(_READABLE, sum(widths.values()) + _GAP * (len(widths) - 1))
        for line in filter(None, [*self.caption.split("\n"), left_out]):
            yield Constrain(Text(line, style="dim"), page)


def _lines(
    rows: Sequence[tuple[Cell, ...]],
    columns: Mapping[str, Sequence[Cell]],
    widths: Mapping[str, int],
    head: bool = True,
) -> Table:
    # Text, because brackets in a plain string would be taken for markup.
    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=head,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    right = dict(zip(columns, numeric_columns(columns), strict=True))
    for heading, width in widths.items():
        table.add_column(
            Text(heading),
            justify="right" if right[heading] else "left",
            width=width,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(_styled, row))
    return table


def _fit(columns: Mapping[str, Sequence[Cell]], width: int) -> tuple[dict[str, int], str]:
    """Width of each column that is shown, and what to say of the others."""
    right = dict(zip(columns, numeric_columns(columns), strict=True))
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for name, column in columns.items():
        cells = [str(cell) for cell in column]
        most[name] = max(map(len, [name, *cells]))
        words = [*re.split(" (?!%)", name), *(cells if right[name] else " ".join(cells).split())]
        longest = max(map(len, words), default=1)
        least[name] = longest if right[name] else min(longest, _LONGEST_WORD)
    gone: list[str] = []
    for name in list(least)[:0:-1]:
        if sum(least.values()) + _GAP * (len(least) - 1) <= width:
            break
        if not name.startswith(_KEPT):
            gone.insert(0, name)
            del least[name]
    spare = width - sum(least.values()) - _GAP * (len(least) - 1)
    for name in sorted(least, key=lambda name: most[name] - least[name]):
        more = max(0, min(most[name] - least[name], spare))
        least[name] += more
        spare -= more
    return least, f"Not shown for lack of room: {', '.join(gone)}." if gone else ""


def _styled(cell: Cell) -> Text:
    text = str(cell)
    if isinstance(cell, Estimate) and cell.leads:
        return Text(text, style="bold green")
    if "BUG" in text:
        return Text(text, style="bold red")
    return Text(text, style="dim" if text == ABSENT else "")
