"""Sweeps and overviews are drawn with the numbers and verdicts of their tables."""

import hashlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from analysis import residuals
from analysis.figures import pictures_of
from analysis.plots import overviews
from analysis.plots.charts import Point
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.overviews import budget_picture, speedup_by_budget, undecided_groups
from analysis.plots.ranking import (
    Agreement,
    Ranked,
    mat_against_speedup,
    predicted_against_measured,
    prompts,
    ranked,
)
from analysis.plots.style import leader_style
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import prompt_speedups
from analysis.runs.leaders import leaders
from analysis.runs.load import load_runs, usable_runs
from analysis.runs.surfaces import PassTimes, Surface, cost_of_pass
from analysis.runs.sweeps import sweeps, swept_knobs
from specbench.paths import PROJECT
from specbench.results.estimate import Estimate
from specbench.results.manifest import ModelInfo, RunManifest
from tests.analysis.folders import EXPERIMENTS, RECORDS

SURFACE = "surfaces/smollm2_135m-cpu-epyc-1thread.json"
UNITS = ("speedup", "MAT")


@pytest.fixture(scope="module")
def comparison():
    return make_comparisons(load_runs([RECORDS]))[0]


@pytest.fixture(scope="module")
def swept():
    """Runs of N-Grammys over k and w on one data set."""
    runs, _ = usable_runs([EXPERIMENTS / "ngrammys_figure3"])
    return make_comparisons([run for run in runs if run.dataset == "gsm8k"])[0]


def grid(values, leaders=()):
    cells = {(i, j): Estimate(v) for i, line in enumerate(values) for j, v in enumerate(line)}
    return HeatmapGrid.of("", cells, leaders)


# --- heatmaps -------------------------------------------------------------------------------------


def test_rows_grow_upwards_and_numbers_stand_in_their_order():
    cells = {(knob, 1): Estimate(float(knob)) for knob in (10, 2, 5)}
    axes = heatmaps([HeatmapGrid.of("", cells)], "x", "y", "u", "t", "c").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "5", "10"]
    assert not axes.yaxis_inverted()
    assert [text.get_text() for text in axes.texts] == ["2.00", "5.00", "10.0"]
    words = {(word, 0.5): Estimate(1.0) for word in ("mixed", "context")}
    assert HeatmapGrid.of("", words).rows == ["context", "mixed"]


def test_the_best_cell_is_framed_and_those_that_may_be_as_good_have_a_dot():
    figure = heatmaps([grid([[1, 2], [3, 4]], [(1, 1), (1, 0)])], "x", "y", "u", "t", "c")
    axes = figure.axes[0]
    (frame,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    x, y = frame.get_x() + frame.get_width() / 2, frame.get_y() + frame.get_height() / 2
    assert (round(x), round(y)) == (1, 1)
    (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(round(x - 0.3), round(y - 0.3)) for x, y in dots.get_xydata()] == [(0, 1)]
    assert "multiple comparisons with the best" in figure.caption


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([[0.5, 1.5], [1.5, 1.5]], {(0.5, 0.0), (0.0, 0.5)}),
        ([[1.0, 0.9], [1.2, 0.8]], {(0.5, 0.0), (0.5, 1.0)}),
        ([[1.1, 1.2], [1.2, 1.3]], set()),
        ([[0.9, float("nan")], [0.8, 1.3]], {(0.5, 1.0)}),
    ],
)
def test_a_line_parts_gains_from_losses(values, edges):
    axes = heatmaps([grid(values)], "x", "y", "u", "t", "c", break_even=1.0).axes[0]
    assert {tuple(line.get_xydata().mean(axis=0)) for line in axes.lines} == edges


# --- a sweep of one's own -------------------------------------------------------------------------


