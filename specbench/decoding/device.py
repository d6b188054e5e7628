"""Small arrays on their way to a device.

A copy from ordinary memory to a GPU waits until the GPU has done all that was queued before it, so
each one within a step costs the host what it had ahead. From pinned memory the copy is queued with
the rest.
"""

from __future__ import annotations

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
