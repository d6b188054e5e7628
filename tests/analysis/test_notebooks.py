"""Every notebook runs on the fixture records, as a plain file and through jupytext."""

import os
import runpy
import subprocess
import sys

import jupytext
import pytest

from analysis.notebooks import shared
from analysis.runs.comparisons import make_comparisons
from specbench.paths import PROJECT
from specbench.results.cells import NumberCell
from tests.analysis.folders import GOLDEN
from tests.conftest import quick_first

FOLDER = PROJECT / "analysis" / "notebooks"
# Records, a notebook that reads them, and figures that must come of it.
SHOWN = [
    (
        "experiments/token_recycling_figure4",
        "speedup",
        "speedup_vicuna7b_specbench time_vicuna7b_specbench",
    ),
    ("experiments/ssd_stream", "mat", "mat_vicuna7b_gsm8k acceptance_vicuna7b_gsm8k"),
    ("experiments/ngrammys_figure3", "kw_heatmaps", "ngrammys_figure3_mistral7b"),
]


def run_cells(path):
    """Convert the file to a notebook as for Jupyter and execute its cells."""
    book = jupytext.reads(jupytext.writes(jupytext.read(path), fmt="ipynb"), fmt="ipynb")
    assert book.cells[0].cell_type == "markdown", "it says first what it shows"
    namespace = {"__name__": "__main__"}
    for cell in book.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(path), "exec"), namespace)


@pytest.mark.parametrize(
    ("records", "stem", "figures"), quick_first(SHOWN, SHOWN[1:2], unpack=True)
)
def test_a_notebook_shows_its_figures(records, stem, figures, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS", str(GOLDEN / records))
    monkeypatch.setenv("FIGURES", str(tmp_path))
    shared._stems.clear()
    run_cells(FOLDER / f"{stem}.py")
    for figure in figures.split():
        assert (tmp_path / f"{figure}.png").stat().st_size > 5_000


def test_what_a_run_lacks_is_said_with_the_command_that_makes_it(monkeypatch, capsys):
    monkeypatch.setenv("RUNS", str(GOLDEN / "records"))
    runpy.run_path(str(FOLDER / "kw_heatmaps.py"), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Nothing to show: ")
    assert "experiment=ngrammys_figure3" in line


def test_numbers_are_a_data_frame_with_the_settings_of_labels(monkeypatch):
    monkeypatch.setenv("RUNS", str(GOLDEN / "records"))
    frame = shared.numbers(make_comparisons(shared.runs()), "mat", "speedup", "speedup_graph")
    assert list(frame) == ["model", "dataset", "label", "mat", "speedup"]
    rows = frame.set_index("label")
    assert rows.loc["ar", "speedup"] == 1.0
    assert rows.loc["pld", "mat"] == pytest.approx(1.65, abs=0.01)
    monkeypatch.setenv("RUNS", str(GOLDEN / "experiments" / "cacheback_figure4"))
    labels = list(shared.numbers(make_comparisons(shared.runs()), "mat").label)
    methods = [label for label in labels if label != "ar"]
    assert len(set(methods)) == len(methods) > 1
    assert "leader_len=" in methods[0]


@pytest.mark.slow
def test_executed_as_a_notebook(tmp_path):
    """Execute with the project's environment; outputs hold frames and pictures."""
    executed = tmp_path / "kw_heatmaps.ipynb"
    runs = {"RUNS": str(GOLDEN / "experiments/ngrammys_figure3"), "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-m", "jupytext", "--to", "notebook", "--execute", "-o", str(executed),
         str(FOLDER / "kw_heatmaps.py")],
        env=os.environ | runs, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = [o for cell in jupytext.read(executed).cells for o in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds


def test_labels_that_are_left_out_are_counted(monkeypatch):
    monkeypatch.setenv("RUNS", str(GOLDEN / "experiments" / "token_recycling_figure3"))
    (comparison,) = make_comparisons(shared.runs())
    assert len(shared.lines(comparison, lambda entry: [(1.0, NumberCell(2.0))])) == 6
    assert not shared.lines(comparison, lambda entry: [])
    assert "the first 6 of 8 labels" in shared.caption_of(comparison)


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_wrong_folder_ends_with_an_error(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RUNS", str(tmp_path / name))
    with pytest.raises(SystemExit) as ended:
        shared.runs()
    assert ended.value.code == 2 and str(tmp_path) in capsys.readouterr().err
