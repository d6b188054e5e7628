"""Write the tables of README.md and docs/ from the kept records.

    python scripts/pages.py            write them
    python scripts/pages.py --check    exit 1 where a page is not what its records say

Between ``<!-- made of RUN -->`` and ``<!-- end -->`` stands the table of a run of all methods: the
best, the median and the losing ones, or every one with ``<!-- made of RUN, whole -->``. In any
other table the numbers are written, in as many decimals as they have, where a comment above it
says where they lie::

    <!-- from: docs/measurements/MACHINE/RUN docs/measurements/MACHINE/FILE.json
    columns: overall mat | overall speedup
    rows: pld | suffix_5/suffix_8 -->

A number is looked up by the words of its row and of its column: keys, labels, tasks and other
values on its way through the record, with ``_`` for a space, and ``@NAME`` for the record of that
name. Words with ``/`` between them belong to a cell's numbers in turn; ``2:`` takes the second of
the row's. The ends of an interval are under ``KEY_ci``. ``-`` is a column that was not measured.
Below such a table, and behind ``Record:`` below a picture, stand date and commit of its records.
"""

import csv
import functools
import itertools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.paths import PROJECT
from specbench.results.decision import against_cell
from specbench.results.names import display_name
from specbench.results.records import MANIFEST, SUMMARY
from specbench.results.summary_schema import SummaryRow
from specbench.storage.jsonl import read_json

_BEST = 5  # rows at the top; then the median, then all whose interval lies below 1
_WHOLE = re.compile(r"(<!-- made of ([^\s,]+)(, whole)? -->\n).*?(<!-- end -->)", re.S)
_TABLE = re.compile(
    r"<!-- from: (?P<records>.+)\ncolumns: (?P<columns>.+)\nrows: (?P<rows>.+) -->\n\n"
    r"\|.*\n\|.*\n(?P<body>(?:\|.*\n)+)(?P<caption>\n\*Measured.*\*\n)?"
)
_PICTURE = re.compile(r"^(?P<shown>Record: (?P<records>`.+`)\.)(?: \*Measured.*\*)?$", re.M)
_NUMBER = r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?"
_ITEM = re.compile(rf"(?P<value>{_NUMBER})(?: \[(?P<low>[\d.]+), (?P<high>[\d.]+)\])?")


class Record:
    """The numbers, intervals and texts of some files, by the words on the way to each."""

    def __init__(self, paths: Sequence[str], root: Path = PROJECT) -> None:
        self.values: list[Any] = []
        self._places: dict[str, set[int]] = defaultdict(set)  # of a word
        for path in paths:
            name = Path(path).stem
            if name in ("training", "summary"):  # as each folder has one
                name = Path(path).parent.name
            self._add(_read(root / path), {f"@{name}"})

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
            for word in words:
                self._places[word].add(len(self.values))
            self.values.append(node)

    def at(self, *words: str) -> list[Any]:
        """All values that all these words lead to."""
        places = [self._places.get(word, set()) for word in words]
        return [self.values[place] for place in set.intersection(*places)]


def _read(path: Path) -> Any:
    """A run's summary, a JSON file, or the rows of a CSV file."""
    if path.suffix == ".csv":
        parts = path.read_text(encoding="utf-8").strip().split("\n\n")
        return [_row(row) for part in parts for row in csv.DictReader(part.splitlines())]
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    summary: Any = read_json(path / SUMMARY)
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


