"""What a draft head borrows from the target: the first and the last matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class TargetEnds(Protocol):
    """The target's embedding and LM head, to read and never to write."""

    @property
    def embedding(self) -> torch.Tensor:
        """``[vocab, hidden]``."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., vocab]`` of states ``[..., hidden]`` after the final norm."""
