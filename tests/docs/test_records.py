"""Every measured number of the documents' tables stands in the record that the table names.

A comment above a table says where its numbers are::

    <!-- from: docs/measurements/MACHINE/RUN docs/measurements/MACHINE/FILE.json
    columns: overall mat | overall speedup
    rows: pld | suffix_5/suffix_8 -->

A number is looked up by the words of its row and of its column: keys, labels, tasks and other
values on its way through the record, with ``_`` for a space, and ``@NAME`` for the record of that
name. The ends of an interval are under ``KEY_ci``. Words with ``/`` between them belong to a cell's
numbers in turn, or to whichever is there; ``2:`` takes the second of the row's. ``-`` is a column
without measured numbers, ``any`` asks for no word. Columns are counted from the right.
"""

import csv
import itertools
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import pytest

from analysis import figures, rivals
from analysis.runs.load import load_runs
from specbench.paths import PROJECT
from specbench.results.decision import against_cell
from specbench.results.records import DONE
from specbench.results.statistics.summary import summarize

PAGES = ["README.md", "docs/findings.md", "docs/gallery.md"]
PAGES += sorted(str(page.relative_to(PROJECT)) for page in PROJECT.glob("docs/measurements/*.md"))
TABLE = re.compile(
    r"<!-- from: (?P<records>.+)\ncolumns: (?P<columns>.+)\nrows: (?P<rows>.+) -->\n\n"
    r"\|.*\n\|.*\n(?P<body>(?:\|.*\n)+)"
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?")
ITEM = re.compile(rf"(?P<value>{NUMBER.pattern})(?: \[(?P<low>[\d.]+), (?P<high>[\d.]+)\])?")
DECIMALS = "<!-- decimals: of the files linked in each row -->"
FINDINGS, PAPERS = "docs/findings.md", "docs/measurements/cpu-epyc-2core.md"


def text(name):
    return (PROJECT / name).read_text(encoding="utf-8")


def read(path):
    """A record: a run's summary, a JSON file, or the rows of a CSV file."""
    if path.endswith(".csv"):
        parts = text(path).strip().split("\n\n")
        return [_row(row) for part in parts for row in csv.DictReader(part.splitlines())]
    if path.endswith(".json"):
        return json.loads(text(path))
    summary = json.loads(text(f"{path}/summary.json"))
    for row in summary["rows"]:
        if row["task"] == "overall" and "against_best" in summary:
            row["against"] = str(against_cell(summary["against_best"].get(row["label"])))
    return summary["rows"]


def _row(cells):
    """With numbers as numbers and ``X low``, ``X high`` as ``X_ci``."""
    row = {}
    for key, cell in cells.items():
        value = float(cell) if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell) else cell
        if key.endswith((" low", " high")):
            row.setdefault(f"{key.rsplit(' ', 1)[0]}_ci", []).append(value)
        else:
            row[key] = int(value) if cell.isdigit() else value
    return row


class Record:
    """The numbers, intervals and texts of a table's files, by the words on the way to each."""

    def __init__(self, paths):
        self.values = []
        self.places = defaultdict(set)  # of a word
        for path in paths:
            name = Path(path).parent.name if Path(path).stem == "training" else Path(path).stem
            self._add(read(path), {f"@{name}"})

    def _add(self, node, words):
        if isinstance(node, dict):
            # Labels of one method are told apart.
            names = [v for k, v in node.items() if k != "method" or "label" not in node]
            names = {str(v).replace(" ", "_") for v in names if type(v) in (str, int)}
            for key, value in node.items():
                self._add(value, words | names | {key.replace(" ", "_")})
        elif isinstance(node, list) and not all(isinstance(item, float | int) for item in node):
            for item in node:
                self._add(item, words)
        elif node is not None:
            for word in {*words, "any"}:
                self.places[word].add(len(self.values))
            self.values.append(node)

    def at(self, *words):
        """All values that all these words lead to."""
        places = [self.places.get(word, set()) for word in words]
        return [self.values[place] for place in set.intersection(*places)]


def ways(row, column):
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


def shows(shown, value, unit=1000):
    """Whether a number of the record rounds to the one shown, as it is or in another unit."""
    shown = shown.replace(",", "").replace("−", "-")
    half = 0.5001 * 10.0 ** -len(shown.partition(".")[2])
    numbers = [value] if isinstance(value, float | int) else NUMBER.findall(str(value))
    numbers = [float(str(number).replace(",", "")) for number in numbers]
    return any(abs(k * number - float(shown)) <= half for number in numbers for k in (1, unit))


