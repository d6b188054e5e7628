"""Times of one turn, taken at its borders without disturbing it.

A turn is a row of marks, and every time is a difference of two marks::

    begin | prefill | setup | step | step | … | finish | end

On a CPU a mark is one reading of a monotonic clock. On a GPU it is a CUDA event recorded in the
stream: the host does not wait, and the event carries the moment at which the device got there. The
device is synchronised once before ``begin`` and once after ``end``, never in between.

With phases (``measure=phases``) there are marks inside the steps too. Each stretch of time between
two marks then belongs to exactly one phase, so the phases sum to the wall time by construction.
More marks cost time, which is why headline numbers come from a clock without phases.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PREFILL, SETUP, STEP, FINISH, END = "prefill", "setup", "step", "finish", "end"
OTHER = "other"

_FIRST_EVENTS = 4096
_MARKS = 8  # at most, of a step with phases, and of a turn outside its steps


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the garbage collector from scanning objects that exist now and outlive the timing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # the process may live on: a notebook's


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of one turn, in seconds."""

    prefill_s: float = 0.0  # the target's pass over the prompt
    decode_s: float = 0.0  # everything after it
    # The part of ``decode_s`` the drafter spent outside the steps: indexing the prompt and
    # inserting the finished text.
    drafter_setup_s: float = 0.0
    step_s: list[float] = field(default_factory=list)  # one entry per step
    # By phase; None without phases. ``prefill`` and ``setup`` are further phases, and ``other``
    # is the time that no phase claims.
    phase_s: dict[str, float] | None = None

    @property
    def wall_s(self) -> float:
        return self.prefill_s + self.decode_s

    def with_setup(self, seconds: float) -> Timings:
        """Add drafter work done before ``begin``, such as ``reset``."""
        phases = self.phase_s
        if phases is not None:
            phases = {**phases, SETUP: phases.get(SETUP, 0.0) + seconds}
        return replace(
            self,
            decode_s=self.decode_s + seconds,
            drafter_setup_s=self.drafter_setup_s + seconds,
            phase_s=phases,
        )


class Clock:
    """The engine makes these calls in this order; a new ``begin`` drops an abandoned turn."""

    __slots__ = ("_names", "phases")

    def __init__(self, phases: bool = False) -> None:
        self.phases = phases
        self._names: list[str] = []

    def begin(self, steps: int = 0) -> None:
        """Start a turn of ``steps`` at most, after the device has finished all earlier work."""
        self._names = []
        self._start(steps)

    def prefill_done(self) -> None:
        self._mark(PREFILL)

    def setup_done(self) -> None:
        self._mark(SETUP)

    def phase(self, name: str) -> None:
        """End the phase ``name``, begun at the mark before; nothing without phases."""
        if self.phases:
            self._mark(name)

    def step_done(self) -> None:
        self._mark(STEP)

    def finish_begin(self) -> None:
        self._mark(FINISH)

    def end(self) -> Timings:
        """End the turn: wait for the device once.

        Raises:
            RuntimeError: the calls did not come in the order above.
        """
        return _timings(self.laps(), self.phases)

    def laps(self) -> list[tuple[str, float]]:
        """End a group of turns, with marks in any order; return each name with its seconds.

        A stretch bears the name of the mark that ends it. Waits for the device once.
        """
        self._mark(END)
        return list(zip(self._names, self._seconds(), strict=True))

    def _start(self, steps: int) -> None:
        raise NotImplementedError

    def _mark(self, name: str) -> None:
        raise NotImplementedError

    def _seconds(self) -> Sequence[float]:
        """Return the seconds of each stretch that ends at a mark."""
        raise NotImplementedError


class CpuClock(Clock):
    """Marks are readings of the monotonic clock with the highest resolution."""

    __slots__ = ("_times",)

    def __init__(self, phases: bool = False) -> None:
        super().__init__(phases)
        self._times: list[int] = []

    def _start(self, steps: int) -> None:
        self._times = [time.perf_counter_ns()]

    def _mark(self, name: str) -> None:
        self._times.append(time.perf_counter_ns())
        self._names.append(name)

    def _seconds(self) -> Sequence[float]:
        times = self._times
        return [(b - a) * 1e-9 for a, b in itertools.pairwise(times)]


class CudaClock(Clock):
    """Marks are events in the device's stream, taken from a pool that turns share.

    Differences are taken between neighbours only: an event's time is a 32-bit float of
    milliseconds, too coarse for a step when counted from the start of a long turn.
    """

    __slots__ = ("_backend", "_events", "_used")

    def __init__(self, backend: TorchEvents, phases: bool = False) -> None:
        super().__init__(phases)
        self._backend = backend
        self._events = [backend.new_event() for _ in range(_FIRST_EVENTS)]
        self._used = 0

    def _start(self, steps: int) -> None:
        # Thousands that were made within the turn would take a step as long as ten others.
        self._make(_MARKS + steps * (_MARKS if self.phases else 1))
        self._backend.synchronize()
        self._used = 0
        self._record()

    def _mark(self, name: str) -> None:
        self._record()
        self._names.append(name)

    def _record(self) -> None:
        if self._used == len(self._events):
            self._make(2 * len(self._events))
        self._backend.record(self._events[self._used])
        self._used += 1

    def _make(self, n_events: int) -> None:
        missing = n_events - len(self._events)
        self._events.extend(self._backend.new_event() for _ in range(missing))

    def _seconds(self) -> Sequence[float]:
        self._backend.synchronize()
        events = self._events[: self._used]
        elapsed = self._backend.elapsed_s
        return [elapsed(a, b) for a, b in itertools.pairwise(events)]


class TorchEvents:
    """CUDA events of the device's current stream, through torch."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device(device)

    def new_event(self) -> Any:
        """Make a CUDA event with timing and record it once: the driver creates it only then."""
        with self._cuda.device(self._device):
            event = self._cuda.Event(enable_timing=True)
            event.record()
        return event

    def record(self, event: Any) -> None:
        """Record the event after all work launched so far, without waiting."""
        event.record(self._cuda.current_stream(self._device))

    def elapsed_s(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) * 1e-3

    def synchronize(self) -> None:
        self._cuda.synchronize(self._device)


def make_clock(device: str, phases: bool = False) -> Clock:
    """Make the clock for a device: ``cuda`` or ``cuda:N`` by events, others by the host's clock."""
    if str(device).startswith("cuda"):
        return CudaClock(TorchEvents(str(device)), phases)
    return CpuClock(phases)


def _timings(laps: list[tuple[str, float]], phases: bool) -> Timings:
    """Add up the stretches: each belongs to the step, and to the phase, that its last mark ends."""
    names = [name for name, _ in laps]
    if PREFILL not in names:
        raise RuntimeError(f"the clock must be driven begin, prefill_done, …, end, got {names[:4]}")
    prefill = setup = decode = step = 0.0
    steps: list[float] = []
    by_phase = {PREFILL: 0.0, SETUP: 0.0}
    section = PREFILL
    for name, stretch in laps:
        if section == PREFILL:
            prefill += stretch
            phase = PREFILL
        else:
            decode += stretch
            if section == SETUP or name == END:
                setup += stretch
                phase = SETUP
            else:
                step += stretch
                phase = OTHER if name in (STEP, FINISH) else name
        by_phase[phase] = by_phase.get(phase, 0.0) + stretch
        if name == PREFILL:
            section = SETUP
        elif name == SETUP:
            section = STEP
        elif name == STEP:
            steps.append(step)
            step = 0.0
    return Timings(prefill, decode, setup, steps, by_phase if phases else None)
