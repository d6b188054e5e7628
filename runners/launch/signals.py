"""SIGINT, SIGTERM and SIGHUP, from the first import on: one line and the right exit code.

Only the standard library is imported, so that a stop while the rest is imported is caught, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

# Windows has no SIGHUP, and cannot make signals wait.
STOP_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGHUP", "SIGINT", "SIGTERM"))
_CAN_WAIT = hasattr(signal, "pthread_sigmask")


class Stopped(SystemExit):
    """A stop signal arrived: the process ends with 128 and the signal's number, as shells count."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def exit_on_signal() -> None:
    """End the process at once on any later stop signal: there is nothing to clean up."""
    for signum in _unignored():
        signal.signal(signum, _end)


@contextlib.contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise `Stopped` inside, each time a stop signal arrives.

    Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, _raise) for signum in _unignored()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def raise_on_first_sigterm() -> None:
    """Raise `Stopped` on the first SIGTERM from now on, and ignore all other stop signals.

    A terminal's signals reach parent and child: the parent signals the child once, so that no
    second signal interrupts the child's cleanup.
    """
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signum)
            raise Stopped(signum)

    for signum in _unignored():
        signal.signal(signum, stop if signum == signal.SIGTERM else signal.SIG_IGN)


def block_signals() -> None:
    """Make stop signals wait, also in a started process; for good at a process's end."""
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_signals() -> None:
    """Let stop signals through that `block_signals` made wait."""
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def print_stopped(signum: int) -> None:
    """Write the one line of a stopped run."""
    # A closed terminal accepts no line.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
        sys.stderr.flush()


def _unignored() -> list[signal.Signals]:
    """Return the stop signals that are not ignored, as SIGHUP is under nohup."""
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(signum)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    print_stopped(signum)
    os._exit(128 + signum)
