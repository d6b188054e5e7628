"""How near plain decoding comes to the memory's speed: the honesty of a speedup's baseline.

At batch 1 a one-token pass reads every weight once and computes next to nothing, so the time to
read the weights is a floor. A speedup over a baseline far above that floor is partly the
baseline's slowness: compiled engines reach 65-70 % of an A100's bandwidth (gpt-fast's README),
launched kernel by kernel a 7B model reaches a quarter to a third.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # far larger than any cache
SLOW_BASELINE = 0.5  # share of the bandwidth below which a table warns
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


def share(model: Mapping[str, Any], tokens_per_s: float | None) -> float | None:
    """Share of the bandwidth that ``tokens_per_s`` of plain decoding takes.

    Args:
        model: the manifest's part about the model, with ``weight_bytes`` and ``copy_bytes_per_s``.
        tokens_per_s: of ``ar``; None gives None.
    """
    size, speed = model.get("weight_bytes"), model.get("copy_bytes_per_s")
    if not (size and speed and tokens_per_s):
        return None
    return float(size) * tokens_per_s / float(speed)


def note(model: Mapping[str, Any], tokens_per_s: float | None) -> str | None:
    """A line for the table about its baseline, with a warning where that is slow."""
    reached = share(model, tokens_per_s)
    if reached is None:
        return None
    engine = (model.get("passes") or {}).get("engine", "eager")
    text = (
        f"ar ({engine} engine) reads its weights at {reached:.0%} of this machine's copy bandwidth "
        f"({float(model['copy_bytes_per_s']) / 1e9:.0f} GB/s)"
    )
    if reached < SLOW_BASELINE:
        text += (
            f": under {SLOW_BASELINE:.0%}, so a part of each speedup is the baseline's slowness, "
            "which a faster engine would not leave"
        )
    return text + "."
