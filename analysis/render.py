"""A table as text, and the forms it is written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORDS = ("run", "method", "lossless", "verdict", "first", "second", "first is")


@dataclass(frozen=True)
class Sheet:
    """A table as text, whatever it is printed as."""

    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def to_rich(page: Sheet) -> Table:
    """For a terminal."""
    table = Table(title=Text(page.title), caption=Text(page.caption), caption_justify="left")
    for heading in page.headings:
        table.add_column(Text(heading), justify="left" if heading in _WORDS else "right")
    for row in page.rows:
        # Text, because brackets in a plain string would be taken for markup.
        table.add_row(*map(Text, row))
    return table


def to_markdown(pages: Sequence[Sheet]) -> str:
    """For a README or an issue."""
    parts = []
    for page in pages:
        lines = [
            f"### {page.title}",
            "",
            "| " + " | ".join(page.headings) + " |",
            "|" + "|".join(" --- " for _ in page.headings) + "|",
            *(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
                for row in page.rows
            ),
            "",
            page.caption,
        ]
        if page.notes:
            lines += ["", *(f"- {note}" for note in page.notes)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "–": "--", "×": r"$\times$",
    }
)  # fmt: skip


def to_latex(pages: Sequence[Sheet]) -> str:
    """For a paper; needs the booktabs package."""
    parts = []
    for page in pages:
        rows = [" & ".join(c.translate(_LATEX) for c in row) + r" \\" for row in page.rows]
        text = " ".join([page.caption, *page.notes]).translate(_LATEX)
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
