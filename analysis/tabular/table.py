"""Tables as frames of cells, and their forms: terminal, Markdown, CSV, LaTeX."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from analysis.runs.claims import VERDICT_RULES
from specbench.results.cells import (
    ABSENT,
    FEWEST,
    INTERVAL,
    Cell,
    NumberCell,
    TextCell,
    numeric_columns,
)
from specbench.results.fitted_table import FittedTable, in_short
from specbench.results.headline_table import AGAINST, DECISION, END_TO_END, MAT, SPEEDUP
from specbench.results.metrics import METRICS
from specbench.results.names import DATASETS, MODELS, display_name

# Columns that tables without ``short`` show on request only.
_FURTHER = (
    *({metric.column for metric in METRICS} - {MAT, SPEEDUP, END_TO_END}),
    *("claimed tokens/s", "claimed on", "measured on", "claimed in"),
)
_FEW = f"[{ABSENT}]: no interval, because there are fewer than {FEWEST} cases."
_ALIKE = "[=]: an interval without width, because the cases hardly differ."


@dataclass(frozen=True)
class ResultTable:
    """A table, in any output format.

    Attributes:
        frame: headings and cells; a cell is text, an :class:`NumberCell` or a :class:`TextCell`.
        notes: about claims, below the table.
        short: the columns that are shown at first, one with intervals by its name without
            ``[95 %]`` if it is shown without them; none: all but :data:`_FURTHER`.
        groups: number of leading columns that head the rows that share them.
        head: sentences above the table, which say what it shows.
    """

    title: str
    caption: str
    frame: pd.DataFrame
    notes: Sequence[str] = ()
    short: Sequence[str] = ()
    groups: int = 0
    head: Sequence[str] = ()

    @classmethod
    def from_rows(
        cls,
        title: str,
        caption: str,
        rows: Sequence[Mapping[str, Cell]],
        notes: Sequence[str] = (),
        short: Sequence[str] = (),
        groups: int = 0,
        head: Sequence[str] = (),
    ) -> ResultTable:
        """Make a table of rows, each its cells by heading; missing cells are absent."""
        frame = pd.DataFrame(rows, dtype=object).fillna(ABSENT)
        return cls(title, caption, frame, notes, short, groups, head)

    def in_short(self) -> ResultTable:
        """Keep the first columns, and those of the decision even if they are empty."""
        full = [str(name) for name in self.in_full().frame]
        available = {*full, *(name.removesuffix(INTERVAL) for name in full)}
        available |= {*DECISION} if AGAINST in self.short else set()
        usual = [n if n == SPEEDUP else n.removesuffix(INTERVAL) for n in full if n not in _FURTHER]
        names = [str(name) for name in self.frame.columns[: self.groups + 1]]
        names += [name for name in self.short or usual if name in available and name not in names]
        frame = pd.DataFrame(in_short(self.frame, names), dtype=object)
        filled = _filled(frame.iloc[:, self.groups + 1 :])
        if len(filled.columns):
            frame = frame[filled.any(axis=1)]
        claims = any(name.startswith(("claimed", "verdict")) for name in names)
        return replace(self, frame=frame, notes=self.notes if claims else ())

    def in_full(self) -> ResultTable:
        """Keep all columns that hold something."""
        if self.frame.empty:
            return self
        filled = _filled(self.frame).any()
        filled.iloc[: self.groups + 1] = True
        return replace(self, frame=self.frame.loc[:, filled])

    @property
    def rows(self) -> list[list[Cell]]:
        return [list(row) for row in self.frame.itertuples(index=False, name=None)]

    @property
    def foot(self) -> list[str]:
        """Notes on all rows: the rule of the verdicts, why some numbers have no interval."""
        cells = [cell for row in self.rows for cell in row if isinstance(cell, NumberCell)]
        foot = [note for note in self.notes if note in VERDICT_RULES]
        foot += [_FEW] if any(cell.few and cell.value is not None for cell in cells) else []
        return foot + ([_ALIKE] if any(cell.degenerate for cell in cells) else [])


def _filled(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.map(lambda cell: str(cell) not in (ABSENT, ""))


def to_rich(table: ResultTable) -> FittedTable:
    """Lay a table out for a terminal; only files list the sources of claims."""
    text = "\n".join([table.caption, *table.foot])
    return FittedTable(table.frame, "\n".join([table.title, *table.head]), text, table.groups)


# --- Markdown -------------------------------------------------------------------------------------


def to_markdown(tables: Sequence[ResultTable]) -> str:
    """Write tables for a README or an issue."""
    parts = []
    for table in tables:
        texts = table.frame.map(_markdown_cell).rename(columns=_markdown_cell)
        grid = texts.to_markdown(index=False, tablefmt="github", disable_numparse=True)
        head = "".join(f"**{_one_line(sentence)}**\n\n" for sentence in table.head)
        parts.append(
            f"### {_one_line(table.title)}\n\n{head}{grid}\n\n{_without_tags(table.caption)}\n"
        )
        notes = [note for note in table.notes if note not in VERDICT_RULES] + table.foot
        if notes:
            parts[-1] += "\n" + "".join(f"- {_without_tags(note)}\n" for note in notes)
    return "\n".join(parts)


def _markdown_cell(cell: object) -> str:
    return _one_line(str(cell)).replace("\\", "\\\\").replace("|", "\\|")


def _without_tags(text: str) -> str:
    """Escape tags in users' names, since a page shows Markdown as HTML; ``<0.01`` is no tag."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def _one_line(text: str) -> str:
    return _without_tags(" ".join(text.splitlines()))


