"""Tables for a terminal, folded by rich at whatever width it has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from specbench.results.cells import ABSENT, INTERVAL, Cell, NumberCell, numeric_columns

if TYPE_CHECKING:
    import pandas as pd

_KEPT = ("MAT", "speedup")  # columns that stay where others find no room
_WORD = 17  # characters of a word that is not broken

# A frame, or cells by heading: a run's end has a few rows, and pandas takes long to import.
Columns: TypeAlias = "pd.DataFrame | Mapping[str, Sequence[Cell]]"


def columns_of(rows: Sequence[Mapping[str, Cell]]) -> dict[str, list[Cell]]:
    """Put the cells of ``rows`` by heading; what a row lacks is absent there."""
    headings = dict.fromkeys(heading for row in rows for heading in row)
    return {heading: [row.get(heading, ABSENT) for row in rows] for heading in headings}


def in_short(columns: Columns, headings: Sequence[str]) -> dict[str, list[Cell]]:
    """Choose some of the columns; ``MAT`` of one with ``MAT [95 %]``: without the interval."""
    return {
        heading: [*columns[heading]]
        if heading in columns
        else [_without_interval(cell) for cell in columns[heading + INTERVAL]]
        for heading in headings
    }


def _without_interval(cell: Cell) -> Cell:
    return cell.without_interval if isinstance(cell, NumberCell) else cell


@dataclass(frozen=True)
class FittedTable:
    """Columns of cells for a terminal.

    Numbers are never broken or cut, text is folded. Where even that is too wide, the last columns
    are left out, and a line below names them.

    Attributes:
        groups: so many leading columns stand as a line of their own above the rows that share them.
    """

    columns: Columns
    title: str = ""
    caption: str = ""
    groups: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, dropped = [str(name) for name in self.columns], list[str]()
        while not self._fits(table := self._table(names), options.max_width):
            last = next((n for n in names[: self.groups : -1] if not n.startswith(_KEPT)), None)
            if last is None:
                break
            names.remove(last)
            dropped.insert(0, last)
        if self.title:
            yield Text(self.title, style="bold")
        yield table
        gone = f"Not shown for lack of room: {', '.join(dropped)}." if dropped else ""
        for line in filter(None, [*self.caption.split("\n"), gone]):
            yield Text(line, style="dim")

    def _fits(self, table: Table, width: int) -> bool:
        """Narrow the widest columns of text until the table fits; return whether it does."""
        columns = table.columns
        while sum(column.width or 0 for column in columns) + 2 * len(columns) - 2 > width:
            texts = [c for c in columns if not c.no_wrap and (c.width or 0) > (c.min_width or 0)]
            if not texts:
                return False
            widest = max(texts, key=lambda column: column.width or 0)
            widest.width = (widest.width or 0) - 1
        return True

    def _table(self, names: Sequence[str]) -> Table:
        # Text, because brackets in a plain string would be taken for markup.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        leading = [[str(cell) for cell in self.columns[name]] for name in names[: self.groups]]
        heads = [", ".join(parts) for parts in zip(*leading, strict=True)]
        widest = max(map(len, heads), default=0)  # a head stands in the first column
        cells = {name: [*self.columns[name]] for name in names[self.groups :]}
        for name, number in zip(cells, numeric_columns(cells), strict=True):
            texts = [str(cell) for cell in cells[name]]
            longest = max(map(len, texts), default=0)
            heading = re.sub(" (?!%)", "\n", name) if number and len(name) > longest else name
            whole = max(longest, widest, *map(len, heading.split("\n")))
            # A short word is never broken; a number with its interval neither.
            word = max((len(w) for w in " ".join([name, *texts]).split()), default=1)
            table.add_column(
                Text(heading),
                justify="right" if number else "left",
                no_wrap=number,
                width=whole,
                min_width=max(min(word, _WORD), widest),
                overflow="fold",
            )
            widest = 0
        for i, row in enumerate(zip(*cells.values(), strict=True)):
            if heads and (i == 0 or heads[i] != heads[i - 1]):
                table.add_row(Text(heads[i], style="bold"))
            table.add_row(*map(_styled, row))
        return table


def _styled(cell: Cell) -> Text:
    text = str(cell)
    if isinstance(cell, NumberCell) and cell.leads:
        return Text(text, style="bold green")
    if "BUG" in text:
        return Text(text, style="bold red")
    return Text(text, style="dim" if text == ABSENT else "")
