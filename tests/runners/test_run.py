"""run.py as a process: exit codes and messages, kills at random moments, two at a time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from specbench import durable, records

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90


@pytest.fixture
def start(small, environment, tmp_path):
    """Start run.py with the tiny model's overrides and more; its output goes to a file."""
    started = []

    def run(*arguments, base=small, **extra):
        flags = [word for word in arguments if word.startswith("-")]
        overrides = [word for word in arguments if not word.startswith("-")]
        log = tmp_path / f"log-{len(started)}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, ROOT / "run.py", *flags, *base, *overrides],
                cwd=ROOT,
                env={**environment, **extra},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        process.log = log
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def finish(process):
    process.wait(timeout=TIMEOUT_S)
    return process.returncode, process.log.read_text()


def result(folder):
    """Everything a run leaves, sorted by key, without times, hosts and time stamps."""
    free = {"prefill_s", "decode_s", "drafter_setup_s", "wall_s", "phase_s"}
    free |= {"cpu_steal", "started_at", "host"}
    lines = durable.read_jsonl(folder / records.CASES)[0]
    cases = [{k: v for k, v in line.items() if k not in free} for line in lines]
    cases.sort(key=lambda r: (r["repeat"], r["case_id"], r["turn"], r["label"]))
    steps = pq.read_table(folder / records.STEPS).to_pylist()
    for row in steps:
        del row["step_s"]
    steps.sort(key=lambda r: (r["repeat"], r["case_id"], r["turn"], r["label"], r["step"]))
    rows = durable.read_json(folder / records.SUMMARY)["rows"]
    timed = ("tokens_per_s", "end_to_end_tokens_per_s", "speedup", "geomean_speedup")
    timed += ("speedup_ci", "geomean_speedup_ci")
    rows = [{k: v for k, v in row.items() if k not in timed} for row in rows]
    return {"cases": cases, "steps": steps, "rows": rows}


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=pdl"], ["method", "'pdl'", "'pld'"]),
        (["method.num_tokenz=3"], ["num_tokenz", "num_tokens"]),
        (["generation.max_new_tokens=many"], ["generation.max_new_tokens", "many"]),
    ],
)
def test_composition_errors_exit_with_2_and_no_traceback(start, overrides, said):
    code, output = finish(start(*overrides))
    assert code == 2
    assert "Traceback" not in output
    assert "error: " in output
    for word in said:
        assert word in output


def test_help_works(start):
    code, output = finish(start("--help", base=[]))
    assert code == 0
    assert "method" in output


def test_an_output_path_below_a_regular_file_exits_with_2(start, tmp_path):
    (tmp_path / "file").touch()
    code, output = finish(start(f"output_dir={tmp_path}/file/run"))
    assert code == 2
    assert f"output_dir={tmp_path}/file/run cannot be used" in output
    assert "Traceback" not in output


def test_a_multirun_runs_all_jobs_and_exits_with_the_highest_code(start, tmp_path):
    # The middle job is refused (a knob out of range); the one after it runs all the same.
    sweep = start(
        "-m", "method.num_tokens=2,-1,3", f"output_dir={tmp_path}/sweep", "dataset.limit=2"
    )
    code, output = finish(sweep)
    assert code == 2
    assert "method.num_tokens=-1" in output
    done = [path.parent for path in (tmp_path / "sweep").rglob(records.DONE)]
    knobs = {
        durable.read_json(folder / records.MANIFEST)["config"]["method"]["num_tokens"]
        for folder in done
    }
    assert knobs == {2, 3}


# -- kills -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kill_overrides():
    return ["compare=[random_drafts]", "repeats=4", "generation.max_new_tokens=24"]


@pytest.fixture(scope="session")
def undisturbed(small, kill_overrides, tmp_path_factory):
    """The result of the run that the kills disturb, and how long its measuring took."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "run.py", *small, *kill_overrides, f"output_dir={folder}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=TIMEOUT_S)
    return result(folder)


def kill_and_resume(start, overrides, folder, seed):
    """Kill parent or child once, after a random number of finished blocks; then run to the end."""
    rng = random.Random(seed)
    out = f"output_dir={folder}"
    process = start(*overrides, out)
    blocks = rng.randrange(0, 18)
    cases = folder / records.CASES
    end = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        if cases.exists() and len({line[:200] for line in _lines(cases)}) >= blocks * 3:
            break
        time.sleep(0.001)
    time.sleep(rng.random() * 0.05)
    child = _measuring_child(process)
    if rng.random() < 0.5 or child is None:
        process.kill()
    else:
        child.kill()
        assert process.wait(timeout=TIMEOUT_S) == 1
        assert "killed by SIGKILL" in process.log.read_text()
    process.wait()
    before = len(_lines(cases))
    code, output = finish(start(*overrides, out))
    assert code == 0, output
    return before


def _measuring_child(process):
    """The spawned child; multiprocessing has another one that tracks resources."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child
    return None


def _lines(path):
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] * (s > 2)) for s in range(20)]
)
def test_a_run_killed_at_any_moment_is_resumed_to_the_same_result(
    start, kill_overrides, undisturbed, tmp_path, seed
):
    kill_and_resume(start, kill_overrides, tmp_path / "run", seed)
    assert result(tmp_path / "run") == undisturbed


# -- two processes, signals ------------------------------------------------------------------------


def wait_until(condition, what):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def test_a_second_process_is_refused_and_an_interrupt_leaves_the_files_in_order(start, tmp_path):
    folder = tmp_path / "run"
    overrides = ["repeats=2000", f"output_dir={folder}"]
    first = start(*overrides)
    wait_until(lambda: len(_lines(folder / records.CASES)) > 4, "records")
    code, output = finish(start(*overrides))
    assert code == 2
    assert f"is being written by process {first.pid} " in output
    first.send_signal(signal.SIGINT)
    code, output = finish(first)
    assert code == 130
    assert "Traceback" not in output
    assert durable.read_json(folder / records.MANIFEST)["status"] == "interrupted"
    found, truncated = records.read_records(folder)
    assert not truncated
    assert len(found) % 2 == 0
    assert not (folder / ".holder.json").exists()
    json.loads((folder / records.MANIFEST).read_text())
