"""A product with few rows that reads its weights once, in the order in which they lie in memory.

The matrix libraries behind torch read several rows of the weights at a time, and a core's
prefetcher follows several streams within a page badly: they reach half of what one plain stream
does. Here the weights lie in panels of ``WIDTH`` outputs, input by input, so each thread reads a
single stream, whatever the number of rows; the sums of ``TILE`` rows stay in registers meanwhile.
The products of a sum are added in one order whatever the number of rows, so that a row is the same
to the last bit alone and among others.

Panels hold numbers in one of three ``Form``s, and each becomes exactly its float32 number in a
register: a pass with few rows takes as long as its weights take to be read. How far ahead of what
is read memory is asked for is a number by form and rows (`set_distance`), which ``prefetch``
measures; it changes no sum.

The loops run on the threads of torch's own OpenMP library: a second pool of threads would compete
with it for the cores. The memory of the panels is asked for in huge pages, of which few are needed
to address all weights.

One file, because numba's cache on disk notices a change in a function's own file only.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from dataclasses import dataclass
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

log = logging.getLogger(__name__)

_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
WIDTH = 32 if _WIDE else 16  # outputs of a panel: two registers of a row's sums
TILE = 8 if _WIDE else 4  # rows whose sums fit into the registers together
CHUNK = 64  # rows whose inputs stay in the second-level cache while all weights pass by
_BLOCK = 128  # inputs that are summed up before their sum is added to the total: rounds less
_ARENA = 64 << 20  # bytes asked of the system at a time
_LINE = 64  # bytes that come from memory together
QUANTS = 32  # inputs of a block of Q8_0 and Q4_1, which have a scale together


@dataclass(frozen=True)
class Form:
    """The storage format of weights in panels.

    Attributes:
        name: in manifests; ``number``: in compiled code.
        bytes_per_block: of ``QUANTS`` inputs of one output.
    """

    name: str
    number: int
    bytes_per_block: int


FLOAT32 = Form("float32", 0, 4 * QUANTS)
# As in GGUF files, with a half's scale: signed bytes, and nibbles with a half's minimum, too.
Q8_0, Q4_1 = Form("Q8_0", 1, 2 + QUANTS), Form("Q4_1", 2, 4 + QUANTS // 2)
FORMS = (FLOAT32, Q8_0, Q4_1)

# Bytes from what is read to what is asked for meanwhile, by form and rows; 0 asks for nothing new.
# With little to compute a core runs far ahead by itself, so that a page is too far for it.
DISTANCES = (0, 1024, 4096)
_distances = np.full((len(FORMS), TILE + 1), DISTANCES[-1], dtype=np.intp)
_distances[FLOAT32.number, 1:3] = 1024
_TABLE = "specbench_distances"  # by which compiled code finds it

_thread = types.ExternalFunction("specbench_omp_get_thread_num", types.intc())
_threads = types.ExternalFunction("specbench_omp_get_num_threads", types.intc())


class _Weights:
    """Code that reads the weights of one input after the other from a panel of a form.

    Args:
        b: the code's builder; ``index`` its type of numbers.
        panel: its address; ``step``: from one input to the next, in numbers, where these are whole.
        rows: that they are multiplied with.
    """

    def __init__(self, b: Any, index: Any, form: Form, panel: Any, step: Any, rows: int) -> None:
        self._b, self._index, self._form, self._panel, self._step = b, index, form, panel, step
        kind = ir.ArrayType(index, _distances.size)
        table = b.module.globals.get(_TABLE) or ir.GlobalVariable(b.module, kind, _TABLE)
        entry = form.number * (TILE + 1) + rows
        self._ahead = b.load(b.gep(table, [index(0), index(entry)]))
        self._numbers = ir.VectorType(ir.FloatType(), WIDTH)
        self.per_scale = 1 if form is FLOAT32 else QUANTS

    def scales(self, first: Any) -> None:
        """Read what the ``per_scale`` inputs from ``first`` have together."""
        if self.per_scale == 1:
            return
        b, size = self._b, self._index(WIDTH * self._form.bytes_per_block)
        self._block = b.add(self._panel, b.mul(b.sdiv(first, self._index(QUANTS)), size))
        self._ask(self._block, WIDTH * self._form.bytes_per_block)
        kind = ir.VectorType(ir.HalfType(), WIDTH)
        self._scale = b.fpext(self._read(self._block, kind), self._numbers)
        behind = b.add(self._block, self._index(2 * WIDTH))
        if self._form is Q4_1:
            self._least = b.fpext(self._read(behind, kind), self._numbers)
            behind = b.add(behind, self._index(2 * WIDTH))
        self._quants = behind

    def of(self, first: Any, within: Any) -> Any:
        """Read the float32 weights of input ``first + within``, a vector."""
        b, form = self._b, self._form
        if form is FLOAT32:
            offset = b.mul(b.mul(b.add(first, within), self._step), self._index(4))
            address = b.add(self._panel, offset)
            self._ask(address, WIDTH * form.bytes_per_block // QUANTS)
            return self._read(address, self._numbers)
        width = WIDTH if form is Q8_0 else WIDTH // 2
        kind = ir.VectorType(ir.IntType(8), width)
        held = self._read(b.add(self._quants, b.mul(within, self._index(width))), kind)
        if form is Q8_0:
            return b.fmul(b.sitofp(held, self._numbers), self._scale)
        low = b.and_(held, ir.Constant(kind, [15] * width))
        high = b.lshr(held, ir.Constant(kind, [4] * width))
        places = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), list(range(WIDTH)))
        both = b.uitofp(b.shuffle_vector(low, high, places), self._numbers)
        # The product of a half and a nibble has no rounding, so that the sum is rounded once.
        scaled = b.fmul(both, self._scale, flags=("contract",))
        return b.fadd(scaled, self._least, flags=("contract",))

    def _ask(self, address: Any, size: int) -> None:
        """Ask for ``size`` bytes in time; prefetchers follow a stream within its page only."""
        byte, lane = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, lane, lane, lane])
        ask = cgutils.get_or_insert_function(self._b.module, kind, "llvm.prefetch.p0i8")
        for line in range(0, size, _LINE):
            line_address = self._b.add(self._b.add(address, self._ahead), self._index(line))
            self._b.call(ask, [self._b.inttoptr(line_address, byte), lane(0), lane(3), lane(1)])

    def _read(self, address: Any, kind: Any) -> Any:
        vector = self._b.load(self._b.inttoptr(address, kind.as_pointer()))
        vector.align = 1 if self._form in (Q8_0, Q4_1) else 2
        return vector


def _tile(rows: int, form: Form) -> Any:
    """Compile the product of one panel with ``rows`` rows.

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
            x, out = (b.inttoptr(a, number.as_pointer()) for a in args[2:6:2])
            weights = _Weights(b, index, form, args[0], args[1], rows)
            across, stride, k = args[3], args[5], args[6]
            zero = ir.Constant(vector, [0.0] * WIDTH)
            totals = [cgutils.alloca_once_value(b, zero) for _ in range(rows)]
            sums = [cgutils.alloca_once(b, vector) for _ in range(rows)]
            inputs = [b.gep(x, [b.mul(across, index(row))]) for row in range(rows)]
            nothing = ir.Constant(vector, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(lane, WIDTH), [0] * WIDTH)

            def whole(pointer: Any) -> Any:
                return b.bitcast(pointer, vector.as_pointer())

            def add(to: Any, value: Any) -> None:
                b.store(b.fadd(value, b.load(to), flags=("contract",)), to)

            def add_input(first: Any, within: Any) -> None:
                held = weights.of(first, within)
                for row in range(rows):
                    value = b.load(b.gep(inputs[row], [b.add(first, within)]))
                    single = b.insert_element(nothing, value, lane(0))
                    same = b.shuffle_vector(single, nothing, everywhere)
                    add(sums[row], b.fmul(held, same, flags=("contract",)))

            with cgutils.for_range_slice(b, index(0), k, index(_BLOCK)) as (start, _):
                end = b.add(start, index(_BLOCK))
                end = b.select(b.icmp_signed("<", end, k), end, k)
                for row in range(rows):
                    b.store(zero, sums[row])
                with cgutils.for_range_slice(b, start, end, index(weights.per_scale)) as (i, _):
                    if weights.per_scale == 1:
                        add_input(i, index(0))
                    else:
                        weights.scales(i)
                        inner = cgutils.for_range_slice(b, index(0), index(QUANTS), index(1))
                        with inner as (within, _):
                            add_input(i, within)
                for row in range(rows):
                    add(totals[row], b.load(sums[row]))
            for row in range(rows):
                pointer = whole(b.gep(out, [b.mul(stride, index(row))]))
                b.store(b.load(totals[row]), pointer).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return tile


