"""A target pass in one call: every step of every layer, on all threads, without going back.

A pass of one token is some eight thousand calls in Python and torch around 120 products, and these
calls take a quarter of its time. Here one thread team runs the whole pass. Each thread does its
share of a step (panels of a product, queries of an attention, rows of the rest) and waits for the
others at a barrier. ``compiled_pass`` says for which models, and fills in the addresses.

Rows are flat. A *segment* is those rows that continue one text: it knows where the text's keys and
values lie, and which of the uncommitted rows each of its rows sees. Attention runs by segment, and
everything else does not know of them.

All sums are added in one order whatever the number of rows. A row is therefore the same to the last
bit alone and among others, as long as the keys that it sees have the same positions.

All in one file, because numba's cache on disk notices only changes of a function's file. The
products are ``panel_kernels``'s, called by address.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, float32, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from specbench.kernels import panel_kernels
from specbench.kernels.panel_kernels import CHUNK, FLOAT32, FORMS, QUANTS, WIDTH

# Fields of a call: sizes first, then addresses.
(
    ROWS, KEPT, LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, SEGMENTS, SCRATCH_BYTES,
    COSINES, SINES, WEIGHTS, SEGMENT_TABLE, WANTED, FINAL_NORM,
    LM_HEAD, LM_HEAD_FORM, LM_HEAD_BIAS, NUMBERS, LOGITS, CHOICES,
    STATES, NORMED, PRODUCT, QUERIES, ATTENDED, GATED, SCRATCH, BEST, MEETING,
    BESIDE, JOINED, JOIN, JOIN_FORM, JOIN_BIAS,
    CALL_WORDS,
) = range(38)  # fmt: skip
# Fields of a layer's row in the table of weights; the address 0 is a part that the layer lacks. A
# product's panels are followed by the number of their form and the bias. A layer with
# ``BESIDE_NORM`` reads what lies at ``BESIDE``, normed by it, then the normed state.
(
    NORM_1, QKV, QKV_FORM, QKV_BIAS, QUERY_NORM, KEY_NORM, OUT, OUT_FORM, OUT_BIAS,
    NORM_2, GATE_UP, GATE_UP_FORM, GATE_UP_BIAS, DOWN, DOWN_FORM, DOWN_BIAS, BESIDE_NORM,
    LAYER_WORDS,
) = range(18)  # fmt: skip
# Of a segment: its first row and their number, the address of layer 0's keys, the elements from a
# head to the next, from keys to values and from a layer to the next, rows of keys before its own
# ones that all see, rows that a tree holds already, and the address of what its rows see of held
# and own rows (bytes, 0 for a chain) with the distance of two rows.
(
    FIRST, COUNT, KEYS, BY_HEAD, TO_VALUES, BY_LAYER, PAST, HELD, VISIBLE, BY_ROW,
    SEGMENT_WORDS,
) = range(11)  # fmt: skip

_LANES = 16  # of the blocks in which keys are transposed
_LEAST = -87.0  # exponents below it give 0

_thread = types.ExternalFunction("specbench_omp_get_thread_num", types.intc())
_threads = types.ExternalFunction("specbench_omp_get_num_threads", types.intc())
_yield = types.ExternalFunction("specbench_yield", types.intc())
# form, panel, its step, inputs, their distance, outputs, their distance, inputs of a sum, rows
_panel = types.ExternalFunction("specbench_panel", types.void(*[types.intp] * 9))
_FLOAT32 = FLOAT32.number
_BLOCK_BYTES = tuple(WIDTH * form.bytes_per_block for form in FORMS)  # by number of the form


# -- addresses -------------------------------------------------------------------------------------


def _typed(kind: Any) -> Any:
    """Compile the cast of a number to a pointer to ``kind``."""
    pointer = types.CPointer(kind)

    @intrinsic  # type: ignore[untyped-decorator]
    def typed(_context: Any, address: Any) -> Any:
        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.intp), generate

    return typed


_floats, _doubles, _intps = _typed(types.float32), _typed(types.float64), _typed(types.intp)
_bytes, _int32s = _typed(types.uint8), _typed(types.int32)


# -- threads ---------------------------------------------------------------------------------------

# OpenMP's own barrier puts a thread to sleep at once where all its teams outnumber the cores, and
# waking it takes as long as a small product. Here a thread looks for some ten microseconds, and
# then lets others of the machine run between two looks.
_LOOKS = 500
_APART = 64  # bytes between what all count and what all look at
_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _atomic(emit: Callable[..., Any], takes_value: bool) -> Any:
    """Compile an atomic operation on a word; it gives ``emit``'s result or the word before."""

    @intrinsic  # type: ignore[untyped-decorator]
    def operation(_context: Any, address: Any, value: Any) -> Any:
        def generate(_: Any, b: Any, _signature: Any, args: Any) -> Any:
            pointer = b.inttoptr(args[0], args[1].type.as_pointer())
            result = emit(b, pointer, args[1])
            return args[1] if takes_value else result

        return types.intp(types.intp, types.intp), generate

    return operation


