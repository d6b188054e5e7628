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
from specbench.results.names import DATASETS, MODELS, display_name

# In points: the narrowest column and page among the usual styles, those of ACL's conferences.
COLUMN_PT, PAGE_PT = 219.0, 455.0
_ROWS = 40  # of a float; more do not fit a page, nor half of them where cells are broken
_LONGEST = 2000  # characters below a table; where claims need more, theirs are comments
_SLACK_PT = 4.0  # letters of small sizes are a little wider or narrower than reckoned here
_SEPARATION_PT = 3.0  # on each side of a column
_NARROWEST_PT = 40.0  # of a column whose text is broken
# Width of the letters, as a part of those of 10 points: smaller ones are wider for their height.
_SIZES = {r"\small": 0.93, r"\footnotesize": 0.86, r"\scriptsize": 0.8}

# Columns of names that a user types, which a reader knows by others.
_NAMED = ("method", "setting", "model", "data", "first", "second")
_PLACES = {name: words for name, words in (MODELS | DATASETS).items() if name != "demo"}

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
        table = table.in_full()
        folded = "raggedright" in _grid(table, table.frame)[2]
        starts = range(0, max(1, len(table.frame)), _ROWS // 2 if folded else _ROWS)
        for number, start in enumerate(starts, 1):
            rows = table.frame.iloc[start : start + starts.step]
            of = f" ({number} of {len(starts)})" if len(starts) > 1 else ""
            last = number == len(starts)
            parts.append(_float(table, rows, of, label if number == 1 else "", last))
    return "\n".join(parts)


def _float(table: ResultTable, rows: pd.DataFrame, of: str, label: str, last: bool) -> str:
    """One float: caption above, grid, notes below the last one."""
    width, size, grid = _grid(table, rows)
    environment = "table" if width <= COLUMN_PT - _SLACK_PT else "table*"
    leads = any(isinstance(c, Estimate) and c.leads for row in table.rows for c in row)
    notes = [*table.caption.split("\n"), *([_BOLD] if leads else []), *table.foot]
    if width > PAGE_PT - _SLACK_PT:  # many columns were asked for
        grid = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{grid}}}\n"
    lines = [
        f"\\begin{{{environment}}}",
        f"\\caption{{{_text(_with_names(table.title))}{of}}}"
        + (f"\\label{{{label}}}" if label else ""),
        f"\\centering{size}\\setlength{{\\tabcolsep}}{{{_SEPARATION_PT:g}pt}}",
        grid.rstrip("\n"),
    ]
    text = _text(" ".join(filter(None, notes)))
    if last and len(text) > _LONGEST:
        lines = [*(f"% {note}" for note in table.notes), *lines]
        text = _text(" ".join(note for note in notes if note and note not in table.notes))
    if last and text:
        lines.append(f"\\par\\smallskip\\parbox{{\\linewidth}}{{\\footnotesize {text}}}")
    return "\n".join([*lines, f"\\end{{{environment}}}", ""])


