"""State of the pretended driver: owners of memory, work of streams, copies under way.

Numbers are computed at once, by the CPU. So order is checked by clocks: each stream counts what it
was given, and knows how far it has waited for the others; each block of memory remembers who wrote
and read it last. What has no order between them would be a race on a GPU.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICES = 2
# The rules, by the name that a broken one is reported with.
CAPTURE, PAGEABLE, FREED, POOL = "host in a capture", "pageable copy", "freed memory", "pool memory"
EARLY, PINNED, RACE, APART = "read too early", "pinned memory reused", "missing wait", "two devices"
LIBRARY = "work space of a library"
RULES = (CAPTURE, PAGEABLE, FREED, POOL, EARLY, PINNED, RACE, APART, LIBRARY)


class RuleBroken(RuntimeError):
    """An error that on a GPU is wrong numbers, a crash or a wait; ``rule`` is one of `RULES`."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}, at {site()}")
        self.rule = rule


def site() -> str:
    """Name the project's lines on the stack, the innermost first."""
    lines, frame = [], sys._getframe(1)
    while frame is not None and len(lines) < 2:
        if path := _of_the_project(frame.f_code.co_filename):
            lines.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "?"


@cache
def _of_the_project(file: str) -> str | None:
    """Return a file's path within the project; None for the pretended device's own files."""
    path = Path(file)
    outside = not path.is_relative_to(ROOT) or ".venv" in path.parts
    return None if outside or path.parent == HERE else str(path.relative_to(ROOT))


class Stream:
    """A queue of work; ``clock`` counts its own work and how far it has waited for others."""

    def __init__(self, world: World, device: int) -> None:
        self.world, self.index = world, device
        self.device = torch.device("cuda", device)
        self.clock: dict[Stream, int] = {self: 0}

    def work(self) -> int:
        """Queue one piece of work, after all that the host has waited for."""
        self.world.answer()
        self.follow(self.world.host)
        self.clock[self] += 1
        return self.clock[self]

    def follow(self, clock: dict[Stream, int]) -> None:
        ticks = self.clock
        for stream, tick in clock.items():
            if ticks.get(stream, 0) < tick:
                ticks[stream] = tick

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.clock)

    def wait_event(self, event: Any) -> None:
        self.follow(event.clock or {})

    def synchronize(self) -> None:
        self.world.wait("a stream", self.clock)

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.world.host.get(self, 0) >= self.clock[self]


@dataclass(eq=False)
class Block:
    """A block of a device's memory, or of the host's pinned memory (``device`` None)."""

    weak: StorageWeakRef
    device: int | None
    graph: Any = None  # in whose pool it lies
    fresh: bool = True  # of a pool's: no other replay has been there since
    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)


@dataclass
class PendingCopy:
    """A copy between pinned memory and a device that the host has not waited for."""

    block: Block
    memory: torch.Tensor  # the pinned part
    numbers: torch.Tensor  # upwards as they were when it was queued, downwards as they will be
    up: bool
    stream: Stream
    tick: int


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """Collect the tensors in an operation's arguments or results, also from nested lists."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_of(*value)
        elif isinstance(value, dict):
            tensors += tensors_of(*value.values())
    return tensors


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the pretended device's own operations from the rules."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def poison(tensor: torch.Tensor) -> None:
    """Fill with numbers that cannot pass for results."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(1 if tensor.dtype == torch.bool else -77)


