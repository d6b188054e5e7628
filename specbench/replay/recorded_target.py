"""A recorded greedy output in the target's place: the engine's own loop without a model.

Greedy decoding with a drafter commits the same tokens whatever the drafter, so a draft can be
verified against the recorded output. For drafters of tokens alone every step is exactly the live
run's. Heads also read the hidden states of committed tokens, which were recorded along plain
decoding: the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.device import to_device
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import ROOT_ALONE, TreeGeometry
from specbench.errors import CaseFailed

_BEYOND = 64  # ids after the output's end, for drafts that reach further


class RecordedScores:
    """The recorded choices of a pass."""

    verified = None

    def __init__(
        self,
        choices: IntArray,
        vocab_size: int,
        depths: IntArray = ROOT_ALONE,
        hidden: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._choices, self.depths, self.hidden = choices, depths, hidden
        self.vocab_size = vocab_size

    def greedy(self) -> IntArray:
        """``[n + 1]`` the recorded token at each row's depth; right wherever its path is."""
        return self._choices

    @property
    def logits(self) -> NoReturn:
        raise CaseFailed("no_model", "a recorded output has no logits")


class RecordedTarget:
    """Stands in for ``specbench.models.target.Target`` in ``specbench.decoding.engine.Engine``.

    Args:
        vocab_size: ids are in ``[0, vocab_size)``.
        max_nodes: nodes of the largest draft tree; `reserve` allows more.

    Attributes:
        passes: ``(k, width, context)`` of each pass since ``load``: k = 1 and the rows of a tree
            (root included), or k rows of the given width in the batch layout; and the tokens that
            were cached before it.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, max_nodes: int) -> None:
        self._vocab_size = vocab_size
        self._max_nodes = -1
        self.reserve(max_nodes)
        self.load(np.zeros(0, dtype=np.int64))

    def reserve(self, max_nodes: int) -> None:
        if max_nodes > self._max_nodes:
            self._max_nodes = max_nodes
            self._geometry = TreeGeometry(max_nodes)

    def load(self, output: IntArray, states: Mapping[int, torch.Tensor] | None = None) -> None:
        """The plain greedy output ``[n_new]`` of the turn that is decoded next.

        ``states``: ``[n_prompt + n_new - 1, hidden]`` by number as drafters ask for them.
        """
        self._output = np.concatenate([output, np.zeros(_BEYOND + self._max_nodes, np.int64)])
        self._states = states or {}
        self._n_prompt = self._done = 0
        self.passes: list[tuple[int, int, int]] = []

    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> RecordedScores:
        self._n_prompt = len(prompt)
        hidden = {layer: rows[: len(prompt)] for layer, rows in self._of(hidden_layers).items()}
        return RecordedScores(self._output[:1], self._vocab_size, hidden=hidden)

    def forward(
        self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()
    ) -> RecordedScores:
        """The recorded token after each row, and the recorded states.

        Rows have the states of the token at their depth, which is theirs wherever the path is.
        """
        n = len(tree)
        self.check(tree)
        k, width = (1, n + 1) if tree.rows is None else (tree.rows[0], tree.rows[1] + 1)
        self.passes.append((k, width, self._n_prompt + self._done))
        depths = self._geometry.depths[: n + 1]
        hidden: dict[int, torch.Tensor] = {}
        for layer, states in self._of(hidden_layers).items():
            # Only rejected nodes reach beyond the last state.
            rows = np.minimum(self._n_prompt + self._done + depths, len(states) - 1)
            hidden[layer] = states[to_device(rows, states.device)]
        choices = self._output[self._done + 1 + depths]
        return RecordedScores(choices, self._vocab_size, depths, hidden)

    def check(self, tree: DraftTree) -> None:
        """Refuse a malformed draft (CaseFailed)."""
        self._geometry.read(tree, self._vocab_size)

    def commit(self, tree: DraftTree, path: IntArray) -> None:
        self._done += len(path) + 1

    def free_rows(self) -> int:
        return self._max_nodes

    def _of(self, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
        if any(layer not in self._states for layer in layers):
            raise CaseFailed(
                "no_model",
                f"needs.hidden_layers asks for the hidden states {', '.join(map(str, layers))}, "
                "which were not recorded. Record them with record=states, or run the method live "
                "(runner=offline)",
            )
        return {layer: self._states[layer] for layer in layers}
