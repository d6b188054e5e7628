"""A decoder layer's steps on a GPU, in fewer kernels: 15 to 19 instead of 40 to 58.

One row of a 7B model reads 13 GB of weights and launches 1,300 kernels, of which most touch a few
thousand numbers: each costs its launch and little else. Here the norm is one kernel; query, key
and value are one product, and so are gate and up; queries and keys are rotated together where they
lie, and keys and values are written to the cache together. All of it is torch's own operations, so
that a CPU computes it too and a CUDA graph records it.

The formulas are the model's. Roundings are fewer: a norm and a rotation are each rounded once where
transformers rounds two or three times, so that in half precision a logit may differ in its last
bits. In float64 transformers' norms still round to float32, and these do not.

Modules keep their names, children, parameters and hooks. An instance is given another ``forward``,
and only instances of classes whose own ``forward`` is known to be the same formula; it acts within
``Fusion.active()`` alone. Outside of it, and so for a program that calls the model by itself, it is
the class's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from specbench.kernels.architectures import (
    ATTENTION,
    GATED,
    NORM,
    inputs_of,
    known_part,
    sliding_window,
)
from specbench.kernels.attention import AttentionPlan, attend

# A model's attribute: weak references to what has graphs of its passes in ``graphs``.
GRAPH_USERS = "_specbench_graph_users"


class Fusion:
    """The modules of a model that `fuse` changed, and those that it left.

    Attributes:
        fused: how many instances of a class compute in fewer kernels.
        stock: parts of decoder layers that are transformers' own, because nothing here is known to
            be the same formula.
    """

    def __init__(self) -> None:
        self.fused: Counter[str] = Counter()
        self.stock: Counter[str] = Counter()
        self.is_active = False

    def add(self, forward: _Forward) -> None:
        forward.module.forward = forward
        self.fused[type(forward.module).__name__] += 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run passes within fused."""
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False

    def describe(self) -> dict[str, dict[str, int]]:
        return {"fused": dict(self.fused), "stock": dict(self.stock)}


