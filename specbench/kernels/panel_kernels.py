"""A product with few rows that reads its weights once, in the order in which they lie in memory.

The matrix libraries behind torch read several rows of the weights at a time, and a core's
prefetcher follows several streams within a page badly: they reach half of what one plain stream
does. Here the weights lie in panels of ``WIDTH`` outputs, input by input, so each thread reads a
single stream, whatever the number of rows; the sums of ``TILE`` rows stay in registers meanwhile.
The products of a sum are added in one order whatever the number of rows, so that a row is the same
to the last bit alone and among others.

The loops run on the threads of torch's own OpenMP library: a second pool of threads would compete
with it for the cores. The memory of the panels is asked for in huge pages, of which few are needed
to address all weights.

One file, because numba's cache on disk notices a change in a function's own file only.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
WIDTH = 32 if _WIDE else 16  # outputs of a panel: two registers of a row's sums
TILE = 8 if _WIDE else 4  # rows whose sums fit into the registers together
CHUNK = 64  # rows whose inputs stay in the second-level cache while all weights pass by
_BLOCK = 128  # inputs that are summed up before their sum is added to the total: rounds less
_ARENA = 64 << 20  # bytes asked of the system at a time

_thread = types.ExternalFunction("specbench_omp_get_thread_num", types.intc())
_threads = types.ExternalFunction("specbench_omp_get_num_threads", types.intc())


def _tile(rows: int) -> Any:
    """The product of one panel with ``rows`` rows, as compiled code.

    Its arguments are addresses of the panel ``[k, WIDTH]``, of the inputs ``[rows, k]`` and of the
    outputs, each with the distance of two of its rows in elements, then ``k``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        _context: Any, panel: Any, step: Any, x: Any, across: Any, out: Any, stride: Any, k: Any
    ) -> Any:
        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            number, lane = ir.FloatType(), ir.IntType(32)
            vector = ir.VectorType(number, WIDTH)
            index = args[6].type
            panel, x, out = (b.inttoptr(a, number.as_pointer()) for a in args[:6:2])
            step, across, stride, k = args[1], args[3], args[5], args[6]
            zero = ir.Constant(vector, [0.0] * WIDTH)
            totals = [cgutils.alloca_once_value(b, zero) for _ in range(rows)]
            sums = [cgutils.alloca_once(b, vector) for _ in range(rows)]
            inputs = [b.gep(x, [b.mul(across, index(row))]) for row in range(rows)]
            nothing = ir.Constant(vector, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(lane, WIDTH), [0] * WIDTH)

            def whole(place: Any) -> Any:
                return b.bitcast(place, vector.as_pointer())

            def add(to: Any, value: Any) -> None:
                b.store(b.fadd(value, b.load(to), flags=("contract",)), to)

            with cgutils.for_range_slice(b, index(0), k, index(_BLOCK)) as (start, _):
                end = b.add(start, index(_BLOCK))
                end = b.select(b.icmp_signed("<", end, k), end, k)
                for row in range(rows):
                    b.store(zero, sums[row])
                with cgutils.for_range_slice(b, start, end, index(1)) as (i, _):
                    weights = b.load(whole(b.gep(panel, [b.mul(i, step)])))
                    weights.align = 4
                    for row in range(rows):
                        one = b.insert_element(nothing, b.load(b.gep(inputs[row], [i])), lane(0))
                        same = b.shuffle_vector(one, nothing, everywhere)
                        add(sums[row], b.fmul(weights, same, flags=("contract",)))
                for row in range(rows):
                    add(totals[row], b.load(sums[row]))
            for row in range(rows):
                place = whole(b.gep(out, [b.mul(stride, index(row))]))
                b.store(b.load(totals[row]), place).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return tile


_one, _two, _three, _four = (_tile(rows) for rows in (1, 2, 3, 4))
_five, _six, _seven, _full = (_tile(rows) for rows in (5, 6, 7, TILE))


