"""What a sweep ends with, whoever ran its jobs."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from runners.launch import sweep
from runners.launch.sweep import JobOutcome, finish_sweep
from specbench.results import records


@pytest.fixture(autouse=True)
def nothing_arrived(monkeypatch):
    monkeypatch.setattr(sweep, "arrived", {})


@pytest.fixture
def commands(monkeypatch):
    """The commands that were to summarize jobs."""
    made = []

    def run(command, **_):
        made.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return made


def job(folder: Path, *overrides, code=0, error="", done=True):
    folder.mkdir(parents=True)
    (folder / records.CASES).touch()
    if done:
        (folder / records.DONE).touch()
    return JobOutcome(code, ("method=pld", *overrides), folder, error)


def test_an_outcome_from_another_process_arrives_in_this_one():
    sent = pickle.dumps(JobOutcome(2, ("a=1",), Path("x"), "no such thing"))
    sweep.arrived.clear()
    found = pickle.loads(sent)
    assert (found, found.folder, found.error) == (2, Path("x"), "no such thing")
    assert pickle.loads(sent) == 2  # some launchers read a result twice
    assert [*sweep.arrived.values()] == [found]


def test_one_job_is_no_sweep(commands, tmp_path, capsys):
    finish_sweep([job(tmp_path / "one")])
    assert not commands
    assert not capsys.readouterr().out


def test_a_sweep_is_summarized_beside_its_jobs_and_always_there(commands, tmp_path, capsys):
    jobs = [job(tmp_path / f"pld-{n}", f"method.num_tokens={n}") for n in (1, 2)]
    finish_sweep(jobs)
    finish_sweep(jobs[::-1])
    (first, second) = commands
    assert first[:3] == [sys.executable, "-m", "analysis.sweep"]
    assert first[3:5] == [str(tmp_path / "pld-1"), str(tmp_path / "pld-2")]
    home = Path(first[first.index("-o") + 1])
    assert home.parent == tmp_path
    assert home.name.startswith("sweep-num_tokens-")
    assert second[-1] == first[-1]
    assert "sweep of 2 jobs: 2 done" in capsys.readouterr().out


def test_failed_jobs_are_named_by_what_was_varied_and_how_to_go_on(commands, tmp_path, capsys):
    finish_sweep(
        [
            job(tmp_path / "a", "method.num_tokens=1", "seed=5"),
            job(
                *(tmp_path / "b", "method.num_tokens=2", "seed=5"),
                code=1, error="the measuring process was killed by SIGKILL.", done=False,
            ),
            job(tmp_path / "c", "method.num_tokens=3", "seed=5", code=1),
            JobOutcome(2, ("method=pld", "method.num_tokens=0", "seed=5"), None, "at least 1"),
        ]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "sweep of 4 jobs: 2 done" in out
    assert "failed: method.num_tokens=2: the measuring process was killed by SIGKILL.\n" in out
    assert "failed: method.num_tokens=0: at least 1\n" in out
    assert f"(verdict bug in cases.jsonl), in {tmp_path}/c\n" in out
    assert "method.num_tokens=1:" not in out
    assert "type the same command again" in out
    # The table shows what there is.
    assert commands[0][3:5] == [str(tmp_path / "a"), str(tmp_path / "c")]


def test_a_sweep_without_one_measured_job_has_no_table(commands, capsys):
    finish_sweep([JobOutcome(2, (f"seed={n}",), None, "no such model") for n in (1, 2)])
    assert not commands
    assert "failed: seed=1: no such model" in capsys.readouterr().out


def test_parts_of_one_run_are_joined_not_compared(commands, tmp_path, capsys):
    finish_sweep([job(tmp_path / f"{i}", f"shard={i}/2") for i in range(2)])
    assert not commands
    assert "python -m analysis.merge" in capsys.readouterr().out
