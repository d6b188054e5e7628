"""Find every shown number of the pages in the kept records; list those without one.

    python scripts/shown_numbers.py                   README.md, findings and the measurements
    python scripts/shown_numbers.py docs/findings.md
    python scripts/shown_numbers.py --refill          write the tables anew from their records

A comment above a table, or above a paragraph (as ``numbers:``), says where its numbers are::

    <!-- from: docs/measurements/MACHINE/RUN docs/measurements/MACHINE/FILE.json
    columns: overall mat | overall speedup
    rows: pld | suffix_5/suffix_8 -->

    <!-- from: docs/measurements/MACHINE/RUN
    numbers: pld overall speedup | - -->

A number is looked up by the words of its row and of its column: keys, labels, tasks and other
values on its way through the record, with ``_`` for a space, and ``@NAME`` for the record of that
name. The ends of an interval are under ``KEY_ci``. Words with ``/`` between them belong to a cell's
numbers in turn, or to whichever is there; ``2:`` takes the second of the row's. ``-`` is a column
or a number that was not measured, ``any`` asks for no word. Columns are counted from the right.

The other numbers of a text (with a point, in percent, or with a unit) are searched among all values
of the records that its section names. ``<!-- no record kept; ... -->`` above a text or table, or
below a section's date, says that there is none, and what makes it again. ``<!-- not measured: 15 |
3.3 -->`` names numbers of its section that are a rule's or a size's.
"""

import argparse
import csv
import functools
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from specbench.paths import PROJECT
from specbench.results.decision import against_cell
from specbench.results.records import SUMMARY

PAGES = ["README.md", "docs/findings.md", "docs/gallery.md"]
PAGES += sorted(str(page.relative_to(PROJECT)) for page in PROJECT.glob("docs/measurements/*.md"))
TABLE = re.compile(
    r"<!-- from: (?P<records>.+)\ncolumns: (?P<columns>.+)\nrows: (?P<rows>.+) -->\n\n"
    r"\|.*\n\|.*\n(?P<body>(?:\|.*\n)+)"
)
_MARKED = re.compile(
    r"<!-- from: (?P<records>.+)\nnumbers: (?P<words>.+) -->\n(?P<text>(?:.+\n?)+)"
)
NONE_KEPT = "<!-- no record kept"
_NOT_MEASURED = re.compile(r"<!-- not measured: (.+) -->")
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?")
_ITEM = re.compile(rf"(?P<value>{NUMBER.pattern})(?: \[(?P<low>[\d.]+), (?P<high>[\d.]+)\])?")
# What is measured in a text: with a point, in percent, or with a unit of time, size or speed.
_SHOWN = re.compile(
    r"(?<![\w.])[-+−]?(?:\d[\d,]*\.\d+(?![\w.]*\.\d)"
    r"|\d[\d,]*(?= ?(?:%|×|ms\b|µs|s\b|MB\b|GB|minutes)))"
)
# Not a text's own numbers: code, links, what a section begins with, versions, levels of intervals.
_NOT_TEXT = re.compile(
    r"^```.*?^```|^\|.*$|^\*\*(?:Machine|Command|Date):.*$|^#.*$|<!--.*?-->|`[^`]*`"
    r"|\[\d{4}\.\d{5}\](?:\([^)]*\))?|\]\([^)]*\)|!\[[^]]*\]"
    r"|Python\s+3\.\d+(?:(?:,| or| and)+ 3\.\d+)*"
    r"|(?:torch|transformers|vLLM|llama\.cpp:? (?:wheel)?|Hydra|version)\s+[\d.]+|95 %"
    r"|\w+-\d\.\d[\w.-]*",
    re.M | re.S,
)
_NAMED = re.compile(r"(?:docs/measurements/|assets/|surfaces/|cpu-)[\w./-]+\w")
_UNITS = (1, 100, 1000, 1e6, 1 / 60, 1e-6, 2.0**-30)


