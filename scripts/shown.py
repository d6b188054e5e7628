"""Make again every measured table and figure of the documents: ``make shown``.

A line ``<!-- shown: NAME -->`` stands above each such table, and ``docs/shown.yaml`` names the
records of each table and figure. Tables are written into the documents; a figure carries the hashes
of its records. ``tests/docs/test_shown.py`` fails where a document says something else.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from analysis.plots.charts import Panel, Point, Series, bars, bars_and_radar, curves
from analysis.plots.style import RC
from scripts.shown_tables import TABLES
from specbench.paths import PROJECT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INDEX = PROJECT / "docs" / "shown.yaml"
DOCUMENTS = ("README.md", "docs/measurements.md")
SHOWN = re.compile(r"(<!-- shown: (\w+) -->\n\n)((?:\|.*\n)+)")
INTERVALS = "Bars: 95 % intervals, bootstrap over prompts within categories."


def index() -> dict[str, dict[str, list[str]]]:
    """Records of each ``tables`` name and each ``figures`` path, both relative to the root."""
    found: dict[str, dict[str, list[str]]] = yaml.safe_load(INDEX.read_text(encoding="utf-8"))
    return found


def read(path: str) -> Any:
    """A record: parsed JSON, or the tables of a CSV, each as a list of rows."""
    text = (PROJECT / path).read_text(encoding="utf-8")
    if path.endswith(".json"):
        return json.loads(text)
    if path.endswith(".csv"):
        return [list(csv.DictReader(part.splitlines())) for part in text.strip().split("\n\n")]
    return text


def fingerprint(records: list[str]) -> str:
    """The hash that a figure carries of the records it was drawn from."""
    digest = hashlib.sha256()
    for record in records:
        digest.update((PROJECT / record).read_bytes())
    return digest.hexdigest()


def with_tables(text: str) -> str:
    """A document with its shown tables made again from their records."""
    records = index()["tables"]

    def write(found: re.Match[str]) -> str:
        name = found[2]
        return found[1] + TABLES[name](*(read(record) for record in records[name]))

    return SHOWN.sub(write, text)


def draw_bench(summary: Any) -> Figure:
    """Speedup by task of the main job."""
    rows = {(row["label"], row["task"]): row for row in summary["rows"]}
    tasks = list(dict.fromkeys(task for _, task in rows))
    ticks = [f"{task.replace('_', ' ')}\nn = {rows['ar', task]['n_cases']}" for task in tasks]
    series = [
        Series(label, label, [_point(x, rows[label, task]) for x, task in enumerate(tasks)])
        for label in ("cacheback", "pld")
    ]
    panel = Panel("", "", "speedup over ar", series, ticks, reference=(1.0, "ar"))
    caption = f"{summary['caption']} {INTERVALS} Two prompts a task say little."
    return bars([panel], "Main job: SmolLM2-135M, 12 shipped prompts, 2 CPU cores", caption)


def _point(x: float, row: Any) -> Point:
    interval = row["speedup_ci"]
    return Point(x, row["speedup"], tuple(interval) if interval else None)


def draw_cacheback_figure3(tables: Any, page: str) -> Figure:
    """Speedup of six methods over all tasks, and by task around a circle."""
    overall, by_task = tables
    methods = [row for row in overall if row["method"] != "ar"]
    tasks = list(dict.fromkeys(row["data"] for row in by_task))
    spokes = [
        f"{task.replace('_', ' ')}\nn = {next(r['cases'] for r in by_task if r['data'] == task)}"
        for task in tasks
    ]
    series = []
    for row in methods:
        claimed = row["claimed speedup / MAT"].partition(" / ")[0]
        interval = (float(row["speedup low"]), float(row["speedup high"]))
        point = Point(0, float(row["speedup"]), interval)
        claims = [Point(0, float(claimed))] if claimed else []
        series.append(Series(row["method"], row["method"], [point], claimed=claims))
    around = [
        Series(
            row["method"],
            row["method"],
            [
                Point(x, float(cell["speedup"]))
                for x, task in enumerate(tasks)
                for cell in by_task
                if (cell["data"], cell["method"]) == (task, row["method"])
            ],
        )
        for row in methods
    ]
    panel = Panel("", "", "speedup over ar", series, ["smollm2_135m"], reference=(1.0, "ar"))
    conditions = next(line for line in page.splitlines() if line.startswith("smollm2_135m ("))
    claim = next(row for row in methods if row["claimed speedup / MAT"])
    caption = f"Hollow marker: claimed for {claim['claimed on']}.\n{conditions}"
    return bars_and_radar(panel, spokes, around, "Cacheback, Figure 3, with SmolLM2-135M", caption)


def draw_growth(record: Any) -> Figure:
    """Drafting time against tokens of context and tokens stored."""
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


def main() -> int:
    for name in DOCUMENTS:
        path = PROJECT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, records in index()["figures"].items():
        with mpl.rc_context(RC):
            draw: Any = FIGURES[Path(name).stem]
            figure = draw(*(read(record) for record in records))
            drawn = io.BytesIO()
            figure.savefig(drawn)
        made_from = PngInfo()
        made_from.add_text("Records", " ".join(records))
        made_from.add_text("Records-SHA256", fingerprint(records))
        # A palette: a third of the bytes that the repository has to carry.
        Image.open(drawn).convert("RGB").quantize().save(PROJECT / name, pnginfo=made_from)
    return 0


if __name__ == "__main__":
    sys.exit(main())