_count = _atomic(lambda b, pointer, value: b.atomic_rmw("add", pointer, value, "acq_rel"), False)
_write = _atomic(lambda b, pointer, value: b.store_atomic(value, pointer, "release", 8), True)
_read = _atomic(lambda b, pointer, _: b.load_atomic(pointer, "acquire", 8), False)


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_context: Any) -> Any:
    """Leave the core to its other thread for a moment."""

    def generate(context: Any, b: Any, _signature: Any, _args: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit  # type: ignore[untyped-decorator]
def _barrier(meeting: int, threads: int) -> None:
    """Wait until all threads are here; ``meeting`` holds how many are, and ``_APART`` a number."""
    if threads == 1:
        return
    seen = _read(meeting + _APART, 0)
    if _count(meeting, 1) == threads - 1:
        _write(meeting, 0)
        _write(meeting + _APART, seen + 1)
        return
    looks = 0
    while _read(meeting + _APART, 0) == seen:
        looks += 1
        if looks < _LOOKS:
            _pause()
        else:
            _yield()


# -- steps on registers of WIDTH numbers -----------------------------------------------------------

_NUMBER, _LANE = ir.FloatType(), ir.IntType(32)
_VECTOR, _NUMBERS = ir.VectorType(_NUMBER, WIDTH), ir.VectorType(_LANE, WIDTH)
_FUSED = ("contract",)


def _all(value: float) -> Any:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * WIDTH)


def _at(b: Any, address: Any, index: Any = None, kind: Any = _VECTOR) -> Any:
    """Make a pointer to the vector that begins ``index`` numbers after an address."""
    pointer = b.inttoptr(address, kind.element.as_pointer())
    return b.bitcast(pointer if index is None else b.gep(pointer, [index]), kind.as_pointer())


def _load(b: Any, pointer: Any) -> Any:
    vector = b.load(pointer)
    vector.align = 4
    return vector


def _store(b: Any, value: Any, pointer: Any) -> None:
    b.store(value, pointer).align = 4


def _exponential(b: Any, x: Any) -> Any:
    """Compute powers of e of a vector of numbers up to 0, to two roundings; NaN stays."""
    near = b.fcmp_ordered(">=", x, _all(_LEAST))
    z = b.select(near, x, _all(_LEAST))
    halves = b.fsub(b.fmul(z, _all(1 / math.log(2))), _all(0.5))
    n = b.fptosi(halves, _NUMBERS)  # the nearest, as z is not above 0
    whole = b.sitofp(n, _VECTOR)
    high = 2839 / 4096  # of the logarithm of 2, so short that its product is exact
    r = b.fsub(z, b.fmul(whole, _all(high), _FUSED), _FUSED)
    r = b.fsub(r, b.fmul(whole, _all(math.log(2) - high), _FUSED), _FUSED)
    total = _all(1 / math.factorial(7))
    for k in range(6, -1, -1):
        total = b.fadd(b.fmul(total, r, _FUSED), _all(1 / math.factorial(k)), _FUSED)
    bits = b.shl(
        b.add(n, ir.Constant(_NUMBERS, [127] * WIDTH)), ir.Constant(_NUMBERS, [23] * WIDTH)
    )
    small = b.select(b.fcmp_unordered("uno", x, x), x, _all(0.0))
    return b.select(near, b.fmul(total, b.bitcast(bits, _VECTOR)), small)


