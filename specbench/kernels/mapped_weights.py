"""Weights that lie in a mapped file leave memory once a copy in another order is read instead.

A checkpoint's tensors are pages of its file, which the system reads when somebody looks. What
nobody has changed can be given back: whoever looks again gets it from the file, or from what the
system keeps of it.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import torch

_MAPS = Path("/proc/self/smaps")
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+p \S+ \S+ [1-9]\d*\s+(/.*)$")
_DONT_NEED = 4  # <sys/mman.h>

Regions = list[tuple[int, int]]  # first address, and the one behind the last


def unchanged_regions() -> Regions:
    """Private mappings of files of which no page was written to; none where nobody tells."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found, region = [], None
    for line in lines:
        if matched := _REGION.match(line):
            region = int(matched[1], 16), int(matched[2], 16)
        elif re.match(r"^[0-9a-f]+-", line):
            region = None
        elif region is not None and line.split() == ["Anonymous:", "0", "kB"]:
            found.append(region)
    return found


def give_back(weight: torch.Tensor, regions: Regions) -> bool:
    """Let the pages of ``weight`` go where they lie in ``regions``; whether they do."""
    begin = weight.data_ptr()
    end = begin + weight.nbytes
    if not weight.is_contiguous() or not any(a <= begin and end <= b for a, b in regions):
        return False
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        size = ctypes.c_size_t(last - first)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, _DONT_NEED)
    return True
