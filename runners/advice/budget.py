"""Minutes: what is done with them, and what they do not suffice for."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

FEWEST_PROMPTS, MOST_PROMPTS = 6, 48  # half of them choose, half confirm
_MOST_LIVE = 0.6  # of the minutes, for what is run behind the search
_PREDICT = 0.05  # of the minutes, to replay the best settings on the other half
_TURNS_PER_PROMPT = 4.0  # turns of plain decoding that a prompt costs in all: recorded, confirmed
_GRACE = 0.1  # of the minutes, by which the last step may exceed them
_ONE_TRIAL_S = 10.0  # of a setting of a slow method
START_S = 20.0  # to start a process and load a small model


class Budget:
    """Counts the minutes down and says what is being done.

    Args:
        minutes: for everything.
        clock: seconds, monotonic.
        console: where lines go.
    """

    def __init__(
        self,
        minutes: float,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self.minutes = minutes
        self._clock, self._start = clock, clock()
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._last = -1e9

    @property
    def left_s(self) -> float:
        return 60 * self.minutes - (self._clock() - self._start)

    def say(self, text: str) -> None:
        """A line with the time left."""
        self._last = self._clock()
        left = max(0, round(self.left_s))
        self._console.print(
            f"[{left // 60}:{left % 60:02d} left] {text}", markup=False, highlight=False
        )

    def say_now_and_then(self, text: str, every_s: float = 5.0) -> None:
        if self._clock() - self._last >= every_s:
            self.say(text)

    def prompts(self, available: int, turn_s: float) -> int:
        """How many prompts are worth the minutes, of those that there are."""
        for_prompts = 0.5 * max(0.0, self.left_s - 2 * START_S)
        affordable = int(for_prompts / (_TURNS_PER_PROMPT * max(turn_s, 1e-3)))
        return min(available, max(FEWEST_PROMPTS, min(MOST_PROMPTS, affordable)))

    def keep_for_live(self, confirm_s: float, live_s: float) -> float:
        """Seconds that the search leaves: to confirm, to try others live where that fits too."""
        confirm = confirm_s + START_S + _PREDICT * 60 * self.minutes
        both = confirm + live_s + START_S
        kept = both if both <= _MOST_LIVE * 60 * self.minutes else confirm
        return kept + _ONE_TRIAL_S  # which was begun before the search ends

    def affords(self, seconds: float, last: bool = False) -> bool:
        """Whether a live run of so many seconds, and its start, still fits.

        The last one, which decides, may take a tenth of the minutes more.
        """
        more = _GRACE * 60 * self.minutes if last else 0.0
        return self.left_s + more >= seconds + START_S
