"""Tables for a paper: LaTeX with booktabs, in one column or across the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import pandas as pd

from analysis.tabular.table import ResultTable, column_name
from specbench.results.estimate import Cell, Estimate, numeric_columns
from specbench.results.names import DATASETS, MODELS, display_name
from specbench.results.wording import parted

_ROWS = 40  # of a float; more do not fit a page
_COLUMN, _TEXT = 48, 28  # characters across a paper's column, and of a cell that is not broken
_LONGEST = 2000  # characters below a table; where claims need more, theirs are comments
# Of a long caption these sentences are printed beside its first one and warnings; others are
# comments.
_PRINTED = (
    "Hardware", "State kept", "Budgets", "Drafted", "Lossless", "Outputs", "Speedup: ",
    "Speedup and", "Intervals", "end-to-end",
)  # fmt: skip
# Only a table that is wider than its column or page is made smaller.
_FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
_BROKEN = r">{\raggedright\arraybackslash}p{3.4cm}"
_BOLD = "Bold: the best, and what the data cannot part from it."
# Columns of names that a user types, which a reader knows by others.
_NAMED = ("method", "setting", "model", "data", "first", "second")
_PLACES = {name: words for name, words in (MODELS | DATASETS).items() if name != "demo"}
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
    used: Counter[str] = Counter()
    floats = ["% Needs \\usepackage{booktabs,array,graphicx}.\n"]
    for table in tables:
        label = f"tab:{column_name(table.title)}"
        used[label] += 1
        label += f"_{used[label]}" if used[label] > 1 else ""
        floats += _floats(table.in_full(), label)
    return "\n".join(floats)


def _floats(table: ResultTable, label: str) -> Iterator[str]:
    leads = any(isinstance(cell, Estimate) and cell.leads for row in table.rows for cell in row)
    caption, rest = parted(table.caption, _PRINTED)
    notes = [*table.head, caption, *([_BOLD] if leads else []), *table.foot]
    text, comments = _text(" ".join(filter(None, notes))), f"% {rest}\n" if rest else ""
    if len(text) > _LONGEST:
        text = _text(" ".join(note for note in notes if note and note not in table.notes))
        comments += "".join(f"% {note}\n" for note in table.notes)
    below = f"\\par\\smallskip\\parbox{{\\linewidth}}{{\\footnotesize {text}}}\n" if text else ""
    named = table.frame.iloc[:, table.groups :]
    cells = {name: [_named(str(name), cell) for cell in named[name]] for name in named}
    body = pd.DataFrame(cells, dtype=object)
    longest = [max([len(str(cell)) for cell in body[name]], default=0) for name in body]
    columns = "".join(
        "r" if number else _BROKEN if length > _TEXT else "l"
        for number, length in zip(numeric_columns(body), longest, strict=True)
    )
    kind = "table" if sum(longest) + 2 * len(longest) <= _COLUMN else "table*"
    starts = range(0, max(1, len(body)), _ROWS // 2 if _BROKEN in columns else _ROWS)
    for number, start in enumerate(starts, 1):
        title = _text(_with_names(table.title))
        title += f" ({number} of {len(starts)})" if len(starts) > 1 else ""
        yield (
            (comments if number == len(starts) else "")
            + f"\\begin{{{kind}}}\n\\caption{{{title}}}"
            + (f"\\label{{{label}}}\n" if number == 1 else "\n")
            + f"\\centering\\small\\setlength{{\\tabcolsep}}{{3pt}}\n{_FIT}\n"
            + f"\\begin{{tabular}}{{@{{}}{columns}@{{}}}}\n"
            + "\n".join(_lines(table, body, slice(start, start + starts.step)))
            + "\n\\end{tabular}}\n"
            + (below if number == len(starts) else "")
            + f"\\end{{{kind}}}\n"
        )


def _lines(table: ResultTable, body: pd.DataFrame, part: slice) -> Iterator[str]:
    """Head and some rows of a tabular; rows that share leading columns have a head of their own."""
    yield "\\toprule"
    yield _line(_heading(str(name), body[name]) for name in body)
    yield "\\midrule"
    heads = [", ".join(map(display_name, map(str, row[: table.groups]))) for row in table.rows]
    rows = zip(heads[part], body.values.tolist()[part], strict=True)
    for place, (head, members) in enumerate(groupby(rows, lambda row: row[0])):
        if head:
            yield from ["\\addlinespace"] if place else []
            yield f"\\multicolumn{{{body.shape[1]}}}{{@{{}}l}}{{\\textit{{{_text(head)}}}}} \\\\"
        for _, cells in members:
            yield _line(map(_cell, cells))
    yield "\\bottomrule"


def _line(cells: Iterable[str]) -> str:
    """A row; TeX would take a bracket or a star that follows the row before for an option of it."""
    text = " & ".join(cells)
    return f"{'{}' if text[:1] in ('[', '*') else ''}{text} \\\\"


def _heading(heading: str, cells: Iterable[Cell]) -> str:
    """A heading, word below word where it is longer than all of its cells."""
    words = [_text(word) for word in re.split(" (?!%)", heading)]
    if len(words) == 1 or len(heading) <= max([len(str(cell)) for cell in cells], default=0):
        return " ".join(words)
    return "\\shortstack{" + "\\\\{}".join(words) + "}"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Estimate):
        value, _, interval = str(cell).partition(" [")
        number = f"\\textbf{{{_text(value)}}}" if cell.leads else _text(value)
        return f"{number}{{\\,\\scriptsize[{_text(interval)}}}" if interval else number
    text = re.sub(r", p \$<\$([\d.]+)$", r", $p < \1$", _text(str(cell)))
    return re.sub(r", p ([\d.]+)$", r", $p = \1$", text)


def _named(heading: str, cell: Cell) -> Cell:
    """A cell with the name that a reader knows."""
    if heading == "run":
        return _with_names(str(cell))
    if heading not in _NAMED or not isinstance(cell, str):
        return cell
    name, beside, settings = cell.partition(" (")
    return f"{display_name(name)}{beside}{settings}"


def _with_names(text: str) -> str:
    """Text with the names of models and data that a reader knows."""
    return re.sub(r"\w+", lambda word: _PLACES.get(word[0], word[0]), text)


def _text(text: str) -> str:
    return text.translate(_LATEX)
