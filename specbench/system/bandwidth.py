"""A floor for plain decoding: the bytes it must read and the memory's speed.

At batch 1 a one-token pass reads every weight once and computes next to nothing, so the time to
read the weights is a floor (``specbench.results.statistics.roofline`` makes the table's line of
it).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specbench.kernels import panel_kernels
from specbench.kernels.compiled_pass import packed_memory
from specbench.kernels.panel_kernels import WIDTH, panel_gemm
from specbench.kernels.prefetch import MEASURE_BYTES
from specbench.kernels.weight_forms import is_quantised, short_bytes, stored_bytes
from specbench.system.clock import TorchEvents

_ROUNDS, _ROUND_CALLS = 5, 12  # on CUDA: the best round of so many reads in a row
_READ_BYTES = (1 << 20, 1 << 30)  # at least and at most
_READS = 8  # on a CPU at a time; the first one warms up
_READS_BETWEEN = 2
_COLUMNS = 4096
_ENOUGH = 0.8  # of the bytes that are to be read


def streamed_bytes(model: PreTrainedModel) -> int:
    """Count the bytes of weights that a one-token pass reads, without a lookup-only embedding."""
    packed = is_quantised(model)
    total = stored_bytes(model) if packed else sum(short_bytes(p) for p in model.parameters())
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else short_bytes(embedding)
    return int(total - looked_up)


class FastestRead:
    """The fastest read of a device's memory so far: no pass over the weights can beat it.

    Each read is a product with one row, as a one-token pass is made of, over as many bytes as the
    weights have (a gigabyte at most), so that caches help both alike. A copy would not do: on
    CPUs it is slower than what it counts, reading and writing, and a plain sum is slower, too.
    On a CPU packed weights are read where they lie, where there are enough: another buffer of their
    size would take a third of a run's memory, and longer to fill than to read.

    Args:
        device: whose memory is read.
        weight_bytes: read by a one-token pass, from `streamed_bytes`.
        bytes_per_s: of an earlier start of the run; 0 without one.
        model: whose packed weights may be read.
    """

    def __init__(
        self,
        device: torch.device,
        weight_bytes: int,
        bytes_per_s: float | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        self._device = device
        least, most = _READ_BYTES
        self._size = min(max(weight_bytes, least), most)
        self._model = model
        self._host_read: tuple[Callable[[], object], int] | None = None
        self.bytes_per_s = bytes_per_s or 0.0

    @torch.inference_mode()
    def measure(self) -> None:
        """Read a few times, at a run's start and end."""
        if self._device.type != "cuda":
            self._read_host(_READS)
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        rows = min(self._size, free // 4) // (4 * _COLUMNS)
        weight = torch.ones(rows, _COLUMNS, device=self._device)
        row = torch.ones(_COLUMNS, device=self._device)
        for read in (partial(torch.mv, weight, row), weight.sum):
            self._note(_by_events(read, TorchEvents(str(self._device))), 4 * weight.numel())

    @torch.inference_mode()
    def measure_between(self) -> None:
        """Read between cases, on a CPU alone: others use its memory too, and moments are quick."""
        if self._device.type != "cuda":
            self._read_host(_READS_BETWEEN)

    def _read_host(self, times: int) -> None:
        # A buffer is kept: filling it takes several times as long as reading it.
        self._host_read = self._host_read or _host_read(self._size, self._model)
        read, size = self._host_read
        for _ in range(times):
            start = time.perf_counter()
            read()
            self._note(time.perf_counter() - start, size)

    def _note(self, seconds: float, size: int) -> None:
        self.bytes_per_s = max(self.bytes_per_s, size / seconds)


def _host_read(size: int, model: PreTrainedModel | None = None) -> tuple[Callable[[], object], int]:
    """Make a product that reads ``size`` bytes (whole rows) by the fastest kernel there is.

    Reads from caches use the plain one: kernels differ at the memory, and loading one takes time.
    With a ``model`` that has as much in panels, these are read. Also returns the bytes read.
    """
    from_memory = size >= MEASURE_BYTES
    if from_memory and model is not None:
        panels = [_as_panels(memory) for memory in packed_memory(model)]
        if (held := sum(part.nbytes for part in panels)) >= _ENOUGH * size:
            inputs = torch.ones(1, _COLUMNS)
            return lambda: [panel_gemm(inputs, part, 1) for part in panels], held
    row = torch.ones(1, _COLUMNS)
    # One number seen as a matrix, so that only what is read takes memory.
    weight = torch.ones(1).expand(size // (4 * _COLUMNS), _COLUMNS)
    if from_memory and panel_kernels.available():
        return partial(panel_gemm, row, panel_kernels.pack(weight), len(weight)), size
    return partial(torch.nn.functional.linear, row, weight.contiguous()), size


def _as_panels(memory: torch.Tensor) -> torch.Tensor:
    """View ``memory [n]``, without its last numbers, as panels of ``_COLUMNS`` inputs."""
    count = memory.numel() // (_COLUMNS * WIDTH)
    return memory[: count * _COLUMNS * WIDTH].view(count, _COLUMNS, WIDTH)


def _by_events(call: Callable[[], object], events: TorchEvents) -> float:
    """Time one call in the best round, in seconds; the first calls warm up."""
    first, last = events.new_event(), events.new_event()
    call()
    best = float("inf")
    for _ in range(_ROUNDS):
        call()  # the host is then ahead of the device when the first event is recorded
        events.record(first)
        for _ in range(_ROUND_CALLS):
            call()
        events.record(last)
        events.synchronize()
        best = min(best, events.elapsed_s(first, last) / _ROUND_CALLS)
    return best
