"""CARD's cache: a tree of drafted layers that grows below the text and is pruned to it.

Every layer holds at most K nodes, the K most likely children of the layer above by the product of
the draft's conditionals along their paths. Each node keeps its own K most likely children too (the
paper's secondary cache): they become the next layer, now or after pruning has emptied the present
one. Tokens, parents and scores live on the host; what a draft pass yields stays on its device until
the next layer is chosen, which costs one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specbench.arrays import FloatArray, IntArray
from specbench.decoding.device import to_device

ROOT: IntArray = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class _Layer:
    """Nodes of one depth, the most likely first.

    Attributes:
        tokens: ``[n]``.
        parents: ``[n]`` places in the layer above.
        scores: ``[n]`` logarithm of the path's probability, up to a constant of the whole tree.
        children: ``[m, k]`` tokens of each node's most likely children, on the draft's device.
        chances: ``[m, k]`` logarithms of their conditional probabilities.
        rows: ``[n]`` the nodes' rows in these two, which pruning leaves as they are.
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray
    children: torch.Tensor
    chances: torch.Tensor
    rows: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    def only(self, places: IntArray, parents: IntArray) -> _Layer:
        return replace(
            self,
            tokens=self.tokens[places],
            parents=parents,
            scores=self.scores[places],
            rows=self.rows[places],
        )


class LayeredTree:
    """At most ``width`` nodes per layer below a root, which is no node itself.

    A *path* is a list of places: its l-th entry is a node's place in layer l, the child of the one
    before. A *number* is a node's position in the order of growth, layer after layer, as the draft
    model counts the nodes it was fed.

    Args:
        width: K, nodes per layer and children kept of every node.
        target_ids: from the draft's own ids, which its logits are over, to the target's; None
            where they are the same.
    """

    def __init__(
        self, width: int, target_ids: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.width = width
        self._target_ids = target_ids
        self._layers: list[_Layer] = []  # the root first

    @property
    def rooted(self) -> bool:
        return bool(self._layers)

    @property
    def depth(self) -> int:
        return max(len(self._layers) - 1, 0)

    def __len__(self) -> int:
        return sum(map(len, self._layers[1:]))

    def clear(self) -> None:
        self._layers = []

    def restart(self, logits: torch.Tensor) -> None:
        """Begin anew from a root whose next token has these logits, ``[vocab]``."""
        children, chances = self._most_likely(logits.reshape(1, -1))
        self._layers = [_Layer(ROOT, ROOT, np.zeros(1), children, chances, ROOT)]

    def grow(self, forward: Callable[[IntArray, IntArray], torch.Tensor]) -> None:
        """Add a layer: the most likely children of the deepest one.

        ``forward`` is the draft's pass over new nodes: from their tokens ``[n]`` and the numbers of
        their parents ``[n]`` (-1 for the root) to logits ``[n, vocab]``.
        """
        above = self._layers[-1]
        chances, children = above.chances, above.children
        if len(above) < len(chances):
            rows = to_device(above.rows, chances.device)
            chances, children = chances[rows], children[rows]
        scores = to_device(above.scores, chances.device)[:, None] + chances
        best, places = scores.flatten().topk(min(self.width, scores.numel()))
        chosen = torch.stack((best, places.double(), children.flatten()[places].double()))
        scores_, places_, tokens_ = chosen.cpu().numpy()
        possible = np.isfinite(scores_)  # not ids that the draft's vocabulary lacks
        parents = places_[possible].astype(np.int64) // chances.shape[1]
        tokens = tokens_[possible].astype(np.int64)
        first = len(self) - len(above)
        numbers = parents + first if self.depth else np.full(len(parents), -1)
        children, chances = self._most_likely(forward(tokens, numbers))
        rows_ = np.arange(len(tokens))
        self._layers.append(_Layer(tokens, parents, scores_[possible], children, chances, rows_))

    def best_path(self, above: Sequence[int] = ()) -> list[int]:
        """``above`` continued by the most likely child, layer by layer, while there is one.

        Not the most likely leaf's path: the reference's target chooses greedily, too.

        Returns:
            The continuation alone.
        """
        path: list[int] = []
        place = above[-1] if above else 0
        for layer in self._layers[1 + len(above) :]:
            below = layer.parents == place
            place = int(below.argmax())  # the first is the most likely
            if not below[place]:
                break
            path.append(place)
        return path

    def child(self, above: Sequence[int], token: int) -> int | None:
        """The place of the node with ``token`` below the path ``above``, None without one."""
        if len(above) >= self.depth:
            return None
        layer = self._layers[1 + len(above)]
        place = above[-1] if above else 0
        found = np.flatnonzero((layer.parents == place) & (layer.tokens == token))
        return int(found[0]) if len(found) else None

    def tokens(self, path: Sequence[int], first: int = 0) -> IntArray:
        """Tokens ``[len(path)]`` of a path that begins in layer ``first``."""
        layers = self._layers[1 + first :]
        return np.array(
            [layer.tokens[place] for layer, place in zip(layers, path, strict=False)],
            dtype=np.int64,
        )

    def numbers(self, path: Sequence[int]) -> IntArray:
        """Numbers ``[len(path)]`` of a path's nodes."""
        sizes = [len(layer) for layer in self._layers[1 : 1 + len(path)]]
        firsts = np.cumsum([0, *sizes])[: len(path)]
        return firsts.astype(np.int64) + np.array(path, dtype=np.int64)

    def reroot(self, path: Sequence[int]) -> IntArray:
        """Make the path's last node the root and drop what does not descend from it.

        Layers end where no descendant is left; ``grow`` then goes on with the children that the
        last layer's nodes have kept.

        Returns:
            Numbers of the nodes that remain, as they were before, in ascending order.
        """
        first = sum(map(len, self._layers[1 : 1 + len(path)]))
        places = np.array(path[-1:], dtype=np.int64)
        root = self._layers[len(path)]
        pruned, kept = [root.only(places, ROOT)], []
        size = len(root)
        for layer in self._layers[1 + len(path) :]:
            new_places = np.full(size, -1, dtype=np.int64)
            new_places[places] = np.arange(len(places))
            parents = new_places[layer.parents]
            places = np.flatnonzero(parents >= 0)
            if not len(places):
                break
            pruned.append(layer.only(places, parents[places]))
            kept.append(first + places)
            size = len(layer)
            first += size
        self._layers = pruned
        return np.concatenate(kept) if kept else np.empty(0, dtype=np.int64)

    def _most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities ``[n, k]`` of each row's most likely next tokens."""
        # Many times faster on a CPU than choosing first and normalising by `logsumexp`.
        chances, tokens = logits.log_softmax(-1).topk(min(self.width, logits.shape[-1]), dim=-1)
        return tokens if self._target_ids is None else self._target_ids(tokens), chances
