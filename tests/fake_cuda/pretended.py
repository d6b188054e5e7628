"""``torch.cuda`` as this project uses it, on a machine without a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.fake_cuda.device import DeviceMoves, Kernels
from tests.fake_cuda.graphs import Capture, Graph
from tests.fake_cuda.memory import APART, CAPTURE, DEVICES, EARLY, RuleBroken, Stream, World, unseen

MEMORY = 80 * 2**30


class _Event:
    world: World

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.timing = enable_timing
        self.clock: dict[Stream, int] | None = None
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        world = self.world
        if world.capturing is not None:
            raise RuleBroken(CAPTURE, "an event is recorded")
        stream = stream or world.stream(world.current)
        if self._stream is not None and self._stream.index != stream.index:
            raise RuleBroken(APART, "an event of one device is recorded on the other")
        stream.work()
        self._stream, self.clock, self._at = stream, dict(stream.clock), time.perf_counter()

    def synchronize(self) -> None:
        if self.clock is not None:
            self.world.wait("an event", self.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.world.stream(self.world.current)).wait_event(self)

    def query(self) -> bool:
        host = self.world.host
        return self.clock is None or host.get(self._stream, 0) >= self.clock[self._stream]

    def elapsed_time(self, later: _Event) -> float:
        if not (self.timing and later.timing and self.clock and later.clock):
            raise RuntimeError("both events must be recorded and made with enable_timing")
        if not (self.query() and later.query()):
            raise RuleBroken(EARLY, "the time of an event is read before it is waited for")
        return max(later._at - self._at, 1e-7) * 1e3


@contextmanager
def pretended_cuda(free: int = MEMORY) -> Iterator[World]:
    """Two GPUs with ``free`` bytes each; gives what they know. The rules hold within it."""
    world = World()

    def number(device: Any) -> int:
        if device is None:
            return world.current
        index = device if isinstance(device, int) else torch.device(device).index
        return world.current if index is None else index

    def new_stream(device: Any = None, **_: object) -> Stream:
        stream = Stream(world, number(device))
        world.streams.append(stream)
        return stream

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before, world.local.device = world.current, number(device)
        try:
            yield
        finally:
            world.local.device = before

    @contextmanager
    def on_stream(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = world.stream(stream.index)
        with on_device(stream.index):
            world.local.streams[stream.index] = stream
            try:
                yield
            finally:
                world.local.streams[stream.index] = before

    def wait_for_all(device: Any = None) -> None:
        index = number(device)
        clock = {s: s.clock[s] for s in world.streams if s.index == index}
        world.wait("a device", clock)

    def properties(device: Any = None) -> SimpleNamespace:
        uuid = f"00000000-0000-0000-0000-00000000000{number(device)}"
        return SimpleNamespace(
            name="Pretended",
            total_memory=MEMORY,
            major=9,
            minor=0,
            multi_processor_count=132,
            uuid=uuid,
        )

    def error_on_wait(mode: Any) -> None:
        world.waiting_is_an_error = mode in ("error", 2)

    nothing = mock.Mock(return_value=None)
    replaced = {
        **dict.fromkeys(
            ("init", "_lazy_init", "empty_cache", "manual_seed_all", "set_rng_state"), nothing
        ),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: world.current,
        "set_device": lambda d: setattr(world.local, "device", number(d)),
        "device": on_device,
        "stream": on_stream,
        "Stream": new_stream,
        "Event": type("Event", (_Event,), {"world": world}),
        "CUDAGraph": type("CUDAGraph", (Graph,), {"world": world}),
        "graph": Capture,
        "graph_pool_handle": object,
        "current_stream": lambda d=None: world.stream(number(d)),
        "default_stream": lambda d=None: world.defaults[number(d)],
        "synchronize": wait_for_all,
        "is_current_stream_capturing": lambda: world.capturing is not None,
        "set_sync_debug_mode": error_on_wait,
        "mem_get_info": lambda d=None: (free, MEMORY),
        "memory_allocated": lambda d=None: 0,
        "memory_reserved": lambda d=None: 0,
        "max_memory_allocated": lambda d=None: 0,
        "get_device_properties": properties,
        "get_device_name": lambda d=None: "Pretended",
        "get_device_capability": lambda d=None: (9, 0),
        "get_rng_state": lambda d=None: torch.zeros(1),
        "is_bf16_supported": lambda *_: True,
    }
    run = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with Kernels(world), DeviceMoves(world):  # torch's modes are a thread's own
            run(thread)

    generator = torch.Generator
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        clear = ("_cuda_clearCublasWorkspaces", world.work_space.clear)
        stack.enter_context(mock.patch.object(torch._C, *clear, create=True))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_there))
        stack.enter_context(mock.patch.object(torch, "Generator", lambda device="cpu": generator()))
        stack.enter_context(Kernels(world))
        stack.enter_context(DeviceMoves(world))
        yield world
        for stream in world.streams:
            world.host[stream] = stream.clock[stream]
        with unseen(), torch.inference_mode():
            world.arrive()