def _grid(table: ResultTable, rows: pd.DataFrame) -> tuple[float, str, str]:
    """Width in points, size of letters and the tabular of some rows."""
    body = rows.iloc[:, table.groups :]
    right = numeric_columns(table.frame.iloc[:, table.groups :])
    cells = {str(name): [_named(str(name), cell) for cell in body[name]] for name in body}
    for size, scale in _SIZES.items():  # noqa: B007, the largest that fits
        natural = [
            max(_points(line, scale) for line in [*_lines(name, found), *found])
            for name, found in cells.items()
        ]
        longest = [_longest_word(name, found, scale) for name, found in cells.items()]
        least = [
            full if number else min(full, max(_NARROWEST_PT, word))
            for full, word, number in zip(natural, longest, right, strict=True)
        ]
        widths = _squeezed(natural, least)
        total = sum(widths) + 2 * _SEPARATION_PT * (len(widths) - 1)
        if total <= PAGE_PT - _SLACK_PT:
            break
    broken = [width < full for width, full in zip(widths, natural, strict=True)]
    specification = "".join(
        f">{{\\raggedright\\arraybackslash}}p{{{width:.1f}pt}}" if cut else "r" if number else "l"
        for width, number, cut in zip(widths, right, broken, strict=True)
    )
    heads = []
    for (name, found), number in zip(cells.items(), right, strict=True):
        head = [_text(line) for line in _lines(name, found)]
        side = "r" if number else "l"
        stacked = "\\\\{}".join(head)  # a bracket would be an option of the line's end
        heads.append(f"\\shortstack[{side}]{{{stacked}}}" if len(head) > 1 else stacked)
    lines = [
        f"\\begin{{tabular}}{{@{{}}{specification}@{{}}}}",
        "\\toprule",
        f"{' & '.join(heads)} \\\\",
        "\\midrule",
    ]
    above = rows.iloc[:, : table.groups]
    keys = [", ".join(display_name(str(name)) for name in row) for row in above.values.tolist()]
    named = zip(keys, zip(*cells.values(), strict=True), strict=True)
    for place, (key, members) in enumerate(groupby(named, lambda pair: pair[0])):
        if key:
            lines += ["\\addlinespace"] if place else []
            lines.append(
                f"\\multicolumn{{{len(cells)}}}{{@{{}}l}}{{\\textit{{{_text(key)}}}}} \\\\"
            )
        lines += [f"{' & '.join(map(_cell, row))} \\\\" for _, row in members]
    return total, size, "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _squeezed(natural: Sequence[float], least: Sequence[float]) -> list[float]:
    """Widths for a page: the widest texts are broken into lines, as far as they may be."""
    widths = list(natural)
    room = PAGE_PT - _SLACK_PT - 2 * _SEPARATION_PT * (len(widths) - 1)
    while sum(widths) > room:
        texts = [i for i, width in enumerate(widths) if width > least[i]]
        if not texts:
            break
        widest = max(texts, key=lambda i: widths[i])
        widths[widest] = max(least[widest], widths[widest] - min(10.0, sum(widths) - room))
    return widths


def _longest_word(heading: str, cells: Sequence[Cell], scale: float) -> float:
    texts = [*_lines(heading, cells), *map(str, cells)]
    longest = max(_points(word, scale) for text in texts for word in text.split(" "))
    return longest + _SLACK_PT / 2


def _lines(heading: str, cells: Sequence[Cell]) -> list[str]:
    """A heading in lines that are not longer than the column's cells, as far as words allow."""
    room = max([_points(cell, 1.0) for cell in cells], default=0.0)
    lines = [""]
    for word in re.split(" (?!%)", heading):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _points(longer, 1.0) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _named(heading: str, cell: Cell) -> Cell:
    if heading == "run":
        return _with_names(str(cell))
    if heading not in _NAMED or not isinstance(cell, str):
        return cell
    name, beside, settings = cell.partition(" (")
    return f"{display_name(name)}{beside}{settings}"


def _points(cell: Cell, scale: float) -> float:
    """Width of a cell in letters of a size; intervals are of the smallest."""
    text = str(cell)
    if not isinstance(cell, Estimate):
        return scale * sum(map(_advance, text))
    value, _, interval = text.partition(" [")
    bold = 1.15 if cell.leads else 1.0
    smallest = _SIZES[r"\scriptsize"]
    beside = smallest * sum(map(_advance, f"[{interval}")) + 2.0 if interval else 0.0
    return scale * bold * sum(map(_advance, value)) + beside


@cache
def _font() -> FT2Font:
    font = FT2Font(f"{mpl.get_data_path()}/fonts/ttf/cmr10.ttf")
    font.set_size(10, 72)
    return font


@cache
def _advance(letter: str) -> float:
    font = _font()
    if not letter.isascii() or not letter.isprintable():
        return 7.8  # as wide as most signs
    if letter == " ":
        return 3.4
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536


def _cell(cell: Cell) -> str:
    if isinstance(cell, Estimate):
        value, _, interval = str(cell).partition(" [")
        number = f"\\textbf{{{_text(value)}}}" if cell.leads else _text(value)
        return f"{number}{{\\,\\scriptsize[{_text(interval)}}}" if interval else number
    return re.sub(r", p (\$<\$)?([\d.]+)$", _p_value, _text(str(cell)))


def _p_value(found: re.Match[str]) -> str:
    return f", $p {'<' if found[1] else '='} {found[2]}$"


def _with_names(text: str) -> str:
    """Text with the names of models and data that a reader knows."""
    return re.sub(r"\w+", lambda word: _PLACES.get(word[0], word[0]), text)


def _text(text: str) -> str:
    return text.translate(_LATEX)
