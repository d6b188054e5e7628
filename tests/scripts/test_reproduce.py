"""One command for all tables and figures: what it runs, and what it draws of it."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.papers import REPRODUCTIONS
from scripts import reproduce
from specbench.models import memory

FIXTURES = Path(__file__).resolve().parents[1] / "golden" / "experiments"


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The commands; each leaves the fixture's runs of its experiment."""
    commands = []

    def run(command, check):
        assert not check, "one failed experiment does not stop the others"
        name = command[2].removeprefix("experiment=")
        commands.append(command)
        shutil.copytree(FIXTURES / name, tmp_path / name, dirs_exist_ok=True)
        return SimpleNamespace(returncode=int(name == "ssd_stream"))

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    return commands


@pytest.mark.slow  # over a second
def test_one_artifact_is_run_and_drawn(calls, tmp_path, capsys):
    arguments = ["token_recycling_table1", "data_dir=D", "dataset.limit=2"]
    assert reproduce.main([*arguments, "--results", str(tmp_path)]) == 0
    assert [command[2] for command in calls] == [
        f"experiment=token_recycling_table1{part}" for part in ("", "_shuffle", "_mbpp")
    ]
    assert calls[0][3:] == [f"paths.results={tmp_path}", "data_dir=D", "dataset.limit=2"]
    assert (tmp_path / "artifacts" / "token_recycling_table1.md").exists()
    assert list((tmp_path / "artifacts").glob("token_recycling_table1_*.png"))
    assert "minutes" in capsys.readouterr().out


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(reproduce.figures, "main", lambda _: 0)


def test_the_surface_comes_first_one_failure_stops_none_and_the_highest_code_is_returned(
    calls, no_figures, tmp_path
):
    arguments = ["ssd_stream", "ngrammys_figure1", "data_dir=D", "--results", str(tmp_path)]
    assert reproduce.main(arguments) == 1
    order = [command[2].removeprefix("experiment=") for command in calls]
    assert order == ["ngrammys_figure1", "ssd_stream"]
    assert (tmp_path / "artifacts" / "ngrammys_figure1.md").exists()


def test_without_a_data_folder_the_demo_prompts_stand_in_but_not_in_the_paper_s_size(
    calls, tmp_path, capsys, monkeypatch
):
    # Whatever this machine's conf/local says.
    monkeypatch.setattr(reproduce, "compose", lambda: SimpleNamespace(data_dir=None))
    arguments = ["card_table2", "--results", str(tmp_path)]
    reproduce.main(arguments)
    assert calls[0][-2:] == ["dataset=demo", "dataset.sample=stratified"]
    assert "type data_dir=FOLDER" in capsys.readouterr().err
    reproduce.main([*arguments, "scale=paper"])
    assert calls[-1][-1] == "scale=paper"


def test_a_grid_that_two_artifacts_show_is_measured_once(calls, no_figures, tmp_path):
    """Not where one of them is replayed: then it has runs of its own."""
    arguments = ["ngrammys_figure3", "ngrammys_figure5", "--results", str(tmp_path), "data_dir=D"]
    reproduce.main([*arguments, "scale=paper"])
    assert [command[2] for command in calls] == ["experiment=ngrammys_figure3"]
    calls.clear()
    reproduce.main(arguments)
    assert len(calls) == 2
    calls.clear()
    reproduce.main([*arguments[1:], "scale=paper"])
    assert [command[2] for command in calls] == ["experiment=ngrammys_figure5"]


def test_list_names_every_artifact_and_an_unknown_name_exits_2_with_the_nearest(calls, capsys):
    assert reproduce.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [artifact.name for artifact in REPRODUCTIONS]
    assert reproduce.main(["card_tabel2"]) == 2
    assert "card_table2" in capsys.readouterr().err
    assert calls == []


def test_a_dry_run_prints_jobs_and_memory_and_runs_nothing(calls, tmp_path, capsys):
    (tmp_path / "cacheback_table1").mkdir()
    (tmp_path / "cacheback_table1" / "DONE").touch()
    arguments = ["cacheback_table1", "scale=paper", "--dry-run", "--results", str(tmp_path)]
    assert reproduce.main(arguments) == 0
    assert not calls
    shown = capsys.readouterr().out
    assert re.search(r"cacheback_table1 +vicuna7b +1 of 1 +17\n", shown)
    assert "Nothing was run" in shown


def test_estimates_count_jobs_and_parameters():
    jobs = reproduce._jobs(["experiment=card_table1", "scale=paper", "model=llama2_70b"])
    assert len(jobs) == 6 and {job.model.name for job in jobs} == {"llama2_70b"}
    assert memory.run_bytes(jobs[0]) == pytest.approx(2 * (69e9 + 7e9) + 4.6e9, rel=0.02)
