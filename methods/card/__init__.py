"""CARD: the draft model fills a cache of candidate texts while the target verifies one of them.

Paper: "CARD: A Cache-Assisted Parallel Speculative Decoding Framework via Query-and-Correct
    Paradigm for Accelerating LLM Inference", arXiv 2508.04462.
Reference code studied: hunzhizi/CARD (``drafter_decoding``), the synchronous version that its
    benchmarks run, by its description.
Method: the cache is a tree of layers with K nodes each (``methods.card.layered_tree``).
    While the target verifies the path it found there (*query*), the draft model adds r layers. Then
    the tree is pruned to what the target committed (*correct*), and the next path is chosen: the
    most likely child, layer by layer. The target's own token is looked for in the layers that have
    arrived meanwhile: where the tree has it (a *hit*) drafting goes on below it, else (a *miss*)
    the tree starts anew from the text, at the cost of one of the next r draft passes. The target
    verifies a chain. A layer that pruning has emptied is filled from the children that its parents
    kept (the secondary cache); nothing else uses them, a miss least of all.
What overlaps: one target pass on the path chosen after the step before, and r draft passes on the
    tree that path came from. ``engine.overlap=serial`` runs the same schedule one after the other,
    with the same tokens.
r: ``auto`` is the paper's ceil(t_target / t_draft), measured in ``setup`` with K nodes a draft pass
    and eight rows a target pass (fewer where ``max_depth`` is below 7), once for a run, resumed or
    not; the number is in every record.
Temperature above 0: the tree is a function of the committed text and of how it came in steps; no
    random number that the verifier has yet to draw enters it. Given the text, every child is a
    point mass, so accepting it with probability p(x) is exact; this is what the reference does
    (it draws one token per position and compares), not the ratio min(1, p / q).
``correct: false``, the paper's ablation "query but don't correct", for which there is no code. Our
    reading: what the target accepted is not fed back. The tree keeps its old root and all its
    branches, wrong ones included, whose descendants go on taking places from right ones; the
    target walks down in it as long as it finds its tokens. A miss starts the tree anew (without
    that, the first divergence would end all hits of a turn, which the paper's 3.45x excludes), and
    so does a tree that has been walked to its last layer.
Where ours differs, and why:
    - The engine calls after the prompt's pass, so the target's first pass verifies nothing; the
      draft model reads the prompt beside it. In the reference it does so beside the prompt's pass.
    - Pruned nodes are removed, also from the draft's cache, instead of getting weight 0.
    - Scores are sums of logarithms; products of 50 float32 probabilities underflow.
    - Layers end at ``max_depth`` instead of overwriting the oldest, and where no more tokens are
      wanted.
    - After a hit that empties the tree, which was seen at r = 2 and never from r = 3 on, the
      reference goes on from the last node that was fed; ours from the node that was hit.
    - A node whose children all have weight 0 ends the path; the reference may go on with a node
      that is not a child.
    - One process; a second device is the draft's (``pair.draft.device``), not a second rank.
State kept: the tree and the draft's cache, for a turn. At K = 100 and 50 layers the kept children
    take 4 MB and the draft's cache 5000 rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from methods.card.layered_tree import LayeredTree
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    Counted,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)

_NODE_LIMIT = 2**14  # that the draft holds at once: its mask has a byte for each pair
_ROWS = 8  # of the target's passes when r is measured, at most; the paper's r is 4 to 7


@dataclass(kw_only=True, eq=False)
class Card(Drafter):
    """CARD: a draft model fills a cache while the target verifies a path through it.

    Attributes:
        k: K, nodes per layer.
        r: communication ratio, draft passes per target pass; ``auto`` measures it.
        max_depth: layers at most.
        correct: prune the tree to what the target committed; false for the ablation.
    """

    name: str = "card"
    k: Positive = 100
    r: Positive | Literal["auto"] = 7
    max_depth: Positive = 50
    correct: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        most = _NODE_LIMIT // self.max_depth
        self._require(self.k <= most, "k", f"at most {most} with method.max_depth={self.max_depth}")
        self._ratio = 0 if self.r == "auto" else self.r
        self._require(self._ratio <= self.max_depth, "r", f"at most max_depth={self.max_depth}")
        self._target_weights = 0
        self._tree = LayeredTree(self.k)
        self._trail: list[int] = []  # places from the tree's root to the text's last token
        self._path: list[int] = []  # places below it, which the target verifies
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
            self._tree.restart(draft.catch_up(state.tokens, own=True))
        # Deeper layers are of no use: they lie behind the last token wanted, or out of reach.
        useful = min(state.remaining, free) + len(self._trail)
        while draft.forwards < passes and self._tree.depth < min(self.max_depth, useful):
            self._tree.grow(lambda tokens, parents: draft.extend(tokens, parents, own=True))

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if not len(outcome.committed):
            return
        self._counts["steps"] += 1
        self._counts["verified"] += 1 + len(outcome.tree)
        if outcome.finished:
            return
        path = self._trail + self._path[: len(outcome.path)]
        # The target's own token; in a union perhaps others that other parts had drafted.
        for token in outcome.committed[len(outcome.path) :].tolist():
            place = self._tree.child(path, token)
            if place is None:
                self._counts["misses"] += 1
                self._draft.commit_path(self._tree.numbers(path))
                self._tree.clear()
                self._trail = []
                return
            path.append(place)
        self._counts["hits"] += 1
        if self.correct:
            numbers = self._tree.numbers(path)
            self._draft.commit_path(numbers, self._tree.reroot(path))
        else:
            self._trail = path

    def report(self) -> Mapping[str, Counted]:
        """Counters of the turn.

        ``hits`` and ``misses`` count the steps after which the target's own token was looked for
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
