"""Graphs of the pretended device: operations with the addresses that the capture saw."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.fake_cuda.memory import (
    CAPTURE,
    FREED,
    Block,
    RuleBroken,
    Stream,
    World,
    poison,
    site,
    tensors_of,
    unseen,
)

_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """View the same memory by its address, without keeping it alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    world: World  # of the subclass that stands in for torch's

    def __init__(self, *_: object, **__: object) -> None:
        self.pool: object = None
        self.device = 0
        self._nodes: list[tuple[Any, Any, Any, list[torch.Tensor] | None]] = []
        self._outside: dict[Block, tuple[bool, str]] = {}  # written there, and by which line
        self._inside: dict[Block, torch.Tensor] = {}

    def record(
        self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor], used: dict[Block, bool]
    ) -> None:
        """Add a node; ``used`` are the blocks that it reads or, if True, writes."""

        def address(tensor: torch.Tensor) -> torch.Tensor:
            block = self.world.block(tensor)
            return tensor if block is None or block.graph is self else raw(tensor)

        for block, writes in used.items():
            if block.graph is not self:
                before = self._outside.get(block, (False, ""))[0]
                self._outside[block] = (writes or before, f"{func} at {site()}")
        fills = func.overloadpacket.__name__ not in _UNFILLED
        args, kwargs = tree_map_only(torch.Tensor, address, (args, kwargs))
        new = [out for out in outs if (block := self.world.block(out)) and block not in used]
        for out in new:
            self._inside[self.world.block(out)] = out
        if fills:
            self._nodes.append((func, args, kwargs, None if any(used.values()) else new))

    def replay(self) -> None:
        # These operations were checked when they were captured.
        with unseen(), torch.inference_mode():
            self._replay()

    def _replay(self) -> None:
        world = self.world
        if world.capturing is not None:
            raise RuleBroken(CAPTURE, "a graph is replayed")
        for block, (_, where) in self._outside.items():
            if block.weak.expired():
                raise RuleBroken(FREED, f"a graph uses memory that is no longer there: {where}")
        stream = world.stream(self.device)
        tick = stream.work()
        for block, (writes, _) in self._outside.items():
            world.touch(stream, tick, block, writes=writes)
        self._take_pool(stream, tick)
        world.counts["replays"] += 1
        for func, args, kwargs, outs in self._nodes:
            results = func(*args, **kwargs)
            if outs is not None:
                results = tensors_of(results)
                for out, new in zip(outs, results, strict=True):
                    out.copy_(new)

    def _take_pool(self, stream: Stream, tick: int) -> None:
        """Poison what other graphs of the pool left there: all of them share its memory."""
        world = self.world
        fresh = world.fresh.setdefault(self.pool, set())
        for block in fresh | set(self._inside):
            world.touch(stream, tick, block, writes=True)
            block.fresh = block in self._inside
        for block in fresh - set(self._inside):
            if not block.weak.expired():
                for memory in block.graph.memory(block):
                    poison(memory)
        for tensor in self._inside.values():
            poison(tensor)
        world.fresh[self.pool] = set(self._inside)

    def memory(self, block: Block) -> list[torch.Tensor]:
        return [self._inside[block]] if block in self._inside else []

    def reset(self) -> None:
        self._nodes.clear()


class Capture:
    """In place of ``torch.cuda.graph``."""

    def __init__(
        self, graph: Graph, pool: object = None, stream: Stream | None = None, **_: object
    ):
        self._graph, self._world = graph, graph.world
        self._stream = stream or torch.cuda.Stream()
        graph.pool = pool if pool is not None else object()

    def __enter__(self) -> None:
        world = self._world
        if world.capturing is not None:
            raise RuleBroken(CAPTURE, "another capture begins")
        torch.cuda.synchronize()
        self._inside = torch.cuda.stream(self._stream)
        self._inside.__enter__()
        self._graph.device = self._stream.index
        world.capturing = self._graph

    def __exit__(self, *error: object) -> None:
        world, graph = self._world, self._graph
        world.capturing = None
        self._inside.__exit__(*error)
        for block in graph._inside:
            block.fresh = False  # nothing has run yet
            block.written, block.read = None, {}
        if error[0] is None:
            world.counts["graphs"] += 1
