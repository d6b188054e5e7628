"""The child process: answers, refusals, crashes and signals come back; nobody outlives anybody."""

import contextlib
import enum
import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from runners.launch import signals
from runners.launch.child_process import JobCrashed, JobRefused, run_in_child
from tests.small_run import ROOT

pytestmark = pytest.mark.usefixtures("signals_arrive")

# One handler hears all of them: the others need not be tried each time.
SLOW = [pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]

WORK = """
import os, signal, sys, time
from specbench.errors import ConfigurationError

def answer(code):
    return code

def refuse(text):
    raise ConfigurationError(text)

def crash(text):
    raise RuntimeError(text)

def environ(name):
    return int(os.environ[name])

def die(_):
    os.kill(os.getpid(), signal.SIGKILL)

def sleep(path):
    try:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    except BaseException as error:
        with open(path + ".end", "w") as file:
            file.write(type(error).__name__)
        raise
    return 0

def unwind_slowly(path):
    try:
        return sleep(path)
    finally:
        os.rename(path + ".end", path + ".unwinding")
        time.sleep(1)
        os.rename(path + ".unwinding", path + ".end")

def show_progress(text):
    from tqdm import tqdm
    for _ in tqdm(range(3), desc=text):
        pass
    return 0
"""

MAIN = """
import sys
from runners.launch.child_process import run_in_child
from specbench.errors import SpecBenchError
import work
if __name__ == "__main__":
    name, argument = sys.argv[1:]
    try:
        argument = int(argument) if argument.isdigit() else argument
        sys.exit(run_in_child(getattr(work, name), argument))
    except SpecBenchError as error:
        print(type(error).__name__, error)
        sys.exit(error.exit_code)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "work.py").write_text(textwrap.dedent(WORK))
    (tmp_path / "main.py").write_text(textwrap.dedent(MAIN))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}

    def start(*arguments, **options):
        return subprocess.Popen(
            [sys.executable, str(tmp_path / "main.py"), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    return start


def wait_for(path: Path, timeout: float = 20.0) -> str:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def wait_gone(pid: int, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.01)


def test_how_the_child_ends_comes_back(script, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    import work

    assert run_in_child(work.answer, 0) == 0
    assert run_in_child(work.answer, 1) == 1
    monkeypatch.setenv("SET_HERE", "3")
    assert run_in_child(work.environ, "SET_THERE", {"SET_THERE": "4", "SET_HERE": "5"}) == 4
    assert (os.environ["SET_HERE"], "SET_THERE" in os.environ) == ("3", False)
    with pytest.raises(JobRefused, match="no-such-key") as refusal:
        run_in_child(work.refuse, "no-such-key")
    assert refusal.value.exit_code == 2
    with pytest.raises(JobCrashed, match="RuntimeError: boom"):
        run_in_child(work.crash, "boom")
    with pytest.raises(JobCrashed, match="killed by SIGKILL"):
        run_in_child(work.die, "now")


def test_the_child_dies_with_its_parent(script, tmp_path):
    process = script("sleep", tmp_path / "pid")
    child = int(wait_for(tmp_path / "pid"))
    process.kill()
    process.wait()
    wait_gone(child)


@pytest.mark.parametrize("signum", [signal.SIGTERM, *SLOW])
def test_a_signal_to_the_parent_unwinds_the_child(script, tmp_path, signum):
    process = script("sleep", tmp_path / "pid")
    child = int(wait_for(tmp_path / "pid"))
    process.send_signal(signum)
    assert process.wait(timeout=30) == 128 + signum
    assert wait_for(tmp_path / "pid.end") == "Stopped"
    wait_gone(child)


@pytest.mark.parametrize("signum", [signal.SIGINT, *SLOW])
def test_a_terminal_s_signal_while_the_child_starts_is_no_traceback(script, tmp_path, signum):
    process = script("sleep", tmp_path / "pid", process_group=0)
    end = time.monotonic() + 20
    while not (started := [c for c in psutil.Process(process.pid).children() if spawned(c)]):
        assert time.monotonic() < end
    os.killpg(process.pid, signum)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert output == ""
    wait_gone(started[0].pid)


LATE = """
import os, signal, sys
from runners.launch import signals

class Late:  # is deleted when Python has dropped its handlers
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):
        kill(pid, signum)

late = Late()
signals.exit_on_signal()
signals.block_signals()
sys.exit(130)
"""


def test_a_second_signal_while_python_ends_leaves_the_code(environment):
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, cwd=ROOT, timeout=60)
    assert done.returncode == 130


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_stop_is_heard_also_behind_one_that_python_swallowed():
    class Last:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with signals.raise_on_signal():
        Last()
        for signum in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(signals.Stopped) as stop:
                signal.raise_signal(signum)
            assert stop.value.code == 128 + signum


def test_the_child_hears_its_parent_once(script, tmp_path):
    """A terminal's signal, and a second one while it unwinds, disturb nothing."""
    process = script("unwind_slowly", tmp_path / "pid")
    child = int(wait_for(tmp_path / "pid"))
    os.kill(child, signal.SIGINT)
    process.terminate()
    wait_for(tmp_path / "pid.unwinding")
    os.kill(child, signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert wait_for(tmp_path / "pid.end") == "Stopped"


def spawned(child):
    """Whether it is the measuring process, and not multiprocessing's own helper."""
    with contextlib.suppress(psutil.Error):
        return "spawn_main" in " ".join(child.cmdline())
    return False


def test_a_progress_bar_in_the_child_leaves_no_semaphore(script):
    process = script("show_progress", "downloading")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "downloading" in output
    assert "leaked" not in output


def test_where_the_system_has_fewer_signals_those_it_has_stop_a_run(monkeypatch):
    """As on Windows, where a missing one would end ``import run`` with a traceback."""
    fewer = enum.IntEnum("Signals", {"SIGINT": int(signal.SIGINT), "SIGTERM": int(signal.SIGTERM)})
    with monkeypatch.context() as patch:
        patch.setattr(signal, "Signals", fewer)
        patch.delattr(signal, "pthread_sigmask")
        names = runpy.run_path(str(ROOT / "runners" / "launch" / "signals.py"))
    assert set(names["STOP_SIGNALS"]) == {signal.SIGINT, signal.SIGTERM}
    names["block_signals"]()
    names["unblock_signals"]()
    with pytest.raises(names["Stopped"]), names["raise_on_signal"]():
        signal.raise_signal(signal.SIGTERM)
