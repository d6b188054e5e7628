"""Kills by SIGKILL at random moments, in rounds until a run is complete: nothing is lost.

``make soak`` runs a hundred and prints the figures. Runs are forked from the test, where all is
imported already, so that a start takes a second.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import psutil
import pyarrow.parquet as pq
import pytest

from runners.launch import child_process
from runners.measure import blocks, interference_rule
from specbench.results import records
from specbench.storage import jsonl
from tests.small_run import run_here, without_times

WHEN = ("any moment", "behind a write", "within a write")
WHO = ("child", "parent", "both")
SEED = 7
TIMEOUT_S = 300
CHILD_KILLED = 99  # how the parent ends then, so that no start that fails by itself counts

_fork = multiprocessing.get_context("fork")

# Three labels, two of which keep what they learn in the stream; a block is measured again.
OVERRIDES = [
    "compare=[{method: cacheback, table: dynamic, leader_capacity: 64, follower_capacity: 8,"
    " state_scope: run}, {method: token_recycling, state_scope: run}]",
    "repeats=2",
    "measure.rerun_share=1",
    "measure.exclusive=false",
]


def noisy(measured, limits):
    """Two of the five cases are disturbed when they are first measured."""
    first = (r for r in measured if r.case_id in ("82", "84") and not r.attempt)
    return {record.key: "made up" for record in first}


class Writes:
    """Stands before ``os.write`` and ``os.replace`` of the run: the n-th of a file is the last."""

    def __init__(self, folder, count, within, victims):
        self.folder, self.count, self.within, self.victims = str(folder), count, within, victims
        self.write, self.replace = os.write, os.replace

    def __enter__(self):
        os.write, os.replace = self.writing, self.replacing

    def __exit__(self, *_):
        os.write, os.replace = self.write, self.replace

    def writing(self, fd, data):
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(self.folder):
            return self.write(fd, data)
        self.count -= 1
        if not self.count and self.within:
            self.write(fd, bytes(data)[: len(data) // 2])
            self.kill()
        written = self.write(fd, data)
        if not self.count:
            self.kill()
        return written

    def replacing(self, source, target):
        self.replace(source, target)
        if str(target).startswith(self.folder):
            self.count -= 1
            if self.count <= 0:
                self.kill()

    def kill(self):
        pids = {"child": [os.getpid()], "parent": [os.getppid()]}
        for pid in pids.get(self.victims, [os.getppid(), os.getpid()]):
            os.kill(pid, signal.SIGKILL)
        time.sleep(TIMEOUT_S)  # an orphan is killed by the kernel


def in_forked_child(work, job):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process.multiprocessing, "get_context", lambda kind: _fork)
        return child_process.run_in_child(work, job)


def start(folder, overrides, fatal=None):
    """Start the parent of a run as a process; ``fatal``: (writes, within, victims)."""

    def launch(work, job):
        return in_forked_child(work if fatal is None else Sabotaged(work, folder, fatal), job)

    def parent():
        blocks.by_counters = interference_rule.by_counters = noisy
        try:
            code = run_here([*overrides, f"output_dir={folder}"], launch=launch)
        except child_process.JobCrashed as crash:
            code = CHILD_KILLED if "killed by SIGKILL" in str(crash) else 1
        os._exit(code)

    process = _fork.Process(target=parent)
    process.start()
    return process


class Sabotaged:
    """The work of the child, which ends at one of its writes."""

    def __init__(self, work, folder, fatal):
        self.work, self.writes = work, Writes(folder, *fatal)

    def __call__(self, job):
        with self.writes:
            return self.work(job)


def kill_at(process, seconds, victims):
    """SIGKILL from outside, unless the run had ended by then."""
    process.join(seconds)
    if not process.is_alive():
        return
    children = psutil.Process(process.pid).children()
    targets = {"child": children, "parent": [psutil.Process(process.pid)]}.get(
        victims, [psutil.Process(process.pid), *children]
    )
    for target in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.kill()


def until_complete(folder, overrides, rng, max_kills, longest_s):
    """Start and kill until the run is complete; gives (when, who) of each kill that hit."""
    kills = []
    while not (folder / records.DONE).exists():
        when, who = (rng.choice(WHEN), rng.choice(WHO)) if len(kills) < max_kills else (None, None)
        fatal = (rng.randint(1, 25), when == "within a write", who) if when in WHEN[1:] else None
        process = start(folder, overrides, fatal)
        if when == "any moment":
            kill_at(process, rng.random() * longest_s, who)
        process.join(TIMEOUT_S)
        assert process.exitcode is not None, "a run hangs"
        assert process.exitcode in (0, CHILD_KILLED, -signal.SIGKILL), "a run failed by itself"
        if process.exitcode:
            kills.append((when, who))
        cases = (folder / records.CASES).exists()
        assert not cases or (folder / records.MANIFEST).exists(), "a folder that cannot be resumed"
    return kills


def outcome(folder):
    """All that a run leaves, in the order of its files, without times."""
    steps = pq.read_table(folder / records.STEPS).drop_columns("step_s").to_pylist()
    steps.sort(key=lambda r: (r["repeat"], r["case_id"], r["turn"], r["label"], r["step"]))
    counted = ("label", "method", "task", "n_cases", "mat", "mat_ci", "lossless", "state_scope")
    rows = jsonl.read_json(folder / records.SUMMARY)["rows"]
    results = {"steps": steps, "rows": [{name: row[name] for name in counted} for row in rows]}
    for name in (records.CASES, records.DISTURBED, records.ERRORS):
        lines, truncated = jsonl.read_jsonl(folder / name)
        assert not truncated
        results[name] = list(map(without_times, lines))
    assert not list(folder.glob("*.tmp"))
    return results


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("n_kills", [pytest.param(6, id="6"), pytest.param(100, id="100")])
def test_runs_killed_at_any_moment_end_as_one_that_was_left_alone(small, tmp_path, n_kills):
    overrides = [*small, *OVERRIDES]
    began = time.monotonic()
    quiet = start(tmp_path / "quiet", overrides)
    quiet.join(TIMEOUT_S)
    assert quiet.exitcode == 0
    longest_s = time.monotonic() - began
    expected = outcome(tmp_path / "quiet")
    assert len(expected[records.DISTURBED]) > 0

    rng, kills, rounds, starts = random.Random(SEED), [], 0, 0
    while len(kills) < n_kills:
        folder = tmp_path / f"round-{rounds}"
        kills += until_complete(folder, overrides, rng, n_kills - len(kills), longest_s)
        assert outcome(folder) == expected
        rounds += 1
        starts += len(jsonl.read_json(folder / records.MANIFEST)["starts"])
    by = [
        ", ".join(f"{n} {name}" for name, n in Counter(kind).items())
        for kind in zip(*kills, strict=True)
    ]
    n_records, n_steps = len(expected[records.CASES]), len(expected["steps"])
    print(
        f"\nsoak: {len(kills)} kills ({by[0]}; of {by[1]}) in {rounds} runs and {starts} noted "
        f"starts; each run's {n_records} records and {n_steps} steps are a quiet run's"
    )
