"""A decoder layer's small steps on the CPU, one call each instead of a dozen.

With a single row, the norms and the rotation of queries and keys are a few hundred numbers each,
and what they cost is the calls: some forty a layer. Here each is one compiled loop. The formulas
are the model's own; only the order in which a norm's squares are summed differs, and it is the same
for every number of rows, so a row is the same to the last bit alone and among others.

Modules keep their names, children and parameters. An instance is given another ``forward``, and
only instances of classes whose own ``forward`` is known to be the same formula. A trace
(``torch.compile``) follows that one: it cannot look into compiled loops.

One file, because numba's cache on disk notices a change in a function's own file only.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import MethodType
from typing import Any

import torch
from numba import carray, cfunc, float32, njit, types
from torch import nn
from torch.compiler import is_compiling

from specbench.kernels.architectures import ATTENTION, GATED, NORM, known_part, sliding_window
from specbench.kernels.attention import attend
from specbench.kernels.packed_linear import SiblingLinear

_FLOATS = types.CPointer(types.float32)


@njit(inline="never", fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _mean_square(x: Any) -> Any:
    total = float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total / float32(x.shape[0])


def _norm(x: Any, weight: Any, out: Any, rows: int, size: int, epsilon: float) -> None:
    """Rows of ``x`` divided by their root mean square, times ``weight``."""
    source, result = carray(x, (rows, size)), carray(out, (rows, size))
    factor = carray(weight, size)
    for row in range(rows):
        scale = float32(1.0) / float32((_mean_square(source[row]) + float32(epsilon)) ** 0.5)
        for i in range(size):
            result[row, i] = factor[i] * (source[row, i] * scale)


def _rotate(x: Any, cos: Any, sin: Any, rows: int, stride: int, heads: int, size: int) -> None:
    """The first ``heads`` heads of each row of ``x``, rotated where they are."""
    half = size // 2
    both, c, s = carray(x, (rows, stride)), carray(cos, (rows, size)), carray(sin, (rows, size))
    for row in range(rows):
        for head in range(heads):
            start = head * size
            for i in range(half):
                first, second = both[row, start + i], both[row, start + half + i]
                both[row, start + i] = first * c[row, i] - second * s[row, i]
                both[row, start + half + i] = second * c[row, half + i] + first * s[row, half + i]


@cache
def _compiled() -> tuple[Any, Any]:
    whole = types.intp
    norm = types.void(_FLOATS, _FLOATS, _FLOATS, whole, whole, types.float64)
    rotate = types.void(_FLOATS, _FLOATS, _FLOATS, whole, whole, whole, whole)
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    return (
        ctypes.CFUNCTYPE(None, *[pointer] * 3, size, size, ctypes.c_double)(
            cfunc(norm, cache=True)(_norm).address
        ),
        ctypes.CFUNCTYPE(None, *[pointer] * 3, *[size] * 4)(
            cfunc(rotate, cache=True)(_rotate).address
        ),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm of ``x [..., size]``, float32 on the CPU."""
    _must_be_readable(x, weight)
    x = x.contiguous()
    out = torch.empty_like(x)
    size = len(weight)
    _compiled()[0](
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, epsilon
    )
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    """Rotate the first ``heads`` heads (query and key) of each row in place.

    ``x [..., all heads * size]`` is float32 on the CPU, its rows at one distance. ``cos`` and
    ``sin [..., size]`` are contiguous, as the model's rotary embedding gives them.
    """
    _must_be_readable(x, cos, sin)
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise TypeError("tables of cosines and sines must be contiguous")
    size = cos.shape[-1]
    _compiled()[1](
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.numel() // size, x.stride(-2), heads, size
    )


def _must_be_readable(*tensors: torch.Tensor) -> None:
    """TypeError for what the compiled code would misread."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise TypeError(f"float32 on the CPU wanted, not {tensor.dtype} on {tensor.device}")


# -- what modules of known classes are given as ``forward`` ----------------------------------------


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> Any:
    if is_compiling():
        return type(self).forward(self, hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    # A pass that is traced, or not one of this project's engine.
    if is_compiling() or "plan" not in kwargs or past_key_values is None:
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )
    batch, rows, _ = hidden_states.shape
    size = self.head_dim
    heads, kv_heads = (linear.out_features // size for linear in (self.q_proj, self.k_proj))
    product = self.q_proj.product.packed(hidden_states)
    cos, sin = (table.expand(batch, rows, size).contiguous() for table in position_embeddings)
    rotate_(product, cos, sin, heads + kv_heads)
    by_head = product.view(batch, rows, heads + 2 * kv_heads, size).transpose(1, 2)
    queries, keys, values = by_head.split((heads, kv_heads, kv_heads), 1)
    keys, values = past_key_values.update(keys, values, self.layer_idx)
    out, _ = attend(
        self, queries, keys, values, attention_mask,
        scaling=self.scaling, sliding_window=sliding_window(self), **kwargs,
    )  # fmt: skip
    return self.o_proj(out.view(batch, rows, -1)), None


def _gated_forward(self: Any, x: torch.Tensor) -> Any:
    if is_compiling():
        return type(self).forward(self, x)
    gate, up = self.gate_proj.product.packed(x).chunk(2, -1)
    return self.down_proj(self.act_fn(gate).mul_(up))


def fuse(model: nn.Module) -> int:
    """Fuse the small steps of ``model``'s float32 layers on the CPU, once its linears are packed.

    A module that was given a ``forward`` by someone else (accelerate's hooks) keeps it. Returns
    how many have ours.
    """
    for module in model.modules():
        forward = _fused(module)
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(forward, module)
    count = count_fused(model)
    if count:
        _compiled()  # now, and not within the first pass, which somebody times
    return count


def count_fused(model: nn.Module) -> int:
    """How many modules of ``model`` were given another ``forward`` by ``fuse``."""
    return sum(is_fused(module) for module in model.modules())


def is_fused(module: nn.Module) -> bool:
    """Whether ``fuse`` has given it another ``forward``."""
    ours = (_norm_forward, _attention_forward, _gated_forward)
    return getattr(vars(module).get("forward"), "__func__", None) in ours


def _fused(module: Any) -> Any:
    part, family = known_part(module)
    if family is None:
        return None
    if part == NORM:
        weight = module.weight
        return _norm_forward if weight.dtype == torch.float32 and weight.is_cpu else None
    if family.joined:
        return None
    if part == ATTENTION and not family.norms_heads and isinstance(module.q_proj, SiblingLinear):
        return _attention_forward
    if part == GATED and isinstance(module.gate_proj, SiblingLinear):
        return _gated_forward
    return None


def unfuse(model: nn.Module) -> None:
    """Undo ``fuse``; before the linears are unpacked, which it relies on."""
    for module in model.modules():
        if is_fused(module):
            del module.forward
