"""One child process per job that loads a model, so that memory and graphs never leak onwards.

The parent blocks while the child measures. The child dies with its parent, whichever way that
one goes; an interrupt unwinds the child, so that its files and lock are left in order. The first
child may be started ahead: it imports torch and transformers, which takes longest, while the parent
composes and checks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

from runners.launch.stopping import (
    Interrupted,
    exit_code,
    held_back,
    pass_over,
    release,
    unwind_once,
    unwinding,
)
from specbench.errors import SpecBenchError

T = TypeVar("T")

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PATIENCE_S = 30.0  # from asking the child to stop until it is killed


class JobRefused(SpecBenchError):
    """What the child refused, with the child's message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class JobCrashed(SpecBenchError):
    """The child ended unexpectedly; the message holds its traceback or signal."""


def run_in_child(
    work: Callable[[T], int], argument: T, variables: Mapping[str, str] | None = None
) -> int:
    """Call ``work(argument)`` in a spawned process and return its exit code.

    Args:
        work: a module-level function; a :class:`SpecBenchError` it raises is reported as such.
        argument: anything that can be pickled.
        variables: of its environment, besides this process's own.

    Raises:
        JobRefused: ``work`` raised a SpecBenchError.
        JobCrashed: ``work`` raised anything else, or its process was killed.
        SystemExit: this process was asked to stop (128 + the signal's number).
    """
    child = _Child()
    with unwinding(again=True):
        try:
            with held_back(), _set(variables or {}):
                child = _taken() or child
                child.start()
            child.connection.send((work, argument))
            kind, *details = child.connection.recv()
            child.process.join()
        except (EOFError, ConnectionError):
            child.process.join()
            raise JobCrashed(_cause_of_death(child.process.exitcode)) from None
        except Interrupted as stop:
            _stop(child.process)
            raise SystemExit(exit_code(stop)) from None
        finally:
            child.connection.close()
    if kind == "done":
        return int(details[0])
    if kind == "refused":
        raise JobRefused(details[0], details[1])
    raise JobCrashed(f"the measuring process crashed:\n{details[0]}")


class _Child:
    """A process that imports ``module`` and waits for its work."""

    def __init__(self, module: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, self._theirs = context.Pipe()
        arguments = (self._theirs, os.getpid(), module)
        self.process = context.Process(target=_child, args=arguments)
        self.began_in: object = None
        if sys.platform != "win32":  # which has no such process
            resource_tracker.ensure_running()  # starting it would let signals through

    def start(self) -> None:
        """Start the process, unless it runs; signals must be held back."""
        if self.process.pid is not None:
            return
        self.began_in = _surroundings()
        self.process.start()
        self._theirs.close()


_ahead: list[_Child] = []


def start_ahead(module: str) -> None:
    """Start the first job's process now, if a second processor is there to run it.

    It imports ``module`` and waits. It ends with this process if no job comes, or one that is to
    begin in another environment.
    """
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    if len(usable(0)) < 2:
        return
    child = _Child(module)
    with held_back():
        child.start()
    _ahead.append(child)
    atexit.register(_end_ahead)  # before multiprocessing waits for its processes


def _taken() -> _Child | None:
    """The process that was started ahead, if it began as one would begin now."""
    if _ahead and _ahead[0].began_in == _surroundings():
        return _ahead.pop()
    _end_ahead()
    return None


def _end_ahead() -> None:
    for child in _ahead:
        child.process.kill()
        child.process.join()
    _ahead.clear()


def _surroundings() -> tuple[str, dict[str, str]]:
    """What a process takes over when it begins; of Hydra's variables no job takes notice."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HYDRA_")}
    return os.getcwd(), kept


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)


def _child(connection: Connection, parent: int, module: str | None) -> NoReturn:
    _die_with(parent)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for ours in ("runners", "specbench", "methods"):
        logging.getLogger(ours).setLevel(logging.INFO)
    # A lock that a progress bar would make lies in a file, which nobody removes after `_exit`.
    tqdm.set_lock(threading.RLock())
    try:
        unwind_once()
        release()
        if module is not None:
            _import(module)
        work, argument = _received(connection)
        _watch(connection)
        message: tuple[Any, ...] = ("done", work(argument))
    except SpecBenchError as error:
        message = ("refused", str(error), error.exit_code)
    except Interrupted as stop:
        message = ("done", exit_code(stop))
    except BaseException:
        message = ("crashed", traceback.format_exc())
    pass_over()
    # A parent that is gone needs no answer, and the watcher ends this process.
    with contextlib.suppress(OSError):
        connection.send(message)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of libraries must not keep a finished job's memory alive.
    os._exit(int(message[1]) if message[0] == "done" else 1)


def _import(module: str) -> None:
    gc.disable()  # see `runners.runner.uncollected`
    with contextlib.suppress(Exception):  # the work meets it again, and then it is told
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):  # nobody is there who could have work
        os._exit(1)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, on Linux; elsewhere the pipe does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request was in place
            os._exit(1)


def _watch(connection: Connection) -> None:
    """End this process when its parent's end of the pipe is closed."""

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()  # the parent sends nothing: this returns when it is gone
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _stop(process: multiprocessing.process.BaseProcess) -> None:
    if process.pid is None:
        return
    log.info("stopping …")
    with contextlib.suppress(Interrupted):  # a second Ctrl-C: wait no longer
        process.terminate()
        process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
    process.join()


def _cause_of_death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " Was the machine out of memory?" if name == "SIGKILL" else ""
        what = f"was killed by {name}.{hint}"
    else:
        what = f"ended without an answer (exit code {exitcode})."
    return (
        f"the measuring process {what} What was measured is kept: run the same command again to "
        "go on from there."
    )