def _rows_of(form: Form) -> Any:
    """Compile a panel's product with any number of rows."""
    one_row, two_rows, three_rows, four_rows = (_tile(rows, form) for rows in (1, 2, 3, 4))
    five_rows, six_rows, seven_rows, full = (_tile(rows, form) for rows in (5, 6, 7, TILE))

    @njit  # type: ignore[untyped-decorator]
    def product(
        panel: int, step: int, x: int, across: int, out: int, stride: int, k: int, rows: int
    ) -> None:
        done = 0
        while rows - done >= TILE:
            full(panel, step, x + 4 * done * across, across, out + 4 * done * stride, stride, k)
            done += TILE
        x += 4 * done * across
        out += 4 * done * stride
        rest = rows - done
        if rest == 1:
            one_row(panel, step, x, across, out, stride, k)
        elif rest == 2:
            two_rows(panel, step, x, across, out, stride, k)
        elif rest == 3:
            three_rows(panel, step, x, across, out, stride, k)
        elif rest == 4:
            four_rows(panel, step, x, across, out, stride, k)
        elif rest == 5:
            five_rows(panel, step, x, across, out, stride, k)
        elif rest == 6:
            six_rows(panel, step, x, across, out, stride, k)
        elif rest == 7:
            seven_rows(panel, step, x, across, out, stride, k)

    return product