def page_text(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def words_beside(table: Path) -> str:
    """The words of a CSV file, which lie in a file beside it; empty where there is none."""
    words = table.with_suffix(".md")
    return words.read_text(encoding="utf-8") if words.is_file() else ""


def read(path: str) -> Any:
    """A record: a run's summary, a JSON file, or the rows of a CSV file."""
    if path.endswith(".csv"):
        parts = page_text(path).strip().split("\n\n")
        return [_row(row) for part in parts for row in csv.DictReader(part.splitlines())]
    if path.endswith(".json"):
        return json.loads(page_text(path))
    summary = json.loads(page_text(f"{path}/{SUMMARY}"))
    for row in summary["rows"]:
        if row["task"] == "overall" and "against_best" in summary:
            row["against"] = str(against_cell(summary["against_best"].get(row["label"])))
    return summary["rows"]


def _row(cells: dict[str, str]) -> dict[str, Any]:
    """With numbers as numbers and ``X low``, ``X_low``, … as ``X_ci``."""
    row: dict[str, Any] = {}
    for key, cell in cells.items():
        value = float(cell) if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell) else cell
        if bound := re.fullmatch("(.+)[ _](?:low|high)", key):
            row.setdefault(f"{bound[1]}_ci", []).append(value)
        else:
            row[key] = int(cell) if cell.isdigit() else value
    return row


class Record:
    """The numbers, intervals and texts of some files, by the words on the way to each."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.values: list[Any] = []
        self._places: dict[str, set[int]] = defaultdict(set)  # of a word
        for path in paths:
            name = Path(path).stem
            if name in ("training", "summary"):  # as each folder has one
                name = Path(path).parent.name
            self._add(read(path), {f"@{name}"})

    def _add(self, node: Any, words: set[str]) -> None:
        if isinstance(node, dict):
            # Labels of one method are told apart.
            names = [v for k, v in node.items() if k != "method" or "label" not in node]
            said = {str(v).replace(" ", "_") for v in names if type(v) in (str, int)}
            for key, value in node.items():
                self._add(value, words | said | {key.replace(" ", "_")})
        elif isinstance(node, list) and not all(isinstance(item, float | int) for item in node):
            for item in node:
                self._add(item, words)
        elif node is not None:
            for word in {*words, "any"}:
                self._places[word].add(len(self.values))
            self.values.append(node)

    def at(self, *words: str) -> list[Any]:
        """All values that all these words lead to."""
        places = [self._places.get(word, set()) for word in words]
        return [self.values[place] for place in set.intersection(*places)]


def _ways(row: str, column: str) -> list[list[str]]:
    """The words that each of a cell's numbers is looked up by, in turn."""
    nth, _, column = column.rpartition(": ")
    rows, columns = ([word.split("/") for word in part.split()] for part in (row, column))
    if nth:
        rows = [[words[int(nth) - 1]] for words in rows]
    return [
        [*first, *last]
        for first in itertools.product(*rows)
        for last in itertools.product(*columns)
    ]


def shows(shown: str, value: Any, units: Sequence[float] = (1, 1000)) -> bool:
    """Whether a number of the record rounds to the one shown, in one of the units."""
    shown = shown.replace(",", "").replace("−", "-")
    half = 0.5001 * 10.0 ** -len(shown.partition(".")[2])
    numbers = [value] if isinstance(value, float | int) else NUMBER.findall(str(value))
    numbers = [float(str(number).replace(",", "").replace("−", "-")) for number in numbers]
    return any(abs(k * number - float(shown)) <= half for number in numbers for k in units)


def _stands(item: re.Match[str], way: list[str], record: Record) -> bool:
    """Whether a number with its interval is in the record, where the words lead."""
    units = (1, 100) if "%" in item.string else (1, 1000)  # milliseconds of seconds
    if not any(shows(item["value"], value, units) for value in record.at(*way)):
        return False
    ends = [*record.at(*way[:-1], f"{way[-1]}_ci"), *record.at(*way[:-1], "ci")]
    return item["low"] is None or any(
        shows(item["low"], low) and shows(item["high"], high) for low, high in ends
    )


