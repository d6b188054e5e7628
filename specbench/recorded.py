"""A recorded greedy output in the target's place: the engine's own loop without a model.

Greedy decoding with a drafter commits the same tokens whatever the drafter, so a draft can be
verified against the recorded output. For drafters of tokens alone every step is exactly the live
run's; a drafter that needs logits or hidden states cannot be replayed this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specbench.errors import CaseFailed
from specbench.tree import NO_AUX, VALID, fill_tree

if TYPE_CHECKING:
    from specbench.structs import DraftTree, IntArray

_BEYOND = 64  # ids after the output's end, for drafts that reach further


class RecordedScores:
    """The recorded choices of a pass."""

    hidden = None
    verified = None

    def __init__(self, choices: IntArray, vocab_size: int) -> None:
        self._choices = choices
        self.vocab_size = vocab_size

    def greedy(self) -> IntArray:
        """``[n + 1]`` the recorded token at each row's depth; right wherever its path is."""
        return self._choices

    @property
    def logits(self) -> None:
        """There are none.

        Raises:
            CaseFailed: always.
        """
        raise CaseFailed("no_model", "a recorded output has no logits")


class RecordedTarget:
    """Stands in for ``specbench.target.Target`` in ``specbench.engine.Engine``.

    Args:
        vocab_size: ids are in ``[0, vocab_size)``.
        max_nodes: nodes of the largest draft tree.
    """

    device = "cpu"

    def __init__(self, vocab_size: int, max_nodes: int) -> None:
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._depths = np.zeros(max_nodes + 1, dtype=np.int64)
        self._visible = np.zeros((max_nodes + 1, max_nodes + 1), dtype=np.bool_)
        self._output: IntArray = np.zeros(_BEYOND, dtype=np.int64)
        self._done = 0

    def load(self, output: IntArray) -> None:
        """The plain greedy output of the turn that is decoded next."""
        self._output = np.concatenate([output, np.zeros(_BEYOND + self._max_nodes, np.int64)])
        self._done = 0

    def prefill(self, prompt: IntArray, *, all_logits: bool = False) -> RecordedScores:
        """The first recorded token."""
        return RecordedScores(self._output[:1], self._vocab_size)

    def forward(
        self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()
    ) -> RecordedScores:
        """The recorded token after each row.

        Raises:
            CaseFailed: the tree is malformed.
        """
        n = len(tree)
        aux = NO_AUX if tree.aux is None else tree.aux
        status = fill_tree(
            np.asarray(tree.tokens),
            tree.parents,
            aux,
            self._vocab_size,
            self._depths,
            self._visible,
        )
        if status != VALID:
            raise CaseFailed("invalid_draft", "the draft tree is malformed")
        choices = self._output[self._done + 1 + self._depths[: n + 1]]
        return RecordedScores(choices, self._vocab_size)

    def keep(self, tree: DraftTree, path: IntArray) -> None:
        """Go on behind the accepted path."""
        self._done += len(path) + 1

    def room(self) -> int:
        """Nodes that the buffers hold."""
        return self._max_nodes
