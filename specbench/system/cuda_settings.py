"""Torch's settings on CUDA: set once, equal for everything that is compared.

- cuDNN's attention is off. On Hopper torch prefers it (``sdp_utils.cpp``), and it makes a plan for
  each new shape, which takes some 30 ms: methods, whose rows and keys vary, would pay it at nearly
  every step, and plain decoding seldom. FlashAttention and the memory-efficient kernel plan
  nothing.
- Partial sums of half-precision products stay in float32. Products of few rows and of many are
  split differently, so sums rounded to half precision would differ by the number of rows.
- Float32 products are float32: TF32 is off, whatever the machine's environment prefers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from specbench.system.hardware import CudaSettings

_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_OFF = (*_REDUCTIONS, "allow_tf32", "allow_fp16_accumulation")


def fix() -> None:
    """Set them for this process, all its threads and devices, also for transformers' loops."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    for name in _OFF:
        setattr(torch.backends.cuda.matmul, name, False)


@contextmanager
def restored_on_exit() -> Iterator[None]:
    """Restore on exit the settings that `fix` changes within, for a process that goes on."""
    import torch

    matmul, attention = torch.backends.cuda.matmul, torch.backends.cuda.cudnn_sdp_enabled()
    before = {name: getattr(matmul, name) for name in _OFF}
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attention)
        for name, value in before.items():
            setattr(matmul, name, value)


def in_force() -> CudaSettings:
    """Read torch's current settings for the manifest; empty where no CUDA device computes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    cuda = torch.backends.cuda
    return {
        "cudnn_attention": cuda.cudnn_sdp_enabled(),
        "flash_attention": cuda.flash_sdp_enabled(),
        "efficient_attention": cuda.mem_efficient_sdp_enabled(),
        **{name: getattr(cuda.matmul, name) for name in _REDUCTIONS},
        "allow_tf32": cuda.matmul.allow_tf32,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
