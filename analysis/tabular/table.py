"""Tables as frames of cells, and the one writer of each form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pandas as pd
from rich.table import Table

from specbench.results.console import rich_table
from specbench.results.estimate import ABSENT, FEWEST, Estimate

Cell: TypeAlias = "str | Estimate"

_INTERVAL = " [95 %]"  # of a heading whose cells have intervals
_FEW = f"[{ABSENT}]: fewer than {FEWEST} cases, of which no interval is made."
_ALIKE = (
    "[=]: the interval has no width to speak of (a thousandth at most), because the cases hardly "
    "differ; among a few cases that can be chance."
)


@dataclass(frozen=True)
class ResultTable:
    """A table, whatever it is printed as.

    Attributes:
        frame: headings and cells; a cell is text or an :class:`Estimate`.
        notes: below the table, besides its caption.
    """

    title: str
    caption: str
    frame: pd.DataFrame
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        title: str,
        caption: str,
        rows: Sequence[Mapping[str, Cell]],
        notes: Sequence[str] = (),
    ) -> ResultTable:
        """A table of rows, each its cells by heading.

        The first row names the columns in their order; what another row lacks is absent there.
        """
        return cls(title, caption, pd.DataFrame(rows, dtype=object).fillna(ABSENT), notes)

    @property
    def rows(self) -> list[list[Cell]]:
        return [list(row) for row in self.frame.itertuples(index=False, name=None)]

    @property
    def foot(self) -> list[str]:
        """The notes, and why some numbers have no interval."""
        cells = [cell for row in self.rows for cell in row if isinstance(cell, Estimate)]
        few = any(cell.few and cell.value is not None for cell in cells)
        alike = any(cell.degenerate for cell in cells)
        return [*self.notes, *([_FEW] if few else []), *([_ALIKE] if alike else [])]


def to_rich(table: ResultTable) -> Table:
    """For a terminal."""
    return rich_table(table.frame, table.title, table.caption)


def to_markdown(tables: Sequence[ResultTable]) -> str:
    """For a README or an issue."""
    parts = []
    for table in tables:
        words = table.frame.map(_markdown_cell).rename(columns=_markdown_cell)
        grid = words.to_markdown(index=False, tablefmt="github", disable_numparse=True)
        title = _one_line(_without_tags(table.title))
        parts.append(f"### {title}\n\n{grid}\n\n{_without_tags(table.caption)}\n")
        if table.foot:
            parts[-1] += "\n" + "".join(f"- {_without_tags(note)}\n" for note in table.foot)
    return "\n".join(parts)


def _markdown_cell(cell: object) -> str:
    return _without_tags(_one_line(str(cell)).replace("\\", "\\\\").replace("|", "\\|"))


def _without_tags(text: str) -> str:
    """Names are the user's, and a page shows Markdown as HTML; ``<0.01`` begins no tag."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def to_csv(tables: Sequence[ResultTable]) -> str:
    """For a program: numbers bare, each estimate followed by the bounds of its interval.

    Several tables follow each other after an empty line, each with its own head.
    """
    return "\n".join(
        pd.concat([_bare(table.frame[name]) for name in table.frame], axis=1).to_csv(
            index=False, lineterminator="\n"
        )
        for table in tables
    )


def _bare(column: pd.Series[object]) -> pd.DataFrame:
    """A column as text; one of estimates in three columns: value, low, high."""
    name = str(column.name).replace(_INTERVAL, "")
    names = [name]
    if any(isinstance(cell, Estimate) for cell in column):
        names += [f"{name} low", f"{name} high"]
    cells = [
        _numbers(cell) if isinstance(cell, Estimate) else [csv_cell(str(cell))] for cell in column
    ]
    return pd.DataFrame([row + [""] * (len(names) - len(row)) for row in cells], columns=names)


def csv_cell(text: str) -> str:
    """Text that a spreadsheet takes for text, nothing for what is absent.

    It would run ``=cmd|…`` as a formula.
    """
    if text == ABSENT:
        return ""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _numbers(cell: Estimate) -> list[str]:
    numbers = (cell.value, *(cell.interval or (None, None)))
    return ["" if number is None else f"{number:.6g}" for number in numbers]


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "–": "--", "×": r"$\times$", "<": "$<$", ">": "$>$", "|": r"\textbar{}", "\n": " ",
    }
)  # fmt: skip


def to_latex(tables: Sequence[ResultTable]) -> str:
    """For a paper; needs the booktabs package."""
    parts = []
    for table in tables:
        words = table.frame.map(_latex).rename(columns=_latex).style.hide(axis="index")
        grid = words.to_latex(hrules=True, column_format="l" * table.frame.shape[1])
        caption = _latex(" ".join([table.caption, *table.foot]))
        parts.append(
            f"\\begin{{table}}\n\\centering\n{grid}\\caption{{{caption}}}\n\\end{{table}}\n"
        )
    return "\n".join(parts)


def _latex(cell: object) -> str:
    return str(cell).translate(_LATEX)
