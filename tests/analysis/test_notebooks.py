"""Every notebook runs on the fixture records, as a plain file and through jupytext."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

from analysis.notebooks import shared
from analysis.papers.ngrammys import grid_figures
from analysis.runs.comparisons import make_comparisons
from tests.analysis.folders import GOLDEN

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    set((ROOT / "analysis" / "notebooks").glob("[a-z]*.py")) - {Path(shared.__file__)}
)
# What each needs, and a figure that must come of it.
SHOWN = {
    "acceptance": ("records", "acceptance_vicuna7b_specbench"),
    "adaptation": ("experiments/ssd_stream", "adaptation_vicuna7b_gsm8k"),
    "kw_heatmaps": ("experiments/ngrammys_figure3", "kw_speedup_mistral7b"),
    "leader_follower": ("experiments/cacheback_figure4", "lengths_vicuna7b_mat"),
    "mat": ("records", "steps_vicuna7b_specbench"),
    "speedup": ("records", "speedup_vicuna7b_specbench"),
    "time_waterfall": ("experiments/token_recycling_figure4", "time_vicuna7b_specbench"),
}


QUICK = "leader_follower"


@pytest.fixture
def shown(request, tmp_path, monkeypatch):
    """Where the figures of a notebook go; its records are its own."""
    records, figure = SHOWN[request.node.callspec.params["path"].stem]
    monkeypatch.setenv("RUNS", str(GOLDEN / records))
    monkeypatch.setenv("FIGURES", str(tmp_path))
    shared._shown.clear()
    return tmp_path / f"{figure}.png"


def test_all_notebooks_are_known():
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_as_a_plain_file(path, shown):
    runpy.run_path(str(path), run_name="__main__")
    assert shown.stat().st_size > 5_000


# One in the fast suite: the way through jupytext is the same for all.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == QUICK else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
)
def test_through_jupytext(path, shown, tmp_path):
    """Converted to a notebook as for Jupyter, and the cells of that file executed."""
    jupytext.write(jupytext.read(path), tmp_path / "converted.ipynb")
    book = jupytext.read(tmp_path / "converted.ipynb")
    kinds = [cell.cell_type for cell in book.cells]
    assert kinds[0] == "markdown", "it says first what it shows"
    namespace = {"__name__": "__main__"}
    for cell in book.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(path), "exec"), namespace)
    assert shown.exists()


@pytest.mark.parametrize(
    ("stem", "command"),
    [
        ("kw_heatmaps", "experiment=ngrammys_figure3"),
        ("leader_follower", "experiment=cacheback_figure4"),
        ("time_waterfall", "measure=phases"),
    ],
)
def test_what_a_run_lacks_is_said_with_the_command_that_makes_it(
    stem, command, monkeypatch, capsys
):
    monkeypatch.setenv("RUNS", str(GOLDEN / "records"))
    runpy.run_path(str(ROOT / "analysis" / "notebooks" / f"{stem}.py"), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Nothing to show: ")
    assert command in line


def test_numbers_are_shown_as_a_data_frame(monkeypatch):
    monkeypatch.setenv("RUNS", str(GOLDEN / "records"))
    frame = shared.numbers(make_comparisons(shared.runs()), "mat", "speedup", "speedup_graph")
    assert list(frame) == ["model", "dataset", "label", "mat", "speedup"]
    own = frame.set_index("label")
    assert own.loc["ar", "speedup"] == 1.0
    assert own.loc["pld", "mat"] == pytest.approx(1.65, abs=0.01)


@pytest.mark.slow
def test_executed_as_a_notebook(tmp_path):
    """By the project's own environment, with frames and pictures in it."""
    made = tmp_path / "leader_follower.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "jupytext", "--to", "notebook", "--execute", "-o", str(made),
         str(ROOT / "analysis" / "notebooks" / "leader_follower.py")],
        env=os.environ
        | {"RUNS": str(GOLDEN / "experiments" / "cacheback_figure4"), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = [o for cell in jupytext.read(made).cells for o in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds


@pytest.mark.parametrize("stem", ["acceptance", "adaptation", "mat"])
@pytest.mark.parametrize(
    ("records", "said"), [("experiments/token_recycling_figure3", True), ("records", False)]
)
def test_labels_that_are_left_out_are_counted(stem, records, said, monkeypatch):
    figures = []
    monkeypatch.setenv("RUNS", str(GOLDEN / records))
    monkeypatch.setattr(shared, "show", lambda figure, name: figures.append(figure))
    runpy.run_path(str(ROOT / "analysis" / "notebooks" / f"{stem}.py"), run_name="__main__")
    assert ("the first 6 of 8 labels" in figures[-1].caption) == said


def test_a_sweep_is_not_mixed_with_other_experiments(monkeypatch, tmp_path):
    """Figure 4 of N-Grammys runs one cell of Figure 5's grid."""
    experiments = GOLDEN / "experiments"
    cell = shutil.copytree(experiments / "ngrammys_figure5" / "mtbench_5_6", tmp_path / "cell")
    path = cell / "manifest.json"
    path.write_text(path.read_text().replace("=ngrammys_figure5", "=ngrammys_figure4"))
    folders = [cell, experiments / "ngrammys_figure5"]
    monkeypatch.setenv("RUNS", os.pathsep.join(map(str, folders)))
    sweeps = shared.by_experiment("python run.py", "k", "w")
    assert sorted(len(runs) for runs in sweeps) == [1, 8]
    figures = [list(grid_figures(runs, "mat")) for runs in sweeps]
    assert sorted(map(len, figures)) == [0, 1], "one cell is no sweep"
    assert shared.by_experiment("python run.py", "leader_len") == []


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_bad_folder_is_one_line(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RUNS", str(tmp_path / name))
    with pytest.raises(SystemExit) as stopped:
        shared.runs()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
    monkeypatch.setattr(shared, "_in_notebook", lambda: True)
    assert shared.runs() == []  # the cells below it go on
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("error: RUNS:")
