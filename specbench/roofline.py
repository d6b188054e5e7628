"""What plain decoding is held against: the bytes it must read and the memory's speed.

At batch 1 a one-token pass reads every weight once and computes next to nothing, so the time to
read the weights is a floor (``specbench.statistics.roofline`` makes the table's line of it).
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # far larger than any cache
_COPIES = 9


def streamed_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a one-token pass reads: all but an embedding that only looks up."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel() * embedding.element_size()
    return int(total - looked_up)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy within the device's memory, each byte read and written once."""
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / statistics.median(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
