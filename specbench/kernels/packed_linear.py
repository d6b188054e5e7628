"""Products whose weights were packed once, in panels (``panel_kernels``).

A draft tree turns matrix-vector products into products with 2 to 128 columns. Called with plain
row-major weights, the CPU libraries behind torch repack them on every call, and between 2 and 64
rows that costs more than the arithmetic. Panels are packed once, and a pass of few rows takes as
long as its weights take to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specbench.kernels import panel_kernels
from specbench.kernels.panel_kernels import FLOAT32
from specbench.kernels.weight_forms import round_to, shortest


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a matrix in panels.

    Attributes:
        panels: see ``panel_kernels.pack``.
        bias: ``[out_features]``, or None.
    """

    panels: torch.Tensor
    out_features: int
    bias: torch.Tensor | None

    @classmethod
    def from_linears(cls, linears: Sequence[Any]) -> Product:
        """Pack linears that read one input; their outputs are concatenated."""
        weights = [shortest(linear.weight) for linear in linears]
        if len({(weight.dtype, weight.shape[2:]) for weight in weights}) > 1:
            weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            panel_kernels.pack(weights[0] if len(weights) == 1 else torch.cat(weights)),
            sum(map(len, weights)),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        out = panel_kernels.panel_gemm(x.reshape(-1, x.shape[-1]), self.panels, self.out_features)
        if self.bias is not None:
            out.add_(self.bias)
        return out.view(*x.shape[:-1], self.out_features)


class PackedLinear(nn.Module):
    """Stands in for a head's ``nn.Linear``, whose parameters it shares."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.product = Product.from_linears([linear])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        return self.product(x)


def pack_linears(module: nn.Module, form: str = FLOAT32.name) -> None:
    """Round the float32 linears of ``module`` on a CPU to ``form``, and pack them.

    Where this build of torch has no panels, they stay as they are.
    """
    if not panel_kernels.available():
        return
    round_to(module, form)
    with torch.inference_mode():
        for name, linear in list(module.named_modules()):
            weight = linear.weight if type(linear) is nn.Linear else None
            if weight is not None and weight.is_cpu and weight.dtype == torch.float32:
                parent, _, child = name.rpartition(".")
                setattr(module.get_submodule(parent), child, PackedLinear(linear))


def product_of(
    weight: torch.Tensor, bias: torch.Tensor | None, packed: str | None = None
) -> nn.Module:
    """Make a product with a given matrix, packed with its values rounded to a form."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    product = nn.Sequential(linear)
    if packed:
        pack_linears(product, packed)
    return product