class World:
    """The machine: two devices, their streams and memory, and how often the host waited."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.host: dict[Stream, int] = {}  # how far the host has waited for each stream
        self.coming: list[PendingCopy] = []
        self.capturing: Any = None
        self.counts: Counter[str] = Counter()
        self.waits: list[str] = []
        self.waiting_is_an_error = False
        self.lost: str | None = None  # every call's error, once the context is lost
        self.local = threading.local()
        self.defaults = [Stream(self, index) for index in range(DEVICES)]
        self.streams = list(self.defaults)
        self.fresh: dict[object, set[Block]] = {}  # by pool
        # By stream, for products: the graph in whose pool it lies, or None.
        self.work_space: dict[Stream, Any] = {}

    # -- the present thread ------------------------------------------------------------------

    @property
    def current(self) -> int:
        return getattr(self.local, "device", 0)

    def stream(self, device: int) -> Stream:
        streams: dict[int, Stream] = vars(self.local).setdefault("streams", {})
        return streams.get(device, self.defaults[device])

    # -- memory ------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor) -> Block | None:
        return self.blocks.get(tensor.untyped_storage()._cdata)

    def register(self, tensor: torch.Tensor, device: int | None) -> Block:
        """Register the memory of ``tensor`` as a device's, or as pinned."""
        if len(self.blocks) > 4096 and self.counts["blocks"] % 1024 == 0:
            self.blocks = {key: b for key, b in self.blocks.items() if not b.weak.expired()}
        self.counts["blocks"] += 1
        storage = tensor.untyped_storage()
        block = Block(StorageWeakRef(storage), device, self.capturing)
        self.blocks[storage._cdata] = block
        return block

    def touch(self, stream: Stream, tick: int, block: Block, *, writes: bool) -> None:
        """Work ``tick`` of ``stream`` reads or writes ``block``."""
        last, clock = block.written, stream.clock
        if last is not None and clock.get(last[0], 0) < last[1]:
            raise RuleBroken(RACE, "memory is used that another stream may still be writing")
        if writes:
            if any(clock.get(other, 0) < seen for other, seen in block.read.items()):
                raise RuleBroken(RACE, "memory is written that another stream may still be reading")
            block.written, block.read = (stream, tick), {}
        else:
            block.read[stream] = tick
        if block.graph is not None and not writes and not block.fresh:
            raise RuleBroken(POOL, "memory of a graph's pool is read that another replay may hold")

    def multiply(self, stream: Stream) -> None:
        """Note a product, whose library makes its work space once per stream."""
        if self.work_space.setdefault(stream, self.capturing) is not self.capturing:
            raise RuleBroken(LIBRARY, "a graph's products share theirs with what is outside")

    # -- the host ----------------------------------------------------------------------------

    def answer(self) -> None:
        """Raise if the device is lost."""
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def wait(self, event: str, clock: dict[Stream, int]) -> None:
        """Let the host wait until ``clock`` is reached."""
        self.answer()
        if self.capturing is not None:
            raise RuleBroken(CAPTURE, f"the host waits for {event}")
        if self.waiting_is_an_error:
            raise RuntimeError(f"called a synchronizing CUDA operation: {event}")
        self.counts["waits"] += 1
        self.waits.append(f"{event} at {site()}")
        for stream, tick in clock.items():
            self.host[stream] = max(self.host.get(stream, 0), tick)
        with unseen(), torch.inference_mode():
            self.arrive()

    def arrive(self) -> None:
        """Finish copies that are known to be done: numbers appear at their destination."""
        still = []
        for copy in self.coming:
            if self.host.get(copy.stream, 0) < copy.tick:
                still.append(copy)
            elif not copy.up:
                copy.memory.copy_(copy.numbers)
            elif not torch.equal(copy.memory, copy.numbers):
                self.coming = []
                raise RuleBroken(PINNED, "pinned memory was written while a copy read it")
        self.coming = still

    def send(self, memory: torch.Tensor, numbers: torch.Tensor, *, up: bool, device: int) -> None:
        """Queue a copy out of pinned ``memory`` or into it."""
        block = self.block(memory)
        assert block is not None
        stream = self.stream(device)
        if not up:
            with unseen():
                poison(memory)
        self.coming.append(PendingCopy(block, memory, numbers, up, stream, stream.clock[stream]))

    def host_uses(self, tensor: torch.Tensor) -> None:
        """Check that the host may read and write the memory of ``tensor``."""
        block = self.block(tensor)
        for copy in self.coming if block is not None else ():
            if copy.block is block:
                if copy.up:
                    raise RuleBroken(PINNED, "pinned memory is opened while a copy reads it")
                raise RuleBroken(EARLY, "a result is read before its copy is waited for")
