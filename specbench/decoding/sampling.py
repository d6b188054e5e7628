"""From logits to probabilities: temperature, top-k, top-p.

Target and draft model are treated alike, in float32 whatever the model's dtype, because a ratio of
two half-precision probabilities has lost most of its digits. Importing this module does not import
torch, so that drafters can be replayed without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specbench.arrays import FloatArray
from specbench.config.schema import GenerationConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings that turn the target's logits into the distribution of its next token.

    Attributes:
        temperature: 0 is greedy: all mass on the largest logit, the smallest id on ties.
        top_p: keeps the most likely tokens until their mass reaches this; 1 keeps all.
        top_k: keeps this many, and those as likely as the last of them; 0 keeps all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @staticmethod
    def from_config(generation: GenerationConfig) -> Sampling:
        """Take the settings of the ``generation`` group."""
        return Sampling(
            float(generation.temperature), float(generation.top_p), int(generation.top_k)
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute probabilities in float32 (float64 stays) of logits ``[..., vocab]``.

        Temperature, top-k and top-p apply in this order, each to the result of the one before.
        """
        import torch

        values = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            ids = values.argmax(-1, keepdim=True)
            return torch.zeros_like(values).scatter_(-1, ids, 1.0)
        # Subtract the largest first, so that a small temperature cannot overflow.
        values = (values - values.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < values.shape[-1]:
            least = values.topk(self.top_k, dim=-1).values[..., -1:]
            values = values.masked_fill(values < least, -torch.inf)
        probs = values.softmax(-1)
        if self.top_p < 1.0:
            mass, ids = probs.sort(dim=-1, descending=True, stable=True)
            before = mass.cumsum(-1) - mass  # of tokens more likely than this one
            mass = mass.masked_fill(before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, ids, mass)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


GREEDY = Sampling()


def sample(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one id of positive probability from each distribution, by its cumulative sum.

    The sum is taken in float64: in float32, a vocabulary of 10^5 would leave five digits. The same
    uniforms give the same ids on every device, rounding at the borders between ids aside.

    Args:
        probs: ``[n, vocab]``, not negative, not all zero; need not add up to 1.
        uniforms: ``[n]`` float64 in ``(0, 1]``.
    """
    import torch

    mass = probs.cumsum(-1, dtype=torch.float64)
    # The first id whose sum reaches a positive threshold has a positive probability.
    threshold = uniforms.unsqueeze(-1) * mass[..., -1:]
    return torch.searchsorted(mass, threshold).squeeze(-1)


class Uniforms:
    """A turn's random numbers: float64 in ``(0, 1]``, used up in order.

    The numbers depend on the seed alone, not on the device. They differ from
    ``numpy.random.default_rng(seed)``, because a drafter that draws with the turn's seed must not
    know the numbers that verify its draft.
    """

    _SALT = 0x5EC7

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, seed: int) -> None:
        self._random = np.random.default_rng([seed, self._SALT])
        self._ahead = np.empty(0)

    def peek(self, n: int) -> FloatArray:
        """Return the next ``[n]`` numbers without using them up."""
        missing = n - len(self._ahead)
        if missing > 0:
            self._ahead = np.concatenate((self._ahead, 1.0 - self._random.random(missing)))
        return self._ahead[:n]

    def take(self, n: int) -> FloatArray:
        """Return the next ``[n]`` numbers and use them up."""
        taken = self.peek(n)
        self._ahead = self._ahead[n:]
        return taken