# --- CSV ------------------------------------------------------------------------------------------


def sheet(tables: Sequence[ResultTable]) -> pd.DataFrame:
    """Make one frame for a program: column names in lower case, cells split into their parts.

    An estimate is followed by the bounds of its interval, a claimed number by its qualifier. With
    several tables the first column has the title, and cells that a table lacks are empty.
    """
    sheets = []
    for table in tables:
        # A column at a time, so that its parts stay together.
        columns = [
            pd.DataFrame([_parts(str(name), cell) for cell in table.frame[name]], dtype=object)
            for name in table.frame
        ]
        sheets.append(pd.concat(columns, axis=1))
        if len(tables) > 1:
            sheets[-1].insert(0, "table", table.title)
    return pd.concat(sheets)


def csv_text(frame: pd.DataFrame) -> str:
    """Write a sheet as CSV; numbers with six significant digits."""
    return str(frame.map(_plain).to_csv(index=False, lineterminator="\n"))


# Columns of ``summary.json`` keep its names.
_KEYS = {"data": "dataset", **{metric.heading: metric.name for metric in METRICS}}
_KEYS["tokens/s"] = "tokens_per_s"


def column_name(heading: str) -> str:
    """Convert a heading: ``target_params_l_new`` for ``target Params × L_new``."""
    text = heading.removesuffix(INTERVAL)
    text = _KEYS.get(text, text).replace("/", " per ").lower()
    return re.sub(r"[^a-z0-9]+", "_", text).strip("_")


def _parts(heading: str, cell: Cell) -> dict[str, object]:
    """Split a cell into values by column name."""
    name = column_name(heading)
    if isinstance(cell, TextCell):
        return {column_name(part): value for part, value in cell.parts.items()}
    if not isinstance(cell, NumberCell):
        return {name: cell}
    if cell.claimed:
        qualifier = {f"{name}_qualifier": cell.qualifier} if cell.qualifier else {}
        return {name: cell.value, **qualifier}
    if not heading.endswith(INTERVAL):
        return {name: cell.value}
    low, high = cell.interval or (None, None)
    return {name: cell.value, f"{name}_low": low, f"{name}_high": high}


def _plain(value: object) -> str:
    """Format a cell of the file: no spreadsheet formula, empty if absent."""
    if value is None or value != value or value == ABSENT:  # not a number
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text := str(value))
    formula = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not number
    return f"'{text}" if formula else text


# --- LaTeX ----------------------------------------------------------------------------------------

_ROWS = 40  # of a float; more do not fit a page
_NARROW, _WRAPPED = 48, 28  # characters across a paper's column, and of a cell that is not broken
_CAPTION = 120  # characters of the conditions after the title: two lines of a page
_BOLD = "Bold: faster than plain decoding, and no method is shown faster."
# Columns of names that have a display name.
_NAMED = ("method", "setting", "model", "data", "first", "second")
_DISPLAY_NAMES = {name: text for name, text in (MODELS | DATASETS).items() if name != "demo"}
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "–": "--", "×": r"$\times$", "±": r"$\pm$", "<": "$<$", ">": "$>$", "≥": r"$\geq$",
        "µ": r"$\mu$", "|": r"\textbar{}", "\n": " ", "Σ": r"$\Sigma$", "−": "$-$",
        "“": "``", "”": "''", "…": r"\dots{}", "→": r"$\to$",
    }
)  # fmt: skip
# Only a table that is wider than its column or page is scaled down.
_FLOAT = r"""
\begin{{{kind}}}
\setlength{{\abovecaptionskip}}{{0pt}}\setlength{{\belowcaptionskip}}{{6pt}}
\caption{{{caption}}}{label}
\centering\small\setlength{{\tabcolsep}}{{4pt}}
\resizebox{{\ifdim\width>\linewidth\linewidth\else\width\fi}}{{!}}{{%
{tabular}}}
{below}\end{{{kind}}}
"""


