"""Make again every measured table and figure of the documents: ``make shown``.

``docs/shown.yaml`` names the records of each, and has a field in place of each measured number of a
table. Tables are written into the documents; figures are drawn into the files that they show.
``tests/docs/test_shown.py`` fails where a document says something else.
"""

import csv
import io
import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import yaml
from matplotlib.figure import Figure
from PIL import Image

from analysis.plots.charts import Panel, Point, Series, bars, bars_and_radar, curves
from analysis.plots.style import RC
from specbench.paths import PROJECT
from specbench.results.estimate import FEWEST
from specbench.results.manifest import BASELINE

DOCUMENTS = ("README.md", "docs/measurements.md")
SHOWN = re.compile(r"(<!-- shown: (\w+) -->\n\n)((?:\|.*\n)+)")
INTERVALS = (
    "Bars: 95 % intervals, bootstrap over prompts within categories, none for fewer than "
    f"{FEWEST}; they cover prompts, not what differs from run to run."
)


class WithInterval(NamedTuple):
    """A value and its interval's ends, written ``1.56 [1.37, 1.78]``."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        value, low, high = (format(number, spec) for number in self)
        return f"{value} [{low}, {high}]"


class Fields(string.Formatter):
    """Format strings in which ``1e3*.1f`` multiplies first, and ``4e-3/.1f`` divides by."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if scale := re.match(r"([\d.e-]+)([*/])", format_spec):
            factor = float(scale[1])
            value = factor * value if scale[2] == "*" else factor / value
            format_spec = format_spec[scale.end() :]
        text: str = super().format_field(value, format_spec)
        return text if isinstance(value, str) else text.replace("-", "−")


def index() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((PROJECT / "docs/shown.yaml").read_text("utf-8"))
    return found


def read(path: str) -> Any:
    """A record: parsed JSON, the tables of a CSV (each a list of rows), or text."""
    text = (PROJECT / path).read_text(encoding="utf-8")
    if path.endswith(".json"):
        return json.loads(text)
    if path.endswith(".csv"):
        parts = text.strip().split("\n\n")
        return [[_typed(row) for row in csv.DictReader(part.splitlines())] for part in parts]
    return text