def test_two_knobs_end_in_heatmaps_with_the_sweep_s_numbers(swept):
    assert swept_knobs(swept) == ["k", "w"]
    drawn = dict(pictures_of(swept))
    assert list(drawn) == ["k_w_speedup", "k_w_mat"]
    (sweep,) = sweeps(swept, "k", "w")
    for key in ("speedup", "mat"):
        axes = drawn[f"k_w_{key}"].axes[0]
        table = [[sweep.entries[k, w].overall[key] for w in (2, 6)] for k in (1, 5)]
        assert np.allclose(axes.images[0].get_array(), table)
        best = max(sweep.entries, key=lambda cell: sweep.entries[cell].overall[key])
        assert sweep.leaders(key)[0] == best
    assert "k and w (Mistral-7B on GSM8K)" in drawn["k_w_mat"].title
    assert "PREDICTED times" in drawn["k_w_speedup"].caption
    assert "PREDICTED" not in drawn["k_w_mat"].caption, "there are no times in it"
    assert "Steps of a replay." in drawn["k_w_mat"].caption


def test_one_knob_ends_in_lines_with_the_best_ringed(swept):
    runs = [run for run in swept.runs if run.knobs("ngrammys").get("w") == 2]
    (line,) = make_comparisons(runs)
    ((name, figure),) = pictures_of(line)
    assert name == "k"
    speedup = figure.axes[0]
    values = {e.knobs["k"]: e.overall["speedup"] for e in line.drafting}
    (drawn,) = [c.lines[0] for c in speedup.containers]
    assert dict(zip(*drawn.get_data(), strict=True)) == pytest.approx(values)
    size = leader_style(best=True)["markersize"]
    rings = [line for line in speedup.lines if line.get_markersize() == size]
    best = max(values, key=values.get)
    assert (best, values[best]) in [tuple(p) for r in rings for p in r.get_xydata()]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "ngrammys", "methods before marks"


def test_labels_of_one_run_are_no_sweep(comparison):
    """Cacheback runs here with two tables."""
    names = [name for name, _ in pictures_of(comparison)]
    assert names == ["ranked", "mat_speedup", "prompts", "speedup_by_task", "mat"]


# --- overviews ------------------------------------------------------------------------------------


def test_groups_begin_with_the_leaders_and_hold_everyone_once(comparison):
    groups = undecided_groups(comparison.drafting)
    labels = [entry.label for group in groups for entry in group]
    assert sorted(labels) == sorted(entry.label for entry in comparison.drafting)
    first = leaders(comparison.drafting, "speedup")
    assert {entry.label for entry in groups[0]} == {entry.label for entry in first}


def test_prompts_are_the_cases_own_ratios(comparison):
    run = comparison.runs[0]
    found = prompt_speedups(run, "pld")
    expected = []
    timed = {e.label: e.timed_records for e in comparison.entries if e.label in ("pld", "ar")}
    for case in dict.fromkeys(record.case_id for record in timed["pld"]):
        speeds = []
        for label in ("pld", "ar"):
            own = [r for r in timed[label] if r.case_id == case]
            speeds.append(sum(r.n_new - 1 for r in own) / sum(r.decode_s for r in own))
        expected.append(speeds[0] / speeds[1])
    assert found == pytest.approx(expected)
    row = Ranked("PLD", "pld", Estimate(1.5), Estimate(1.7), found)
    (dots, *_) = prompts([row], "speedup", "t", "c").axes[0].lines
    assert sorted(dots.get_xdata()) == pytest.approx(sorted(expected))


def test_ranks_are_drawn_from_the_top_with_their_bands():
    rows = [
        Ranked(name, "pld", Estimate(value, (value - 0.1, value + 0.1)), Estimate(2.0))
        for name, value in (("first", 1.9), ("second", 1.8), ("third", 1.2))
    ]
    speedup, mat = ranked(rows, [2, 1], UNITS, "t", "c").axes
    assert [label.get_text() for label in speedup.get_yticklabels()] == ["first", "second", "third"]
    assert speedup.yaxis_inverted()
    (band,) = speedup.patches
    assert (band.get_y(), band.get_height()) == (-0.5, 2)
    assert (speedup.get_xlabel(), mat.get_xlabel()) == UNITS


