"""CARD: the draft model fills a cache of candidate paths while the target verifies one of them.

Paper: "CARD: A Cache-Assisted Parallel Speculative Decoding Framework via Query-and-Correct
    Paradigm for Accelerating LLM Inference", arXiv 2508.04462.
Reference code studied: hunzhizi/CARD (``drafter_decoding``), the synchronous version that its
    benchmarks run, by its description.
Method: the cache is a tree of layers with K nodes each (`LayeredTree`). While the target verifies
    a path of it (*query*), the draft model adds r layers. Then the tree is pruned to the tokens
    that the target committed (*correct*), and the next path is chosen: the most likely child, layer
    by layer. The target's own token is looked up in the layers that were added meanwhile: if the
    tree has it (a *hit*), drafting continues below it, else (a *miss*) the tree restarts from the
    text, at the cost of one of the next r draft passes. The target verifies a chain. A layer that
    pruning has emptied is refilled from its parents' remaining children (the secondary cache),
    which have no other use, not even after a miss.
What overlaps: one target pass on the path chosen after the previous step, and r draft passes on
    the tree that the path came from. ``engine.overlap=serial`` runs the same schedule one after the
    other, with the same tokens.
r: ``auto`` is the paper's ceil(t_target / t_draft), measured in ``setup`` with K nodes a draft pass
    and eight rows a target pass (fewer if ``max_depth`` is below 7), once for a run, resumed or
    not; the number is in every record.
Temperature above 0: the tree depends on the committed text and its division into steps, but on no
    random number that the verifier has yet to draw. Given the text, every child is a point mass,
    so accepting it with probability p(x) is exact; the reference does this (it draws one token per
    position and compares) instead of using the ratio min(1, p / q).
``correct: false``: the paper's ablation "query but don't correct", which has no published code. Our
    reading: accepted tokens are not fed back. The tree keeps its old root and all its branches,
    wrong ones included, whose descendants keep crowding out right ones; the target walks down
    the tree while it finds its tokens. A miss restarts the tree (otherwise the first divergence
    would end all hits of a turn, which the paper's 3.45x excludes), and so does reaching the last
    layer.
Where ours differs, and why:
    - The engine calls after the prompt's pass, so the target's first pass verifies nothing, and the
      draft model reads the prompt during it. In the reference it does so during the prompt's pass.
    - Pruned nodes are removed, also from the draft's cache, instead of getting weight 0.
    - Scores are sums of logarithms; products of 50 float32 probabilities underflow.
    - Layers end at ``max_depth`` instead of overwriting the oldest, and at the last token of the
      turn.
    - After a hit that empties the tree (seen at r = 2, never from r = 3 on) the reference continues
      from the last node that was fed; ours continues from the node that was hit.
    - A node whose children all have weight 0 ends the path; the reference may continue with a node
      that is not a child.
    - One process; a second device holds the draft (``pair.draft.device``) instead of a second rank.
Example: below the root the cache has a (.6) and b (.4) with c and d below a: the target verifies
    a c. It commits "a d", so the tree continues below d; "a e" would have been a miss.
State kept: the tree and the draft's cache, for a turn. At K = 100 and 50 layers the children
    take 4 MB and the draft's cache 5000 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from specbench.arrays import FloatArray, IntArray
from specbench.config.schema import Positive
from specbench.decoding.device import to_device
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)

_NODE_LIMIT = 2**14  # nodes that the draft holds at once: its mask has a byte for each pair
_ROWS = 8  # at most, of the target's passes when r is measured; the paper's r is 4 to 7


@dataclass(kw_only=True, eq=False)
class Card(Drafter):
    """CARD: a draft model fills a cache while the target verifies a path through it.

    Attributes:
        k: K, nodes per layer.
        r: communication ratio, draft passes per target pass; ``auto`` measures it.
        max_depth: layers at most.
        correct: prune the tree to the tokens that the target committed; false for the ablation.
    """

    name: str = "card"
    k: Positive = 100
    r: Positive | Literal["auto"] = 7
    max_depth: Positive = 50
    correct: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        cap = _NODE_LIMIT // self.max_depth
        self._require(self.k <= cap, "k", f"at most {cap} with method.max_depth={self.max_depth}")
        self._ratio = 0 if self.r == "auto" else self.r
        self._require(self._ratio <= self.max_depth, "r", f"at most max_depth={self.max_depth}")
        self._target_weights = 0
        self._tree = LayeredTree(self.k)
        self._trail: list[int] = []  # indices from the tree's root to the text's last token
        self._path: list[int] = []  # indices below it, which the target verifies
        self._read = False  # whether the draft model has read this turn's prompt
        self._counts = dict.fromkeys(("hits", "misses", "steps", "verified"), 0)

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens_only=False,
            draft_model=True,
            overlap=True,
            max_nodes=self.max_depth,
            draft_nodes=self.k * self.max_depth,
        )

    def setup(self, context: DraftContext) -> None:
        assert context.draft_model is not None
        self._draft = context.draft_model
        self._tree = LayeredTree(self.k, self._draft.to_target_ids)
        if context.target is not None:
            self._target_weights = context.target.n_parameters
        if self.r == "auto":
            rows = min(_ROWS, self.max_depth + 1)  # the target has rows for no longer chain
            assert context.latency_ratio is not None
            self._ratio = min(context.latency_ratio("r", rows, self.k), self.max_depth)

    def begin(self, state: DecodeState) -> None:
        self._tree.clear()
        self._trail, self._path = [], []
        self._read = False
        self._counts = dict.fromkeys(self._counts, 0)

    def propose(self, state: DecodeState) -> DraftTree:
        path = self._tree.best_path(self._trail)
        self._path = path[: max(state.remaining - 1, 0)]
        return DraftTree.chain(self._tree.tokens(self._path, first=len(self._trail)))

    def overlap(self, state: DecodeState, tree: DraftTree) -> None:
        draft = self._draft
        if not self._read:
            draft.begin(state.tokens, state.seed)
            self._read = True
        free = draft.free_rows(state.length)
        if free < 0:
            return
        passes = draft.forwards + self._ratio
        if not self._tree.rooted:
            self._tree.restart(draft.catch_up(state.tokens, draft_vocab=True))
        # Deeper layers are useless: they lie after the turn's last token, or out of reach.
        useful = min(state.remaining, free) + len(self._trail)
        while draft.forwards < passes and self._tree.depth < min(self.max_depth, useful):
            self._tree.grow(lambda tokens, parents: draft.extend(tokens, parents, draft_vocab=True))

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if not len(outcome.committed):
            return
        self._counts["steps"] += 1
        self._counts["verified"] += 1 + len(outcome.tree)
        if outcome.finished:
            return
        path = self._trail + self._path[: len(outcome.path)]
        # The target's own token; in a union perhaps tokens drafted by other parts, too.
        for token in outcome.committed[len(outcome.path) :].tolist():
            child = self._tree.child(path, token)
            if child is None:
                self._counts["misses"] += 1
                self._draft.commit_path(self._tree.numbers(path))
                self._tree.clear()
                self._trail = []
                return
            path.append(child)
        self._counts["hits"] += 1
        if self.correct:
            numbers = self._tree.numbers(path)
            self._draft.commit_path(numbers, self._tree.reroot(path))
        else:
            self._trail = path

    def report(self) -> Mapping[str, ReportValue]:
        """Report the counters of the turn.

        ``hits`` and ``misses`` count the steps after which the target's own token was looked up
        (all but the last). ``*_params_x_new`` is the paper's Params x L_new: billions of weights
        times the mean rows of a pass.
        """
        draft, steps = self._draft, max(self._counts["steps"], 1)
        target_rows = self._counts["verified"] / steps
        draft_rows = draft.tokens / max(draft.forwards, 1)
        return {
            **draft.report(),
            "k": self.k,
            "r": self._ratio,
            "hits": self._counts["hits"],
            "misses": self._counts["misses"],
            "target_params_x_new": self._target_weights / 1e9 * target_rows,
            "draft_params_x_new": draft.n_parameters / 1e9 * draft_rows,
        }


ROOT: IntArray = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class _Layer:
    """Nodes of one depth, the most likely first.

    Attributes:
        tokens: ``[n]``.
        parents: ``[n]`` indices in the layer above.
        scores: ``[n]`` logarithm of the path's probability, up to a constant of the whole tree.
        children: ``[m, k]`` tokens of each node's most likely children, on the draft's device.
        log_probs: ``[m, k]`` their conditional log-probabilities.
        rows: ``[n]`` the nodes' rows in these two, which pruning leaves unchanged.
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray
    children: torch.Tensor
    log_probs: torch.Tensor
    rows: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: IntArray, parents: IntArray) -> _Layer:
        return replace(
            self,
            tokens=self.tokens[indices],
            parents=parents,
            scores=self.scores[indices],
            rows=self.rows[indices],
        )


