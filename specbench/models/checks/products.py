"""Whether packed products and fused steps are what they stand for.

A fault of theirs would be in all passes of the model, its own attention's too, so it is looked for
where nothing enlarges a rounding: each by itself, against torch's product from before, or against
the class's own formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from specbench.kernels.architectures import GATED, NORM, known_part
from specbench.kernels.fused_layers import is_fused
from specbench.kernels.packed_linear import PackedLinear, SiblingLinear

_ROWS = 3
_OUTPUTS = 16  # of each linear that are looked at, from all over it
# Of a dot product's absolute terms. A sum of n terms rounds by some sqrt(n) of its size, and they
# are n of that size.
_ROUNDINGS = 4
_OF_A_STEP = 1e-4  # of its largest output
_SMALL = 0.03  # inputs of norms, whose epsilon then counts


@dataclass(frozen=True, slots=True)
class ProductSample:
    """A few outputs of a linear, in float64 ``[rows, outputs]``, and what their roundings allow."""

    outputs: torch.Tensor  # which
    values: torch.Tensor
    allowed: torch.Tensor


@torch.inference_mode()
def sample_products(model: nn.Module) -> dict[str, ProductSample]:
    """By name, of the float32 linears on the CPU, which may be packed."""
    found = {}
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear | PackedLinear | SiblingLinear):
            continue
        weight = linear.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            continue
        outputs = torch.linspace(0, len(weight) - 1, _OUTPUTS).long()
        x, rows = _input(weight.shape[1]).double(), weight[outputs].double()
        bias = rows.new_zeros(_OUTPUTS) if linear.bias is None else linear.bias[outputs].double()
        absolute = x.abs() @ rows.abs().T + bias.abs()
        unit = _ROUNDINGS * torch.finfo(torch.float32).eps
        found[name] = ProductSample(outputs, x @ rows.T + bias, unit * absolute)
    return found


@torch.inference_mode()
def differing_product(model: nn.Module, samples: dict[str, ProductSample]) -> str:
    """The first packed linear whose outputs are not those of ``samples``; "" where none is."""
    inputs: dict[int, torch.Tensor] = {}  # one tensor for siblings, which share a product
    for name, sample in samples.items():
        linear = model.get_submodule(name)
        if not isinstance(linear, PackedLinear | SiblingLinear):
            continue
        size = linear.in_features
        inputs.setdefault(size, _input(size))
        out = linear(inputs[size])[:, sample.outputs].double()
        apart = (out - sample.values).abs().nan_to_num(torch.inf)
        if (apart > sample.allowed).any():
            return (
                f"the packed product of {name} differs by {float(apart.max()):.2g} from the "
                "product of its weights."
            )
    return ""


@torch.inference_mode()
def differing_step(model: nn.Module) -> str:
    """The first fused step whose outputs are not its class's; "" where none is.

    All norms, and of gated products, which read many weights, the first one. Fused attention is
    what the rest of the self-check is about.
    """
    gated = False
    for name, module in model.named_modules():
        part, _ = known_part(module)
        if not is_fused(module) or part not in (NORM, GATED) or (gated and part == GATED):
            continue
        gated = gated or part == GATED
        linear = module.get_submodule("gate_proj") if part == GATED else None
        x = _SMALL * _input(len(module.weight)) if linear is None else _input(linear.in_features)
        wanted = type(module).forward(module, x)
        apart = float((module(x) - wanted).abs().nan_to_num(torch.inf).max())
        if apart > _OF_A_STEP * float(wanted.abs().max()):
            return (
                f"the fused {name} differs by {apart:.2g} from {type(module).__name__}'s formula."
            )
    return ""


def _input(size: int) -> torch.Tensor:
    return torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(0))
