"""Tables for a paper: LaTeX with booktabs that fits one column or both.

The page that includes them needs the packages booktabs, array and graphicx.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby

import matplotlib as mpl
import pandas as pd
from matplotlib.ft2font import FT2Font

from analysis.tabular.table import ResultTable, column_name
from specbench.results.estimate import Cell, Estimate, numeric_columns
from specbench.results.names import display_name

# In points: the narrowest column and page among the usual styles, those of ACL's conferences.
COLUMN_PT, PAGE_PT = 219.0, 455.0
_ROWS = 40  # of a float; more do not fit a page
_SEPARATION_PT = 4.0  # on each side of a column
_NARROWEST_PT = 40.0  # of a column whose text is broken
# Size of the letters, as a part of 10 points.
_SIZES = {r"\small": 0.9, r"\footnotesize": 0.8, r"\scriptsize": 0.7}
_INTERVAL_SIZE = 0.78  # of an interval's letters, as a part of the number's

# Columns of names that a user types, which a reader knows by others.
_NAMED = ("method", "setting", "model", "data", "source")

_BOLD = "Bold: the best, and what the data cannot part from it."

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "–": "--", "×": r"$\times$", "±": r"$\pm$", "<": "$<$", ">": "$>$", "≥": r"$\geq$",
        "µ": r"$\mu$", "|": r"\textbar{}", "\n": " ",
    }
)  # fmt: skip


def to_latex(tables: Sequence[ResultTable]) -> str:
    """A float, or several of a long table, for each; labels are ``tab:`` and the title."""
    used: dict[str, int] = {}
    parts = []
    for table in tables:
        label = f"tab:{column_name(table.title)}"
        used[label] = used.get(label, 0) + 1
        label += f"_{used[label]}" if used[label] > 1 else ""
        starts = range(0, max(1, len(table.frame)), _ROWS)
        for number, start in enumerate(starts, 1):
            rows = table.frame.iloc[start : start + _ROWS]
            of = f" ({number} of {len(starts)})" if len(starts) > 1 else ""
            last = number == len(starts)
            parts.append(_float(table, rows, of, label if number == 1 else "", last))
    return "\n".join(parts)


def _float(table: ResultTable, rows: pd.DataFrame, of: str, label: str, last: bool) -> str:
    """One float: caption above, grid, notes below the last one."""
    width, size, grid = _grid(table, rows)
    environment = "table" if width <= COLUMN_PT else "table*"
    leads = any(isinstance(c, Estimate) and c.leads for row in table.rows for c in row)
    notes = [*table.caption.split("\n"), *table.foot, *([_BOLD] if leads else [])]
    if width > PAGE_PT:  # many columns were asked for
        grid = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{grid}}}\n"
    lines = [
        f"\\begin{{{environment}}}",
        f"\\caption{{{_title(table.title)}{of}}}" + (f"\\label{{{label}}}" if label else ""),
        f"\\centering{size}\\setlength{{\\tabcolsep}}{{{_SEPARATION_PT:g}pt}}",
        grid.rstrip("\n"),
    ]
    if last and (text := _text(" ".join(filter(None, notes)))):
        lines.append(f"\\par\\smallskip\\parbox{{\\linewidth}}{{\\footnotesize {text}}}")
    return "\n".join([*lines, f"\\end{{{environment}}}", ""])


def _grid(table: ResultTable, rows: pd.DataFrame) -> tuple[float, str, str]:
    """Width in points, size of letters and the tabular of some rows."""
    body = rows.iloc[:, table.groups :]
    right = numeric_columns(table.frame.iloc[:, table.groups :])
    cells = {str(name): [_named(str(name), cell) for cell in body[name]] for name in body}
    for size, scale in _SIZES.items():  # noqa: B007, the largest that fits
        natural = [
            scale * max(_points(line) for line in [*_lines(name, found), *found])
            for name, found in cells.items()
        ]
        widths = _squeezed(natural, right)
        total = sum(widths) + 2 * _SEPARATION_PT * (len(widths) - 1)
        if total <= PAGE_PT:
            break
    broken = [width < full for width, full in zip(widths, natural, strict=True)]
    specification = "".join(
        f">{{\\raggedright\\arraybackslash}}p{{{width:.1f}pt}}" if cut else "r" if number else "l"
        for width, number, cut in zip(widths, right, broken, strict=True)
    )
    heads = []
    for (name, found), number in zip(cells.items(), right, strict=True):
        words = [_text(line) for line in _lines(name, found)]
        side = "r" if number else "l"
        stacked = "\\\\".join(words)
        heads.append(f"\\shortstack[{side}]{{{stacked}}}" if len(words) > 1 else stacked)
    lines = [
        f"\\begin{{tabular}}{{@{{}}{specification}@{{}}}}",
        "\\toprule",
        f"{' & '.join(heads)} \\\\",
        "\\midrule",
    ]
    above = rows.iloc[:, : table.groups]
    keys = [" on ".join(display_name(str(name)) for name in row) for row in above.values.tolist()]
    named = zip(keys, zip(*cells.values(), strict=True), strict=True)
    for number, (key, members) in enumerate(groupby(named, lambda pair: pair[0])):
        if key:
            lines += ["\\addlinespace"] if number else []
            lines.append(
                f"\\multicolumn{{{len(cells)}}}{{@{{}}l}}{{\\textit{{{_text(key)}}}}} \\\\"
            )
        lines += [f"{' & '.join(map(_cell, row))} \\\\" for _, row in members]
    return total, size, "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _squeezed(natural: Sequence[float], right: Sequence[bool]) -> list[float]:
    """Widths for a page: numbers keep theirs, the widest texts are broken into lines."""
    widths = list(natural)
    room = PAGE_PT - 2 * _SEPARATION_PT * (len(widths) - 1)
    while sum(widths) > room:
        texts = [i for i, number in enumerate(right) if not number and widths[i] > _NARROWEST_PT]
        if not texts:
            break
        widest = max(texts, key=lambda i: widths[i])
        widths[widest] = max(_NARROWEST_PT, widths[widest] - min(10.0, sum(widths) - room))
    return widths


def _lines(heading: str, cells: Sequence[Cell]) -> list[str]:
    """A heading in lines that are not longer than the column's cells, as far as words allow."""
    room = max([_points(cell) for cell in cells], default=0.0)
    lines = [""]
    for word in heading.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _points(longer) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _named(heading: str, cell: Cell) -> Cell:
    return display_name(cell) if heading in _NAMED and isinstance(cell, str) else cell


