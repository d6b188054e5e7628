"""What plain decoding is held against: the bytes it must read and the memory's speed.

At batch 1 a one-token pass reads every weight once and computes next to nothing, so the time to
read the weights is a floor (``specbench.results.statistics.roofline`` makes the table's line of
it).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specbench.system.clock import EventBackend, TorchEvents

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # far larger than any cache
_COPIES = 9
_ROUNDS, _ROUND_COPIES = 5, 12  # on CUDA: the best round of so many copies in a row


def streamed_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a one-token pass reads: all but an embedding that only looks up."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel() * embedding.element_size()
    return int(total - looked_up)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy within the device's memory, each byte read and written once.

    On CUDA by events around copies in a row: a copy of a gigabyte ends in half a millisecond, of
    which launching it and waiting for it would be a part on the host's clock. Of a few rounds the
    best counts, which leaves a baseline no better share than it has.
    """
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    on_cuda = device.type == "cuda"
    if on_cuda:
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        size = min(size, (free - torch.cuda.memory_allocated(device)) // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    copy = partial(target.copy_, source)
    seconds = _by_events(copy, TorchEvents(str(device))) if on_cuda else _by_host(copy)
    return 2 * size / seconds


def _by_host(copy: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _by_events(copy: Callable[[], object], events: EventBackend) -> float:
    """Seconds of one copy in the best round; the first copies warm up."""
    first, last = events.new_event(), events.new_event()
    copy()
    best = float("inf")
    for _ in range(_ROUNDS):
        copy()  # the host is then ahead of the device when the first event is recorded
        events.record(first)
        for _ in range(_ROUND_COPIES):
            copy()
        events.record(last)
        events.synchronize()
        best = min(best, events.elapsed_s(first, last) / _ROUND_COPIES)
    return best
