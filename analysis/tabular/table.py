"""Tables as frames of cells, and the one writer of each form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from analysis.runs.claims import VERDICT_RULE, VERDICT_WORDS
from specbench.results.decision import AGAINST, DECISION
from specbench.results.estimate import ABSENT, FEWEST, Cell, Estimate, Fact
from specbench.results.fitted_table import INTERVAL, FittedTable, in_short

# Columns that tables show on request only, and their CSV files always.
_FURTHER = (
    "tokens/s [95 %]", "geo. mean [95 %]", "over eager ar [95 %]", "over graph ar [95 %]",
    "bandwidth share", "J/token", "claimed tokens/s", "claimed on", "measured on",
    "claimed in",
)  # fmt: skip
# The one number that is never shown without its interval.
_HEADLINE = "speedup [95 %]"
_FEW = f"[{ABSENT}]: no interval, because there are fewer than {FEWEST} cases."
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
        short: the columns that are shown at first, one with intervals by its name without
            ``[95 %]`` where it is shown without them; none: by :data:`_FURTHER`.
        groups: so many leading columns head the rows that share them.
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
    def of(
        cls,
        title: str,
        caption: str,
        rows: Sequence[Mapping[str, Cell]],
        notes: Sequence[str] = (),
        short: Sequence[str] = (),
        groups: int = 0,
    ) -> ResultTable:
        """A table of rows, each its cells by heading.

        The first row names the columns in their order; what another row lacks is absent there.
        """
        frame = pd.DataFrame(rows, dtype=object).fillna(ABSENT)
        return cls(title, caption, frame, notes, short, groups)

    def in_short(self) -> ResultTable:
        """Its first columns, and the rows that say something there.

        The six of the decision are there even where nothing is known.
        """
        said = [str(name) for name in self.in_full().frame]
        short = self.short or [
            name if name == _HEADLINE else name.removesuffix(INTERVAL)
            for name in said
            if name not in _FURTHER
        ]
        kept = {*said, *(name.removesuffix(INTERVAL) for name in said)}
        kept |= {*DECISION} if AGAINST in self.short else set()
        return self.only([name for name in short if name in kept])

    def in_full(self) -> ResultTable:
        """All columns that hold something."""
        if self.frame.empty:
            return self
        said = self.frame.map(lambda cell: str(cell) not in (ABSENT, "")).any()
        said.iloc[: self.groups + 1] = True
        return replace(self, frame=self.frame.loc[:, said])

    def only(self, headings: Sequence[str]) -> ResultTable:
        """Some of its columns, after those that name a row, and the rows with something there."""
        names = [str(name) for name in self.frame.columns[: self.groups + 1]]
        names += [name for name in headings if name not in names]
        frame = pd.DataFrame(in_short(self.frame, names), dtype=object)
        said = frame.iloc[:, self.groups + 1 :].map(lambda cell: str(cell) not in (ABSENT, ""))
        if len(said.columns):
            frame = frame[said.any(axis=1)]
        # Notes are about claims.
        claims = any(name.startswith(("claimed", "verdict")) for name in names)
        return replace(self, frame=frame, notes=self.notes if claims else ())

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


def to_rich(table: ResultTable) -> FittedTable:
    """For a terminal; of the foot what holds for all rows, not where each claim is from."""
    shared = [note for note in table.foot if note in (VERDICT_RULE, VERDICT_WORDS, _FEW, _ALIKE)]
    text = "\n".join([table.caption, *shared])
    title = "\n".join([table.title, *table.head])
    return FittedTable(table.frame, title, text, table.groups)


def to_markdown(tables: Sequence[ResultTable]) -> str:
    """For a README or an issue."""
    parts = []
    for table in tables:
        words = table.frame.map(_markdown_cell).rename(columns=_markdown_cell)
        grid = words.to_markdown(index=False, tablefmt="github", disable_numparse=True)
        title = _one_line(_without_tags(table.title))
        head = "".join(f"**{_without_tags(_one_line(said))}**\n\n" for said in table.head)
        parts.append(f"### {title}\n\n{head}{grid}\n\n{_without_tags(table.caption)}\n")
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


def sheet(tables: Sequence[ResultTable]) -> pd.DataFrame:
    """For a program: all columns under names of small letters, cells in their parts.

    An estimate is followed by the bounds of its interval, a claimed number by its qualifier. Of
    several tables the first column has the title, and what one lacks is empty.
    """
    sheets = [_sheet(table.frame) for table in tables]
    if len(sheets) > 1:
        for each, table in zip(sheets, tables, strict=True):
            each.insert(0, "table", table.title)
    return pd.concat(sheets)


def _sheet(frame: pd.DataFrame) -> pd.DataFrame:
    columns: dict[str, list[object]] = {}
    for heading in frame:
        cells = [_parts(str(heading), cell) for cell in frame[heading]]
        for part in dict.fromkeys(part for cell in cells for part in cell):
            columns[part] = [cell.get(part) for cell in cells]
    return pd.DataFrame(columns, dtype=object)


def csv_text(frame: pd.DataFrame) -> str:
    """A sheet as CSV; numbers with six significant digits."""
    text = frame.map(_bare).to_csv(index=False, lineterminator="\n")
    return str(text)


# Columns that ``summary.json`` has too are called as there.
_COLUMNS = {
    "data": "dataset",
    "J/token": "joules_per_token",
    "end-to-end": "end_to_end_speedup",
    "geo. mean": "geomean_speedup",
    "over eager ar": "speedup_eager",
    "over graph ar": "speedup_graph",
}


def column_name(heading: str) -> str:
    """``target_params_l_new`` of ``target Params × L_new``."""
    words = heading.removesuffix(INTERVAL)
    words = _COLUMNS.get(words, words).replace("/", " per ").lower()
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


def _parts(heading: str, cell: Cell) -> dict[str, object]:
    """What a cell holds, by column."""
    name = column_name(heading)
    if isinstance(cell, Fact):
        return {column_name(part): value for part, value in cell.parts.items()}
    if not isinstance(cell, Estimate):
        return {name: cell}
    found: dict[str, object] = {name: cell.value}
    if cell.claimed:
        return found | ({f"{name}_qualifier": cell.qualifier} if cell.qualifier else {})
    if not heading.endswith(INTERVAL):
        return found
    low, high = cell.interval or (None, None)
    return found | {f"{name}_low": low, f"{name}_high": high}


def _bare(value: object) -> str:
    if value is None or value != value:  # not a number
        return ""
    return f"{value:.6g}" if isinstance(value, float) else csv_cell(str(value))


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