def test_lines_of_equal_cost_are_mat_over_speedup():
    rows = [Ranked("PLD", "pld", Estimate(1.5), Estimate(2.0))]
    axes = mat_against_speedup(rows, UNITS, "t", "c", {}).axes[0]
    costs = [text.get_text() for text in axes.texts]
    assert costs[0] == "1×"
    for text, line in zip(costs, axes.lines, strict=False):
        x, y = line.get_xydata()[-1]
        assert x / y == pytest.approx(float(text.rstrip("×")))


def test_a_step_stands_over_the_price_of_its_rows():
    rows = [Ranked("PLD", "pld", Estimate(1.5), Estimate(2.4), rows=5.0)]
    prices = mat_against_speedup(rows, UNITS, "t", "c", {1: 1.0, 4: 1.2, 8: 1.5, 64: 9.0}).axes[1]
    dot, line = prices.lines
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (5.0, pytest.approx(1.6))
    assert list(line.get_xdata()) == [1, 4, 8], "to the first size beyond the dots"


def test_a_picture_that_leaves_methods_out_says_so(comparison, monkeypatch):
    monkeypatch.setattr(overviews, "_DOTS", 2)
    drawn = dict(overviews.overview_pictures(comparison, "c"))
    assert "The 2 first of 3 are drawn." in drawn["mat_speedup"].caption
    assert "are drawn" not in drawn["ranked"].caption


def test_speedup_by_budget_stands_before_the_cost_of_a_pass():
    points = [Point(8.0, 1.4), Point(2.0, 1.2, (1.1, 1.3))]
    lines = {("PLD", "pld"): [points]}
    figure = speedup_by_budget(lines, {1: 1.0, 8: 1.5}, "speedup", "t", "c")
    front, behind = figure.axes
    assert list(front.containers[0].lines[0].get_xdata()) == [2.0, 8.0]
    assert front.get_zorder() > behind.get_zorder()
    assert len(speedup_by_budget(lines, {}, "s", "t", "c").axes) == 1


def test_one_setting_measured_again_and_again_is_no_line_of_budgets(comparison):
    (run,) = comparison.runs
    again = [replace(run, path=run.path.with_name(f"{i}")) for i in range(3)]
    assert budget_picture(make_comparisons(again)[0], "") is None
    (pld,) = [entry for entry in comparison.drafting if entry.label == "pld"]
    several = [replace(pld, run=_with_knobs(run, num_tokens=n)) for n in (2, 4, 8)]
    figure = budget_picture(replace(comparison, entries=several), "")
    assert [c.get_label() for c in figure.axes[0].containers] == ["pld"]


def test_settings_with_wrong_outputs_are_on_no_line_of_budgets(comparison):
    (run,) = comparison.runs
    records = [
        r.replace(lossless=r.lossless.replace(verdict="bug")) if r.label == "pld" else r
        for r in run.records
    ]
    (pld,) = [entry for entry in comparison.drafting if entry.label == "pld"]
    wrong = replace(run, records=records)
    entries = [replace(pld, run=_with_knobs(wrong, num_tokens=n)) for n in (2, 4, 8)]
    assert budget_picture(replace(comparison, entries=entries), "") is None


