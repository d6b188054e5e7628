"""Small arrays on their way to a device, and the time of work on a device.

A copy from pageable memory to a GPU waits for all work queued before it, so each one within a step
costs the host its lead. A copy from pinned memory is queued like other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specbench.arrays import Array


def to_device(values: Array | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move ``values`` to ``device`` without waiting; on the CPU, share the array's memory.

    A GPU gets a copy, so the host array may be overwritten at once.
    """
    tensor = torch.as_tensor(values)
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fill(buffer: torch.Tensor, values: Array) -> None:
    """Write ``values`` to the start of ``buffer``, without waiting for its device."""
    tensor = torch.from_numpy(values)
    if buffer.device.type == "cuda":
        tensor = tensor.pin_memory()
    buffer[: len(tensor)].copy_(tensor, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all queued work; a CPU never has any."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time ``work``, including the work it queues on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
