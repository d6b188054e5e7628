"""run.py as a process: exit codes and messages, kills at random moments, two at a time."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from specbench.errors import OutputRefused
from specbench.results import records
from specbench.storage import jsonl
from tests.small_run import ROOT, run_here, without_times

pytestmark = pytest.mark.usefixtures("signals_arrive")

TIMEOUT_S = 90


@pytest.fixture
def start(small, environment, tmp_path):
    """Start run.py with the tiny model's overrides and more; its output goes to a file."""
    started = []

    def run(*arguments, base=small, group=False, **extra):
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
                process_group=0 if group else None,
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
    cases = [without_times(line) for line in jsonl.read_jsonl(folder / records.CASES)[0]]
    cases.sort(key=lambda r: (r["repeat"], r["case_id"], r["turn"], r["label"]))
    steps = pq.read_table(folder / records.STEPS).to_pylist()
    for row in steps:
        del row["step_s"]
    steps.sort(key=lambda r: (r["repeat"], r["case_id"], r["turn"], r["label"], r["step"]))
    rows = jsonl.read_json(folder / records.SUMMARY)["rows"]
    counted = ("label", "method", "task", "n_cases", "mat", "mat_ci", "lossless", "state_scope")
    rows = [{name: row[name] for name in counted} for row in rows]
    return {"cases": cases, "steps": steps, "rows": rows}


# -- exit codes ------------------------------------------------------------------------------------


def test_a_composition_error_exits_with_2_and_no_traceback(start):
    code, output = finish(start("method=pdl"))
    assert code == 2
    assert "Traceback" not in output
    assert "error: " in output and "'pdl'" in output and "'pld'" in output


def test_help_works(start):
    code, output = finish(start("--help", base=[]))
    assert code == 0
    assert "method" in output


@pytest.mark.slow  # three processes, one after the other
def test_a_multirun_runs_all_jobs_and_exits_with_the_highest_code(start, tmp_path):
    # The first job is refused in its child (a knob out of range); the next one runs all the same.
    sweep = start("-m", "method.num_tokens=-1,2", f"output_dir={tmp_path}", "dataset.limit=2")
    code, output = finish(sweep)
    assert code == 2
    assert "method.num_tokens=-1" in output
    assert "Traceback" not in output
    (done,) = [path.parent for path in tmp_path.rglob(records.DONE)]
    assert jsonl.read_json(done / records.MANIFEST)["config"]["method"]["num_tokens"] == 2


# -- kills -----------------------------------------------------------------------------------------


def kill_somewhere(process, folder, rng):
    """SIGKILL parent or child at a random moment: of starting up, or of measuring.

    However fast the machine, a start that is to be killed by the clock is killed when it has
    measured as much as one that is killed by its records: a run outlasts its kills.
    """
    cases = folder / records.CASES
    starting = rng.random() < 0.3
    end = time.monotonic() + (rng.random() * 4 if starting else 3 * TIMEOUT_S)
    enough = len(_lines(cases)) + rng.randrange(LINES_A_KILL)
    while process.poll() is None and len(_lines(cases)) <= enough:
        if time.monotonic() > end:
            assert starting, "waited in vain for records"
            break
        time.sleep(0.002)
    if not starting:
        time.sleep(rng.random() * 0.03)
    child = _measuring_child(process)
    assert process.poll() is None, f"ended before it could be killed: {process.log.read_text()}"
    if child is None or rng.random() < 0.5:
        process.kill()
    else:
        child.kill()
    process.wait(timeout=TIMEOUT_S)
    assert process.returncode != 0


def wait_until(condition, what):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.002)


def _measuring_child(process):
    """The spawned child; multiprocessing has another one that tracks resources."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child
    return None


def _lines(path):
    return path.read_bytes().splitlines() if path.exists() else []


LINES = 7 * 3  # turns and labels of a repeat of the run below
LINES_A_KILL = 15  # of the two repeats that a run has for each of its kills


@pytest.mark.slow  # a start takes seconds, and many where others use the machine
@pytest.mark.timeout(900)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_left_alone(start, small, tmp_path):
    n_kills = 20
    repeats = 2 * n_kills
    overrides = ["compare=[random_drafts]", f"repeats={repeats}"]
    assert run_here([*small, *overrides, f"output_dir={tmp_path}/whole"]) == 0

    rng = random.Random(1)
    folder = tmp_path / "killed"
    for _ in range(n_kills):
        kill_somewhere(start(*overrides, f"output_dir={folder}"), folder, rng)
        assert not (folder / records.DONE).exists()
    assert run_here([*small, *overrides, f"output_dir={folder}"]) == 0
    starts = jsonl.read_json(folder / records.MANIFEST)["starts"]
    assert 1 < len(starts) <= n_kills + 1  # some are killed before they note it
    assert len(_lines(folder / records.CASES)) == repeats * LINES
    assert result(folder) == result(tmp_path / "whole")


# -- two processes, signals ------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_modules_are_imported_is_one_line(start, signum):
    process = start()
    wait_until(lambda: _catches(process.pid, signum), "the handler")
    process.send_signal(signum)
    code, output = finish(process)
    assert code == 128 + signum
    assert output == f"stopped by {signum.name}\n"


def _catches(pid, signum):
    mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    # Python's own handler of SIGINT is there from the start, SIGHUP's comes last.
    return all(int(mask, 16) >> (s - 1) & 1 for s in (signum, signal.SIGHUP))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_s_signal_at_any_moment_is_no_traceback(start, tmp_path, signum):
    rng = random.Random(int(signum))
    for i in range(10):
        folder = tmp_path / f"run{i}"
        process = start("repeats=2000", f"output_dir={folder}", group=True)
        wait_until(lambda pid=process.pid: _catches(pid, signum), "the handler")
        time.sleep(rng.uniform(0, 12))
        os.killpg(process.pid, signum)
        code, output = finish(process)
        assert code == 128 + signum, output
        for word in ("Traceback", "Exception", "race condition", "leaked"):
            assert word not in output
        if (folder / records.MANIFEST).exists():
            assert jsonl.read_json(folder / records.MANIFEST)["status"] == "interrupted"


def test_a_second_process_is_refused_and_an_interrupt_leaves_the_files_in_order(
    start, small, tmp_path
):
    folder = tmp_path / "run"
    overrides = ["repeats=2000", f"output_dir={folder}"]
    first = start(*overrides)
    wait_until(lambda: len(_lines(folder / records.CASES)) > 4, "records")
    with pytest.raises(OutputRefused, match=f"is being written by process {first.pid} "):
        run_here([*small, *overrides])
    first.send_signal(signal.SIGINT)
    code, output = finish(first)
    assert code == 130
    assert "Traceback" not in output
    assert jsonl.read_json(folder / records.MANIFEST)["status"] == "interrupted"
    found, truncated = records.read_records(folder)
    assert not truncated
    assert len(found) % 2 == 0
    assert not (folder / ".lock.json").exists()
    json.loads((folder / records.MANIFEST).read_text())
