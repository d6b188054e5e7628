"""Verification: the one place that decides which draft tokens are accepted."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specbench.errors import CaseFailed
from specbench.structs import DraftTree, IntArray, Verdict
from specbench.tree import NO_AUX, longest_match


class PassScores(Protocol):
    """What a verifier asks of a target pass (``specbench.target.Scores`` or a replayed one)."""

    @property
    def vocab_size(self) -> int:
        """Ids are in ``[0, vocab_size)``."""

    def greedy(self) -> torch.Tensor | IntArray:
        """``[n + 1]`` greedy choice of root and nodes; -1 where logits are not finite."""


class Verifier(Protocol):
    """Decides acceptance from a tree and the target's scores."""

    lossless: bool

    def begin(self, seed: int) -> None:
        """A turn begins, with this seed."""

    def first(self, scores: PassScores) -> int:
        """The first new token, from the scores of the prompt's last position."""

    def verify(self, tree: DraftTree, scores: PassScores) -> tuple[Verdict, IntArray | None]:
        """Accepted path with the token after it, and the greedy choice of every row if known."""


class GreedyVerifier:
    """Accepts exactly what plain greedy decoding would emit.

    A pass costs one copy to the host: the choices of all rows, together with the draft's tokens
    where those are on the device.
    """

    lossless = True

    def __init__(self) -> None:
        self._path = np.empty(1024, dtype=np.int64)

    @staticmethod
    def _host(scores: PassScores, tokens: torch.Tensor | None = None) -> IntArray:
        ids = scores.greedy()
        if isinstance(ids, torch.Tensor):
            if tokens is not None:
                ids = torch.cat([ids, tokens])
            ids = ids.cpu().numpy()
        return ids

    def begin(self, seed: int) -> None:
        """Nothing: no random number is drawn."""

    def first(self, scores: PassScores) -> int:
        """The greedy token after the prompt.

        Raises:
            CaseFailed: the logits are not finite.
        """
        return int(_finite(self._host(scores)[-1:])[0])

    def verify(self, tree: DraftTree, scores: PassScores) -> tuple[Verdict, IntArray]:
        """Longest branch of ``tree`` that agrees with the target's greedy choices.

        Raises:
            CaseFailed: some row's logits are not finite.
        """
        n = len(tree)
        tokens = tree.tokens
        if isinstance(tokens, torch.Tensor):
            both = self._host(scores, tokens)
            choices, tokens = both[: n + 1], both[n + 1 :]
            if n and not 0 <= int(tokens.min()) <= int(tokens.max()) < scores.vocab_size:
                raise CaseFailed("invalid_draft", "a draft token is outside the vocabulary")
        else:
            choices = self._host(scores)
        _finite(choices)
        if n > len(self._path):
            self._path = np.empty(2 * n, dtype=np.int64)
        aux = NO_AUX if tree.aux is None else tree.aux
        count = longest_match(tokens, tree.parents, aux, choices, self._path)
        rows = np.zeros(count + 1, dtype=np.int64)  # the root and the accepted nodes
        rows[1:] = self._path[:count] + 1
        # What the target chooses at a matched row is the token of the node below it.
        return Verdict(rows[1:] - 1, choices[rows]), choices


def _finite(choices: IntArray) -> IntArray:
    if len(choices) and int(choices.min()) < 0:
        raise CaseFailed("nan_logits", "the target's logits are not finite (NaN or infinite)")
    return choices
