"""What the engine asks of a verifier, and what every verifier asks of a pass."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specbench.arrays import Array, IntArray
from specbench.decoding.structs import AcceptedPath, DraftTree
from specbench.errors import CaseFailed


class PassScores(Protocol):
    """What a verifier asks of a target pass, live or replayed."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def logits(self) -> torch.Tensor:
        """``[n + 1, vocab]`` of root and nodes."""

    @property
    def depths(self) -> IntArray:
        """``[n + 1]`` of root and nodes, until the next pass."""

    @property
    def verified(self) -> tuple[IntArray, IntArray] | None:
        """Accepted path ``[a]`` and greedy choices ``[n + 1]``, where the pass itself verified."""

    def greedy(self) -> torch.Tensor | IntArray:
        """``[n + 1]`` greedy choice of root and nodes; -1 where logits are not finite."""


class Verifier(Protocol):
    """Decides acceptance from a tree and the target's scores.

    ``first`` and ``verify`` raise CaseFailed where a row's logits are not finite, or a draft token
    is outside the vocabulary.
    """

    name: str  # as in ``verifier=<name>``
    lossless: bool  # whether the committed tokens follow the target's own distribution

    def begin(self, seed: int) -> None:
        """A turn begins, with this seed."""

    def first(self, scores: PassScores) -> int:
        """The first new token, from the scores of the prompt's last position."""

    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """The accepted path, the token after it, and the greedy choice of every row."""


def row_by_row(logits: torch.Tensor) -> bool:
    """Whether to look only at the rows that are reached.

    On a CPU looking costs nothing and every row spared is time saved; on a GPU looking waits for
    the device, so all rows are worked out at once.
    """
    return logits.device.type == "cpu"


def to_host(*parts: torch.Tensor) -> list[Array]:
    """Bring tensors of one device to the host by one copy, flattened; ids and floats may mix."""
    if len(parts) == 1:
        return [parts[0].flatten().cpu().numpy()]
    mixed = any(part.is_floating_point() for part in parts)
    # Ids are far below 2^53, so float64 holds them exactly.
    flat = [part.flatten().double() if mixed else part.flatten() for part in parts]
    host = torch.cat(flat).cpu().numpy()
    cuts = np.cumsum([part.numel() for part in parts])[:-1]
    return [
        piece if part.is_floating_point() else piece.astype(np.int64, copy=False)
        for part, piece in zip(parts, np.split(host, cuts), strict=True)
    ]


def choices_and_tokens(
    tree: DraftTree, scores: PassScores, *more: torch.Tensor
) -> tuple[IntArray, IntArray, list[Array]]:
    """Greedy choices ``[n + 1]``, draft tokens ``[n]`` and ``more``, by one copy to the host."""
    ids = scores.greedy()
    tokens = tree.tokens
    on_device = [part for part in (ids, tokens, *more) if isinstance(part, torch.Tensor)]
    host = to_host(*on_device) if on_device else []
    choices: IntArray = host.pop(0) if isinstance(ids, torch.Tensor) else ids
    if isinstance(tokens, torch.Tensor):
        tokens = host.pop(0)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < scores.vocab_size:
            raise CaseFailed("invalid_draft", "a draft token is outside the vocabulary")
    return finite(choices), tokens, host


def finite(choices: IntArray) -> IntArray:
    """The greedy choices as they are; CaseFailed where the logits of one are not finite."""
    if len(choices) and int(choices.min()) < 0:
        raise CaseFailed("nan_logits", "the target's logits are not finite (NaN or infinite)")
    return choices
