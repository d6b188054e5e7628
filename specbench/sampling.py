"""How logits become probabilities: temperature, top-k, top-p.

Target and draft model are treated alike, in float32 whatever the model's dtype: a ratio of two
half-precision probabilities has lost most of its digits. Importing this module does not import
torch, so that drafters can be replayed without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Sampling:
    """The law by which the target chooses its next token.

    Attributes:
        temperature: 0 is greedy: all mass on the largest logit, the smallest id on ties.
        top_p: keeps the most likely tokens until their mass reaches this; 1 keeps all.
        top_k: keeps this many; 0 keeps all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @staticmethod
    def from_config(generation: DictConfig) -> Sampling:
        """The law of the ``generation`` group."""
        return Sampling(
            float(generation.temperature), float(generation.top_p), int(generation.top_k)
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities ``[..., vocab]`` in float32 (float64 stays) of logits ``[..., vocab]``.

        Filters apply in the order temperature, top-k, top-p, each to what the one before left.
        """
        import torch

        values = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            ids = values.argmax(-1, keepdim=True)
            return torch.zeros_like(values).scatter_(-1, ids, 1.0)
        values = values / self.temperature
        if 0 < self.top_k < values.shape[-1]:
            kept, ids = values.topk(self.top_k, dim=-1)
            values = torch.full_like(values, -torch.inf).scatter_(-1, ids, kept)
        probs = values.softmax(-1)
        if self.top_p < 1.0:
            mass, ids = probs.sort(dim=-1, descending=True, stable=True)
            before = mass.cumsum(-1) - mass  # of the tokens more likely than this one
            mass = mass.masked_fill(before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, ids, mass)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


GREEDY = Sampling()
