"""How weights lie in memory: values that a shorter form holds, and pages of a mapped file.

A parameter stays float32, and transformers computes with it as ever. A note on it has the
same values in fewer bytes, and panels hold these: a pass of few rows takes as long as its
weights take to be read. A copy of a parameter has no note, and is packed as float32.

A checkpoint's tensors are pages of its file, which the system reads on access. Unchanged pages
can be released once a copy in another order is read instead: a later access reads them again from
the file, or from what the system keeps of it.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbench.kernels.panel_kernels import Q8_0, QUANTS

_NOTE = "specbench_short_form"
_MAPS = Path("/proc/self/smaps")
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+p \S+ \S+ [1-9]\d*\s+(/.*)$")
_DONT_NEED = 4  # <sys/mman.h>

Regions = list[tuple[int, int]]  # first address, and the one after the last


def note_form(weight: torch.Tensor, blocks: torch.Tensor) -> None:
    """Note the GGUF blocks, see ``panel_kernels.pack``, that hold the values of ``weight``."""
    setattr(weight, _NOTE, blocks)


def shortest(weight: torch.Tensor) -> torch.Tensor:
    """Get the blocks that were noted for ``weight``, else its values as they are."""
    blocks: torch.Tensor | None = getattr(weight, _NOTE, None)
    return weight.detach() if blocks is None else blocks


def is_quantised(model: nn.Module) -> bool:
    """Say whether some products read other tensors than a plain matrix of floats."""
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    return method is not None or not all(
        type(weight.data) is torch.Tensor and weight.is_floating_point() and weight.itemsize > 1
        for weight in model.parameters()
    )


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the plain tensors that a tensor of a subclass wraps; itself if it is plain."""
    wrapped: Any = getattr(tensor, "__tensor_flatten__", None)
    if wrapped is None:
        return [tensor]
    return [part for name in wrapped()[0] for part in stored_parts(getattr(tensor, name))]


def stored_bytes(model: nn.Module) -> int:
    """Count the bytes of all parameters and buffers, packed ones included; each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = [part.untyped_storage() for tensor in tensors for part in stored_parts(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def short_bytes(weight: torch.Tensor) -> int:
    """Count the bytes of `shortest`."""
    return shortest(weight).nbytes


@torch.no_grad()
def round_to(module: nn.Module, form: str) -> None:
    """Round the float32 linears of ``module`` on a CPU to ``q8_0``, and note their blocks.

    Other forms, and linears whose inputs are no whole blocks, change nothing.
    """
    if form != Q8_0.name.lower():
        return
    for linear in module.modules():
        if type(linear) is not nn.Linear or linear.in_features % QUANTS:
            continue
        weight = linear.weight
        if weight.is_cpu and weight.dtype == torch.float32 and not hasattr(weight, _NOTE):
            blocks, values = q8_0(weight)
            weight.copy_(values)
            note_form(weight, blocks)


def q8_0(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert ``weight [out, in]`` to GGUF's Q8_0 ``[out, in / 32, 34]``, and its values.

    A block has the half of a scale, then 32 signed bytes.
    """
    numbers = weight.detach().float().unflatten(1, (-1, QUANTS))
    # A half's largest number is the limit: weights beyond 8 million come out smaller.
    scale = (numbers.abs().amax(-1, keepdim=True) / 127).clamp(max=65504).half()
    factor = scale.float()
    quants = (numbers / factor.where(factor > 0, 1.0)).round().clamp(-127, 127)
    blocks = torch.cat([scale.view(torch.uint8), quants.to(torch.int8).view(torch.uint8)], -1)
    return blocks, (quants * factor).flatten(1)


def unchanged_regions() -> Regions:
    """List private mappings of files without a written page; none if the system tells nothing."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    regions, region = [], None
    for line in lines:
        if matched := _REGION.match(line):
            region = int(matched[1], 16), int(matched[2], 16)
        elif re.match(r"^[0-9a-f]+-", line):
            region = None
        elif region is not None and line.split() == ["Anonymous:", "0", "kB"]:
            regions.append(region)
    return regions


def give_back(weight: torch.Tensor, regions: Regions) -> bool:
    """Release the pages of ``weight`` if they lie in ``regions``; return True if they do."""
    begin = weight.data_ptr()
    end = begin + weight.nbytes
    if not weight.is_contiguous() or not any(a <= begin and end <= b for a, b in regions):
        return False
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        size = ctypes.c_size_t(last - first)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, _DONT_NEED)
    return True
