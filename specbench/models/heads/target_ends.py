"""What a draft head borrows from the target: the first and the last matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class TargetEnds(Protocol):
    """The target's embedding and LM head; each may be a packed copy."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` of ids ``[...]``."""

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab]`` of states ``[..., hidden]`` that are behind the final norm."""
