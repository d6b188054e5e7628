"""Figures at a paper's widths, with fonts inside and words beside."""

import re

import pytest
from matplotlib.legend import Legend
from matplotlib.text import Text
from PIL import Image

from analysis import figures
from analysis.plots import charts
from analysis.plots.charts import Panel, Point, Series
from analysis.plots.layout import save
from analysis.plots.style import WIDTHS, styled
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs, usable_runs
from tests.analysis.folders import EXPERIMENTS, RECORDS


def drawn(caption="what was run"):
    points = [Point(0, 1.2, (1.1, 1.3)), Point(1, 1.4)]
    series = [Series("PLD", "pld", points), Series("SAM", "sam", points)]
    return charts.bars([Panel("", "", "speedup", series, ["QA", "RAG"])], "A title", caption)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_pdf_is_as_wide_as_its_column_and_brings_its_fonts(width, tmp_path):
    with styled(width):
        paths = {path.suffix: path for path in save(drawn(), tmp_path, "f")}
    pdf = paths[".pdf"].read_bytes()
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf)
    assert float(box[1]) == pytest.approx(72 * WIDTHS[width], abs=0.1)
    assert b"/FontFile2" in pdf
    assert b"/CreationDate" not in pdf
    assert b"<text" not in paths[".svg"].read_bytes()


def test_golden_figures_fit_into_a_column():
    width = "column"
    names = ("token_recycling_figure4", "card_figure6", "ngrammys_figure1")
    runs, _ = usable_runs([EXPERIMENTS / name for name in names], surfaces=True)
    with styled(width):
        found = dict(figures.figures_of(runs))
        assert len(found) == 3
        for stem, figure in found.items():
            assert figure.get_size_inches()[0] == WIDTHS[width], stem
            assert figure.get_size_inches()[1] < 9.5, f"{stem} is higher than a page"


def test_words_stand_beside_a_picture_or_in_it(tmp_path):
    figure = drawn()
    with styled():
        (beside, *_), (inside, *_) = (
            [*save(figure, tmp_path / str(caption), "f", caption)] for caption in (False, True)
        )
    assert (tmp_path / "False" / "f.md").read_text() == "**A title**\n\nwhat was run\n"
    assert not (tmp_path / "True" / "f.md").exists()
    heights = [Image.open(path).height for path in (beside, inside)]
    assert heights[1] > heights[0] + 20
    assert not figure.texts, "drawing it with its words must leave it as it was"


def test_words_in_a_picture_leave_the_legend_its_place(tmp_path, monkeypatch):
    places = {}
    for kind in (Legend, Text):

        def draw(artist, renderer, draw=kind.draw):
            if isinstance(artist, Legend) or artist.get_text() == "A title":
                places[type(artist)] = artist.get_window_extent(renderer)
            draw(artist, renderer)

        monkeypatch.setattr(kind, "draw", draw)
    with styled():
        save(drawn(), tmp_path, "f", caption=True)
    assert places[Legend].y1 <= places[Text].y0


def test_the_command_takes_width_and_caption(tmp_path, results, monkeypatch):
    monkeypatch.setattr(figures, "overview_pictures", lambda *_: ())
    out = tmp_path / "out"
    wide = ["--width", "column", "--caption"]
    assert figures.main([str(results / "one"), "-o", str(out), *wide]) == 0
    assert {path.suffix for path in out.iterdir()} == {".png", ".svg", ".pdf"}


def test_predicted_times_are_named_on_the_axis():
    """A picture travels without its caption."""
    runs, _ = usable_runs([EXPERIMENTS / "ngrammys_figure3"])
    assert {run.timing for run in runs} == {"predicted"}
    (speedup,) = [f for stem, f in figures.figures_of(runs) if "figure3" in stem]
    assert "predicted speedup" in [axes.get_ylabel() for axes in speedup.axes]
    (comparison,) = make_comparisons(load_runs([RECORDS]))
    assert "predicted" not in figures.task_bars(comparison, "speedup").axes[0].get_ylabel()