def stands(item, way, record):
    """Whether a number with its interval is in the record, where the words lead."""
    unit = 100 if "%" in item.string else 1000  # milliseconds of seconds
    if not any(shows(item["value"], value, unit) for value in record.at(*way)):
        return False
    ends = [*record.at(*way[:-1], f"{way[-1]}_ci"), *record.at(*way[:-1], "ci")]
    return item["low"] is None or any(
        shows(item["low"], low) and shows(item["high"], high) for low, high in ends
    )


def cell_stands(cell, row, column, record):
    places = ways(row, column)
    if cell in ("", "–", "1"):  # 1: of the baseline itself
        return True
    values = [value for way in places for value in record.at(*way)]
    if cell in [value for value in values if isinstance(value, str)]:
        return True
    if values and all(isinstance(value, str) for value in values):  # a verdict: words alone
        return False
    items = list(ITEM.finditer(cell))
    if len(items) == len(places):
        return all(stands(item, way, record) for item, way in zip(items, places, strict=True))
    return bool(items) and all(any(stands(item, way, record) for way in places) for item in items)


def wrong_cells(page):
    """``row | column: cell`` of every cell with a number or words that its record has not."""
    for table in TABLE.finditer(page):
        record = Record(table["records"].split())
        columns = table["columns"].split(" | ")
        lines = [line[2:].removesuffix(" |").split(" | ") for line in table["body"].splitlines()]
        for row, cells in zip(table["rows"].split(" | "), lines, strict=True):
            for column, cell in zip(columns, cells[-len(columns) :], strict=True):
                if column != "-" and not cell_stands(cell, row, column, record):
                    yield f"{row} | {column}: {cell}"


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_table_stands_in_its_record(page):
    assert list(wrong_cells(text(page))) == []


@pytest.mark.parametrize(
    ("shown", "typed"),
    [("| PLD (5 tokens) | 1.73 |", "| PLD (5 tokens) | 1.75 |"), ("[1.33, 1.55]", "[1.33, 1.56]")],
)
def test_a_number_that_was_typed_is_found(shown, typed):
    readme = text("README.md")
    assert shown in readme
    assert len(list(wrong_cells(readme.replace(shown, typed, 1)))) == 1


def test_a_verdict_that_was_typed_is_found():
    page = text(FINDINGS).replace("| slower, p 0.010 |", "| undecided, p 0.010 |")
    assert list(wrong_cells(page)) == ["cacheback | overall against: undecided, p 0.010"]


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_table_names_its_record_or_says_that_there_is_none(page):
    for above, header in re.findall(r"(?:^|\n)([^\n]*)\n\n(\|.*)\n\|[ -|]+\n", text(page)):
        if "MAT" in header or (page != "README.md" and "| question |" not in header):
            none = re.fullmatch("<!-- no record kept; made again by `.+` -->", above)
            assert none or above == DECIMALS or re.match("rows: .* -->", above), header
    assert text(page).count("<!-- from:") == len(TABLE.findall(text(page)))


def test_the_findings_name_the_fastest_of_the_run_by_the_rows_of_the_table():
    page = text(FINDINGS)
    table = TABLE.search(page)
    leaders = json.loads(text(f"{table['records']}/summary.json"))["leaders"]
    names = [line.split(" | ")[0].strip("| ") for line in table["body"].splitlines()]
    rows = dict(zip(table["rows"].split(" | "), names, strict=True))
    (sentence,) = re.findall(r"The fastest here: (.+?)\.\s", page)
    assert re.findall('"(.+?)"', sentence) == [rows[label] for label in leaders]


KEPT = sorted({p for page in PAGES for t in TABLE.finditer(text(page)) for p in t[1].split()})
KEPT = [path for path in KEPT if (PROJECT / path / DONE).exists()]


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.endswith("/day") else pytest.mark.slow) for p in KEPT]
)
def test_a_kept_run_s_summary_is_that_of_its_cases(path):
    """Every number shown of it can be made again from the cases in the repository."""
    (run,) = load_runs([PROJECT / path])
    made = summarize(run.records, run.labels, run.baseline, run.seed, run.estimator, n_resamples=2)
    shown = {(row["label"], row["task"]): row for row in read(path)}
    for row in made:
        kept = shown[row["label"], row["task"]]
        for key in ("n_cases", "n_timed", "mat", "tokens_per_s", "speedup", "lossless"):
            wanted = None if kept[key] is None else pytest.approx(kept[key], rel=1e-12)
            assert row[key] == wanted, (row["label"], key)


