"""SIGINT, SIGTERM and SIGHUP, from the first import on: one line and the right exit code.

Only the standard library is imported, so that a stop while the rest is imported is caught, too.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

# Windows has no SIGHUP, and cannot make signals wait.
STOP_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGHUP", "SIGINT", "SIGTERM"))
_CAN_WAIT = hasattr(signal, "pthread_sigmask")
_AGAIN_S = 0.1  # until a stop that Python swallowed is raised once more

_heard: list[int] = []  # the stop that unwinds this process, once it was raised


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived; ``signum`` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def exit_code(stop: KeyboardInterrupt) -> int:
    """128 and the signal's number, as shells count."""
    return 128 + getattr(stop, "signum", signal.SIGINT)


def end_at_once() -> None:
    """From now on a stop signal ends the process: there is nothing to put in order."""
    _install(_end)


def listen() -> None:
    """From now on a stop signal raises `Interrupted`, and those behind it are passed over.

    So what the first one unwinds is left in order.
    """
    _heard.clear()
    sys.unraisablehook = _swallowed
    _install(_raise_once)


def pass_over() -> None:
    """From now on stop signals do nothing, if `listen` was called before."""
    # Not SIG_IGN: Python prints a traceback where one of them has already arrived.
    _heard.append(0)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """`listen` inside, if this is the main thread (elsewhere nothing changes)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, heard = sys.unraisablehook, [*_heard]
    previous = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    listen()
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        sys.unraisablehook = hook
        _heard[:] = heard


def hold() -> None:
    """Have stop signals wait, also in a process that is started; for good at a process's end."""
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release() -> None:
    """Let stop signals through that `hold` made wait."""
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def say(signum: int) -> None:
    """The one line of a run that was stopped."""
    # A terminal that was closed takes no line.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
        sys.stderr.flush()


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(signum, handler)


def _raise_once(signum: int, frame: FrameType | None) -> None:
    # A terminal's Ctrl-C reaches parent and child, and the parent asks again.
    if not _heard:
        _heard.append(signum)
        raise Interrupted(signum)


def _swallowed(unraisable: Any) -> None:
    """Have a stop raised again that came within ``__del__`` or a weakref's callback."""
    if not isinstance(unraisable.exc_value, Interrupted):
        sys.__unraisablehook__(unraisable)
        return
    # Not here: what is raised in this function is swallowed as well.
    _thread.start_new_thread(_ask_again, (unraisable.exc_value.signum,))


def _ask_again(signum: int) -> None:
    time.sleep(_AGAIN_S)
    with contextlib.suppress(ValueError):
        _heard.remove(signum)  # unless all are passed over by now
    main = threading.main_thread().ident
    if _CAN_WAIT and main is not None:
        signal.pthread_kill(main, signum)  # which wakes it, too
    else:
        signal.raise_signal(signum)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    say(signum)
    os._exit(128 + signum)
