"""Kinds of picture: each draws the numbers and intervals that it is given, and stays readable."""

import itertools

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from analysis.plots import charts
from analysis.plots.charts import Panel, Point, Series
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.style import color_of, family_of, looks, save
from specbench.results.cells import NumberCell


def bar_chart(*series):
    return charts.bars([Panel("", "", "speedup", series, ("qa", "rag"))], "t", "c")


def containers(axes, kind="patches"):
    """Return the artists with error bars, by name."""
    return {c.get_label(): c for c in axes.containers if hasattr(c, kind)}


def ends(container):
    """Return the ends of the intervals, in their order."""
    lines = getattr(container, "errorbar", container).lines
    axis = int(not getattr(container, "has_xerr", False))
    return [tuple(segment[:, axis]) for segment in lines[2][0].get_segments() if len(segment)]


def markers(axes, marker):
    """Return positions and heights of the points with this marker."""
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return [tuple(point) for line in lines for point in line.get_xydata()]


def white(axes):
    """Return positions and heights of the hollow points."""
    lines = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    return [tuple(point) for line in lines for point in line.get_xydata()]


def legend(figure):
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]


def test_a_color_stands_for_a_family_and_markers_tell_its_methods_apart():
    methods = ("pld", "sam", "suffix_decoding", "eagle2", "medusa", "sps", "jacobi", "ar", "mine")
    look_of = {method: look for (method, _), look in looks((m, m) for m in methods).items()}
    assert look_of["pld"].color == look_of["sam"].color == look_of["suffix_decoding"].color
    assert look_of["eagle2"].color == look_of["medusa"].color
    assert len({look.color for look in look_of.values()}) == 6
    assert family_of("mine") == "other" and family_of("ngrammys/context") == family_of("ngrammys")
    for first, other in itertools.combinations(look_of.values(), 2):
        assert (first.color, first.marker) != (other.color, other.marker)
        assert (first.color, first.hatch) != (other.color, other.hatch)


# --- bars and lines -------------------------------------------------------------------------------


def test_bars_are_as_high_as_the_numbers_and_each_is_hollow_by_itself():
    points = [Point(0, 1.2, (1.1, 1.3), hollow=True), Point(1, 1.4)]
    first = Series("pld", "pld", points, claimed=[Point(1, 1.5)])
    figure = bar_chart(first, Series("eagle", "eagle", [Point(0, 1.5)]))
    axes, bars = figure.axes[0], containers(figure.axes[0])
    assert [bar.get_height() for bar in bars["pld"]] == [1.2, 1.4]
    assert ends(bars["pld"]) == [pytest.approx((1.1, 1.3))]
    colors = [(to_hex(bar.get_facecolor()), to_hex(bar.get_edgecolor())) for bar in bars["pld"]]
    text = color_of("text").lower()
    assert colors == [("#ffffff", text), (text, "#ffffff")]
    assert to_hex(bars["eagle"][0].get_facecolor()) == color_of("trained heads").lower()
    ((x, y),) = markers(axes, "D")
    bar = bars["pld"][1]
    assert (x, y) == (pytest.approx(bar.get_x() + bar.get_width() / 2), 1.5), "over its own bar"
    names = legend(figure)
    assert "claimed" in names and sum(name.startswith("hollow") for name in names) == 1
    assert axes.get_ylim()[0] == 0


def test_lines_have_their_intervals_gaps_marks_and_claims():
    points = [Point(1, 2.0, (1.5, 2.5)), Point(2, None), Point(3, 4.0, (3.0, 5.5), hollow=True)]
    line = Series("s", "ssd", points, claimed=[Point(2, 3.0)])
    figure = charts.curves([[Panel("", "x", "y", [line])]], "t", "c")
    axes = figure.axes[0]
    assert ends(axes.containers[0]) == [(1.5, 2.5), (3.0, 5.5)]
    assert white(axes) == [(3.0, 4.0), (2.0, 3.0)]
    assert markers(axes, "D") == [(2, 3.0)] and "claimed" in legend(figure)


def test_a_label_looks_alike_in_all_panels():
    first, second = (Series(name, "ssd", [Point(0, 1.0)]) for name in "ab")
    panels = [Panel("", "x", "y", [first, second]), Panel("", "x", "y", [second])]
    drawn = [
        {name: (c.lines[0].get_color(), c.lines[0].get_marker()) for name, c in by_name.items()}
        for by_name in (containers(a, "has_yerr") for a in charts.curves([panels], "t", "c").axes)
    ]
    assert drawn[0]["b"] == drawn[1]["b"] != drawn[0]["a"]


def test_huge_intervals_do_not_flatten_the_rest():
    huge = Series("pld", "pld", [Point(0, 2.0, (0.0, 2000.0))])
    for figure in (bar_chart(huge), charts.curves([[Panel("", "x", "y", [huge])]], "t", "c")):
        assert 2.0 < figure.axes[0].get_ylim()[1] < 4.0
    assert charts.ranked([huge], "speedup", "t", "c").axes[0].get_xlim()[1] < 4.0


# --- heatmaps -------------------------------------------------------------------------------------