def written(page: str, root: Path = PROJECT) -> tuple[str, list[str]]:
    """The page as its records have it now, and the cells that their words lead nowhere."""
    lost: list[str] = []

    def table(found: re.Match[str]) -> str:
        records = found["records"].split()
        record, columns = Record(records, root), found["columns"].split(" | ")
        lines = found["body"].splitlines()
        for i, row in enumerate(found["rows"].split(" | ")):
            cells = lines[i][2:].removesuffix(" |").split(" | ")
            for j, column in enumerate(columns, len(cells) - len(columns)):  # from the right
                if column == "-":
                    continue
                made = _cell(cells[j], row, column, record)
                if made is None:
                    lost.append(f"{row} | {column}: {cells[j]}")
                cells[j] = cells[j] if made is None else made
            lines[i] = f"| {' | '.join(cells)} |"
        shown = found[0].removesuffix(found["caption"] or "")
        body = "".join(f"{line}\n" for line in lines)
        caption = _measured(records, root)
        return shown.replace(found["body"], body) + (f"\n{caption}\n" if caption else "")

    def picture(found: re.Match[str]) -> str:
        caption = _measured(re.findall("`([^`]+)`", found["records"]), root)
        return found["shown"] + (f" {caption}" if caption else "")

    whole = _WHOLE.sub(lambda f: f[1] + _all_methods(f[2], bool(f[3]), root) + f[4], page)
    return _PICTURE.sub(picture, _TABLE.sub(table, whole)), lost


def _cell(cell: str, row: str, column: str, record: Record) -> str | None:
    """A cell's numbers or word as the record has them; None where it has none, or several."""
    items, ways = list(_ITEM.finditer(cell)), list(_ways(row, column))
    values = [record.at(*way) for way in ways]
    if words := {v for found in values for v in found if isinstance(v, str)}:
        return cell if cell in words else words.pop() if len(words) == 1 else None
    if len(items) != len(ways):
        every = np.hstack([[], *itertools.chain(*values)])
        shown = all(
            i["value"] in {_decimals(i["value"], v, _unit(i["value"], [v]) or 1) for v in every}
            for i in items
        )
        return cell if shown or cell in ("", "–", "1") else None
    for item, way, found in reversed(list(zip(items, ways, values, strict=True))):
        numbers = [v for v in found if isinstance(v, float | int)]
        unit = 100 if "%" in cell else _unit(item["value"], numbers)
        ends = [*record.at(*way[:-1], f"{way[-1]}_ci"), *record.at(*way[:-1], "ci")]
        each = {_decimals(item["value"], v, unit) for v in numbers}
        made = item["value"] if item["value"] in each else each.pop() if len(each) == 1 else None
        if made is None or not unit or (item["low"] and not ends):
            return None
        if item["low"]:
            at = float(item["low"])
            low, high = min(ends, key=lambda two: abs(unit * two[0] - at))
            made += f" [{_decimals(item['low'], low, unit)}, {_decimals(item['high'], high, unit)}]"
        cell = cell[: item.start()] + made + cell[item.end() :]
    return cell


def _ways(row: str, column: str) -> Iterator[list[str]]:
    """The words that each of a cell's numbers is looked up by, in turn."""
    nth, _, column = column.rpartition(": ")
    rows, columns = ([word.split("/") for word in part.split()] for part in (row, column))
    if nth:
        rows = [[words[int(nth) - 1]] for words in rows]
    for first in itertools.product(*rows):
        yield from ([*first, *last] for last in itertools.product(*columns))


def _unit(shown: str, values: Sequence[float]) -> float:
    """1, or 1000 where seconds are shown in milliseconds; 0 where that cannot be told."""
    old = abs(float(shown.replace(",", "").replace("−", "-")))
    if not old or any(old / 30 < abs(v) < 30 * old for v in values):
        return 1
    return 1000 if any(old / 8 < 1000 * abs(v) < 8 * old for v in values) else 0


def _decimals(shown: str, value: float, unit: float = 1) -> str:
    """``value`` in ``unit`` with as many decimals as ``shown``."""
    decimals, old = len(shown.partition(".")[2]), float(shown.replace(",", "").replace("−", "-"))
    value *= unit
    if abs(value - old) <= 0.5001 * 10.0**-decimals:  # a half may have been rounded either way
        return shown
    made = f"{value:,.{decimals}f}" if "," in shown else f"{value:.{decimals}f}"
    return made.replace("-", "−") if "−" in shown else made


