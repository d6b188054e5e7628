"""Small arrays on their way to a device, and how long a device takes.

A copy from ordinary memory to a GPU waits until the GPU has done all that was queued before it, so
each one within a step costs the host what it had ahead. From pinned memory the copy is queued with
the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specbench.arrays import Array


def to_device(values: Array | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on ``device``, without waiting for it; on the CPU an array's own memory.

    On a GPU it is a copy, so an array on the host may be written to at once.
    """
    tensor = torch.as_tensor(values)
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fill(buffer: torch.Tensor, values: Array) -> None:
    """Write ``values`` to the first places of ``buffer``, without waiting for its device."""
    tensor = torch.from_numpy(values)
    if buffer.device.type == "cuda":
        tensor = tensor.pin_memory()
    buffer[: len(tensor)].copy_(tensor, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that was queued; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long ``work`` takes, what it queues on the device included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
