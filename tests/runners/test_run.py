"""run.py as a process: exit codes and messages, signals, two at a time."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specbench.errors import OutputRefused
from specbench.results import records
from specbench.storage import jsonl
from tests.small_run import ROOT, run_here

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


def wait_until(condition, event):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {event}"
        time.sleep(0.002)


def _lines(path):
    return path.read_bytes().splitlines() if path.exists() else []


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


@pytest.mark.slow  # two processes start
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
    turns, truncated = records.read_records(folder)
    assert not truncated
    assert len(turns) % 2 == 0
    assert not (folder / ".lock.json").exists()
    json.loads((folder / records.MANIFEST).read_text())
