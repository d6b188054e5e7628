"""One child process per job that loads a model, so that memory and graphs never leak onwards.

The parent blocks while the child measures. The child dies with its parent, however that one
ends; a stop signal unwinds the child, so that its files and lock are left in order.
"""

from __future__ import annotations

import contextlib
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
from multiprocessing.process import parent_process
from typing import NoReturn, TypeVar

from tqdm import tqdm

from runners.launch import signals
from specbench.errors import SpecBenchError, replace_unprintable

T = TypeVar("T")

_PATIENCE_S = 30.0  # from asking the child to stop until it is killed


class JobRefused(SpecBenchError):
    """The child refused the job; has the child's message and exit code."""


class JobCrashed(SpecBenchError):
    """The child ended unexpectedly; the message holds its traceback or signal."""


def run_in_child(
    work: Callable[[T], int], argument: T, variables: Mapping[str, str] | None = None
) -> int:
    """Call ``work(argument)`` in a spawned process and return its exit code.

    Args:
        work: a module-level function; a :class:`SpecBenchError` it raises is reported as such.
        argument: anything that can be pickled.
        variables: environment variables, added to this process's own.

    Raises:
        JobRefused: ``work`` raised a SpecBenchError.
        JobCrashed: ``work`` raised anything else, or its process was killed.
        Stopped: this process was asked to stop; the child has ended.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, work, argument))
    if sys.platform != "win32":  # Windows has no such process
        resource_tracker.ensure_running()  # starting it would let signals through
    answer: int | SpecBenchError | None = None
    with signals.raise_on_signal(), ours:
        try:
            with _starting(variables or {}):
                process.start()
            theirs.close()
            with contextlib.suppress(EOFError):
                answer = ours.recv()
            process.join()
        except signals.Stopped:
            if process.pid is not None:
                process.terminate()
                process.join(_PATIENCE_S)  # a second stop waits no longer
            raise
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
    if answer is None:
        raise JobCrashed(_cause_of_death(process.exitcode))
    if isinstance(answer, SpecBenchError):
        raise answer
    return answer


@contextlib.contextmanager
def _starting(variables: Mapping[str, str]) -> Iterator[None]:
    """Start a process inside with these variables; it is stopped once it can unwind."""
    before = dict(os.environ)
    signals.block_signals()
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
        signals.unblock_signals()


def _child(connection: Connection, work: Callable[[T], int], argument: T) -> NoReturn:
    replace_unprintable()
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for ours in ("runners", "specbench", "methods"):
        logging.getLogger(ours).setLevel(logging.INFO)
    # A progress bar's default lock is a file, which `_exit` would leave behind.
    tqdm.set_lock(threading.RLock())
    answer: int | SpecBenchError
    try:
        signals.raise_on_first_sigterm()
        signals.unblock_signals()
        answer = work(argument)
    except SpecBenchError as error:
        answer = JobRefused(str(error))
        answer.exit_code = error.exit_code
    except signals.Stopped as stop:
        answer = 128 + stop.signum
    except BaseException:
        answer = JobCrashed(f"the measuring process crashed:\n{traceback.format_exc()}")
    signals.block_signals()
    with contextlib.suppress(OSError):  # a parent that is gone needs no answer
        connection.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of libraries must not keep a finished job's memory alive.
    os._exit(answer if isinstance(answer, int) else 1)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _cause_of_death(exitcode: int | None) -> str:
    end = f"ended without an answer (exit code {exitcode})."
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " Was the machine out of memory?" if name == "SIGKILL" else ""
        end = f"was killed by {name}.{hint}"
    return (
        f"the measuring process {end} What was measured is kept: run the same command again to "
        "go on from there."
    )
