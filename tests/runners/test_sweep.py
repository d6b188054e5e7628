"""What a sweep ends with, whoever ran its jobs."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from runners.launch import sweep
from runners.launch.sweep import Outcome, finish
from specbench.results import records


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
    return Outcome(code, ("method=pld", *overrides), folder, error)


def test_outcomes_of_jobs_in_other_processes_are_found_once_and_in_order(tmp_path, monkeypatch):
    """A launcher's processes know Hydra's configuration, and this one the sweep's folder."""
    node = {"sweep": {"dir": str(tmp_path), "subdir": "ended"}, "mode": RunMode.MULTIRUN}
    sweep.Place().on_multirun_start(OmegaConf.create({"hydra": node}))
    ended = [Outcome(2, (f"seed={n}",), None if n else Path("x"), "no such") for n in range(11)]
    (tmp_path / "ended").mkdir()
    for number in (10, *range(10), 3):  # a job that was put back into the queue ends twice
        at = {"runtime": {"output_dir": str(tmp_path / "ended")}, "job": {"num": number}}
        hydra = OmegaConf.create({**node, **at})
        monkeypatch.setattr(HydraConfig, "get", lambda found=hydra: found)
        sweep.keep(ended[number])
    assert sweep.outcomes() == ended
    sweep.forget()
    assert not sweep.outcomes() and not list(tmp_path.iterdir())


def test_one_job_is_no_sweep(commands, tmp_path, capsys):
    finish([job(tmp_path / "one")])
    assert not commands
    assert not capsys.readouterr().out


def test_a_sweep_is_summarized_beside_its_jobs_and_always_there(commands, tmp_path, capsys):
    jobs = [job(tmp_path / f"pld-{n}", f"method.num_tokens={n}") for n in (1, 2)]
    finish(jobs)
    finish(jobs[::-1])
    (first, second) = commands
    assert first[:3] == [sys.executable, "-m", "analysis.sweep"]
    assert first[3:5] == [str(tmp_path / "pld-1"), str(tmp_path / "pld-2")]
    home = Path(first[first.index("-o") + 1])
    assert home.parent == tmp_path
    assert home.name.startswith("sweep-num_tokens-")
    assert second[-1] == first[-1]
    assert "sweep of 2 jobs: 2 done" in capsys.readouterr().out


def test_failed_jobs_are_named_by_what_was_varied_and_how_to_go_on(commands, tmp_path, capsys):
    killed = "the measuring process was killed by SIGKILL."
    two = job(
        tmp_path / "b", "method.num_tokens=2", "seed=5", code=1, error=killed, done=False
    )  # fmt: skip
    finish(
        [
            job(tmp_path / "a", "method.num_tokens=1", "seed=5"),
            two,
            job(tmp_path / "c", "method.num_tokens=3", "seed=5", code=1),
            Outcome(2, ("method=pld", "method.num_tokens=0", "seed=5"), None, "at least 1"),
        ]
    )
    out = capsys.readouterr().out
    assert "sweep of 4 jobs: 2 done" in out
    assert f"failed: method.num_tokens=2: {killed}\n" in out
    assert "failed: method.num_tokens=0: at least 1\n" in out
    assert f"(verdict bug in cases.jsonl), in {tmp_path}/c\n" in out
    assert "method.num_tokens=1:" not in out
    assert "type the same command again" in out
    # The table shows what there is.
    assert commands[0][3:5] == [str(tmp_path / "a"), str(tmp_path / "c")]


def test_jobs_that_measured_nothing_or_parts_of_a_run_have_no_table(commands, tmp_path, capsys):
    finish([Outcome(2, (f"seed={n}",), None, "no such model") for n in (1, 2)])
    assert "failed: seed=1: no such model" in capsys.readouterr().out
    finish([job(tmp_path / f"{i}", f"shard={i}/2") for i in range(2)])
    assert "python -m analysis.merge" in capsys.readouterr().out
    assert not commands
