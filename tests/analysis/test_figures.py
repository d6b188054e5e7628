"""Figures are written, the same for the same records, and one method keeps its color."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from analysis import figures
from analysis.papers import REPRODUCTIONS
from analysis.papers.claimed import speedups
from analysis.plots import charts, heatmaps, stacked_bars
from analysis.plots.charts import Panel, Point, Series
from analysis.plots.layout import CUT_TEXT, save
from analysis.plots.ranking import Ranked, mat_against_speedup, ranked
from analysis.plots.style import looks, styled
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs, usable_runs
from specbench.results.estimate import Estimate
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def comparison():
    return make_comparisons(load_runs([RECORDS]))[0]


def test_pictures_and_their_words_are_written_beside_the_runs(results, capsys):
    assert figures.main([str(results)]) == 0
    names = sorted(path.name for path in (results / "figures").iterdir())
    assert names == sorted(
        f"vicuna7b_specbench_{figure}.{suffix}"
        for figure in ("speedup_by_task", "mat", "ranked", "mat_speedup", "prompts")
        for suffix in ("md", "pdf", "png", "svg")
    )
    pictures = (path for path in (results / "figures").iterdir() if path.suffix != ".md")
    assert all(path.stat().st_size > 5_000 for path in pictures)
    words = (results / "figures" / "vicuna7b_specbench_mat.md").read_text()
    assert words.startswith("**Mean accepted tokens by task (Vicuna-7B on Spec-Bench)**")
    assert "SYNTHETIC RECORDS" in words
    heading, *said = capsys.readouterr().out.splitlines()
    assert heading == f"figures in {results / 'figures'}, each as png, svg, pdf, md:"
    assert sorted(line.strip() for line in said) == sorted(
        {name.partition(".")[0] for name in names}
    )


def test_the_same_numbers_give_the_same_bytes(tmp_path):
    for name in ("first", "again"):
        panel = Panel("", "x", "y", [Series("pld", "pld", [Point(0, 1.0, (0.5, 1.5))])])
        with styled():
            save(charts.curves([[panel]], "t", "c"), tmp_path / name, "one")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def elsewhere(run):
    """The same run on another machine."""
    machine = {"cpu": "Other CPU", "cpus_usable": 2, "gpus": []}
    return replace(
        run, path=run.path / "else", manifest=run.manifest.model_copy(update={"hardware": machine})
    )


@pytest.mark.parametrize(
    "name", ["cacheback_table1", "cacheback_figure4", "ngrammys_figure1", "../records"]
)
def test_a_second_machine_has_figures_of_its_own(name):
    runs, _ = usable_runs([EXPERIMENTS / name], surfaces=True)
    once = [stem for stem, _ in figures.figures_of(runs)]
    twice = [stem for stem, _ in figures.figures_of([*runs, *map(elsewhere, runs)])]
    assert len(set(twice)) == len(twice) == 2 * len(once) > 0
    assert {f"{stem}_2" for stem in once} | set(once) == set(twice)


def test_a_label_of_two_runs_is_drawn_for_each():
    (run,) = load_runs([RECORDS])
    (comparison,) = make_comparisons([run, replace(run, path=run.path.with_name("again"))])
    names = [series.name for series in speedups([comparison])]
    assert sorted(names) == sorted(
        f"{label} ({where})"
        for label in ("cacheback", "no_frozen", "pld")
        for where in ("synthetic", "again")
    )


def test_bars_are_the_table_s_numbers_with_their_intervals(comparison):
    axes = figures.task_bars(comparison, "speedup").axes[0]
    bars = [c for c in axes.containers if hasattr(c, "patches")]
    entries = [entry for entry in comparison.entries if entry.label != "ar"]
    assert len(bars) == len(entries)
    for container, entry in zip(bars, entries, strict=True):
        expected = [entry.rows[task]["speedup"] for task in [*comparison.tasks, "overall"]]
        assert [bar.get_height() for bar in container] == expected
        segments = container.errorbar.lines[2][0].get_segments()
        low, high = entry.overall["speedup_ci"]
        assert segments[-1][:, 1] == pytest.approx([low, high])


def test_no_speedup_figure_without_a_baseline(results):
    edit_manifest(results / "one", baseline=None)
    (comparison,) = make_comparisons(load_runs([results]))
    assert figures.task_bars(comparison, "speedup") is None
    assert figures.task_bars(comparison, "mat") is not None


METHODS = sorted({path.stem for path in (ROOT / "conf" / "method").glob("[!_]*.yaml")})


@pytest.mark.parametrize(
    "labels",
    [
        [(method, method) for method in METHODS if method not in ("ar", "random_drafts")][:16],
        [("pld", f"pld_{n}") for n in range(16)],
        [("mine", "mine"), ("mine", "mine_2"), ("pld", "short"), ("pld", "pld"), ("sam", "sam")],
    ],
    ids=["methods", "settings", "unlisted"],
)
def test_each_label_of_a_picture_has_a_color_and_a_marker_of_its_own(labels):
    found = looks(labels)
    assert looks(reversed(labels)) == found, "in whatever order they are drawn"
    if ("pld", "pld") in found:
        alone = looks([("pld", "pld")])
        assert found["pld", "pld"] == alone["pld", "pld"], "other settings leave it its look"
    for part in ("color", "marker"):
        assert len({getattr(look, part) for look in found.values()}) == len(labels), part
    assert len({look.hatch for look in found.values()}) >= min(len(labels), 12)


def test_beyond_the_colors_the_pairs_still_differ():
    found = looks([("pld", f"pld_{n}") for n in range(40)])
    assert len({(look.color, look.marker) for look in found.values()}) == 40


def _seen(color, matrix):
    """A color in Lab (D65) as somebody with that matrix for eyes sees it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    seen = np.clip(np.asarray(matrix) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.asarray(to_xyz) @ seen / (0.9505, 1.0, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes 2009, severity 1: deuteranopia, protanopia, tritanopia.
EYES = (
    np.eye(3),
    [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
)


@pytest.mark.parametrize(
    "together",
    [
        ("cacheback", "pld", "lookahead", "rest", "sam", "token_recycling"),
        ("card", "sps", "pearl", "lookahead", "ouroboros", "opt_tree"),
        ("card", "opt_tree", "eagle3"),
        ("lookahead", "pld", "rest", "medusa", "token_recycling"),
        ("ar", "ssd", "rest"),
        ("ngrammys", "lookahead", "rest"),
        ("ngrammys/context", "ngrammys/bigram"),
        ("ngrammys/unigram", "ngrammys/bigram", "ngrammys/extended"),
        ("pld", "sam", "suffix_decoding", "union", "medusa", "hydra", "eagle", "eagle2", "eagle3"),
    ],
    ids=",".join,
)
def test_methods_of_one_picture_have_hues_that_any_eye_tells_apart(together):
    found = {method: look for (method, _), look in looks((m, m) for m in together).items()}
    for one, other in itertools.combinations(together, 2):
        looked = found[one], found[other]
        far = min(np.linalg.norm(np.subtract(*(_seen(x.color, m) for x in looked))) for m in EYES)
        assert far > 14, (one, other)
        assert len({look.hatch for look in looked}) == len({look.marker for look in looked}) == 2


def claim_markers(axes):
    """Markers of claims that are drawn, not those in a legend alone."""
    return [
        line
        for line in axes.lines
        if len(line.get_xdata()) and line.get_markerfacecolor() == "white"
    ]


def test_claims_are_hollow_markers_over_their_own_bars():
    series = [
        Series("pld", "pld", [Point(0, 1.2), Point(1, 1.4)], claimed=[Point(1, 1.5)]),
        Series("sam", "sam", [Point(0, 1.3)], claimed=[Point(0, 1.6, bound="upper")]),
        Series("card", "card", [Point(0, 1.3)], claimed=[Point(0, 1.2, bound="lower")]),
    ]
    figure = charts.bars([Panel("", "", "speedup", series, ["qa", "rag"])], "t", "c")
    axes = figure.axes[0]
    marker, *bounds = claim_markers(axes)
    shapes = {(line.get_marker(), line.get_ydata()[0]) for line in bounds}
    assert shapes == {("v", 1.6), ("^", 1.2)}
    assert marker.get_marker() == "D"
    bar = next(c for c in axes.containers if c.get_label() == "pld").patches[1]
    assert marker.get_xdata()[0] == pytest.approx(bar.get_x() + bar.get_width() / 2)
    assert marker.get_ydata()[0] == 1.5
    assert marker.get_markerfacecolor() == "white"
    assert marker.get_markeredgecolor() != to_hex(bar.get_facecolor()), "it would have no outline"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    claims = {"claimed", "claimed at most", "claimed at least"}
    assert sorted(names) == sorted(claims | {"pld", "sam", "card"})


def test_numbers_far_apart_stay_readable():
    series = [
        Series("ar", "ar", [Point(0, 18.0, (17.0, 19.0))]), Series("b", "b", [Point(0, 60.0)]),
    ]  # fmt: skip
    panel = Panel("", "tokens", "tokens/s", series, ratios=True)
    axes = charts.curves([[panel]], "t", "c").axes[0]
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert 10 < low < 17
    assert high > 60


def arrowheads(figure):
    """The marks of cut intervals: which way each points, and where it stands along the edge."""
    return sorted(
        (
            line.get_marker(),
            line.get_xdata()[0] if line.get_marker() in "^v" else line.get_ydata()[0],
        )
        for axes in figure.axes
        for line in axes.lines
        if line.get_zorder() == 5
    )


def test_a_huge_interval_does_not_flatten_the_bars():
    series = [Series("pld", "pld", [Point(0, 2.0, (0.0, 2000.0))])]
    figure = charts.bars([Panel("", "", "speedup", series, ["qa"])], "t", "c")
    assert figure.axes[0].get_ylim()[1] <= 2.0 * charts.HEADROOM
    assert arrowheads(figure) == [("^", 0.0)]
    assert CUT_TEXT in figure.caption


def test_an_interval_that_is_cut_off_is_marked_on_every_side():
    wide, far = Estimate(1.0, (0.1, 1.1)), Estimate(2.0, (1.5, 9.0))
    rows = [Ranked("low", "pld", wide, Estimate(1.2, (1.1, 1.3))), Ranked("far", "sam", far, far)]
    units = ("speedup", "MAT")
    assert arrowheads(mat_against_speedup(rows, units, "t", "c", {})) == [
        (">", 2.0), ("^", 2.0), ("v", 1.2),
    ]  # fmt: skip
    figure = ranked(rows, [1, 1], units, "t", "c")
    assert arrowheads(figure) == [("<", 0), (">", 1), (">", 1)]
    assert CUT_TEXT in figure.caption
    whole = [Ranked("pld", "pld", Estimate(1.2, (1.1, 1.3)), Estimate(1.5, (1.4, 1.6)))]
    assert CUT_TEXT not in mat_against_speedup(whole, units, "t", "c", {}).caption


def test_a_method_keeps_its_color_in_every_kind_of_figure():
    points = [Point(0, 1.0), Point(1, 2.0)]
    series = [Series(method, method, points) for method in ("pld", "ssd")]
    panel = Panel("", "x", "y", series, ["a", "b"])
    drawn = charts.bars([panel], "t", "c").axes[0].containers
    bars = [container for container in drawn if hasattr(container, "patches")]
    lines = charts.curves([[panel]], "t", "c").axes[0].containers
    for bar, line, method in zip(bars, lines, ("pld", "ssd"), strict=True):
        color = looks([(method, method)])[method, method].color
        assert to_hex(bar.patches[0].get_facecolor()).upper() == color
        assert line.lines[0].get_color() == color


def test_two_settings_of_one_method_differ_and_keep_their_look_in_all_panels():
    first = Series("a", "ssd", [Point(0, 1.0)])
    second = Series("b", "ssd", [Point(0, 1.0)])
    panels = [Panel("", "x", "y", [first, second]), Panel("", "x", "y", [second])]
    axes = charts.curves([panels], "t", "c").axes
    drawn = [
        {c.get_label(): (c.lines[0].get_color(), c.lines[0].get_marker()) for c in a.containers}
        for a in axes
    ]
    assert all(a != b for a, b in zip(drawn[0]["a"], drawn[0]["b"], strict=True))
    assert drawn[0]["b"] == drawn[1]["b"]


def test_what_a_paper_claims_has_the_color_of_what_was_measured():
    series = [
        Series("published", "card", [Point(0, 1.0), Point(1, 1.0)], dashed=True),
        Series("run here", "card", [Point(0, 2.0), Point(1, 1.5)]),
    ]
    axes = charts.curves([[Panel("", "x", "y", series)]], "t", "c").axes[0]
    (claimed, *_), (measured, *_) = (container.lines for container in axes.containers)
    assert claimed.get_color() == measured.get_color()
    assert claimed.get_markerfacecolor() == "white" != measured.get_markerfacecolor()


def test_error_bars_are_the_intervals():
    points = [Point(1, 2.0, (1.5, 2.5)), Point(2, None), Point(3, 4.0, (3.0, 5.5))]
    axes = charts.curves([[Panel("", "x", "y", [Series("s", "ssd", points)])]], "t", "c").axes[0]
    segments = axes.containers[0].lines[2][0].get_segments()
    assert [tuple(segment[:, 1]) for segment in segments] == [(1.5, 2.5), (3.0, 5.5)]


def test_a_heatmap_writes_numbers_and_intervals_and_says_where_there_are_none():
    grid = heatmaps.HeatmapGrid(
        "g", [[Estimate(1.0, (0.5, 1.5)), Estimate(None)]], ["r"], ["a", "b"]
    )
    axes = heatmaps.heatmaps([grid], "x", "y", "unit", "t", "c").axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.50–1.50", "–"]


def test_stacks_add_up():
    rows = {
        "ar": {"draft": Estimate(0.25, (0.2, 0.3)), "verify": Estimate(0.75), "none": Estimate(0)}
    }
    axes = stacked_bars.stacked_bars(rows, "share", "t", "c").axes[0]
    widths = [bar.get_width() for bar in axes.patches if bar.get_width() < 1]
    assert widths == [0.25, 0.75]
    assert {text.get_text() for text in axes.texts} == {"25%", "75%"}


def test_a_part_that_is_nearly_all_does_not_hide_the_others():
    rows = {"ar": {"verify": Estimate(0.98), "draft": Estimate(0.0002, (0.0001, 0.0003))}}
    below = stacked_bars.stacked_bars(rows, "share", "t", "c").axes[1]
    assert below.get_xscale() == "log"
    assert [label.get_text() for label in below.get_yticklabels()] == ["verify", "draft"]
    low, high = below.get_xlim()
    assert low < 0.0002 < 0.98 < high


@pytest.fixture(scope="module")
def experiments():
    return usable_runs([EXPERIMENTS], surfaces=True)[0]


@pytest.mark.parametrize("reproduction", REPRODUCTIONS, ids=lambda reproduction: reproduction.name)
def test_every_reproduction_s_figures_are_drawn_with_caption_and_units(reproduction, experiments):
    members = [run for run in experiments if run.experiment in reproduction.experiments]
    drawn = list(reproduction.figures(members))
    if "figure" in reproduction.name:
        assert drawn
    for _, figure in drawn:
        words = f"{figure.title} {figure.caption}"
        labels = [axes.get_ylabel() for axes in figure.axes] if figure.axes else []
        assert ("Speedup:" in words) <= any("speedup" in label for label in labels), words
        for axes in figure.axes:
            if "axis from 1" in axes.get_ylabel():
                assert 0.9 < axes.get_ylim()[0] <= 1
        hollow = [c for axes in figure.axes for c in axes.lines if c.get_label() == "claimed"]
        assert not hollow or "ollow" in words
        assert "SYNTHETIC" in words
        assert "Hardware:" in words
        for axes in figure.axes:
            if axes.name == "rectilinear" and axes.axison:
                assert axes.get_ylabel() or axes.get_xlabel() or figure.get_supxlabel()
