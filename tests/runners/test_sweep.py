"""What a sweep ends with, whoever ran its jobs."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from runners.launch import sweep
from specbench.results import records


@pytest.fixture
def commands(monkeypatch):
    """Collect the commands that would summarize jobs."""
    calls = []

    def run(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """End a sweep: return its outcomes by job number, as launchers' processes leave them."""
    node = {"sweep": {"dir": str(tmp_path), "subdir": ".ended"}, "mode": RunMode.MULTIRUN}
    (tmp_path / ".ended").mkdir()
    (tmp_path / "theirs").mkdir()

    def run_jobs(jobs, overrides=None):
        jobs = list(jobs)
        sweep.remove_outcomes()
        (tmp_path / ".ended").mkdir(exist_ok=True)
        last = max(number for number, _ in jobs) if jobs else 0
        seeds = overrides or f"seed={','.join(map(str, range(last + 1)))}"
        more = {
            "sweeper": {"params": {"seed": "7,8"}},
            "overrides": {"task": [seeds, "x=${not.there}"]},
        }
        sweep.SweepCallback().on_multirun_start(OmegaConf.create({"hydra": {**node, **more}}))
        for number, job in jobs:
            at = {"runtime": {"output_dir": str(tmp_path / ".ended")}, "job": {"num": number}}
            hydra = OmegaConf.create({**node, **at})
            monkeypatch.setattr(HydraConfig, "get", lambda config=hydra: config)
            sweep.save_outcome(*job)
        return sweep.outcomes()

    yield run_jobs
    sweep.remove_outcomes()
    assert not sweep.outcomes() and not (tmp_path / ".ended").exists()
    assert (tmp_path / "theirs").exists()  # whoever else keeps something there


def job(folder: Path, *overrides, code=0, error="", done=True):
    folder.mkdir(parents=True)
    (folder / records.CASES).touch()
    if done:
        (folder / records.DONE).touch()
    return code, ("method=pld", *overrides), folder, error


def test_outcomes_are_found_once_and_in_the_order_of_the_jobs(ended):
    jobs = {n: (2, (f"+seed={n}", "~debug"), None if n else Path("x"), "no") for n in range(11)}
    numbers = (10, *range(10), 3)  # one was put back into the queue, and ended twice
    outcomes = ended((n, jobs[n]) for n in numbers)
    assert [outcome["typed"] for outcome in outcomes] == [{"seed": str(n)} for n in range(11)]
    first = {"code": 2, "typed": {"seed": "0"}, "folder": "x", "error": "no", "logger": None}
    assert outcomes[0] == first


@pytest.mark.parametrize("there", [(), (0,), (1, 2)])
def test_a_job_that_left_nothing_has_failed(ended, there, tmp_path):
    outcomes = ended(((n, job(tmp_path / f"{n}")) for n in there), "seed=0,1,2")
    assert [outcome["code"] for outcome in outcomes] == [0 if n in there else 1 for n in range(3)]
    assert len(sweep.outcomes(whole=False)) == len(there)  # something ended the sweep itself


def test_one_job_is_no_sweep(ended, commands, tmp_path, capsys):
    sweep.finish(ended([(0, job(tmp_path / "one"))]))
    assert not commands
    assert not capsys.readouterr().out


def test_a_sweep_is_summarized_beside_its_jobs_and_always_there(ended, commands, tmp_path, capsys):
    jobs = [job(tmp_path / f"pld-{n}", f"method.num_tokens={n}") for n in (1, 2)]
    outcomes = ended(enumerate(jobs))
    sweep.finish(outcomes)
    sweep.finish(outcomes[::-1])
    (first, second) = commands
    assert first[:3] == [sys.executable, "-m", "analysis.sweep"]
    assert first[3:5] == [str(tmp_path / "pld-1"), str(tmp_path / "pld-2")]
    home = Path(first[first.index("-o") + 1])
    assert home.parent == tmp_path
    assert home.name.startswith("sweep-num_tokens-")
    assert second[-1] == first[-1]
    assert "sweep of 2 jobs: 2 done" in capsys.readouterr().out


def test_failed_jobs_are_named_by_what_was_varied_and_how_to_go_on(
    ended, commands, tmp_path, capsys
):
    def tokens(n):
        return (f"method.num_tokens={n}", "seed=5")

    killed = "the measuring process was killed by SIGKILL."
    jobs = [
        job(tmp_path / "a", *tokens(1)),
        job(tmp_path / "b", *tokens(2), code=1, error=killed, done=False),
        job(tmp_path / "c", *tokens(3), code=1),
        (2, ("method=pld", *tokens(0)), None, "at least 1"),
    ]
    sweep.finish(ended(enumerate(jobs)))
    out = capsys.readouterr().out
    assert "sweep of 4 jobs: 2 done" in out
    assert f"failed: method.num_tokens=2: {killed}\n" in out
    assert "failed: method.num_tokens=0: at least 1\n" in out
    assert f"(verdict bug in cases.jsonl), in {tmp_path}/c\n" in out
    assert "method.num_tokens=1:" not in out
    assert "type the same command again" in out
    # The table shows what there is.
    assert commands[0][3:5] == [str(tmp_path / "a"), str(tmp_path / "c")]


def test_a_sweep_without_one_measured_job_has_no_table(ended, commands, capsys):
    sweep.finish(ended((n, (2, (f"seed={n}",), None, "no such model")) for n in (0, 1)))
    assert not commands
    assert "failed: seed=1: no such model" in capsys.readouterr().out


def test_parts_of_one_run_are_joined_not_compared(ended, commands, tmp_path, capsys):
    sweep.finish(ended((i, job(tmp_path / f"{i}", f"shard={i}/2")) for i in range(2)))
    assert not commands
    assert "python -m analysis.merge" in capsys.readouterr().out