def _typed(row: Mapping[str, str]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for key, cell in row.items():
        number = re.fullmatch(r"(-?\d+)|-?\d+\.\d+(?:e-?\d+)?", cell)
        cells[key] = cell if number is None else int(cell) if number[1] else float(cell)
    ends = [key.removesuffix(" low") for key in row if key.endswith(" low")]
    return cells | {f"{name}_ci": [cells[f"{name} low"], cells[f"{name} high"]] for name in ends}


def by_keys(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[Any, Any]:
    """Rows in nested dicts, one level a key; rows without one of the keys are left out."""
    found: dict[Any, Any] = {}
    for row in rows:
        if any(key not in row for key in keys):
            continue
        place = found
        for key in keys[:-1]:
            place = place.setdefault(row[key], {})
        with_ci = {
            f"{key}_ci": WithInterval(row[key], *row[f"{key}_ci"])
            for key in row
            if isinstance(row.get(f"{key}_ci"), list) and "" not in row[f"{key}_ci"]
        }
        place[row[keys[-1]]] = {**row, **with_ci}
    return found


def table(name: str) -> str:
    made = index()["tables"][name]
    records = [read(record) for record in made["records"]]
    if "by" in made:
        lists = [r[0] if isinstance(r, list) else r[made.get("list", "rows")] for r in records]
        records = [by_keys(rows, made["by"]) for rows in lists]
    named = dict(zip("ab", records, strict=False))
    lines = [made["header"], " | ".join(["---"] * (made["header"].count(" | ") + 1))]
    for row in made["rows"]:
        if isinstance(row, str):
            lines.append(Fields().format(row, **named))
        else:
            found = (records[0].get(item, item) for item in row[1:])
            lines.append(Fields().format(made["row"], row[0], *found))
    return "".join(f"| {line} |\n" for line in lines)


def with_tables(text: str) -> str:
    return SHOWN.sub(lambda found: found[1] + table(found[2]), text)


def draw_bench(summary: Any) -> Figure:
    rows = {(row["label"], row["task"]): row for row in summary["rows"]}
    tasks = list(dict.fromkeys(task for _, task in rows))
    ticks = [f"{task.replace('_', ' ')}\nn = {rows[BASELINE, task]['n_cases']}" for task in tasks]
    series = [
        Series(label, label, [_point(x, rows[label, task]) for x, task in enumerate(tasks)])
        for label in ("cacheback", "pld")
    ]
    panel = Panel("", "", "speedup over ar", series, ticks, reference=(1.0, BASELINE))
    caption = f"{summary['caption']} {INTERVALS} Two prompts a task say little."
    return bars([panel], "Main job: SmolLM2-135M, 12 shipped prompts, 2 CPU cores", caption)


def _point(x: float, row: Any) -> Point:
    # Summaries of earlier versions have intervals of two cases.
    interval = row["speedup_ci"] if row.get("n_cases", FEWEST) >= FEWEST else None
    return Point(x, row["speedup"], tuple(interval) if interval else None)


def draw_cacheback_figure3(tables: Any, page: str) -> Figure:
    overall, by_task = tables
    methods = [row for row in overall if row["method"] != BASELINE]
    tasks = list(dict.fromkeys(row["data"] for row in by_task))
    spokes = [
        f"{task.replace('_', ' ')}\nn = {next(r['cases'] for r in by_task if r['data'] == task)}"
        for task in tasks
    ]
    series, around = [], []
    for row in methods:
        name = row["method"]
        series.append(Series(name, name, [_point(0, row)]))
        cells = (cell for cell in by_task if cell["method"] == name)
        spoke = [Point(tasks.index(cell["data"]), cell["speedup"]) for cell in cells]
        around.append(Series(name, name, spoke))
    panel = Panel("", "", "speedup over ar", series, ["smollm2_135m"], reference=(1.0, BASELINE))
    conditions = next(line for line in page.splitlines() if line.startswith("smollm2_135m ("))
    claim = next(row for row in methods if row["claimed speedup / MAT"])
    values = f"{claim['method']} {claim['claimed speedup / MAT']}"
    place = claim["claimed on"]
    caption = f"Claimed for {place}, so not drawn (speedup / MAT): {values}.\n{conditions}"
    return bars_and_radar(panel, spokes, around, "Cacheback, Figure 3, with SmolLM2-135M", caption)


def draw_growth(record: Any) -> Figure:
    names = {"context": "tokens of context", "stores": "tokens stored (1,000 of context)"}
    panels = []
    for part, xlabel in names.items():
        rows = [row for row in record["rows"] if row["part"] == part]
        series = [
            Series(
                label.replace("ngrammys strategy=", "ngrammys, "),
                label.split()[0],
                [Point(r["size"], r["both_median_us"]) for r in rows if r["label"] == label],
            )
            for label in sorted({row["label"] for row in rows})
        ]
        ylabel = "propose + observe, median µs"
        base = 2 if part == "context" else 10
        panels.append(Panel("", xlabel, ylabel, series, log=base, ratios=True))
    caption = f"Real text as context, made-up stores; seed {record['seed']}."
    return curves([panels], "Drafting time by context and by store", caption)


FIGURES = {
    "bench_speedup": draw_bench,
    "cacheback_figure3": draw_cacheback_figure3,
    "growth": draw_growth,
}


def figure(name: str) -> Image.Image:
    """A figure, in a palette: a third of the bytes that the repository has to carry."""
    draw: Any = FIGURES[Path(name).stem]
    drawn = io.BytesIO()
    with mpl.rc_context(RC):
        draw(*(read(record) for record in index()["figures"][name])).savefig(drawn)
    return Image.open(drawn).convert("RGB").quantize()


def main() -> int:
    for path in map(PROJECT.joinpath, DOCUMENTS):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name in index()["figures"]:
        figure(name).save(PROJECT / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