def heatmap(values, leaders=(), **more):
    cells = {(i, j): NumberCell(v) for i, line in enumerate(values) for j, v in enumerate(line)}
    return heatmaps([HeatmapGrid("", cells, leaders)], "x", "y", "unit", "t", "c", **more)


def test_a_heatmap_writes_numbers_and_intervals_in_the_order_of_its_knobs():
    cells = {(knob, 1): NumberCell(float(knob), (1.0, 11.0)) for knob in (10, 2)}
    cells |= {(2, "words"): NumberCell(None)}
    axes = heatmaps([HeatmapGrid("", cells)], "x", "y", "u", "t", "c").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "10"]
    assert not axes.yaxis_inverted()
    assert [text.get_text() for text in axes.texts] == [
        "2.00", "1.00–11.00", "–", "10.0", "1.0–11.0", "–",
    ]  # fmt: skip


def test_the_highest_cell_is_framed_and_those_that_may_be_as_high_have_a_dot():
    figure = heatmap([[1, 2], [3, 4]], [(1, 1), (1, 0)])
    axes = figure.axes[0]
    (frame,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert (round(frame.get_center()[0]), round(frame.get_center()[1])) == (1, 1)
    assert [(round(x - 0.3), round(y - 0.3)) for x, y in markers(axes, "o")] == [(0, 1)]
    assert "highest" in legend(figure)
    assert "best" in legend(heatmap([[1, 2], [3, 4]], [(1, 1)]))


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
    axes = heatmap(values, break_even=1.0).axes[0]
    assert {tuple(line.get_xydata().mean(axis=0)) for line in axes.lines} == edges


# --- the other kinds ------------------------------------------------------------------------------


def test_ranks_keep_their_order_from_the_top():
    rows = [
        Series("first", "pld", [Point(0, 1.9, (1.8, 2.0))]),
        Series("second", "eagle", [Point(0, 1.1, (0.9, 1.3), hollow=True)]),
    ]
    figure = charts.ranked(rows, "speedup", "t", "c")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    assert axes.yaxis_inverted()
    dots = [c.lines[0] for c in axes.containers]
    assert [tuple(dot.get_xydata()[0]) for dot in dots] == [(1.9, 0), (1.1, 1)]
    assert [ends(c) for c in axes.containers] == [[(1.8, 2.0)], [pytest.approx((0.9, 1.3))]]
    assert [dot.get_markerfacecolor() for dot in dots] == [color_of("text"), "white"]
    names = legend(figure)
    assert names[:2] == ["text", "trained heads"] and any(n.startswith("hollow") for n in names)


def test_lines_of_equal_cost_are_mat_over_speedup():
    rows = [Series("PLD", "pld", [Point(2.0, 1.5, across=(1.9, 2.1))])]
    axes = charts.mat_against_speedup(rows, ("MAT", "speedup"), "t", "c").axes[0]
    guides = [line for line in axes.lines if to_hex(line.get_color()) == "#cccccc"]
    for text, line in zip(axes.texts, guides, strict=True):
        x, y = line.get_xydata()[-1]
        assert x / y == pytest.approx(float(text.get_text().rstrip("×")))
    (dot,) = containers(axes, "has_yerr").values()
    assert dot.lines[0].get_xydata().tolist() == [[2.0, 1.5]]


def test_stacks_add_up():
    shares = {"draft": NumberCell(0.25, (0.2, 0.3)), "verify": NumberCell(0.75)}
    shares["none"] = NumberCell(0)
    axes = charts.stacked_bars({"ar": shares}, "share", "t", "c").axes[0]
    assert [bar.get_width() for bar in axes.patches if bar.get_width() < 1] == [0.25, 0.75]
    assert {text.get_text() for text in axes.texts} - {""} == {"25%", "75%"}
    (segment,) = containers(axes)["draft"].errorbar.lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx((0.2, 0.3))


def test_a_file_has_the_words_above_and_below_and_is_the_same_again(tmp_path):
    title = "A finding in so many words that they need a second line at the width of a figure"
    for folder in ("first", "again"):
        figure = bar_chart(
            Series("a name of some length, k 4, w 10", "pld", [Point(0, 1.0, (0.5, 1.5))]),
            Series("eagle", "eagle", [Point(0, 1.2)]),
        )
        figure.title = title
        paths = save(figure, tmp_path / folder, "one")
    assert {path.suffix for path in paths} == {".png", ".pdf"}
    for path in paths:
        assert path.read_bytes() == (tmp_path / "first" / path.name).read_bytes()
    pixels = figure.get_size_inches() * 200
    assert Image.open(tmp_path / "first" / "one.png").size == tuple(map(round, pixels))
    assert b"/FontFile2" in (tmp_path / "first" / "one.pdf").read_bytes()
    (names,) = figure.legends
    above, below = (text.get_window_extent() for text in (figure._suptitle, figure._supxlabel))
    drawn = [axes.get_tightbbox() for axes in figure.axes] + [names.get_window_extent()]
    for box in drawn:
        assert below.y1 <= box.y0 and box.y1 <= above.y0, "words stand over the picture"
    assert drawn[0].x1 <= drawn[1].x0, "the legend stands over the axes"
    assert above.x1 <= figure.bbox.x1
