"""Pictures of the gallery, from records that the repository carries: ``make shown`` draws them.

``python -m scripts.gallery RUNS -o FILE.json`` makes such a record: of every label of the runs what
figures show. A whole run folder would be tens of times as large, and has its questions' text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.plots.agreement import Agreement, predicted_against_measured
from analysis.plots.budget import COST_TEXT, BudgetPoint, speedup_by_budget
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.layout import Drawing
from analysis.plots.overviews import undecided_groups
from analysis.plots.ranking import Ranked, mat_against_speedup, prompts, ranked
from analysis.plots.sweeps import comparison_title
from analysis.plots.units import MAT, PLAIN, speedup_words, unit_of
from analysis.runs.comparisons import Comparison, caption, make_comparisons
from analysis.runs.drafting import rows_of_target_pass
from analysis.runs.estimates import prompt_speedups
from analysis.runs.load import load_runs
from analysis.runs.surfaces import cost_of_pass
from analysis.runs.sweeps import sweeps, swept_knobs
from specbench.errors import ResultsError
from specbench.results.estimate import Estimate
from specbench.results.names import display_name
from specbench.storage import jsonl

PREDICTED = "predicted"


def record(comparison: Comparison) -> dict[str, Any]:
    """Of every label its numbers with intervals, and which labels the data cannot tell apart."""
    entries = [entry for entry in comparison.drafting if entry.overall["speedup"] is not None]
    knobs = swept_knobs(comparison) if len(comparison.runs) > 1 else []
    groups = undecided_groups(entries)
    swept = sweeps(comparison, *knobs) if knobs else []
    cost, words = cost_of_pass(comparison.runs[0].manifest.config.get("runner") or {})
    return {
        "title": comparison_title(comparison),
        "timing": comparison.timing,
        "caption": caption(comparison),
        "knobs": knobs,
        "cost": {"words": words, "by_rows": cost},
        "leading": {
            key: [list(cell) for sweep in swept for cell in sweep.leading(key)]
            for key in ("speedup", "mat")
        },
        "rows": [
            {
                "label": entry.label,
                "method": entry.method,
                "band": band,
                "cell": [entry.knobs.get(knob) for knob in knobs],
                "speedup": _numbers(entry.measured("speedup")),
                "mat": _numbers(entry.measured("mat")),
                "tokens_of_a_pass": round(rows_of_target_pass(entry).value or 0.0, 4),
                "prompts": [round(v, 4) for v in prompt_speedups(entry.run, entry.label)],
            }
            for band, group in enumerate(groups)
            for entry in group
        ],
    }


def _numbers(cell: Estimate) -> list[float]:
    return [round(number, 4) for number in (cell.value or 0.0, *(cell.interval or ()))]


def _estimate(numbers: Sequence[float]) -> Estimate:
    value, *ends = numbers
    return Estimate(value, (ends[0], ends[1]) if ends else None)


def _ranked(found: Any) -> list[Ranked]:
    return [
        Ranked(
            display_name(row["label"]),
            row["method"],
            _estimate(row["speedup"]),
            _estimate(row["mat"]),
            row["prompts"],
        )
        for row in found["rows"]
    ]


def _units(found: Any) -> tuple[str, str]:
    return speedup_words(found["timing"]), unit_of("mat", found["timing"])


def draw_ranked(found: Any) -> Drawing:
    """Of a record of :func:`record`, as all of the following."""
    bands = [row["band"] for row in found["rows"]]
    counts = [bands.count(band) for band in sorted(set(bands))]
    title = f"All methods, ranked ({found['title']})"
    return ranked(_ranked(found), counts, _units(found), title, found["caption"])


def draw_prompts(found: Any) -> Drawing:
    """Every prompt as a dot."""
    title = f"Speedup prompt by prompt ({found['title']})"
    return prompts(_ranked(found), _units(found)[0], title, found["caption"])


def draw_mat_speedup(found: Any) -> Drawing:
    """MAT against speedup, over lines of equal cost."""
    title = f"MAT against speedup ({found['title']})"
    return mat_against_speedup(_ranked(found), _units(found), title, found["caption"])


def draw_budget(found: Any) -> Drawing:
    """Speedup against draft budget, over the cost of a pass."""
    methods: dict[tuple[str, str], list[BudgetPoint]] = {}
    for row in found["rows"]:
        point = BudgetPoint(row["tokens_of_a_pass"], _estimate(row["speedup"]))
        methods.setdefault((display_name(row["method"]), row["method"]), []).append(point)
    cost = {int(rows): value for rows, value in found["cost"]["by_rows"].items()}
    text = f"{COST_TEXT.format(**found['cost']['words'])}\n{found['caption']}"
    title = f"Speedup against draft budget ({found['title']})"
    return speedup_by_budget(methods, cost, _units(found)[0], title, text)


def _heatmap(found: Any, key: str) -> Drawing:
    down, across = found["knobs"]
    cells = {tuple(row["cell"]): _estimate(row[key]) for row in found["rows"]}
    grid = HeatmapGrid.of("", cells, [(row, column) for row, column in found["leading"][key]])
    method = display_name(found["rows"][0]["method"])
    words = "speedup" if key == "speedup" else "MAT"
    title = f"{method}: {words} by {down} and {across} ({found['title']})"
    unit, even = unit_of(key, found["timing"]), 1.0 if key == "speedup" else None
    return heatmaps([grid], across, down, unit, title, found["caption"], break_even=even)


def draw_heatmap_speedup(found: Any) -> Drawing:
    """Of a sweep over two knobs."""
    return _heatmap(found, "speedup")


def draw_heatmap_mat(found: Any) -> Drawing:
    """Of a sweep over two knobs."""
    return _heatmap(found, "mat")


def draw_line(found: Any) -> Drawing:
    """Speedup and MAT along the one knob of a sweep."""
    (knob,) = found["knobs"]
    method = found["rows"][0]["method"]
    panels = []
    for key, unit in (("speedup", _units(found)[0]), ("mat", MAT)):
        points = [Point.at(row["cell"][0], _estimate(row[key])) for row in found["rows"]]
        series = Series(
            display_name(method),
            method,
            sorted(points, key=lambda point: point.x),
            leading=[place for (place,) in found["leading"][key]],
        )
        line, bottom = ((1.0, PLAIN), None) if key == "speedup" else (None, 1.0)
        panels.append(Panel("", knob, unit, [series], reference=line, bottom=bottom))
    title = f"{display_name(method)}: speedup and MAT by {knob} ({found['title']})"
    return curves([panels], title, found["caption"])


def draw_agreement(found: Any) -> Drawing:
    """Of docs/measurements/*/replay_validation.json."""
    rows = [
        Agreement(
            display_name(method),
            method,
            Estimate(row["speedup_measured"], tuple(row["speedup_ci"])),
            row["speedup_predicted"],
        )
        for row in found["rows"]
        if row["speedup_ci"]
        for method in [_METHODS[row["label"].split("_")[0]]]
    ]
    title = "Predicted and measured speedup (SmolLM2-135M on Spec-Bench)"
    return predicted_against_measured(rows, title, f"{found['machine']}. {found['date']}.")


_METHODS = {
    "pld": "pld",
    "cacheback": "cacheback",
    "ngrammys": "ngrammys",
    "suffix": "suffix_decoding",
    "sam": "sam",
}


@dataclass(frozen=True)
class Cells:
    """Heatmaps of a paper's table, a CSV file with its page: a row is a cell.

    Attributes:
        place: whose figure it is made after.
        down, across: column of the axis, and its name.
        key: column of the number; ``unit`` as shown.
        grids: column that tells heatmaps apart; "" for one.
    """

    place: str
    down: tuple[str, str]
    across: tuple[str, str]
    key: str
    unit: str
    grids: str = ""

    def __call__(self, tables: Any, page: str) -> Drawing:
        """Draw the table; which cells may be as good as the best it does not say."""
        by_grid: dict[str, dict[tuple[int, int], Estimate]] = {}
        for row in tables[0]:
            place = row[self.down[0]], row[self.across[0]]
            if all(isinstance(value, int) for value in place):
                numbers = [row[self.key], *(row.get(f"{self.key}_ci") or [])]
                cell = _estimate([float(number) for number in numbers if number != ""])
                by_grid.setdefault(str(row.get(self.grids, "")), {})[place] = cell
        grids = [
            HeatmapGrid.of(f"{name} cached tokens" if name.isdigit() else display_name(name), cells)
            for name, cells in by_grid.items()
        ]
        even = 1.0 if self.key == "speedup" else None
        conditions = ("PREDICTED", "smollm2_135m (", "Time of")
        words = [line for line in page.splitlines() if line.startswith(conditions)]
        title = f"After {self.place} (SmolLM2-135M)"
        names = self.across[1], self.down[1]
        return heatmaps(grids, *names, self.unit, title, "\n".join(words), break_even=even)


_LENGTHS = (
    ("leader (LL)", "leader length LL (tokens)"),
    ("follower (FL)", "follower length FL (tokens)"),
)
_KW = (("k", "k (rows)"), ("w", "w (draft tokens in a row)"))
_TOKENS = "MAT (tokens per target pass)"
FIGURES: dict[str, Callable[..., Drawing]] = {
    "ranked": draw_ranked,
    "prompts": draw_prompts,
    "mat_speedup": draw_mat_speedup,
    "budget": draw_budget,
    "kw_speedup": draw_heatmap_speedup,
    "kw_mat": draw_heatmap_mat,
    "lengths_speedup": draw_heatmap_speedup,
    "lengths_mat": draw_heatmap_mat,
    "num_tokens": draw_line,
    "predicted_and_measured": draw_agreement,
    "cacheback_figure4_speedup": Cells(
        "Cacheback, Figure 4", *_LENGTHS, "speedup", unit_of("speedup", PREDICTED)
    ),
    "cacheback_figure4_mat": Cells("Cacheback, Figure 4", *_LENGTHS, "MAT", _TOKENS),
    "ngrammys_figure1": Cells(
        "N-Grammys, Figure 1", *_KW, "slow-down", "time over that of one token", "context (tokens)"
    ),
    "ngrammys_figure3": Cells(
        "N-Grammys, Figures 3, 6, 8", *_KW, "speedup", unit_of("speedup", PREDICTED), "data"
    ),
    "ngrammys_figure5": Cells("N-Grammys, Figures 5, 7, 9", *_KW, "MAT", _TOKENS, "data"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gallery", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of one comparison")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    found = make_comparisons(load_runs(options.runs))
    if len(found) != 1:
        raise ResultsError(f"{options.runs[0]} holds {len(found)} comparisons: name those of one.")
    jsonl.write_json(options.output, record(found[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
