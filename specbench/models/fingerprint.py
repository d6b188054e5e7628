"""What tells two models of one architecture apart without their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import nn

    from specbench.arrays import Array

_SAMPLED = 4  # values of each parameter


def sample_weights(model: nn.Module) -> Array:
    """``[m]`` a few values of every parameter, evenly spaced, in float32.

    They are the same for a model in any dtype, up to rounding.
    """
    values = []
    for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        step = max(1, len(flat) // _SAMPLED)
        values.append(flat[::step][:_SAMPLED].float().cpu().numpy())
    return np.concatenate(values)