@njit  # type: ignore[untyped-decorator]
def _rows(
    panel: int, step: int, x: int, across: int, out: int, stride: int, k: int, rows: int
) -> None:
    done = 0
    while rows - done >= TILE:
        _full(panel, step, x + 4 * done * across, across, out + 4 * done * stride, stride, k)
        done += TILE
    x += 4 * done * across
    out += 4 * done * stride
    rest = rows - done
    if rest == 1:
        _one(panel, step, x, across, out, stride, k)
    elif rest == 2:
        _two(panel, step, x, across, out, stride, k)
    elif rest == 3:
        _three(panel, step, x, across, out, stride, k)
    elif rest == 4:
        _four(panel, step, x, across, out, stride, k)
    elif rest == 5:
        _five(panel, step, x, across, out, stride, k)
    elif rest == 6:
        _six(panel, step, x, across, out, stride, k)
    elif rest == 7:
        _seven(panel, step, x, across, out, stride, k)


def _few(panel: int, step: int, x: int, across: int, out: int, stride: int, k: int, n: int) -> None:
    """One panel's product with ``n`` rows, for compiled code of other files; as ``_tile``."""
    _rows(panel, step, x, across, out, stride, k, n)


def _share(call: Any) -> None:
    """One thread's part of a product: ``call`` holds addresses and sizes, see ``multiply``."""
    weights, x, out, rows, k, panels = carray(call, 6)
    thread, threads = _thread(), _threads()
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    stride = panels * WIDTH
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        for panel in range(first, last):
            _rows(
                weights + 4 * panel * WIDTH * k,
                WIDTH,
                x + 4 * start * k,
                k,
                out + 4 * (start * stride + panel * WIDTH),
                stride,
                k,
                count,
            )


@cache
def compiled() -> tuple[Any, Any]:
    """``GOMP_parallel`` of torch's OpenMP library (or an error) and the address of ``_share``."""
    lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    parallel = lib.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
        llvmlite.binding.add_symbol(f"specbench_{name}", address)
    few = cfunc(types.void(*[types.intp] * 8), cache=True)(_few)
    llvmlite.binding.add_symbol("specbench_panel", few.address)
    compiled = cfunc(types.void(types.CPointer(types.intp)), cache=True)(_share)
    return parallel, compiled.address


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight [out, in]`` as panels ``[ceil(out / WIDTH), in, WIDTH]``, zeros in the last one."""
    compiled()
    out_features, in_features = weight.shape
    count = -(-out_features // WIDTH)
    panels = _memory(count * WIDTH * in_features).view(count, in_features, WIDTH)
    whole = out_features // WIDTH
    panels[:whole] = weight[: whole * WIDTH].view(whole, WIDTH, in_features).transpose(1, 2)
    if whole < count:
        panels[whole] = 0.0
        panels[whole, :, : out_features - whole * WIDTH] = weight[whole * WIDTH :].t()
    return panels


def panel_gemm(x: torch.Tensor, panels: torch.Tensor, out_features: int) -> torch.Tensor:
    """``[rows, in]`` to ``[rows, out]``, float32 on the CPU; a view where panels are padded."""
    n_panels, k, _ = panels.shape
    rows = x.shape[0]
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[1] != k:
        # The compiled code would misread its memory.
        raise TypeError(f"panels of {k} float32 inputs on the CPU were given {x.dtype} {x.shape}")
    x = x.contiguous()
    out = torch.empty(rows, n_panels * WIDTH, dtype=torch.float32, device="cpu")
    parallel, share = compiled()
    call = (ctypes.c_ssize_t * 6)(
        panels.data_ptr(), x.data_ptr(), out.data_ptr(), rows, k, n_panels
    )
    parallel(share, call, torch.get_num_threads(), 0)
    return out[:, :out_features]


_arenas = threading.local()


def _memory(count: int) -> torch.Tensor:
    """``[count]`` float32 within a large mapping, which goes when nothing in it is used."""
    left: torch.Tensor | None = getattr(_arenas, "left", None)
    if left is None or left.numel() < count:
        size = max(_ARENA, 4 * count)
        # Private: shared mappings get no huge pages, and a forked child would write into them.
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # An ordinary tensor: what inference mode makes cannot be written to outside of it.
        with torch.inference_mode(False):
            left = torch.from_numpy(np.frombuffer(mapping, dtype=np.float32))
    _arenas.left = left[-(-count // 16) * 16 :]
    return left[:count]
