"""Figures are written, the same for the same records, and one method keeps its colour."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from analysis import figures, heatmaps, plots
from analysis.artifacts import ARTIFACTS
from analysis.groups import make_groups
from analysis.load import load_runs, usable_runs
from analysis.plots import Panel, Point, Series
from analysis.style import bar_style, line_style

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "records"


@pytest.fixture
def results(tmp_path):
    shutil.copytree(GOLDEN / "synthetic", tmp_path / "one")
    return tmp_path


@pytest.fixture
def group():
    return make_groups(load_runs([GOLDEN]))[0]


def test_png_and_svg_are_written_beside_the_runs(results, capsys):
    assert figures.main([str(results)]) == 0
    names = sorted(path.name for path in (results / "figures").iterdir())
    assert names == sorted(
        f"vicuna7b_specbench_{figure}.{suffix}"
        for figure in ("speedup_by_task", "mat")
        for suffix in ("png", "svg")
    )
    assert all(path.stat().st_size > 5_000 for path in (results / "figures").iterdir())
    assert str(results / "figures" / names[0]) in capsys.readouterr().out


def test_the_same_records_give_the_same_bytes(results, tmp_path):
    for name in ("first", "again"):
        assert figures.main([str(results / "one"), "-o", str(tmp_path / name)]) == 0
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_tables_with_one_name_do_not_overwrite_each_other(results):
    shutil.copytree(results / "one", results / "two")
    path = results / "two" / "manifest.json"
    path.write_text(path.read_text().replace("Synthetic CPU", "Other CPU"))
    assert figures.main([str(results)]) == 0
    assert len(list((results / "figures").glob("*.png"))) == 4


def test_bars_are_the_table_s_numbers_with_their_intervals(group):
    axes = figures.speedup_by_task(group).axes[0]
    bars = [c for c in axes.containers if hasattr(c, "patches")]
    entries = [entry for entry in group.entries if entry.label != "ar"]
    assert len(bars) == len(entries)
    for container, entry in zip(bars, entries, strict=True):
        expected = [entry.rows[task]["speedup"] for task in [*group.tasks, "overall"]]
        assert [bar.get_height() for bar in container] == expected
        segments = container.errorbar.lines[2][0].get_segments()
        low, high = entry.overall["speedup_ci"]
        assert segments[-1][:, 1] == pytest.approx([low, high])


def test_axes_have_units(group):
    assert "ratio of tokens/s" in figures.speedup_by_task(group).axes[0].get_ylabel()
    assert "tokens per target pass" in figures.mean_accepted_tokens(group).axes[0].get_ylabel()


def test_no_speedup_figure_without_a_baseline(results):
    path = results / "one" / "manifest.json"
    path.write_text(path.read_text().replace('"baseline": "ar"', '"baseline": null'))
    (group,) = make_groups(load_runs([results]))
    assert figures.speedup_by_task(group) is None
    assert figures.mean_accepted_tokens(group) is not None


def test_an_empty_folder_exits_2(tmp_path, capsys):
    assert figures.main([str(tmp_path)]) == 2
    assert "no run at or below" in capsys.readouterr().err


def test_every_method_looks_different_and_always_the_same():
    methods = sorted({path.stem for path in (ROOT / "conf" / "method").glob("[!_]*.yaml")})
    styles = {method: tuple(bar_style(method).values()) for method in methods}
    assert len(set(styles.values())) == len(methods)
    assert bar_style("unheard_of") == bar_style("unheard_of")
    assert bar_style("pld", 1) != bar_style("pld", 0)
    assert bar_style("pld", 1)["facecolor"] == bar_style("pld", 0)["facecolor"]


def test_a_huge_interval_does_not_flatten_the_bars():
    series = [Series("pld", "pld", [Point(0, 2.0, (0.0, 2000.0))])]
    axes = plots.bars([Panel("", "", "speedup", series, ["qa"])], "t", "c").axes[0]
    assert axes.get_ylim()[1] <= 2.0 * plots.HEADROOM
    assert any(line.get_marker() == "^" for line in axes.lines)


def test_a_method_keeps_its_colour_in_every_kind_of_figure():
    points = [Point(0, 1.0), Point(1, 2.0)]
    series = [Series(method, method, points) for method in ("pld", "ssd")]
    panel = Panel("", "x", "y", series, ["a", "b"])
    drawn = plots.bars([panel], "t", "c").axes[0].containers
    bars = [container for container in drawn if hasattr(container, "patches")]
    lines = plots.curves([[panel]], "t", "c").axes[0].containers
    for bar, line, method in zip(bars, lines, ("pld", "ssd"), strict=True):
        colour = bar_style(method)["facecolor"]
        assert to_hex(bar.patches[0].get_facecolor()).upper() == colour
        assert line.lines[0].get_color() == line_style(method)["color"] == colour


def test_two_settings_of_one_method_differ_and_keep_their_look_in_all_panels():
    first = Series("a", "ssd", [Point(0, 1.0)])
    second = Series("b", "ssd", [Point(0, 1.0)])
    panels = [Panel("", "x", "y", [first, second]), Panel("", "x", "y", [second])]
    axes = plots.curves([panels], "t", "c").axes
    looks = [
        {c.get_label(): (c.lines[0].get_marker(), c.lines[0].get_linestyle()) for c in a.containers}
        for a in axes
    ]
    assert looks[0]["a"] != looks[0]["b"]
    assert looks[0]["b"] == looks[1]["b"]


def test_error_bars_are_the_intervals():
    points = [Point(1, 2.0, (1.5, 2.5)), Point(2, None), Point(3, 4.0, (3.0, 5.5))]
    axes = plots.curves([[Panel("", "x", "y", [Series("s", "ssd", points)])]], "t", "c").axes[0]
    segments = axes.containers[0].lines[2][0].get_segments()
    assert [tuple(segment[:, 1]) for segment in segments] == [(1.5, 2.5), (3.0, 5.5)]


def test_a_heatmap_writes_numbers_and_intervals_and_says_where_there_are_none():
    grid = heatmaps.Grid("g", [[1.0, None]], ["r"], ["a", "b"], [[(0.5, 1.5), None]])
    axes = heatmaps.heatmaps([grid], "x", "y", "unit", "t", "c").axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.50–1.50", "–"]


def test_stacks_add_up():
    rows = {"ar": {"draft": (0.25, (0.2, 0.3)), "verify": (0.75, None), "none": (0.0, None)}}
    axes = plots.stacks(rows, "share", "t", "c").axes[0]
    widths = [bar.get_width() for bar in axes.patches if bar.get_width() < 1]
    assert widths == [0.25, 0.75]
    assert {text.get_text() for text in axes.texts} == {"25%", "75%"}


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda artifact: artifact.name)
def test_every_artifact_s_figures_are_drawn_with_caption_and_units(artifact):
    runs, _ = usable_runs([ROOT / "tests/golden/experiments"], surfaces=True)
    members = [run for run in runs if run.experiment in artifact.experiments]
    drawn = artifact.figures(members)
    if "figure" in artifact.name:
        assert drawn
    for figure in drawn.values():
        words = " ".join(text.get_text() for text in figure.texts)
        assert "SYNTHETIC" in words
        assert "Hardware:" in words
        for axes in figure.axes:
            if axes.name == "rectilinear" and axes.axison:
                assert axes.get_ylabel() or axes.get_xlabel(), figure