def _points(cell: Cell) -> float:
    """Width of a cell in letters of 10 points."""
    value, _, interval = str(cell).partition(" [") if isinstance(cell, Estimate) else (cell, "", "")
    bold = 1.15 if isinstance(cell, Estimate) and cell.leads else 1.0
    beside = f" [{interval}" if interval else ""
    return bold * sum(map(_advance, str(value))) + _INTERVAL_SIZE * sum(map(_advance, beside))


@cache
def _font() -> FT2Font:
    font = FT2Font(f"{mpl.get_data_path()}/fonts/ttf/cmr10.ttf")
    font.set_size(10, 72)
    return font


@cache
def _advance(letter: str) -> float:
    font = _font()
    if letter == " " or not letter.isascii():
        return 3.4 if letter == " " else 7.8
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536


def _cell(cell: Cell) -> str:
    if isinstance(cell, Estimate):
        value, _, interval = str(cell).partition(" [")
        number = f"\\textbf{{{_text(value)}}}" if cell.leads else _text(value)
        small = f"\\,[{interval}" if interval else ""
        return number + (f"{{\\scalefont{{{_INTERVAL_SIZE}}}{_text(small)}}}" if small else "")
    return re.sub(r", p (?:\$(<)\$)?([\d.]+)$", _p_value, _text(str(cell)))


def _p_value(found: re.Match[str]) -> str:
    return f", $p {found[1] or '='} {found[2]}$"


def _title(title: str) -> str:
    words = (display_name(word) for word in title.split(" "))
    return _text(" ".join(words))


def _text(text: str) -> str:
    return text.translate(_LATEX)


__all__: Sequence[str] = ("COLUMN_PT", "PAGE_PT", "to_latex")