def _cell_stands(cell: str, row: str, column: str, record: Record) -> bool:
    places = _ways(row, column)
    if cell in ("", "–", "1"):  # 1: of the baseline itself
        return True
    values = [value for way in places for value in record.at(*way)]
    if cell in [value for value in values if isinstance(value, str)]:
        return True
    if values and all(isinstance(value, str) for value in values):  # a verdict: words alone
        return False
    items = list(_ITEM.finditer(cell))
    if len(items) == len(places):
        return all(_stands(item, way, record) for item, way in zip(items, places, strict=True))
    return bool(items) and all(any(_stands(item, way, record) for way in places) for item in items)


def wrong_cells(page: str) -> Iterator[str]:
    """``row | column: cell`` of every cell with a number or words that its record has not."""
    for table in TABLE.finditer(page):
        record = Record(table["records"].split())
        columns = table["columns"].split(" | ")
        lines = [line[2:].removesuffix(" |").split(" | ") for line in table["body"].splitlines()]
        for row, cells in zip(table["rows"].split(" | "), lines, strict=True):
            for column, cell in zip(columns, cells[-len(columns) :], strict=True):
                if column != "-" and not _cell_stands(cell, row, column, record):
                    yield f"{row} | {column}: {cell}"


def refilled(page: str) -> str:
    """The page with each number of its tables as its record has it now, in as many decimals.

    Where the words of a number lead to several values, or to none, it stays.
    """

    def table(found: re.Match[str]) -> str:
        record = Record(found["records"].split())
        columns = found["columns"].split(" | ")
        lines = found["body"].splitlines()
        for i, row in enumerate(found["rows"].split(" | ")):
            cells = lines[i][2:].removesuffix(" |").split(" | ")
            first = len(cells) - len(columns)
            for j, column in enumerate(columns):
                cells[first + j] = _refilled_cell(cells[first + j], row, column, record)
            lines[i] = f"| {' | '.join(cells)} |"
        return found[0].replace(found["body"], "".join(f"{line}\n" for line in lines))

    return TABLE.sub(table, page)


def _refilled_cell(cell: str, row: str, column: str, record: Record) -> str:
    items, places = list(_ITEM.finditer(cell)), _ways(row, column)
    if column == "-" or len(items) != len(places) or _cell_stands(cell, row, column, record):
        return cell
    for item, way in reversed(list(zip(items, places, strict=True))):
        values = [v for v in record.at(*way) if isinstance(v, float | int)]
        ends = [*record.at(*way[:-1], f"{way[-1]}_ci"), *record.at(*way[:-1], "ci")]
        if len(values) != 1 or (item["low"] and len(ends) != 1):
            continue
        written = _written(item["value"], values[0], "%" in cell)
        if item["low"]:
            low, high = (_written(item["low"], end) for end in ends[0])
            written = f"{written} [{low}, {high}]"
        cell = cell[: item.start()] + written + cell[item.end() :]
    return cell


def _written(shown: str, value: float, percent: bool = False) -> str:
    """``value`` with as many decimals as ``shown``, and in its unit: as it is, or times 1,000."""
    unit = 100 if percent else 1
    old = float(shown.replace(",", "").replace("−", "-"))
    if not percent and value and not 0.03 < abs(old / value) < 30:
        unit = 1000  # milliseconds of seconds
    return f"{unit * value:,.{len(shown.partition('.')[2])}f}"


@dataclass(frozen=True, slots=True)
class InText:
    """Numbers of a page's running text: how many are in a record, and those that are not.

    Attributes:
        absent: ``section: number (in its words)`` of each that no record of its section has.
        none_kept: how many stand below a comment which says that no record was kept.
    """

    n_there: int
    absent: list[str]
    none_kept: int


