"""The interface of a verifier, and of a pass as verifiers see it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specbench.arrays import Array, IntArray
from specbench.decoding.structs import AcceptedPath, DraftTree
from specbench.errors import CaseFailed


class PassScores(Protocol):
    """Scores of a target pass, live or replayed, as a verifier reads them."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def logits(self) -> torch.Tensor:
        """``[n + 1, vocab]`` of root and nodes."""

    @property
    def depths(self) -> IntArray:
        """``[n + 1]`` of root and nodes, until the next pass."""

    @property
    def verified(self) -> tuple[IntArray, IntArray, IntArray] | None:
        """Accepted path ``[a]``, tokens to match and greedy choices ``[n + 1]``.

        None unless the pass itself verified.
        """

    def greedy(self) -> torch.Tensor | IntArray:
        """Return ``[n + 1]`` greedy choices of root and nodes; -1 if logits are not finite."""


class Verifier(Protocol):
    """Decides acceptance from a tree and the target's scores.

    ``first`` and ``verify`` raise CaseFailed if a row's logits are not finite, or a draft token is
    outside the vocabulary.
    """

    name: str  # as in ``verifier=<name>``
    lossless: bool  # whether the committed tokens follow the target's own distribution

    def begin(self, seed: int) -> None:
        """Begin a turn with this seed."""

    def first(self, scores: PassScores) -> int:
        """Return the first new token, from the scores of the prompt's last position."""

    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the accepted path, the token after it, and the greedy choice of every row."""


def row_by_row(logits: torch.Tensor) -> bool:
    """Return whether to compute only the rows that are reached.

    On a CPU reading a row costs nothing and every row spared saves time; on a GPU reading waits for
    the device, so all rows are computed at once.
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
    """Bring greedy choices ``[n + 1]``, draft tokens ``[n]`` and ``more`` to the host at once."""
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
    """Return the greedy choices unchanged; CaseFailed if a row's logits are not finite."""
    if len(choices) and int(choices.min()) < 0:
        raise CaseFailed("nan_logits", "the target's logits are not finite (NaN or infinite)")
    return choices
