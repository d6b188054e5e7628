"""Write the tables of README.md and docs/ from the kept records.

    python scripts/pages.py            write them
    python scripts/pages.py --check    exit 1 where a page is not what its records say
    python scripts/pages.py --pictures also draw each picture above a ``Record:`` from that record

A table is between two comments; the first one defines it::

    <!-- table
    from: docs/measurements/MACHINE/RUN docs/measurements/MACHINE/FILE.json
    columns: method | MAT = overall mat | speedup [95 %] = overall speedup: ci
    rows: prompt lookup = pld | suffix_decoding -->
    <!-- end -->

The first column holds the rows' own names. A number is looked up by the words of its row and of
its column: keys, labels, tasks and other values on the way to it through the record, with ``_``
for a space, and ``@NAME`` for the record of that name. After a colon comes its format: a
format (``.1f``, ``,d``), ``ci`` for its interval, ``ms`` for seconds in milliseconds, ``%``. The
row ``*`` means every method of the first record, the fastest first. Below a table, and after
``Record:`` below a picture, come machine, date and commit of its records. Between
``<!-- metrics -->`` and ``<!-- end -->`` is the list of metrics.
"""

import contextlib
import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.figures import figures_of
from analysis.plots.style import save
from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.load import usable_runs
from specbench.paths import PROJECT
from specbench.results.headline_table import against_cell, no_drafts_text
from specbench.results.metrics import METRICS
from specbench.results.records import MANIFEST, SUMMARY
from specbench.storage.jsonl import read_json

PAGES = ("README.md", "assets/README.md")  # besides those below docs/
_TABLE = re.compile(
    r"(<!-- table\nfrom: (?P<records>.+)\ncolumns: (?P<columns>.+)\nrows: (?P<rows>.+) -->\n)"
    r"[\s\S]*?(<!-- end -->)"
)
_METRICS = re.compile(r"(<!-- metrics -->\n)[\s\S]*?(<!-- end -->)")
_RECORD = re.compile(r"^(?P<shown>Record: (?P<records>`.+`)\.)(?: \*Measured.*\*)?$", re.M)
_PICTURE = re.compile(r"!\[[^\]]*\]\((.+/(\w+)\.png)\)(?:(?!!\[)[\s\S])*?^Record: `(.+)`\.", re.M)


class Record:
    """The numbers, intervals and texts of some files, by the words on the way to each."""

    def __init__(self, paths: Sequence[str], root: Path = PROJECT) -> None:
        self.values: list[Any] = []
        self._indices: dict[str, set[int]] = defaultdict(set)  # of values, by keyword
        self.methods: list[str] = []  # of the first run, the fastest first
        for path in paths:
            record, name = _read(root / path), Path(path).stem
            if name == "training":  # as each folder has one
                name = Path(path).parent.name
            self._add(record, {f"@{name}"})
            if path == paths[0] and isinstance(record, list):
                overall = [r for r in record if r.get("task") == "overall" and r.get("speedup")]
                ranked = sorted(overall, key=lambda row: -row["speedup"])
                self.methods = [row["label"] for row in ranked if row["method"] != "ar"]

    def _add(self, node: Any, keywords: set[str]) -> None:
        if isinstance(node, dict):
            # The method does not distinguish its labels.
            names = [v for k, v in node.items() if k != "method" or "label" not in node]
            values = {str(v).replace(" ", "_") for v in names if type(v) in (str, int)}
            for key, value in node.items():
                self._add(value, keywords | values | {key.replace(" ", "_")})
        elif isinstance(node, list) and not all(isinstance(item, float | int) for item in node):
            for item in node:
                self._add(item, keywords)
        elif node is not None:
            for keyword in keywords:
                self._indices[keyword].add(len(self.values))
            self.values.append(node)

    def at(self, *keywords: str) -> Any:
        """Look up the one value that all these keywords lead to.

        Raises:
            LookupError: they lead nowhere, or to several values.
        """
        indices = set.intersection(*(self._indices.get(keyword, set()) for keyword in keywords))
        values = [self.values[index] for index in indices]
        if not values or any(value != values[0] for value in values):
            raise LookupError(f"{len(values)} values for {' '.join(keywords)}")
        return values[0]


def _read(path: Path) -> Any:
    """Read a run's summary, a JSON file, or the rows of a CSV file."""
    if path.suffix == ".csv":
        return [_row(row) for row in csv.DictReader(path.read_text("utf-8").splitlines())]
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    summary: Any = read_json(path / SUMMARY)
    manifest = path / MANIFEST  # which pooled processes lack
    labels: Any = read_json(manifest)["labels"] if manifest.is_file() else {}
    idle = {w["values"]["label"] for w in summary.get("warnings", []) if w["code"] == "NO_DRAFT"}
    for row in summary["rows"]:
        if row["task"] == "overall":
            row["against"] = str(against_cell(summary["against_best"].get(row["label"])))
            if row["label"] in idle:
                row["idle"] = no_drafts_text(labels.get(row["label"], {}).get("budget"))
    return summary["rows"] + summary.get("served", []) + summary.get("batched", [])