def _with_knobs(run, **knobs):
    info = run.manifest.labels["pld"]
    info = info.model_copy(update={"knobs": {**info.knobs, **knobs}})
    return replace(run, manifest=run.manifest.model_copy(update={"labels": {"pld": info}}))


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ([(2, 0, 1), (3, 1, 1), (4, 2, 1), (4, 1, 2), (8, 3, 3)], [3, 1, 1]),  # a chain, trees
        ([(3, 3, 1), (4, 4, 1), (2, 2, 2), (3, 3, 2), (4, 4, 2)], [3, 2]),
        ([(2, "a", 1), (2, "b", 1), (2, "c", 1)], [1, 1, 1]),  # words have no order
    ],
)
def test_a_line_joins_settings_that_differ_in_one_thing(comparison, settings, lines):
    (run,) = comparison.runs
    (pld,) = [entry for entry in comparison.drafting if entry.label == "pld"]
    knobs = [dict(zip(("total", "depth", "top_k"), values, strict=True)) for values in settings]
    entries = [replace(pld, run=_with_knobs(run, **own)) for own in knobs]
    axes = budget_picture(replace(comparison, entries=entries), "").axes[0]
    assert sorted((len(c.lines[0].get_xdata()) for c in axes.containers), reverse=True) == lines
    assert len({c.lines[0].get_color() for c in axes.containers}) == 1


def test_labels_beside_a_sweep_are_drawn_too(swept, comparison):
    """Of many methods' settings in several runs but one method's may make a sweep."""
    (other,) = [entry for entry in comparison.drafting if entry.label == "pld"]
    names = [n for n, _ in pictures_of(replace(swept, entries=[*swept.entries, other]))]
    assert {"k_w_speedup", "ranked"} <= set(names)


def test_the_cost_of_a_pass_never_falls():
    """Two tokens were timed as faster than one: noise, which predictions smooth away too."""
    times = np.array([10.0, 8.0, 12.0, 20.0])[:, None, None] * np.ones((1, 1, 3))
    tree = PassTimes({"rows": [1, 2, 4, 8], "context": [256]}, times)
    cost = Surface({"tree": tree}, {}).cost_of_rows(256)
    assert cost[1] == cost[2] == 1.0
    assert 1.0 < cost[4] < cost[8]


def test_the_cost_is_that_of_the_file_that_the_run_was_predicted_with():
    sha = hashlib.sha256((PROJECT / SURFACE).read_bytes()).hexdigest()[:16]

    def cost_of(**runner: object) -> tuple[dict[int, float], dict[str, object]]:
        return cost_of_pass(RunManifest(config={"runner": runner}))

    cost, words = cost_of(surface=SURFACE, surface_sha=sha)
    assert cost[1] == 1.0
    assert words["source"] in SURFACE
    assert cost_of(surface=SURFACE, surface_sha="another") == ({}, {})
    moved = cost_of(surface="gone.json", surface_sha=sha)
    assert moved == (cost, words), "the same file is among those that the project has"
    assert cost_of() == ({}, {})
    measured = RunManifest(
        model=ModelInfo(row_times={"context": 9, "seconds": {"1": 2.0, "4": 3.0}})
    )
    assert cost_of_pass(measured)[0] == {1: 1.0, 4: 1.5}


def test_a_prediction_that_is_right_stands_on_the_diagonal():
    rows = [Agreement("PLD", "pld", Estimate(1.5, (1.2, 1.9)), 1.5)]
    axes = predicted_against_measured(rows, "t", "c").axes[0]
    (point,) = [c.lines[0] for c in axes.containers if c.get_label() == "PLD"]
    assert point.get_xydata().tolist() == [[1.5, 1.5]]
    assert "predicted" in axes.get_ylabel()
    assert "measured" in axes.get_xlabel()


def test_residuals_are_drawn_with_the_measured_interval(comparison):
    row = {"label": "pld", "method": "pld", "speedup": 1.5, "speedup_ci": (1.2, 1.9)}
    found = pd.DataFrame([row | {"speedup_predicted": 1.6, "residual": 1.6 / 1.5 - 1}])
    figure = residuals.draw(found, comparison.runs[0])
    assert figure.title == "Predicted and measured speedup (Vicuna-7B on Spec-Bench)"
    (container,) = figure.axes[0].containers
    ((low, high),) = (part[:, 0] for part in container.lines[2][0].get_segments())
    assert (low, high) == pytest.approx((1.2, 1.9))
