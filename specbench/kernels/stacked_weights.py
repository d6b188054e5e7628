"""Weights of linears that read the same input, as parts of one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``parts`` below one another; they become views of the result, so that it takes no memory."""
    stacked = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = stacked[start : start + len(part)]
        start += len(part)
    return stacked
