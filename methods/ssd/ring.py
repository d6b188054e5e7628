"""Texts of finished requests in a circular buffer, with a suffix array that follows behind.

The buffer takes every request at once; the array over it is rebuilt now and then, in a thread, and
replaced in one assignment. So look-ups never wait, and see the buffer as it was some time ago.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from specbench.arrays import Array
from specbench.index.suffix_array import SEPARATOR, build_suffix_array

log = logging.getLogger(__name__)


class TokenRing:
    """The last ``capacity`` tokens of all that was appended, separators included.

    The memory is taken as it is filled.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0
        self._buffer = np.empty(capacity, dtype=np.int32)

    def append(self, tokens: Array) -> None:
        """Write a text and a separator over the oldest tokens; of a longer text, the end."""
        text = np.append(np.asarray(tokens, dtype=np.int32), np.int32(SEPARATOR))[-self.capacity :]
        begin = self.written % self.capacity
        head = min(len(text), self.capacity - begin)
        self._buffer[begin : begin + head] = text[:head]
        self._buffer[: len(text) - head] = text[head:]
        self.written += len(text)

    def snapshot(self) -> Array:
        """A copy of what is stored, the oldest token first, so the seam is nowhere inside."""
        if self.written <= self.capacity:
            return self._buffer[: self.written].copy()
        begin = self.written % self.capacity
        return np.concatenate((self._buffer[begin:], self._buffer[:begin]))

    def restore(self, tokens: Array) -> None:
        self._buffer[: len(tokens)] = tokens
        self.written = len(tokens)


@dataclass(frozen=True, slots=True)
class Staleness:
    """What the suffix array does not know yet.

    Attributes:
        requests: finished ones that are not in it.
        tokens: written since it was begun.
        seconds: since it was begun, 0 where nothing is missing.
    """

    requests: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BuiltArray:
    """A suffix array and what it was built of.

    Attributes:
        tokens: ``[n]`` int32, the oldest first.
        suffixes: ``[n]`` int32.
        requests: requests appended before.
        written: tokens appended before.
        begun: time at which the tokens were copied.
    """

    tokens: Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    suffixes: Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    requests: int = 0
    written: int = 0
    begun: float = 0.0


class RingIndex:
    """A ring of requests and its suffix array.

    Args:
        capacity: tokens of the ring.
        background: rebuild in a thread; False rebuilds where the request is added, which makes
            every draft reproducible and costs decoding time.
        every_requests: rebuild when so many finished requests are missing; None for never.
        every_seconds: rebuild when the array is so old and something is missing, which is looked
            at when a request begins or ends; None for never.

    Attributes:
        current: the array in use.
        failures: rebuilds that failed.
    """

    def __init__(
        self,
        capacity: int,
        *,
        background: bool = True,
        every_requests: int | None = 1,
        every_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        build: Callable[[Array], Array] = build_suffix_array,
    ) -> None:
        self.current = BuiltArray()
        self.failures = 0
        self._ring = TokenRing(capacity)
        self._every_requests = every_requests
        self._every_seconds = every_seconds
        self._clock = clock
        self._build = build
        self._requests = 0
        self._attempt = (0, clock())  # requests and time of the last rebuild, failed or not
        self._epoch = 0  # raised by `clear`, so that a rebuild under way is thrown away
        self._start = BuiltArray()
        self._lock = threading.Lock()
        self._background = background
        self._job: threading.Thread | None = None

    def __len__(self) -> int:
        """Tokens stored, separators included."""
        return min(self._ring.written, self._ring.capacity)

    @property
    def staleness(self) -> Staleness:
        built = self.current
        missing = self._requests - built.requests
        seconds = self._clock() - built.begun if missing else 0.0
        return Staleness(missing, self._ring.written - built.written, seconds)

    def add(self, tokens: Array) -> None:
        """Store a finished request's tokens and rebuild the array if it is time."""
        with self._lock:
            self._ring.append(tokens)
            self._requests += 1
        self.refresh()

    def start_with(self, texts: Iterable[Array]) -> None:
        """Store texts and make them what `clear` goes back to; the array is built here."""
        with self._lock:
            for tokens in texts:
                self._ring.append(tokens)
                self._requests += 1
        self._rebuild()
        self._start = self.current

    def refresh(self) -> None:
        """Rebuild the array if it is time: here, or by waking the thread."""
        if not self._due():
            return
        if not self._background:
            self._rebuild()
        elif self._job is None or not self._job.is_alive():
            # A thread for each rebuild, which ends with it. The sorting opens an OpenMP team, which
            # lives as long as its thread, and OpenMP lets the threads of all teams sleep while they
            # are more than the cores: every pass of every label was 1.5 times slower.
            self._job = threading.Thread(target=self._rebuild_until_fresh, name="suffix-array")
            self._job.start()

    def wait(self) -> None:
        if self._job is not None:
            self._job.join()

    def clear(self) -> None:
        with self._lock:
            self._epoch += 1
            self._ring.restore(self._start.tokens)
            self._requests = self._start.requests
            self.current = replace(self._start, written=self._ring.written, begun=self._clock())
            self._attempt = (self._requests, self.current.begun)

    def _due(self) -> bool:
        requests, begun = self._attempt
        missing = self._requests - requests
        if missing <= 0:
            return False
        by_requests = self._every_requests is not None and missing >= self._every_requests
        age = self._clock() - begun
        return by_requests or (self._every_seconds is not None and age >= self._every_seconds)

    def _rebuild_until_fresh(self) -> None:
        while self._due():
            self._rebuild()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        log.warning(
            "rebuilding the suffix array over %d tokens failed (%s: %s); drafts go on with the "
            "array of %d tokens",
            len(self),
            type(error).__name__,
            error,
            len(self.current.tokens),
        )

    def _rebuild(self) -> None:
        try:
            with self._lock:
                requests, written, epoch = self._requests, self._ring.written, self._epoch
                begun = self._clock()
                self._attempt = (requests, begun)
                tokens = self._ring.snapshot()
            suffixes = self._build(tokens)
        except Exception as error:  # whatever it is, drafting goes on with the older array
            self._failed(error)
            return
        with self._lock:
            if epoch == self._epoch:
                self.current = BuiltArray(tokens, suffixes, requests, written, begun)