def pictures():
    """``(page, picture, record)`` of every picture; None where no line below it names one."""
    for page in PAGES:
        for part in text(page).split("![")[1:]:
            picture = (PROJECT / page).parent / re.match(r"[^]]*\]\(([^)]+)\)", part)[1]
            line = re.search(r"^Record: (.*)$", part, re.M)
            yield page, picture.resolve(), line and re.findall("`([^`]+)`", line[1])


def test_every_picture_names_a_record_that_is_there_and_every_one_is_shown():
    records = {picture: names for _, picture, names in pictures() if names}
    shown = {picture for _, picture, _ in pictures()}
    assert shown == records.keys() == set(PROJECT.glob("docs/measurements/**/*.png"))
    for picture, names in records.items():
        assert all((PROJECT / name).exists() for name in names), picture
        assert picture.stat().st_size <= 150_000


PLACES = ("data_dir=", "output_dir=", "runner.traces=", "runner.surface=")  # of one machine


def settings(words):
    """What was typed, without places and spaces."""
    return {word.replace(" ", "") for word in words if not word.startswith(PLACES)}


def test_a_kept_run_s_pictures_stand_below_the_command_that_made_it():
    """Labels and budgets are the record's: nothing else was typed."""
    checked = 0
    for section in text("docs/gallery.md").split("\n## ")[1:]:
        lines = re.findall(r"^python run\.py .*", section, re.M)
        typed = [shlex.split(line)[2:] for line in lines]
        for kept in set(re.findall(r"^Record: `([^`]+)`\.", section, re.M)):
            if (PROJECT / kept / DONE).exists():
                made = json.loads(text(f"{kept}/manifest.json"))["overrides"]
                assert settings(made) in [settings(words) for words in typed], kept
                checked += 1
    assert checked


@pytest.mark.slow  # every picture of a run's, with its intervals
@pytest.mark.skipif(
    f"matplotlib=={mpl.__version__}\n" not in text("constraints.txt"),
    reason="another matplotlib than constraints.txt has: letters differ by pixels",
)
def test_pictures_of_a_kept_run_are_those_that_the_figures_command_draws(tmp_path):
    page = text("docs/gallery.md")
    drawn = 0
    for _, picture, names in pictures():
        if names and len(names) == 1 and (PROJECT / names[0] / DONE).exists():
            if not (made := tmp_path / names[0]).exists():
                assert figures.main([str(PROJECT / names[0]), "-o", str(made)]) == 0
            (again,) = made.glob(f"*_{picture.name}")
            assert again.read_bytes() == picture.read_bytes(), picture
            words = again.with_suffix(".md").read_text(encoding="utf-8").split("\n\n", 1)[1]
            assert words.strip() in page, picture
            drawn += 1
    assert drawn >= 3


def test_decimals_of_the_papers_table_are_those_of_the_linked_files():
    """The cells are sentences; each decimal in them is a number of the CSV, perhaps in percent."""
    tables = [part.strip().partition("\n\n")[0] for part in text(PAPERS).split(DECIMALS)[1:]]
    rows = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()[2:]]
    assert len(rows) == 21
    for row in rows:
        link = re.search(r"\]\((.*)\.md\)", row[0]).group(1)
        recorded = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text(f"docs/measurements/{link}.csv"))
        for shown in re.findall(r"\d+\.\d+", row[3]):
            assert any(shows(shown, float(number), 100) for number in recorded), (link, shown)


def test_the_quickstart_s_output_is_its_record_s():
    printed = text("README.md").split("```text\n")[1].split("```")[0].splitlines()[2:]
    rows = read("docs/measurements/cpu-xeon-2core/quickstart.json")["rows"]
    for line, row in zip(printed, rows, strict=True):
        low_high = "" if row["label"] == "ar" else " [{:.2f}, {:.2f}]".format(*row["speedup_ci"])
        assert line.split()[:2] == [row["label"], f"{row['mat']:.2f}"]
        assert f" {row['speedup']:.2f}{low_high} " in line
        assert f" {row['end_to_end_speedup']:.2f} " in line
        assert line.endswith(f" {row['lossless']['equal']} equal")


def test_the_ratios_to_rivals_are_of_the_runs_beside_them(tmp_path):
    kept = "docs/measurements/cpu-epyc-2core/adaptive"
    rivals.main([str(PROJECT / kept), "--method", "adaptive", "--csv", str(tmp_path / "again.csv")])
    assert (tmp_path / "again.csv").read_text() == text(f"{kept}/rivals.csv")
