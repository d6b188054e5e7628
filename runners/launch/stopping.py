"""SIGINT, SIGTERM and SIGHUP, from the first import on: one line and the right exit code.

Only the standard library is imported, so that a stop while the rest is imported is caught, too.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], None]

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


def unwind_once() -> None:
    """From now on a stop signal raises `Interrupted`, and those behind it are passed over."""
    _heard.clear()
    _install(_raise_once)
    sys.unraisablehook = functools.partial(_swallowed, sys.unraisablehook)


def pass_over() -> None:
    """From now on stop signals do nothing."""
    # Not SIG_IGN: Python prints a traceback where one of them has already arrived.
    _install(_nothing)


@contextlib.contextmanager
def unwinding(*, again: bool = False) -> Iterator[None]:
    """Inside, a stop signal raises `Interrupted` (in the main thread; elsewhere nothing changes).

    Args:
        again: a second one raises, too; else it is passed over, and what the first one unwinds is
            left in order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, heard = sys.unraisablehook, [*_heard]
    sys.unraisablehook = functools.partial(_swallowed, hook)
    _heard.clear()
    previous = _install(_raise if again else _raise_once)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        sys.unraisablehook = hook
        _heard[:] = heard


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, stop signals wait; a process that is started inherits that, see `release`."""
    hold()
    try:
        yield
    finally:
        release()


def hold() -> None:
    """Have stop signals wait, for good at a process's end: there Python drops its handlers."""
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release() -> None:
    """Let stop signals through that `held_back` made wait."""
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def say(signum: int) -> None:
    """The one line of a run that was stopped."""
    # A terminal that was closed takes no line.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
        sys.stderr.flush()


def _install(handler: Handler) -> dict[signal.Signals, Any]:
    """The handlers that were there; under nohup, SIGHUP is ignored, and stays so."""
    heard = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in heard}


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _raise_once(signum: int, frame: FrameType | None) -> None:
    # A terminal's Ctrl-C reaches parent and child, and the parent asks again.
    if not _heard:
        _heard.append(signum)
        raise Interrupted(signum)


def _swallowed(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Have a stop raised again that came within ``__del__`` or a weakref's callback."""
    stop = unraisable.exc_value
    if not isinstance(stop, Interrupted):
        hook(unraisable)
        return
    # Not here: what is raised in this function is swallowed as well.
    _thread.start_new_thread(_ask_again, (stop.signum,))


def _ask_again(signum: int) -> None:
    time.sleep(_AGAIN_S)
    _heard.clear()
    main = threading.main_thread().ident
    if _CAN_WAIT and main is not None:
        signal.pthread_kill(main, signum)  # which wakes it, too
    else:
        signal.raise_signal(signum)


def _nothing(signum: int, frame: FrameType | None) -> None:
    pass


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    say(signum)
    os._exit(128 + signum)