def _row(cells: dict[str, str]) -> dict[str, Any]:
    """Parse numbers, and join ``X_low`` and ``X_high`` to ``X_ci``."""
    row: dict[str, Any] = {}
    for key, cell in cells.items():
        value = float(cell) if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell) else cell
        if bound := re.fullmatch("(.+)_(?:low|high)", key):
            row.setdefault(f"{bound[1]}_ci", []).append(value)
        else:
            row[key] = int(cell) if cell.isdigit() else value
    return row


def render(page: str, root: Path = PROJECT) -> tuple[str, list[str]]:
    """Fill the page from its records; returns also the cells whose keywords lead to no value."""
    lost: list[str] = []

    def table(match: re.Match[str]) -> str:
        records = match["records"].split()
        record = Record(records, root)
        head, *columns = (column.partition(" = ") for column in match["columns"].split(" | "))
        rows = [row.partition(" = ") for row in match["rows"].split(" | ")]
        if rows[0][0] == "*":
            rows = [(label, "", "") for label in record.methods]
        lines = [f"| {' | '.join([head[0], *(name for name, _, _ in columns)])} |"]
        lines.append(f"|{' --- |' * (1 + len(columns))}")
        for text, _, keywords in rows:
            cells = [text if keywords else f"`{text}`"]
            with contextlib.suppress(LookupError):
                cells[0] += f" ({record.at(*(keywords or text).split(), 'idle')})"
            for _, _, column in columns:
                path, _, form = column.partition(": ")
                try:
                    cells.append(_cell(record, [*(keywords or text).split(), *path.split()], form))
                except LookupError as error:
                    lost.append(str(error))
            lines.append(f"| {' | '.join(cells)} |")
        if caption := _caption(records, root):
            lines += ["", caption]
        return "\n".join([match[1].rstrip(), "", *lines, "", match[5]])

    def picture(match: re.Match[str]) -> str:
        caption = _caption(re.findall("`([^`]+)`", match["records"]), root)
        return match["shown"] + (f" {caption}" if caption else "")

    page = _METRICS.sub(lambda match: f"{match[1]}\n{metrics_table()}\n{match[2]}", page)
    return _RECORD.sub(picture, _TABLE.sub(table, page)), lost


def metrics_table() -> str:
    """List every metric: heading, key in files, whether it has an interval, definition."""
    lines = ["| column | in `summary.json` | 95 % interval | definition |", "|" + " --- |" * 4]
    for metric in METRICS:
        interval = "yes" if metric.has_interval else "no"
        lines.append(f"| {metric.heading} | `{metric.name}` | {interval} | {metric.help} |")
    return "\n".join(lines) + "\n"


def _cell(record: Record, keywords: Sequence[str], form: str) -> str:
    value = record.at(*keywords)
    if isinstance(value, str):
        return value
    flags = form.split()
    scale = 1000 if "ms" in flags else 1
    default = "d" if isinstance(value, int) else ".0%" if "%" in flags else ".2f"
    shape = next((flag for flag in flags if flag not in ("ci", "ms", "%")), default)
    text = format(scale * value, shape)
    if "ci" in flags:
        low, high = record.at(*keywords[:-1], f"{keywords[-1]}_ci")
        text += f" [{format(scale * low, shape)}, {format(scale * high, shape)}]"
    return text


def _origin(record: Path) -> tuple[str, str, str]:
    """Read date, commit and processor from a run's folder or a file; empty if not recorded."""
    file = record / MANIFEST if record.is_dir() else record
    if file.suffix != ".json" or not file.is_file():
        return "", "", ""
    data: Any = json.loads(file.read_text(encoding="utf-8"))
    data = data if isinstance(data, dict) else {}
    about = data | (data.get("environment") or {})
    git, hardware = about.get("git") or {}, about.get("hardware") or {}
    date = str(data.get("ended_at") or data.get("date") or "")[:10]
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    return date, (git.get("commit") or "")[:8], (gpus or [hardware.get("cpu") or ""])[0]


def _caption(records: Sequence[str], root: Path) -> str:
    folders = [root / record for record in records]
    paths = [path for folder in folders for path in [folder, *folder.glob("*/")]]  # a sweep's runs
    origins = [_origin(path) for path in paths]
    dates, commits, machines = (sorted({o[i] for o in origins if o[i]}) for i in range(3))
    parts = [f"on {' and '.join(machines)}"] if machines else []
    parts += [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    parts += [f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"] if commits else []
    return f"*Measured {', '.join(parts)}.*" if parts else ""


def draw(page: Path) -> None:
    """Draw a page's pictures again, each the first of its record whose name ends as the file's."""
    for file, kind, record in _PICTURE.findall(page.read_text(encoding="utf-8")):
        runs, _ = usable_runs([PROJECT / record], include_incomplete=True)
        picture = next(drawn for stem, drawn in figures_of(runs) if stem.endswith(kind))
        save(picture, (page.parent / file).parent, kind)[1].unlink()  # the PDF beside the PNG


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    options = parser.parse_args()
    check, wrong = options.check, 0
    for path in [*(PROJECT / page for page in PAGES), *sorted((PROJECT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        now, lost = render(text)
        name = path.relative_to(PROJECT)
        for cell in lost:
            print(f"{name}: no number in its records, or several: {cell}")
        if now != text:
            print(f"{name}: {'not what its records say' if check else 'written'}")
            if not check:
                path.write_text(now, encoding="utf-8")
        if options.pictures and not check:
            draw(path)
        wrong += bool(lost) or (check and now != text)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
