"""What a build of minutes or hours shows: how far it is, and how long the rest will take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Progress: TypeAlias = Callable[[str, int, int], None]

# Lines come often at first, so that a user soon knows how long the build takes.
_OFTEN_S, _SELDOM_S = 5.0, 30.0

log = logging.getLogger(__name__)


def silent(what: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


@contextmanager
def shown_progress(
    console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Progress]:
    """A progress callback: a bar on a terminal, a line now and then elsewhere.

    Both say how long the rest will take by the pace of the last half minute.

    Args:
        console: where the bar goes, and what decides whether there is one; None for stderr.
        clock: seconds, monotonic.
    """
    from rich import progress as bars
    from rich.console import Console

    console = console or Console(stderr=True)
    bar = bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        get_time=clock,
    )
    start = last = clock()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        task = bar.tasks[-1] if bar.tasks else None
        if task is None or task.description != what or done < task.completed:
            # Each kind of work has a pace, and what an earlier start did took no time now.
            if task is not None:
                bar.remove_task(task.id)
            bar.add_task(what, total=total or None, completed=done)
        else:
            bar.update(task.id, completed=done, total=total or None)
        now = clock()
        every = _OFTEN_S if now - start < 2 * _SELDOM_S else _SELDOM_S
        if not console.is_terminal and now - last >= every:
            last = now
            log.warning("%s", line(what, done, total, bar.tasks[-1].time_remaining))

    with bar if console.is_terminal else nullcontext():
        yield report


def line(what: str, done: int, total: int, left_s: float | None) -> str:
    """How far a build is, in words; the time left where it is known."""
    if not total:
        return f"{what}: {done:,}" if done else what
    left = "" if left_s is None else f", about {int(left_s) // 60}:{int(left_s) % 60:02d} left"
    return f"{what}: {done:,} of {total:,}{left}"