def _across(b: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Reduce a vector to one number."""
    distance = WIDTH // 2
    while distance:
        turned = [(i + distance) % WIDTH for i in range(WIDTH)]
        places = ir.Constant(ir.VectorType(_LANE, WIDTH), turned)
        vector = join(vector, b.shuffle_vector(vector, vector, places))
        distance //= 2
    return b.extract_element(vector, _LANE(0))


@intrinsic  # type: ignore[untyped-decorator]
def _softmax(_context: Any, scores: Any, keys: Any, scale: Any) -> Any:
    """Replace scores ``[keys]`` by powers of e, at most 1; return one over their sum."""

    def generate(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        address, count, scale = args
        index = count.type
        step = index(WIDTH)

        def larger(left: Any, right: Any) -> Any:
            return b.select(b.fcmp_ordered(">", right, left), right, left)

        held = cgutils.alloca_once_value(b, _all(-math.inf))
        with cgutils.for_range_slice(b, index(0), count, step) as (i, _):
            b.store(larger(b.load(held), _load(b, _at(b, address, i))), held)
        everywhere = ir.Constant(ir.VectorType(_LANE, WIDTH), [0] * WIDTH)
        nothing = ir.Constant(_VECTOR, ir.Undefined)

        def spread(number: Any) -> Any:
            single = b.insert_element(nothing, number, _LANE(0))
            return b.shuffle_vector(single, nothing, everywhere)

        top, scales = spread(_across(b, b.load(held), larger)), spread(scale)
        b.store(_all(0.0), held)
        with cgutils.for_range_slice(b, index(0), count, step) as (i, _):
            pointer = _at(b, address, i)
            power = _exponential(b, b.fmul(b.fsub(_load(b, pointer), top), scales))
            _store(b, power, pointer)
            b.store(b.fadd(b.load(held), power), held)
        return b.fdiv(_NUMBER(1.0), _across(b, b.load(held), b.fadd))

    return types.float32(types.intp, types.intp, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _gate(_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """Compute a vector ``gate * sigmoid(gate) * up``."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        gate, up = (_load(b, _at(b, address)) for address in args[:2])
        below = b.fcmp_ordered("<", gate, _all(0.0))
        power = _exponential(b, b.select(below, gate, b.fneg(gate)))
        share = b.fdiv(b.select(below, power, _all(1.0)), b.fadd(_all(1.0), power))
        _store(b, b.fmul(b.fmul(gate, share), up), _at(b, args[2]))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def _keep_best(_context: Any, values: Any, best: Any, panels: Any, panel: Any) -> Any:
    """Keep logits that exceed the best so far, or are NaN, and their panel's number."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        value, best_pointer = _load(b, _at(b, args[0])), _at(b, args[1])
        where = _at(b, args[2], kind=_NUMBERS)
        best, panels = _load(b, best_pointer), _load(b, where)
        lane = b.insert_element(
            ir.Constant(_NUMBERS, ir.Undefined), b.trunc(args[3], _LANE), _LANE(0)
        )
        here = b.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(_LANE, WIDTH), [0] * WIDTH))
        takes = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
        _store(b, b.select(takes, value, best), best_pointer)
        _store(b, b.select(takes, here, panels), where)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def _transpose(_context: Any, source: Any, size: Any, out: Any) -> Any:
    """Transpose ``_LANES`` rows, ``size`` numbers apart, into ``out [_LANES, WIDTH]``."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        source, size, out = args
        kind, index = ir.VectorType(_NUMBER, _LANES), args[1].type
        rows = [_load(b, _at(b, source, b.mul(size, index(i)), kind)) for i in range(_LANES)]
        distance = _LANES // 2
        while distance:  # blocks beside the diagonal change places, ever smaller ones
            for i in range(_LANES):
                if not i & distance:
                    left, right = rows[i], rows[i + distance]
                    upper = [
                        j if not j & distance else _LANES + j - distance for j in range(_LANES)
                    ]
                    lower = [
                        j + distance if not j & distance else _LANES + j for j in range(_LANES)
                    ]
                    rows[i], rows[i + distance] = (
                        b.shuffle_vector(
                            left, right, ir.Constant(ir.VectorType(_LANE, _LANES), places)
                        )
                        for places in (upper, lower)
                    )
            distance //= 2
        for i, row in enumerate(rows):
            _store(b, row, _at(b, out, index(i * WIDTH), kind))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


# -- steps of a row --------------------------------------------------------------------------------


@njit(inline="never", fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _mean_square(x: Any) -> Any:
    total = float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total / float32(x.shape[0])


@njit  # type: ignore[untyped-decorator]
def _norm(x: Any, weight: int, out: Any, epsilon: float) -> None:
    factor = carray(_floats(weight), x.shape[0])
    scale = float32(1.0) / float32((_mean_square(x) + float32(epsilon)) ** 0.5)
    for i in range(x.shape[0]):
        out[i] = factor[i] * (x[i] * scale)


@njit  # type: ignore[untyped-decorator]
def _rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    half = x.shape[0] // 2
    for i in range(half):
        first, second = x[i], x[half + i]
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = second * cos[half + i] + first * sin[half + i]


@njit  # type: ignore[untyped-decorator]
def _head_at(address: int, size: int, normed: int, epsilon: float) -> Any:
    """Read a head of a query or key; norm it if the layer does."""
    head = carray(_floats(address), size)
    if normed:
        _norm(head, normed, head, epsilon)
    return head


@njit  # type: ignore[untyped-decorator]
def _gate_row(product: int, inner: int, out: int) -> None:
    """Compute ``out [inner]`` of a row's gate and up, adjacent and padded to whole vectors."""
    last = inner - inner % WIDTH
    for i in range(0, last, WIDTH):
        _gate(product + 4 * i, product + 4 * (inner + i), out + 4 * i)
    if last < inner:  # elsewhere first: the next row begins where this one ends
        rest = np.empty(3 * WIDTH, dtype=np.float32)
        address = int64(rest.ctypes.data)
        source, target = carray(_floats(product), 2 * inner), carray(_floats(out), inner)
        rest[:] = float32(0.0)
        for i in range(last, inner):
            rest[i - last], rest[WIDTH + i - last] = source[i], source[inner + i]
        _gate(address, address + 4 * WIDTH, address + 8 * WIDTH)
        for i in range(last, inner):
            target[i] = rest[2 * WIDTH + i - last]


# -- products and attention ------------------------------------------------------------------------


@njit  # type: ignore[untyped-decorator]
def _panel_bytes(form: int, k: int) -> int:
    return _BLOCK_BYTES[form] * k // QUANTS


@njit  # type: ignore[untyped-decorator]
def _multiply(
    layer: Any, field: int, x: int, out: int, rows: int, k: int, outputs: int, thread: int, n: int
) -> None:
    """Compute one of ``n`` threads' panels of a product, ``out [rows, outputs]`` padded.

    The product's panels, their form and its bias start at ``field`` of a layer's row.
    """
    weights, form, bias = layer[field], layer[field + 1], layer[field + 2]
    size = _panel_bytes(form, k)
    panels = -(-outputs // WIDTH)
    stride = panels * WIDTH
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        for panel in range(panels * thread // n, panels * (thread + 1) // n):
            here, at = weights + panel * size, out + 4 * (start * stride + panel * WIDTH)
            _panel(form, here, WIDTH, x + 4 * start * k, k, at, stride, k, count)
            if bias:
                _add_bias(bias, at, stride, count, panel, outputs)


@njit  # type: ignore[untyped-decorator]
def _add_bias(bias: int, out: int, stride: int, rows: int, panel: int, outputs: int) -> None:
    offsets = carray(_floats(bias), outputs)
    for row in range(rows):
        values = carray(_floats(out + 4 * row * stride), WIDTH)
        for i in range(min(WIDTH, outputs - panel * WIDTH)):
            values[i] += offsets[panel * WIDTH + i]


@njit  # type: ignore[untyped-decorator]
def _transpose_keys(keys: int, size: int, out: int) -> None:
    """Transpose ``WIDTH`` keys ``[WIDTH, size]`` into a panel ``[size, WIDTH]``."""
    whole = size - size % _LANES
    for j in range(0, WIDTH, _LANES):
        for i in range(0, whole, _LANES):
            _transpose(keys + 4 * (j * size + i), size, out + 4 * (i * WIDTH + j))
    if whole < size:
        source = carray(_floats(keys), (WIDTH, size))
        target = carray(_floats(out), (size, WIDTH))
        for j in range(WIDTH):
            for i in range(whole, size):
                target[i, j] = source[j, i]


@njit  # type: ignore[untyped-decorator]
def _attend(
    segment: Any, first: int, count: int, head: int, keys_at: int, values_at: int,
    queries: int, attended: Any, scratch: int, heads: int, kv_heads: int, size: int, scale: Any,
) -> None:  # fmt: skip
    """Attend with ``count`` queries of one key head, from the segment's ``first`` on.

    A key head's queries are those of its group of heads for each row, row by row. Scratch holds a
    panel of keys, the scores, what is attended, and where heads are no whole panels, values.
    """
    group = heads // kv_heads
    before, held = segment[PAST], segment[HELD]
    keys = before + held + segment[COUNT]
    if not segment[VISIBLE]:  # a chain: later rows are seen by none of these
        keys = before + held + (first + count - 1) // group + 1
    padded, wide = -(-keys // WIDTH) * WIDTH, -(-size // WIDTH) * WIDTH
    scores = scratch + 4 * size * WIDTH
    sums = scores + 4 * CHUNK * padded
    rest = sums + 4 * CHUNK * wide
    for key in range(0, padded, WIDTH):
        _transpose_keys(keys_at + 4 * key * size, size, scratch)
        _panel(_FLOAT32, scratch, WIDTH, queries, size, scores + 4 * key, padded, size, count)
    table = carray(_floats(scores), (count, padded))
    inverse = carray(_floats(rest + 4 * WIDTH * padded), CHUNK)
    nothing = float32(-np.inf)
    for i in range(count):
        row = (first + i) // group
        if segment[VISIBLE]:
            uncommitted = keys - before
            seen = carray(_bytes(segment[VISIBLE] + row * segment[BY_ROW]), uncommitted)
            for j in range(uncommitted):
                table[i, before + j] = table[i, before + j] if seen[j] else nothing
            end = keys
        else:
            end = before + held + row + 1
        for j in range(end, padded):
            table[i, j] = nothing
        inverse[i] = _softmax(scores + 4 * i * padded, padded, scale)
    for start in range(0, size, WIDTH):
        if start + WIDTH <= size:
            _panel(
                _FLOAT32, values_at + 4 * start, size,
                scores, padded, sums + 4 * start, wide, keys, count,
            )  # fmt: skip
        else:
            source = carray(_floats(values_at), (keys, size))
            target = carray(_floats(rest), (keys, WIDTH))
            for key in range(keys):
                for i in range(WIDTH):
                    target[key, i] = source[key, start + i] if start + i < size else float32(0.0)
            _panel(_FLOAT32, rest, WIDTH, scores, padded, sums + 4 * start, wide, keys, count)
    results = carray(_floats(sums), (count, wide))
    for i in range(count):
        row, member = (first + i) // group, (first + i) % group
        column = (head * group + member) * size
        for j in range(size):
            attended[segment[FIRST] + row, column + j] = results[i, j] * inverse[i]


@njit  # type: ignore[untyped-decorator]
def _attention(call: Any, segments: Any, layer: int, thread: int, threads: int, scale: Any) -> None:
    """Compute a thread's queries; a chunk of them reads the keys once."""
    heads, kv_heads, size, rows = call[HEADS], call[KV_HEADS], call[HEAD_DIM], call[ROWS]
    group = heads // kv_heads
    attended = carray(_floats(call[ATTENDED]), (rows, heads * size))
    scratch = call[SCRATCH] + thread * call[SCRATCH_BYTES]
    begin, end = rows * heads * thread // threads, rows * heads * (thread + 1) // threads
    done = 0
    for s in range(segments.shape[0]):
        segment = segments[s]
        queries = segment[COUNT] * group
        keys_of_layer = segment[KEYS] + 4 * layer * segment[BY_LAYER]
        for head in range(kv_heads):
            first, last = max(begin - done, 0), min(end - done, queries)
            done += queries
            keys_at = keys_of_layer + 4 * head * segment[BY_HEAD]
            while first < last:
                count = min(CHUNK, last - first)
                query = (head * rows + segment[FIRST]) * group + first
                _attend(
                    segment, first, count, head, keys_at, keys_at + 4 * segment[TO_VALUES],
                    call[QUERIES] + 4 * query * size, attended, scratch, heads, kv_heads, size,
                    scale,
                )  # fmt: skip
                first += count


@njit  # type: ignore[untyped-decorator]
def _place_heads(
    call: Any, weights: Any, segment: Any, layer: int, first: int, last: int, epsilon: float
) -> None:
    """Rotate a segment's rows from ``first`` to ``last``; keys and values go into the cache."""
    rows, heads, kv_heads, size = call[ROWS], call[HEADS], call[KV_HEADS], call[HEAD_DIM]
    group = heads // kv_heads
    stride = -(-((heads + 2 * kv_heads) * size) // WIDTH) * WIDTH
    keys = segment[KEYS] + 4 * layer * segment[BY_LAYER]
    begin = max(first, segment[FIRST])
    for row in range(begin, min(last, segment[FIRST] + segment[COUNT])):
        product = call[PRODUCT] + 4 * row * stride
        cos = carray(_floats(call[COSINES] + 4 * row * size), size)
        sin = carray(_floats(call[SINES] + 4 * row * size), size)
        for head in range(heads):
            query_offset = ((head // group * rows + row) * group + head % group) * size
            query = _head_at(product + 4 * head * size, size, weights[QUERY_NORM], epsilon)
            _rotate(query, cos, sin, carray(_floats(call[QUERIES] + 4 * query_offset), size))
        slot = segment[PAST] + segment[HELD] + row - segment[FIRST]
        for head in range(kv_heads):
            key_address = keys + 4 * (head * segment[BY_HEAD] + slot * size)
            key = _head_at(product + 4 * (heads + head) * size, size, weights[KEY_NORM], epsilon)
            _rotate(key, cos, sin, carray(_floats(key_address), size))
            value = carray(_floats(product + 4 * (heads + kv_heads + head) * size), size)
            cached = carray(_floats(key_address + 4 * segment[TO_VALUES]), size)
            for i in range(size):
                cached[i] = value[i]


@njit  # type: ignore[untyped-decorator]
def _add(x: Any, more: Any) -> None:
    for i in range(x.shape[0]):
        x[i] += more[i]


@njit  # type: ignore[untyped-decorator]
def _lm_head(call: Any, x: int, thread: int, threads: int) -> None:
    """Compute a thread's panels of the logits, and the best of them by row and lane."""
    rows, hidden, vocab, form = call[KEPT], call[HIDDEN], call[VOCAB], call[LM_HEAD_FORM]
    panels = -(-vocab // WIDTH)
    stride = panels * WIDTH
    begin, end = panels * thread // threads, panels * (thread + 1) // threads
    best = call[BEST] + 8 * thread * rows * WIDTH
    where = best + 4 * rows * WIDTH
    values, places = carray(_floats(best), rows * WIDTH), carray(_int32s(where), rows * WIDTH)
    for i in range(rows * WIDTH):
        values[i], places[i] = float32(-np.inf), 0
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        for panel in range(begin, end):
            out = call[LOGITS] + 4 * (start * stride + panel * WIDTH)
            weights = call[LM_HEAD] + panel * _panel_bytes(form, hidden)
            inputs = x + 4 * start * hidden
            _panel(form, weights, WIDTH, inputs, hidden, out, stride, hidden, count)
            if call[LM_HEAD_BIAS]:
                _add_bias(call[LM_HEAD_BIAS], out, stride, count, panel, vocab)
            for row in range(count):
                logits = out + 4 * row * stride
                if (panel + 1) * WIDTH > vocab:
                    last = carray(_floats(logits), WIDTH)
                    for i in range(vocab - panel * WIDTH, WIDTH):
                        last[i] = float32(-np.inf)
                offset = 4 * (start + row) * WIDTH
                _keep_best(logits, best + offset, where + offset, panel)


@njit  # type: ignore[untyped-decorator]
def _choose(call: Any, row: int, threads: int) -> int:
    """Choose the id of a row's largest logit, the smallest on ties; -1 if not finite."""
    rows = call[KEPT]
    top, choice = float32(-np.inf), -1
    for thread in range(threads):
        best = call[BEST] + 8 * thread * rows * WIDTH
        values = carray(_floats(best), (rows, WIDTH))
        panels = carray(_int32s(best + 4 * rows * WIDTH), (rows, WIDTH))
        for i in range(WIDTH):
            value, number = values[row, i], panels[row, i] * WIDTH + i
            if not value < np.inf:
                return -1
            if value > top or (value == top and number < choice):
                top, choice = value, number
    return choice


@njit  # type: ignore[untyped-decorator]
def _copy(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = x[i]


@njit  # type: ignore[untyped-decorator]
def _read_rows(call: Any, weights: Any, first: int, last: int, epsilon: float) -> None:
    """Prepare what a layer's attention reads of a thread's rows."""
    rows, hidden, wide = call[ROWS], call[HIDDEN], call[HIDDEN]
    states = carray(_floats(call[STATES]), (rows, hidden))
    if weights[BESIDE_NORM]:
        wide *= 2
    inputs = carray(_floats(call[JOINED if weights[BESIDE_NORM] else NORMED]), (rows, wide))
    for row in range(first, last):
        if weights[BESIDE_NORM]:
            beside = carray(_floats(call[BESIDE] + 4 * row * hidden), hidden)
            _norm(beside, weights[BESIDE_NORM], inputs[row, :hidden], epsilon)
        if weights[NORM_1]:
            _norm(states[row], weights[NORM_1], inputs[row, wide - hidden :], epsilon)
        else:
            _copy(states[row], inputs[row])


@njit  # type: ignore[untyped-decorator]
def _layers(call: Any, thread: int, threads: int) -> None:
    """Run one thread's part of all layers; ``STATES`` then hold the last one's output."""
    rows, hidden, layers, inner = call[ROWS], call[HIDDEN], call[LAYERS], call[INNER]
    size, heads, kv_heads = call[HEAD_DIM], call[HEADS], call[KV_HEADS]
    first, last = rows * thread // threads, rows * (thread + 1) // threads
    numbers = carray(_doubles(call[NUMBERS]), 3)
    epsilon, of_heads, scale = numbers[0], numbers[1], float32(numbers[2])
    table = carray(_intps(call[WEIGHTS]), (layers, LAYER_WORDS))
    segments = carray(_intps(call[SEGMENT_TABLE]), (call[SEGMENTS], SEGMENT_WORDS))
    states_at = carray(_intps(call[WANTED]), layers + 1)
    wide = -(-hidden // WIDTH) * WIDTH  # a product's row
    stride = -(-2 * inner // WIDTH) * WIDTH
    states = carray(_floats(call[STATES]), (rows, hidden))
    normed = carray(_floats(call[NORMED]), (rows, hidden))
    outputs = carray(_floats(call[PRODUCT]), (rows, wide))
    for layer in range(layers):
        weights = table[layer]
        if states_at[layer]:
            for row in range(first, last):
                _copy(states[row], carray(_floats(states_at[layer] + 4 * row * hidden), hidden))
        _read_rows(call, weights, first, last, epsilon)
        _barrier(call[MEETING], threads)
        beside = weights[BESIDE_NORM] != 0
        _multiply(
            weights, QKV, call[JOINED if beside else NORMED], call[PRODUCT],
            rows, 2 * hidden if beside else hidden, (heads + 2 * kv_heads) * size, thread, threads,
        )  # fmt: skip
        _barrier(call[MEETING], threads)
        for s in range(segments.shape[0]):
            _place_heads(call, weights, segments[s], layer, first, last, of_heads)
        _barrier(call[MEETING], threads)
        _attention(call, segments, layer, thread, threads, scale)
        _barrier(call[MEETING], threads)
        _multiply(
            weights, OUT, call[ATTENDED], call[PRODUCT],
            rows, heads * size, hidden, thread, threads,
        )  # fmt: skip
        _barrier(call[MEETING], threads)
        for row in range(first, last):
            _add(states[row], outputs[row])
            _norm(states[row], weights[NORM_2], normed[row], epsilon)
        _barrier(call[MEETING], threads)
        _multiply(
            weights, GATE_UP, call[NORMED], call[PRODUCT],
            rows, hidden, 2 * inner, thread, threads,
        )  # fmt: skip
        _barrier(call[MEETING], threads)
        for row in range(first, last):
            _gate_row(call[PRODUCT] + 4 * row * stride, inner, call[GATED] + 4 * row * inner)
        _barrier(call[MEETING], threads)
        _multiply(
            weights, DOWN, call[GATED], call[PRODUCT],
            rows, inner, hidden, thread, threads,
        )  # fmt: skip
        _barrier(call[MEETING], threads)
        for row in range(first, last):
            _add(states[row], outputs[row])


def _pass(address: Any) -> None:
    """Run one thread's part of a pass."""
    call = carray(address, CALL_WORDS)
    thread, threads = int64(_thread()), int64(_threads())
    rows, hidden, layers = call[ROWS], call[HIDDEN], call[LAYERS]
    first, last = rows * thread // threads, rows * (thread + 1) // threads
    _layers(call, thread, threads)
    states = carray(_floats(call[STATES]), (rows, hidden))
    normed = carray(_floats(call[NORMED]), (rows, hidden))
    epsilon = carray(_doubles(call[NUMBERS]), 3)[0]
    state_at = carray(_intps(call[WANTED]), layers + 1)[layers]
    for row in range(first, last):
        _norm(states[row], call[FINAL_NORM], normed[row], epsilon)
        if state_at:
            _copy(normed[row], carray(_floats(state_at + 4 * row * hidden), hidden))
    _barrier(call[MEETING], threads)
    _lm_head(call, call[NORMED] + 4 * (rows - call[KEPT]) * hidden, thread, threads)
    _barrier(call[MEETING], threads)
    choices = carray(_intps(call[CHOICES]), call[KEPT])
    for row in range(thread, call[KEPT], threads):
        choices[row] = _choose(call, row, threads)


def _head(address: Any) -> None:
    """Run one thread's part of a trained head's pass: its layers, after a product if any."""
    call = carray(address, CALL_WORDS)
    thread, threads = int64(_thread()), int64(_threads())
    rows, hidden = call[ROWS], call[HIDDEN]
    if call[JOIN]:
        wide = -(-hidden // WIDTH) * WIDTH
        _multiply(
            call, JOIN, call[JOINED], call[PRODUCT], rows, 2 * hidden, hidden, thread, threads
        )
        _barrier(call[MEETING], threads)
        states = carray(_floats(call[STATES]), (rows, hidden))
        outputs = carray(_floats(call[PRODUCT]), (rows, wide))
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            _copy(outputs[row, :hidden], states[row])
        _barrier(call[MEETING], threads)
    _layers(call, thread, threads)


@cache
def compiled(part: str = "pass") -> Callable[[Any, int], None]:
    """Compile a pass, or a ``head``'s: a function of a call's fields and a number of threads.

    Raises what ``panel_kernels`` does where torch's OpenMP library is another one.
    """
    parallel, _ = panel_kernels.compiled()
    yields = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    llvmlite.binding.add_symbol("specbench_yield", yields)
    function = {"pass": _pass, "head": _head}[part]
    entry = cfunc(types.void(types.CPointer(types.intp)), cache=True)(function)

    def run(fields: Any, threads: int) -> None:
        parallel(entry.address, fields, threads, 0)

    return run


def scratch_bytes(size: int, keys: int) -> int:
    """Compute one thread's scratch, for heads of ``size`` and sequences of ``keys`` tokens."""
    padded, wide = -(-keys // WIDTH) * WIDTH, -(-size // WIDTH) * WIDTH
    return 4 * (size * WIDTH + CHUNK * (padded + wide) + padded * WIDTH + CHUNK)