@functools.lru_cache(maxsize=64)
def _measured_by(record: Path) -> tuple[str, str]:
    """Date and commit that a run's folder or a file says; empty where it says none."""
    folder = record.parent if record.name == SUMMARY else record
    place = folder / MANIFEST if folder.is_dir() else folder
    if place.suffix != ".json" or not place.is_file():
        return "", ""
    noted: Any = json.loads(place.read_text(encoding="utf-8"))
    noted = noted if isinstance(noted, dict) else {}
    git = noted.get("git") or (noted.get("environment") or {}).get("git") or {}
    return str(noted.get("ended_at") or noted.get("date") or "")[:10], (git.get("commit") or "")[:8]


def _measured(records: Sequence[str], root: Path) -> str:
    found = [_measured_by(root / record) for record in records]
    dates, commits = (sorted({f[i] for f in found if f[i]}) for i in (0, 1))
    said = [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    said += [f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"] if commits else []
    return f"*Measured {', '.join(said)}.*" if said else ""


def _all_methods(kept: str, whole: bool, root: Path) -> str:
    """Some methods of a kept run, or all, and what they ran on."""
    (run,), summary = load_runs([root / kept]), read_json(root / kept / SUMMARY)
    overall = {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}
    plain = overall.pop(str(run.baseline))
    ranked = sorted(overall.values(), key=lambda row: -row["speedup"])
    over_plain = [pair["verdict"] for pair in summary["pairs"] if pair["second"] == run.baseline]
    losing = [row for row in ranked if row["speedup_ci"] and row["speedup_ci"][1] < 1]
    some = ranked[:_BEST] + ranked[len(ranked) // 2 :][:1] + losing
    shown = ranked if whole else [row for i, row in enumerate(some) if row not in some[:i]]
    which = f"All {len(ranked)} methods."
    if not whole:
        which = (
            f"The first {_BEST} of {len(ranked)} methods, the median, and all whose interval lies "
            f"below 1 ({len(losing)})."
        )
    model, form = run.manifest.model, run.manifest.setting("engine", "draft_weights")
    assert model is not None
    drafts = f" Draft models and heads are read in {form}." if form not in (None, "float32") else ""
    share = ""
    if plain["bandwidth_share"]:
        share = (
            f" Plain decoding reads the weights at {100 * plain['bandwidth_share']:.0f} % of the "
            "fastest read of memory."
        )
    lines = [
        f"| {plain['n_cases']} questions | budget | rows a pass | remembers earlier questions "
        "| MAT | speedup over plain decoding [95 %] | against the best | outputs equal of "
        f"{sum(plain['lossless'].values())} |",
        "| --- " * 8 + "|",
        *(
            _line(run, row, against_cell(summary["against_best"].get(row["label"])))
            for row in shown
        ),
        "",
        f"{which} Where all are compared with plain decoding at once, {over_plain.count('faster')} "
        f"are shown to gain and {over_plain.count('slower')} to lose. {display_name(run.model)}, "
        f"{model.dtype}, on {run.manifest.hardware['cpu']}, {model.threads} threads, this "
        f"project's engine.{share}{drafts}",
        "",
        _measured([kept], root),
    ]
    return "\n".join(lines) + "\n"


def _line(run: Run, row: SummaryRow, against: Any) -> str:
    label, info = row["label"], run.manifest.labels[row["label"]]
    turns = [record for record in run.records if record.label == label]
    drafted = sum(record.n_drafted + record.n_aux for record in turns)
    rows = 1 + drafted / sum(record.n_target_passes for record in turns)
    low, high = row["speedup_ci"] or (math.nan, math.nan)
    cells = [
        f"`{label}`", info.budget or "–", f"{rows:.1f}",
        "yes" if info.state_scope == "run" else "no", f"{row['mat']:.2f}",
        f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}]", against, row["lossless"]["equal"],
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, wrong = parser.parse_args().check, 0
    for path in [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        now, lost = written(text)
        name = path.relative_to(PROJECT)
        for cell in lost:
            print(f"{name}: no number, or several, in the record for {cell}")
        if now != text:
            print(f"{name}: {'not what its records say' if check else 'written'}")
            if not check:
                path.write_text(now, encoding="utf-8")
        wrong += bool(lost) or (check and now != text)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
