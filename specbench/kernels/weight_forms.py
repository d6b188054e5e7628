"""Weights whose values a shorter form holds exactly.

A parameter stays float32, and transformers computes with it as ever. What is noted beside it has
the same values in fewer bytes, and panels hold that: a pass of few rows takes as long as its
weights take to be read. A copy of a parameter has no note, and is packed as float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specbench.kernels.panel_kernels import Q8_0, QUANTS

_NOTE = "specbench_short_form"

# A type of numbers, or a GGUF file's blocks, see ``panel_kernels.pack``.
ShortForm = torch.dtype | torch.Tensor


def note_form(weight: torch.Tensor, form: ShortForm | None) -> None:
    """Note what holds the values of ``weight`` exactly; None: nothing shorter does."""
    setattr(weight, _NOTE, form)


def noted_form(weight: torch.Tensor) -> ShortForm | None:
    """What `note_form` noted; None where nothing was."""
    return getattr(weight, _NOTE, None)


def form_of_all(weights: Sequence[torch.Tensor]) -> ShortForm | None:
    """The form of weights below one another; None where they have none in common."""
    forms = [noted_form(weight) for weight in weights]
    if all(isinstance(form, torch.Tensor) for form in forms):
        blocks = [form for form in forms if isinstance(form, torch.Tensor)]
        alike = {block.shape[1:] for block in blocks}
        return torch.cat(blocks) if len(alike) == 1 else None
    return forms[0] if all(form is forms[0] for form in forms) else None


def shortest(weight: torch.Tensor) -> torch.Tensor:
    """The values of ``weight`` in the form that was noted, else as they are."""
    form = noted_form(weight)
    if form is None:
        return weight.detach()
    return form if isinstance(form, torch.Tensor) else weight.detach().to(form)


def short_bytes(weight: torch.Tensor) -> int:
    """Bytes of the values of ``weight`` in the form that was noted."""
    form = noted_form(weight)
    if isinstance(form, torch.Tensor):
        return form.numel()
    return weight.numel() * (weight.dtype if form is None else form).itemsize


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
        if weight.is_cpu and weight.dtype == torch.float32 and noted_form(weight) is None:
            blocks, values = q8_0(weight)
            weight.copy_(values)
            note_form(weight, blocks)


def q8_0(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [out, in]`` in the blocks of GGUF's Q8_0, ``[out, in / 32, 34]``, and their values.

    A block has the half of a scale, then 32 signed bytes.
    """
    numbers = weight.detach().float().unflatten(1, (-1, QUANTS))
    # A half's largest number is the limit: weights beyond 8 million come out smaller.
    scale = (numbers.abs().amax(-1, keepdim=True) / 127).clamp(max=65504).half()
    factor = scale.float()
    quants = (numbers / factor.where(factor > 0, 1.0)).round().clamp(-127, 127)
    blocks = torch.cat([scale.view(torch.uint8), quants.to(torch.int8).view(torch.uint8)], -1)
    return blocks, (quants * factor).flatten(1)