def to_latex(tables: Sequence[ResultTable]) -> str:
    """Write a float for each table, or several of a long one; labels are ``tab:`` and the title."""
    used: Counter[str] = Counter()
    floats = ["% Needs \\usepackage{booktabs,array,graphicx}.\n"]
    for table in tables:
        label = f"tab:{column_name(table.title)}"
        used[label] += 1
        label += f"_{used[label]}" if used[label] > 1 else ""
        floats += _floats(table.in_full(), label)
    return "".join(floats)


def _floats(table: ResultTable, label: str) -> Iterator[str]:
    """Yield floats captioned by title and first line of the conditions; claims are comments."""
    first, *lines = table.caption.split("\n")
    if len(first) > _CAPTION:
        first, lines = "", [first, *lines]
    bold = any(isinstance(cell, NumberCell) and cell.leads for row in table.rows for cell in row)
    lines = [*table.head, *lines, *([_BOLD] if bold else []), *table.foot]
    text = _latex(" ".join(filter(None, lines)))
    below = f"\\par\\smallskip\\parbox{{\\linewidth}}{{\\footnotesize {text}}}\n" if text else ""
    notes = [note for note in table.notes if note not in VERDICT_RULES]
    comments = "".join(f"% {note}\n" for note in notes)
    body = pd.DataFrame(
        {name: [_named(str(name), cell) for cell in table.frame[name]] for name in table.frame},
        dtype=object,
    )
    longest = [max((len(str(cell)) for cell in body[name]), default=0) for name in body]
    columns = "".join(
        "r" if number else r">{\raggedright\arraybackslash}p{3.4cm}" if size > _WRAPPED else "l"
        for number, size in zip(numeric_columns(body), longest, strict=True)
    )
    cells = body.map(_latex_cell).rename(columns=lambda name: _heading(str(name), body[name]))
    groups = cells.iloc[:, : table.groups]
    repeated = (groups == groups.shift()).cumprod(axis=1).astype(bool)
    rows = _ROWS // 2 if "p{" in columns else _ROWS
    for start in range(0, max(1, len(cells)), rows):
        end = start + rows
        part = cells.iloc[start:end].copy()
        part.iloc[1:, : table.groups] = groups.mask(repeated, "").iloc[start + 1 : end]
        page = f" ({1 + start // rows} of {-(-len(cells) // rows)})" if len(cells) > rows else ""
        yield _FLOAT.format(
            kind="table" if sum(longest) + 2 * len(longest) <= _NARROW else "table*",
            caption=_latex(f"{_with_names(table.title)}{page}. {first}".rstrip()),
            label="" if start else f"\\label{{{label}}}",
            tabular=part.to_latex(index=False, column_format=f"@{{}}{columns}@{{}}"),
            below=below + comments if end >= len(cells) else "",
        )


def _heading(heading: str, cells: Sequence[Cell]) -> str:
    """Format a heading, word below word if it is longer than all of its cells."""
    parts = [_latex(word) for word in re.split(" (?!%)", heading)]
    if len(parts) == 1 or len(heading) <= max((len(str(cell)) for cell in cells), default=0):
        return " ".join(parts)
    return "\\shortstack{" + "\\\\{}".join(parts) + "}"


def _latex_cell(cell: Cell) -> str:
    if isinstance(cell, NumberCell):
        value, _, interval = str(cell).partition(" [")
        number = f"\\textbf{{{_latex(value)}}}" if cell.leads else _latex(value)
        return f"{number}{{\\,\\scriptsize[{_latex(interval)}}}" if interval else number
    text = re.sub(r", p \$<\$([\d.]+)$", r", $p < \1$", _latex(str(cell)))
    text = re.sub(r", p ([\d.]+)$", r", $p = \1$", text)
    # TeX would read a leading bracket or star as an option of the row before.
    return f"{{}}{text}" if text[:1] in ("[", "*") else text


def _named(heading: str, cell: Cell) -> Cell:
    """Replace a user's name by its display name."""
    if heading == "run":
        return _with_names(str(cell))
    if heading not in _NAMED or not isinstance(cell, str):
        return cell
    name, separator, settings = cell.partition(" (")
    return f"{display_name(name)}{separator}{settings}"


def _with_names(text: str) -> str:
    """Replace the names of models and data by their display names."""
    return re.sub(r"\w+", lambda word: _DISPLAY_NAMES.get(word[0], word[0]), text)


def _latex(text: str) -> str:
    return text.translate(_LATEX)
