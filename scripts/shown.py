"""Make again every measured table and figure of the documents, and the gallery: ``make shown``.

``docs/shown.yaml`` names the records of each, and has a field in place of each measured number of a
table. Tables are written into the documents; figures are drawn into the files that they show.
``tests/docs/test_shown.py`` fails where a document says something else.
"""

import csv
import functools
import io
import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image

from analysis.plots.charts import Panel, Point, Series, bars, curves
from analysis.plots.layout import Drawing
from analysis.plots.style import styled
from analysis.plots.units import MAT, PLAIN, speedup_words
from scripts import gallery
from specbench.paths import PROJECT
from specbench.results.decision import against_cell
from specbench.results.estimate import FEWEST
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.tasks import OVERALL

DOCUMENTS = (
    "README.md",
    "docs/findings.md",
    *sorted(str(page.relative_to(PROJECT)) for page in PROJECT.glob("docs/measurements/*.md")),
)
GALLERY = "docs/gallery.md"
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


def _judged(record: Mapping[str, Any], rows: str) -> list[dict[str, Any]]:
    """A summary's rows, each with how its label stands against the fastest one."""
    standings = record.get("against_best") or {}
    return [
        row | {"against": str(against_cell(standings.get(row.get("label"))))}
        for row in record[rows]
    ]


def table(name: str) -> str:
    made = index()["tables"][name]
    records = [read(record) for record in made["records"]]
    if "by" in made:
        lists = [
            r[0] if isinstance(r, list) else _judged(r, made.get("list", "rows")) for r in records
        ]
        records = [by_keys(rows, made["by"]) for rows in lists]
    named = dict(zip(string.ascii_lowercase, records, strict=False))
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


def draw_bench(summary: Any, key: str = "speedup") -> Drawing:
    rows = {(row["label"], row["task"]): row for row in summary["rows"]}
    tasks = list(dict.fromkeys(task for _, task in rows))
    ticks = [f"{display_name(task)}\nn = {rows[BASELINE, task]['n_cases']}" for task in tasks]
    series = [
        Series(
            display_name(label),
            label,
            [
                Point(x, found[key], _interval(found, f"{key}_ci"))
                for x, task in enumerate(tasks)
                if (found := rows[label, task])
            ],
        )
        for label in ("cacheback", "pld")
    ]
    unit, line = (MAT, None) if key == "mat" else (speedup_words("measured"), (1.0, PLAIN))
    panel = Panel("", "", unit, series, ticks, line, bottom=1.0 if key == "mat" else None)
    caption = f"{summary['caption']} {INTERVALS} Two prompts a task say little."
    words = "Mean accepted tokens" if key == "mat" else "Speedup"
    return bars([panel], f"{words} by task (SmolLM2-135M, 12 shipped prompts)", caption)


def _interval(row: Any, key: str = "speedup_ci", cases: str = "n_cases") -> Any:
    """None for few cases: summaries of earlier versions have intervals of two."""
    found = row.get(key)
    return tuple(found) if found and "" not in found and row.get(cases, 0) >= FEWEST else None


def draw_cacheback_figure3(tables: Any, page: str) -> Drawing:
    overall, by_task = tables
    methods = [row["method"] for row in overall if row["method"] != BASELINE]
    tasks = list(dict.fromkeys(row["data"] for row in by_task))
    cases = {row["data"]: row["cases"] for row in by_task} | {OVERALL: overall[0]["cases"]}
    rows = {(row["method"], row["data"]): row for row in by_task}
    rows |= {(row["method"], OVERALL): row for row in overall}
    places = [*tasks, OVERALL]
    series = [
        Series(
            display_name(method),
            method,
            [
                Point(x, found["speedup"], _interval(found, cases="cases"))
                for x, task in enumerate(places)
                if (found := rows[method, task])
            ],
        )
        for method in methods
    ]
    ticks = [f"{display_name(task)}\nn = {cases[task]}" for task in places]
    panel = Panel("", "", speedup_words("measured"), series, ticks, reference=(1.0, PLAIN))
    conditions = next(line for line in page.splitlines() if line.startswith("smollm2_135m ("))
    claim = next(row for row in overall if row["claimed speedup / MAT"])
    values = f"{claim['method']} {claim['claimed speedup / MAT']}"
    place = claim["claimed on"]
    caption = f"Claimed for {place}, so not drawn (speedup / MAT): {values}.\n{conditions}"
    return bars([panel], "After Cacheback, Figure 3 (SmolLM2-135M on Spec-Bench)", caption)


def draw_growth(record: Any) -> Drawing:
    names = {"context": "tokens of context", "stores": "tokens stored (1,000 of context)"}
    panels = []
    for part, xlabel in names.items():
        rows = [row for row in record["rows"] if row["part"] == part]
        series = [
            Series(
                display_name(label.split()[0])
                + label[len(label.split()[0]) :].replace(" strategy=", ", "),
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


FIGURES = gallery.FIGURES | {
    "bench_mat": functools.partial(draw_bench, key="mat"),
    "bench_speedup": draw_bench,
    "cacheback_figure3": draw_cacheback_figure3,
    "growth": draw_growth,
}


def drawing(name: str) -> Drawing:
    """A figure of the index, by its path."""
    draw: Any = FIGURES[Path(name).stem]
    with styled():
        made: Drawing = draw(*(read(record) for record in index()["figures"][name]))
    return made


def figure(name: str) -> Image.Image:
    """A figure, in a palette: a third of the bytes that the repository has to carry."""
    drawn = io.BytesIO()
    with styled():
        drawing(name).savefig(drawn, dpi=150)
    return Image.open(drawn).convert("RGB").quantize(64)


def gallery_page() -> str:
    """The gallery: every picture with its words, its records and the commands that make it."""
    parts = [index()["gallery"]["head"]]
    for section in index()["gallery"]["sections"]:
        parts += [f"## {section['title']}", section["text"]]
        parts.append(f"```bash\n{section['command'].strip()}\n```")
        for name in section["figures"]:
            made = drawing(name)
            path = name.removeprefix("docs/")
            records = ", ".join(f"`{record}`" for record in index()["figures"][name])
            words = "\n\n".join(line for line in made.caption.splitlines() if line)
            parts += [
                f"![{made.title}]({path})",
                f"**{made.title}.** {words}",
                f"Record: {records}.",
            ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> int:
    for path in map(PROJECT.joinpath, DOCUMENTS):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    (PROJECT / GALLERY).write_text(gallery_page(), encoding="utf-8")
    for name in index()["figures"]:
        figure(name).save(PROJECT / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