class LayeredTree:
    """At most ``width`` nodes per layer below a root, which is not a node itself.

    A *path* is a list of indices: its l-th entry is a node's index in layer l, a child of the node
    before. A *number* is a node's position in the order of growth, layer after layer, as the draft
    model counts the nodes it was fed.

    Args:
        width: K, nodes per layer and children kept of every node.
        target_ids: map from the draft's ids, which its logits are over, to the target's; None
            if they are the same.
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
        """Restart from a root whose next token has these logits, ``[vocab]``."""
        children, log_probs = self._most_likely(logits.reshape(1, -1))
        self._layers = [_Layer(ROOT, ROOT, np.zeros(1), children, log_probs, ROOT)]

    def grow(self, forward: Callable[[IntArray, IntArray], torch.Tensor]) -> None:
        """Add a layer: the most likely children of the deepest one.

        ``forward`` is the draft's pass over new nodes: from their tokens ``[n]`` and their parents'
        numbers ``[n]`` (-1 for the root) to logits ``[n, vocab]``.
        """
        above = self._layers[-1]
        log_probs, children = above.log_probs, above.children
        if len(above) < len(log_probs):
            rows = to_device(above.rows, log_probs.device)
            log_probs, children = log_probs[rows], children[rows]
        scores = to_device(above.scores, log_probs.device)[:, None] + log_probs
        best, flat = scores.flatten().topk(min(self.width, scores.numel()))
        chosen = torch.stack((best, flat.double(), children.flatten()[flat].double()))
        scores_, flat_, tokens_ = chosen.cpu().numpy()
        possible = np.isfinite(scores_)  # drops ids that the draft's vocabulary lacks
        parents = flat_[possible].astype(np.int64) // log_probs.shape[1]
        tokens = tokens_[possible].astype(np.int64)
        first = len(self) - len(above)
        numbers = parents + first if self.depth else np.full(len(parents), -1)
        children, log_probs = self._most_likely(forward(tokens, numbers))
        rows_ = np.arange(len(tokens))
        self._layers.append(_Layer(tokens, parents, scores_[possible], children, log_probs, rows_))

    def best_path(self, above: Sequence[int] = ()) -> list[int]:
        """Continue ``above`` by the most likely child, layer by layer, while there is one.

        This is not the most likely leaf's path: the reference's target chooses greedily, too.

        Returns:
            The continuation alone.
        """
        path: list[int] = []
        node = above[-1] if above else 0
        for layer in self._layers[1 + len(above) :]:
            below = layer.parents == node
            node = int(below.argmax())  # the first is the most likely
            if not below[node]:
                break
            path.append(node)
        return path

    def child(self, above: Sequence[int], token: int) -> int | None:
        """Return the index of the node with ``token`` below the path ``above``, or None."""
        if len(above) >= self.depth:
            return None
        layer = self._layers[1 + len(above)]
        parent = above[-1] if above else 0
        matches = np.flatnonzero((layer.parents == parent) & (layer.tokens == token))
        return int(matches[0]) if len(matches) else None

    def tokens(self, path: Sequence[int], first: int = 0) -> IntArray:
        """Return the tokens ``[len(path)]`` of a path that begins in layer ``first``."""
        layers = self._layers[1 + first :]
        return np.array(
            [layer.tokens[index] for layer, index in zip(layers, path, strict=False)],
            dtype=np.int64,
        )

    def numbers(self, path: Sequence[int]) -> IntArray:
        """Return the numbers ``[len(path)]`` of a path's nodes."""
        sizes = [len(layer) for layer in self._layers[1 : 1 + len(path)]]
        firsts = np.cumsum([0, *sizes])[: len(path)]
        return firsts.astype(np.int64) + np.array(path, dtype=np.int64)

    def reroot(self, path: Sequence[int]) -> IntArray:
        """Make the path's last node the root and drop what does not descend from it.

        Layers end where no descendant is left; ``grow`` then continues with the remaining children
        of the last layer's nodes.

        Returns:
            The remaining nodes' old numbers, in ascending order.
        """
        first = sum(map(len, self._layers[1 : 1 + len(path)]))
        indices = np.array(path[-1:], dtype=np.int64)
        root = self._layers[len(path)]
        pruned, remaining = [root.take(indices, ROOT)], []
        size = len(root)
        for layer in self._layers[1 + len(path) :]:
            new_indices = np.full(size, -1, dtype=np.int64)
            new_indices[indices] = np.arange(len(indices))
            parents = new_indices[layer.parents]
            indices = np.flatnonzero(parents >= 0)
            if not len(indices):
                break
            pruned.append(layer.take(indices, parents[indices]))
            remaining.append(first + indices)
            size = len(layer)
            first += size
        self._layers = pruned
        return np.concatenate(remaining) if remaining else np.empty(0, dtype=np.int64)

    def _most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and log-probabilities ``[n, k]`` of each row's most likely next tokens."""
        # Many times faster on a CPU than choosing first and normalizing by `logsumexp`.
        log_probs, tokens = logits.log_softmax(-1).topk(min(self.width, logits.shape[-1]), dim=-1)
        return tokens if self._target_ids is None else self._target_ids(tokens), log_probs