_float32, _q8_0, _q4_1 = map(_rows_of, FORMS)


@njit  # type: ignore[untyped-decorator]
def _rows(
    form: int, panel: int, step: int, x: int, across: int, out: int, stride: int, k: int, rows: int
) -> None:
    if form == 0:
        _float32(panel, step, x, across, out, stride, k, rows)
    elif form == 1:
        _q8_0(panel, step, x, across, out, stride, k, rows)
    else:
        _q4_1(panel, step, x, across, out, stride, k, rows)


def _few(
    form: int, panel: int, step: int, x: int, across: int, out: int, stride: int, k: int, n: int
) -> None:
    """Multiply one panel with ``n`` rows, for compiled code of other files; as ``_tile``."""
    _rows(form, panel, step, x, across, out, stride, k, n)


def _share(call: Any) -> None:
    """Compute one thread's part of a product; ``call`` holds addresses and sizes."""
    weights, form, panel_bytes, x, out, rows, k, panels = carray(call, 8)
    thread, threads = _thread(), _threads()
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    stride = panels * WIDTH
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        for panel in range(first, last):
            _rows(
                form,
                weights + panel * panel_bytes,
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
    """Get ``GOMP_parallel`` of torch's OpenMP library (or an error) and ``_share``'s address."""
    lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    parallel = lib.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
        llvmlite.binding.add_symbol(f"specbench_{name}", address)
    llvmlite.binding.add_symbol(_TABLE, _distances.ctypes.data)
    few = cfunc(types.void(*[types.intp] * 9), cache=True)(_few)
    llvmlite.binding.add_symbol("specbench_panel", few.address)
    compiled = cfunc(types.void(types.CPointer(types.intp)), cache=True)(_share)
    return parallel, compiled.address


@cache
def available() -> bool:
    """Test panels with this build of torch: its OpenMP library, and a product's result."""
    weight, x = torch.randn(16, 8), torch.randn(3, 8)
    try:
        out = panel_gemm(x, pack(weight), len(weight))
    except (RuntimeError, AttributeError, NotImplementedError, OSError) as error:
        log.info("products from panels are not usable here (%s)", error)
        return False
    return torch.allclose(out, x @ weight.t(), atol=1e-5)


def set_distance(form: Form, rows: int, distance: int) -> None:
    """Ask for memory ``distance`` bytes ahead in products with ``rows`` rows, up to ``TILE``."""
    _distances[form.number, rows] = distance


def distances(form: Form) -> dict[int, int]:
    """Map rows, up to ``TILE``, to the bytes ahead that memory is requested."""
    return dict(enumerate(_distances[form.number, 1:].tolist(), 1))


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack ``weight [out, in]`` into panels, zeros in the last one.

    Float32 comes as ``[ceil(out / WIDTH), in, WIDTH]``. Blocks of GGUF files, bytes
    ``[out, in / QUANTS, bytes]``, come as ``[ceil(out / WIDTH), in / QUANTS, bytes of the
    panel]``: the halves of ``WIDTH`` outputs, then, input by input, their quants.
    """
    compiled()
    out_features = weight.shape[0]
    count = -(-out_features // WIDTH)
    if weight.dtype == torch.uint8:
        held = weight if out_features == count * WIDTH else _padded(weight, count * WIDTH)
        laid = _laid_blocks(held.unflatten(0, (count, WIDTH)))
        panels = _memory(laid.numel() // 4).view(torch.uint8).view(laid.shape)
        return panels.copy_(laid)
    in_features = weight.shape[1]
    size = count * WIDTH * in_features
    panels = _memory(size).view(count, in_features, WIDTH)
    whole = out_features // WIDTH
    panels[:whole] = weight[: whole * WIDTH].view(whole, WIDTH, in_features).transpose(1, 2)
    if whole < count:
        panels[whole] = 0.0
        panels[whole, :, : out_features - whole * WIDTH] = weight[whole * WIDTH :].t()
    return panels


def form_of(panels: torch.Tensor) -> Form:
    """Tell the form of panels, or of weights that are to be packed."""
    if panels.dtype == torch.float32:
        return FLOAT32
    return (
        Q8_0 if panels.shape[-1] in (Q8_0.bytes_per_block, WIDTH * Q8_0.bytes_per_block) else Q4_1
    )


def _padded(blocks: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([blocks, blocks.new_zeros(rows - len(blocks), *blocks.shape[1:])])


def _laid_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Reorder bytes ``[panels, WIDTH, blocks, bytes]`` as a panel is read."""
    form = form_of(blocks)
    halves = 2 if form is Q8_0 else 4
    scales = blocks[..., :halves].unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4).flatten(2)
    quants = blocks[..., halves:]
    if form is Q4_1:  # a byte has inputs i and i + 16 of a block, and here outputs o and o + W/2
        quants = torch.cat([quants & 15, quants >> 4], -1)
        low, high = quants.chunk(2, 1)
        quants = low | (high << 4)
    return torch.cat([scales, quants.permute(0, 2, 3, 1).flatten(2)], -1)


def panel_gemm(x: torch.Tensor, panels: torch.Tensor, out_features: int) -> torch.Tensor:
    """Map ``[rows, in]`` to ``[rows, out]``, float32 on the CPU; a view if panels are padded."""
    n_panels, form = len(panels), form_of(panels)
    k = panels.shape[1] * (QUANTS if panels.dtype == torch.uint8 else 1)
    rows = x.shape[0]
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[1] != k:
        # The compiled code would misread its memory.
        raise TypeError(f"panels of {k} float32 inputs on the CPU were given {x.dtype} {x.shape}")
    x = x.contiguous()
    out = torch.empty(rows, n_panels * WIDTH, dtype=torch.float32, device="cpu")
    parallel, share = compiled()
    panel_bytes = panels.stride(0) * panels.element_size()
    numbers = (form.number, panel_bytes, x.data_ptr(), out.data_ptr(), rows, k, n_panels)
    call = (ctypes.c_ssize_t * 8)(panels.data_ptr(), *numbers)
    parallel(share, call, torch.get_num_threads(), 0)
    return out[:, :out_features]


_arenas = threading.local()


def _memory(count: int) -> torch.Tensor:
    """Allocate ``[count]`` float32 in a large mapping, freed when nothing in it is used."""
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
