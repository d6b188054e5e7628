"""Where a run stands: a bar on a terminal, otherwise a line every few cases."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)

_LINES = 20  # at most about this many lines for a whole run that is not on a terminal
_QUIET_S = 60.0  # but never silent for much longer than this


class RunProgress:
    """Counts finished blocks and says how long the rest will take. A context manager.

    Args:
        total: blocks of the run.
        done: blocks that an earlier start finished.
        console: where the bar goes; decides whether there is one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._first = total, done, done
        self._clock = clock
        self._start = self._last_line = clock()
        console = console or Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("cases", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, note: str) -> None:
        """One more block is done; ``note`` says what it was."""
        self._done += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=note)
            return
        now = self._clock()
        every = max(1, self._total // _LINES)
        if self._done % every == 0 or self._done == self._total or now - self._last_line > _QUIET_S:
            self._last_line = now
            elapsed = now - self._start
            left = elapsed / (self._done - self._first) * (self._total - self._done)
            log.info(
                "%d/%d cases, %s gone, about %s left (%s)",
                self._done,
                self._total,
                _minutes(elapsed),
                _minutes(left),
                note,
            )


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
