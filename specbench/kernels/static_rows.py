"""Rows of a pass of fixed shape: what they see where only the device knows the text's length."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

# Triton comes with CUDA builds of torch. Its interpreter, in tests, runs on a CPU.
TRITON = torch.version.cuda is not None and find_spec("triton") is not None
INTERPRETED = False


def uses_triton(x: torch.Tensor) -> bool:
    """Tell whether `specbench.kernels.row_kernels` compute on ``x``, or torch's own do."""
    here = INTERPRETED or (TRITON and x.is_cuda)
    return here and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def write_rows(cached: torch.Tensor, first: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write ``new [batch, heads, rows, size]`` from the slots ``first [batch]`` on.

    Returns:
        ``cached [batch, heads, cache rows, size]``, all of it.
    """
    slots = first[:, None] + torch.arange(new.shape[2], device=new.device)
    return cached.scatter_(2, slots[:, None, :, None].expand_as(new), new)


@dataclass(slots=True)
class StaticRows:
    """Rows of a pass of fixed shape: only the device knows how many tokens are committed.

    They see all committed tokens and, of the slots behind these, what ``visible`` says; windows
    aside.
    """

    lengths: torch.Tensor  # [batch] committed tokens
    first: torch.Tensor  # [batch] slot of the first row: the number of committed and held tokens
    visible: torch.Tensor  # [batch, rows, slots] bool, of the slots from ``lengths`` on
    row_depths: torch.Tensor  # [batch, rows] positions of the rows behind ``lengths``
    key_depths: torch.Tensor  # [batch, slots] and of those slots
    triton: bool = True  # False: torch attends, on a GPU too
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by window; filled by use

    def mask(self, keys: int, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Make the additive mask ``[batch, 1, rows, keys]``, once a pass; window 0: none."""
        if window not in self.masks:
            numbers = torch.arange(keys, device=self.lengths.device)
            offsets = numbers - self.lengths[:, None]
            index = offsets.clamp(0, self.visible.shape[2] - 1)
            drafted = (offsets >= 0) & (offsets < self.visible.shape[2])
            seen = self.visible.gather(2, index[:, None].expand(-1, self.visible.shape[1], -1))
            seen = (seen & drafted[:, None]) | (offsets < 0)[:, None]
            if window:
                depths = torch.where(drafted, self.key_depths.gather(1, index), offsets)
                seen &= self.row_depths[:, :, None] - depths[:, None] < window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[window] = mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]
        return self.masks[window]
