"""A table's cells, and the forms it is written in."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from specbench.results.estimate import ABSENT, FEWEST, Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

_FEW = f"[{ABSENT}]: fewer than {FEWEST} cases, of which no interval is made."
_ALIKE = (
    "[=]: the interval has no width to speak of (a thousandth at most), because the cases hardly "
    "differ; among a few cases that can be chance."
)
_WORDS = (
    "run", "model", "data", "method", "setting", "lossless", "verdict", "first", "second",
    "first is", "claimed on", "part", "source",
)  # fmt: skip


@dataclass(frozen=True)
class ResultTable:
    """A table, whatever it is printed as; a cell is text or a :class:`Estimate`."""

    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | Estimate]]
    notes: Sequence[str]

    @property
    def foot(self) -> list[str]:
        """The notes, and why some numbers have no interval."""
        cells = [cell for row in self.rows for cell in row if isinstance(cell, Estimate)]
        few = any(cell.few and cell.value is not None for cell in cells)
        alike = any(cell.degenerate for cell in cells)
        return [*self.notes, *([_FEW] if few else []), *([_ALIKE] if alike else [])]


def to_rich(page: ResultTable) -> Table:
    """For a terminal."""
    table = Table(title=Text(page.title), caption=Text(page.caption), caption_justify="left")
    for heading in page.headings:
        table.add_column(Text(heading), justify="left" if heading in _WORDS else "right")
    for row in page.rows:
        # Text, because brackets in a plain string would be taken for markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def to_markdown(pages: Sequence[ResultTable]) -> str:
    """For a README or an issue."""
    parts = []
    for page in pages:
        lines = [
            f"### {page.title}",
            "",
            _markdown_row(page.headings),
            "|" + "|".join(" --- " for _ in page.headings) + "|",
            *map(_markdown_row, page.rows),
            "",
            page.caption,
        ]
        if page.foot:
            lines += ["", *(f"- {note}" for note in page.foot)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _markdown_row(cells: Sequence[str | Estimate]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def to_csv(pages: Sequence[ResultTable]) -> str:
    """For a program: numbers bare, each measured one followed by the bounds of its interval.

    Several sheets follow each other after an empty line, each with its own head.
    """
    parts = []
    for page in pages:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        wide = [
            any(isinstance(row[i], Estimate) for row in page.rows)
            for i in range(len(page.headings))
        ]
        head: list[str] = []
        for heading, split in zip(page.headings, wide, strict=True):
            name = heading.replace(" [95 %]", "")
            head += [name, f"{name} low", f"{name} high"] if split else [name]
        writer.writerow(head)
        for row in page.rows:
            cells: list[str] = []
            for cell, split in zip(row, wide, strict=True):
                if isinstance(cell, Estimate):
                    cells += _bare(cell)
                else:
                    text = "" if cell == ABSENT else cell
                    cells += [text, "", ""] if split else [text]
            writer.writerow(cells)
        parts.append(out.getvalue())
    return "\n".join(parts)


def _bare(cell: Estimate) -> list[str]:
    numbers = (cell.value, *(cell.interval or (None, None)))
    return ["" if number is None else f"{number:.6g}" for number in numbers]


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "–": "--", "×": r"$\times$",
    }
)  # fmt: skip


def to_latex(pages: Sequence[ResultTable]) -> str:
    """For a paper; needs the booktabs package."""
    parts = []
    for page in pages:
        rows = [" & ".join(str(c).translate(_LATEX) for c in row) + r" \\" for row in page.rows]
        text = " ".join([page.caption, *page.foot]).translate(_LATEX)
        parts.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    r"\begin{tabular}{" + "l" * len(page.headings) + "}",
                    r"\toprule",
                    " & ".join(h.translate(_LATEX) for h in page.headings) + r" \\",
                    r"\midrule",
                    *rows,
                    r"\bottomrule",
                    r"\end{tabular}",
                    rf"\caption{{{text}}}",
                    r"\end{table}",
                ]
            )
            + "\n"
        )
    return "\n".join(parts)