class _Forward:
    """In place of a module's ``forward``."""

    def __init__(self, module: Any, fusion: Fusion) -> None:
        self.module, self.fusion = module, fusion

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.fusion.is_active:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _product(self, linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Join weights and biases of all ``linears``."""
        first = linears[0]
        if len(linears) == 1:
            return first.weight, first.bias
        weights = [projection.weight for projection in linears]
        biases = [] if first.bias is None else [projection.bias for projection in linears]
        return _stack(weights), _stack(biases) if biases else None


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate ``parts``, which become views of the result, so that it takes no memory."""
    stacked = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = stacked[start : start + len(part)]
        start += len(part)
    return stacked


class _Norm(_Forward):
    def compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        norm = self.module
        return rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


class _Attention(_Forward):
    def __init__(self, module: Any, fusion: Fusion) -> None:
        super().__init__(module, fusion)
        self.size: int = module.head_dim
        linears = inputs_of(module)
        self.kv_heads = module.config.num_key_value_heads
        outputs = sum(projection.out_features for projection in linears)
        self.heads = outputs // self.size - 2 * self.kv_heads
        self.weight, self.bias = self._product(linears)
        self.head_weights: torch.Tensor | None = None
        if hasattr(module, "q_norm"):
            self.head_weights = torch.cat(
                [
                    module.q_norm.weight.detach().expand(self.heads, -1),
                    module.k_norm.weight.detach().expand(self.kv_heads, -1),
                ]
            )

    def compute(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        plan: AttentionPlan,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        module, heads, both = self.module, self.heads, self.heads + self.kv_heads
        batch, rows, _ = hidden_states.shape
        product = linear(hidden_states, self.weight, self.bias).view(batch, rows, -1, self.size)
        rotated = product[:, :, :both]
        if self.head_weights is not None:
            # Values are normed too and not used: a part of the block would be copied first.
            normed = rms_norm(product, (self.size,), None, module.q_norm.variance_epsilon)
            torch.mul(normed[:, :, :both], self.head_weights, out=rotated)
        cos, sin = position_embeddings
        rotate_(rotated, cos, plan.signed(sin))
        new = product[:, :, heads:].unflatten(2, (2, self.kv_heads)).permute(2, 0, 3, 1, 4)
        keys, values = past_key_values.update_both(new, module.layer_idx)
        out, _ = attend(
            module, product[:, :, :heads].transpose(1, 2), keys, values, attention_mask,
            scaling=module.scaling, sliding_window=sliding_window(module), plan=plan, **kwargs,
        )  # fmt: skip
        return module.o_proj(out.reshape(batch, rows, -1)), None


class _Gated(_Forward):
    def __init__(self, module: Any, fusion: Fusion) -> None:
        super().__init__(module, fusion)
        self.weight, self.bias = self._product(inputs_of(module))
        self.activation = getattr(module, "activation_fn", None) or module.act_fn

    def compute(self, x: torch.Tensor) -> Any:
        gate, up = linear(x, self.weight, self.bias).chunk(2, -1)
        return self.module.down_proj(self.activation(gate).mul_(up))


def rotate_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate the heads of ``x [batch, rows, heads, size]`` where they are.

    ``cos`` and ``signed_sin [batch, rows, rotated]`` as the model's rotary embedding gives them,
    the sines by way of ``AttentionPlan.signed``. Numbers behind the first ``rotated`` of each head
    stay.
    """
    size = cos.shape[-1]
    swapped = torch.cat((x[..., size // 2 : size], x[..., : size // 2]), -1)
    x[..., :size].mul_(cos[:, :, None]).addcmul_(swapped, signed_sin[:, :, None])


def fuse(model: nn.Module, layers: Iterable[nn.Module]) -> Fusion:
    """Fuse ``model``'s modules of known classes; again, and it gives what there is.

    ``layers`` are its decoder layers. What somebody else gave a ``forward`` or hooks that a fused
    step would pass by keeps its own.

    Raises:
        RuntimeError: CUDA graphs of the model are in use. They read the weights where they are, and
            fusing moves them.
    """
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _Forward):
            return forward.fusion
    users = [user() for user in vars(model).get(GRAPH_USERS, ())]
    if any(user is not None and user.model is model and user.graphs for user in users):
        raise RuntimeError(
            "CUDA graphs of this model are in use and would read freed weights: make the target "
            "with fused=True first, or delete the other and collect garbage"
        )
    fusion = Fusion()
    for module in model.modules():
        kind = _kind(module)
        if kind is not None:
            fusion.add(kind(module, fusion))
    for layer in layers:
        for part in layer.children():
            if "forward" not in vars(part) and not isinstance(part, nn.Dropout | nn.Identity):
                fusion.stock[type(part).__name__] += 1
    if fusion.fused and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the weights' former memory, in pieces too small for others
    return fusion


def _kind(module: Any) -> type[_Forward] | None:
    part, _ = known_part(module)
    if part is None or "forward" in vars(module):
        return None
    if part == NORM:
        return _Norm
    linears = inputs_of(module)
    passed_by = [*linears, *(getattr(module, name, None) for name in ("q_norm", "k_norm"))]
    if any(child is not None and not _is_plain(child) for child in passed_by):
        return None
    alike = {(p.weight.dtype, p.weight.device, p.bias is None) for p in linears}
    return {ATTENTION: _Attention, GATED: _Gated}[part] if len(alike) == 1 else None


def _is_plain(module: nn.Module) -> bool:
    """Return True if it can be bypassed: no hooks, no other linear in its place."""
    is_known_class = type(module) is nn.Linear or known_part(module)[0] == NORM
    hooks = module._forward_hooks or module._forward_pre_hooks
    ours = isinstance(vars(module).get("forward"), _Forward)
    return is_known_class and not hooks and (ours or "forward" not in vars(module))
