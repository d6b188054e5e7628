"""Tables for a terminal, at whatever width it has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def in_short(frame: pd.DataFrame, headings: Sequence[str]) -> pd.DataFrame:
    """Some of a frame's columns; ``MAT`` of one with ``MAT [95 %]``: without the interval."""
    import pandas as pd

    found = {
        heading: frame[heading]
        if heading in frame
        else frame[heading + INTERVAL].map(_without_interval)
        for heading in headings
    }
    return pd.DataFrame(found, dtype=object)


def _without_interval(cell: Cell) -> Cell:
    return cell.alone if isinstance(cell, Estimate) else cell


@dataclass(frozen=True)
class FittedTable:
    """A frame of cells for a terminal.

    Numbers are never broken or cut. Text is folded; where even that is too wide, the last columns
    are left out, and a line below says which.

    Attributes:
        groups: so many leading columns stand as a line of their own above the rows that share them.
    """

    frame: pd.DataFrame
    title: str = ""
    caption: str = ""
    groups: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body = self.frame.iloc[:, self.groups :]
        widths, left_out = _fit(body, options.max_width)
        body = body[list(widths)]
        if self.title:
            yield Text(self.title, style="bold")
        if not self.groups:
            yield self._lines(body, widths)
        else:
            yield self._lines(body[:0], widths)
            heads = self.frame.iloc[:, : self.groups].agg(lambda row: ", ".join(map(str, row)), 1)
            for number, (head, rows) in enumerate(body.groupby(heads, sort=False)):
                yield Text(f"\n{head}" if number else head, style="bold")
                yield self._lines(rows, widths, head=False)
        page = max(_READABLE, sum(widths.values()) + _GAP * (len(widths) - 1))
        for line in filter(None, [*self.caption.split("\n"), left_out]):
            yield Constrain(Text(line, style="dim"), page)

    def _lines(self, rows: pd.DataFrame, widths: Mapping[str, int], head: bool = True) -> Table:
        # Text, because brackets in a plain string would be taken for markup.
        table = Table(
            box=box.SIMPLE_HEAD,
            show_header=head,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),
        )
        right = dict(zip(self.frame, numeric_columns(self.frame), strict=True))
        for heading, width in widths.items():
            table.add_column(
                Text(heading),
                justify="right" if right[heading] else "left",
                width=width,
                overflow="fold",
            )
        for row in rows.itertuples(index=False, name=None):
            table.add_row(*map(_styled, row))
        return table


def _fit(frame: pd.DataFrame, width: int) -> tuple[dict[str, int], str]:
    """Width of each column that is shown, and what to say of the others."""
    right = dict(zip(frame, numeric_columns(frame), strict=True))
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for name in map(str, frame):
        cells = [str(cell) for cell in frame[name]]
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