def in_text(page: str) -> InText:
    """Look up the numbers of a page's texts."""
    there, none_kept = 0, 0
    absent: list[str] = []
    for section in re.split(r"^(?=## )", page, flags=re.M):
        title = section.splitlines()[0].lstrip("# ") if section else ""
        for marked in _MARKED.finditer(section):
            wrong = list(_wrong_numbers(marked))
            absent += [f"{title}: {words}" for words in wrong]
            there += len(marked["words"].split(" | ")) - len(wrong)
        rest = _MARKED.sub("", section)
        named = [path.removeprefix("docs/measurements/") for path in _NAMED.findall(section)]
        kept = [path for path in map(_record, dict.fromkeys(named)) if path]
        settings = {n for words in _NOT_MEASURED.findall(section) for n in words.split(" | ")}
        without = any(NONE_KEPT in part for part in rest.split("\n\n") if "**Date:**" in part)
        for part in rest.split("\n\n"):
            for number in _SHOWN.finditer(_text_of(part)):
                if number[0] in settings:
                    continue
                if any(_has(path, number[0].lstrip("+")) for path in kept):
                    there += 1
                elif without or part.startswith(NONE_KEPT):
                    none_kept += 1
                else:
                    absent.append(f"{title}: {_in_words(number)}")
    return InText(there, absent, none_kept)


def _wrong_numbers(marked: re.Match[str]) -> Iterator[str]:
    record = Record(marked["records"].split())
    text = _text_of(marked["text"])
    items = [i for i in _ITEM.finditer(text) if _SHOWN.match(text, i.start())]
    words = marked["words"].split(" | ")
    if len(items) != len(words):
        yield f"{len(words)} words for {len(items)} numbers: {[item[0] for item in items]}"
        return
    for item, said in zip(items, words, strict=True):
        *row, column = said.split()
        alone = _ITEM.match(item[0] + (" %" if text[item.end() :].startswith((" %", "%")) else ""))
        ways = _ways(" ".join(row), column)
        if said != "-" and not (alone and any(_stands(alone, way, record) for way in ways)):
            yield f"{item[0]} ({said})"


def _text_of(part: str) -> str:
    return _NOT_TEXT.sub(" ", part)


def _in_words(number: re.Match[str]) -> str:
    around = number.string[max(0, number.start() - 40) : number.end() + 25]
    return f"{number[0]} (… {' '.join(around.split())} …)"


def _record(named: str) -> str | None:
    """The path of a record that a text names from the project's folder or the pages' folder."""
    for path in (named, f"docs/measurements/{named}"):
        place = PROJECT / path
        if place.suffix in (".json", ".csv") and place.is_file():
            return path
        if (place / SUMMARY).is_file():
            return path
    return None


@functools.lru_cache(maxsize=64)
def _numbers(path: str) -> tuple[float, ...]:
    """All numbers of a record, those in its sentences, notes and words beside it, too."""
    found, values = [], Record([path]).values
    if not path.endswith((".json", ".csv")):
        summary = json.loads(page_text(f"{path}/{SUMMARY}"))
        values += [*summary.get("notes", []), summary.get("caption", "")]
    if path.endswith(".csv"):
        values.append(words_beside(PROJECT / path))
    for value in values:
        flat = value if isinstance(value, list) else [value]
        for one in flat:
            if isinstance(one, float | int):
                found.append(float(one))
            else:
                found += [float(n.replace(",", "").replace("−", "-")) for n in NUMBER.findall(one)]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _has(path: str, shown: str) -> bool:
    return any(shows(shown, number, _UNITS) for number in _numbers(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a number has no record."""
    parser = parser_of(__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES, help="default: all with measurements")
    parser.add_argument(
        "--refill", action="store_true", help="write tables anew from their records"
    )
    return reporting_errors(lambda: _report(parser.parse_args(arguments)))


def _report(options: argparse.Namespace) -> int:
    missing = 0
    for name in options.pages:
        page = page_text(name)
        if options.refill and (now := refilled(page)) != page:
            (PROJECT / name).write_text(now, encoding="utf-8")
            page = now
        cells, texts = list(wrong_cells(page)), in_text(page)
        missing += len(cells) + len(texts.absent)
        print(
            f"{name}: {len(TABLE.findall(page))} tables; in texts {texts.n_there} numbers stand in "
            f"records, {texts.none_kept} are said to have none, {len(texts.absent)} have none"
        )
        for words in (*cells, *texts.absent):
            print(f"  {words}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
