"""One child process per job that loads a model, so that memory and graphs never leak onwards.

The parent blocks while the child measures. The child dies with its parent, whichever way that
one goes; an interrupt unwinds the child, so that its files and lock are left in order.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, os.getpid(), work, argument))
    if sys.platform != "win32":  # which has no such process
        resource_tracker.ensure_running()  # starting it would let signals through
    with unwinding(again=True):
        try:
            with held_back(), _set(variables or {}):
                process.start()
            theirs.close()
            kind, *details = ours.recv()
            process.join()
        except (EOFError, ConnectionResetError):
            process.join()
            raise JobCrashed(_cause_of_death(process.exitcode)) from None
        except Interrupted as stop:
            _stop(process)
            raise SystemExit(exit_code(stop)) from None
        finally:
            ours.close()
    if kind == "done":
        return int(details[0])
    if kind == "refused":
        raise JobRefused(details[0], details[1])
    raise JobCrashed(f"the measuring process crashed:\n{details[0]}")


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


def _child(
    connection: Connection, parent: int, work: Callable[[Any], int], argument: object
) -> NoReturn:
    _die_with(parent, connection)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for ours in ("runners", "specbench", "methods"):
        logging.getLogger(ours).setLevel(logging.INFO)
    # A lock that a progress bar would make lies in a file, which nobody removes after `_exit`.
    tqdm.set_lock(threading.RLock())
    try:
        unwind_once()
        release()
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


def _die_with(parent: int, connection: Connection) -> None:
    """End this process when its parent ends: by the kernel on Linux, by the pipe elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request was in place
            os._exit(1)

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
