"""OPT-Tree: the draft tree with the largest expected accepted length, grown layer by layer.

Paper: "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", TACL 2025,
    arXiv 2406.17276.
Reference code studied: Jikai0Wang/OPT-Tree ``opt_classic/{tree,model,utils}.py``.
Method: a node contributes the product of draft probabilities on its path to the expected accepted
    length E. A child's is at most its parent's, so the ``nodes`` largest of all form a tree, the
    best there is. Layers are added until one adds no more than ``threshold`` to E. Its children are
    a function of the context alone, so it needs no proposal for the ratio test when sampling.
Where ours differs, and why:
    - Only nodes that are among the ``nodes`` best so far are fed to the draft model. The others and
      all below them can never be in the tree, so fewer draft tokens give the same tree.
    - E counts the layer just drafted, as the paper's algorithm does; the code leaves it out and so
      feeds one layer more for the same tree.
    - Equal scores are ordered by depth, then by creation, which keeps every parent of a chosen
      node; the code may cut a parent off its child.
    - When decoding greedily the scores are the draft's plain softmax; else its probabilities after
      the target's temperature and filters; tokens that the filters remove are no candidates.
    - Rows of accepted nodes stay in the draft's cache; the code reads them again.
Example: ``nodes`` 3; the likeliest paths are a (.6), "a c" (.54) and b (.3): they are the tree, and
    E is 1.44.
State kept: none beyond the step but the draft model's cache, for a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge

from specbench.arrays import FloatArray, IntArray
from specbench.config.schema import Positive, Share
from specbench.decoding.device import fill, to_device
from specbench.decoding.drafter import ModelDrafter
from specbench.decoding.protocols import DraftLM, ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.kernels.cuda_graphs import GraphRecorder, RecordedCall


@dataclass(kw_only=True, eq=False)
class OptTree(ModelDrafter):
    """OPT-Tree: a tree of a draft model's most likely paths.

    Attributes:
        nodes: nodes of a tree.
        threshold: a further layer must have added more than this many expected tokens; suits where
            it is near the draft's share of a target pass.
        max_depth: one more than the tree's layers at most, as in the reference code, which drops
            the last layer that it drafts.
    """

    name: str = "opt_tree"
    version: int = 2
    nodes: Positive = 50
    threshold: Share = 0.5
    max_depth: Annotated[int, Ge(2)] = 10  # 2: one layer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tree = DraftTree.empty()
        self._fed = NO_TOKENS
        self._expected: list[float] = []

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens_only=False,
            draft_model=True,
            max_nodes=self.nodes,
            # The last layer is never fed; a tree of one layer holds none.
            draft_nodes=self.nodes * max(1, self.max_depth - 2),
            path_probs=True,
        )

    def setup(self, context: DraftContext) -> None:
        assert context.draft_model is not None
        self._draft = context.draft_model
        self._sampling = context.sampling
        self._graphs: _Graphs | None = None
        if context.sampling.greedy and context.target is not None and context.target.graph_tokens:
            self._graphs = _Graphs(self._draft, self.nodes, context.target.dtype)

    def begin(self, state: DecodeState) -> None:
        self._expected = []
        self._draft.begin(state.tokens, state.seed)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        deepest = min(self.max_depth - 1, state.remaining - 1, self._draft.free_rows(state.length))
        self._tree, self._fed = DraftTree.empty(), NO_TOKENS
        expected = (yield from self._grow(state, deepest)) if deepest > 0 else 0.0
        self._expected.append(round(expected, 4))
        return self._tree

    def _grow(self, state: DecodeState, deepest: int) -> ModelWork[float]:
        """Build the tree; returns its expected accepted length."""
        tokens, parents, fed = NO_TOKENS, NO_TOKENS, NO_TOKENS  # of the best nodes, layer by layer
        scores: FloatArray = np.empty(0)
        layer = np.array([-1])  # nodes whose children come next
        layer_scores = np.ones(1)
        logits = (yield from self._draft.catching_up(state.tokens, draft_vocab=True))[None]
        expected, n_fed = 0.0, 0
        for depth in range(1, deepest + 1):
            full = len(scores) == self.nodes
            above, ids, values = self._children(logits, layer_scores, scores.min() if full else 0.0)
            old = len(scores)
            scores = np.concatenate([scores, values])
            # Stable: of equals the shallower stays, then the earlier, so parents always do.
            best = np.sort(np.argsort(-scores, kind="stable")[: self.nodes])
            tokens = np.concatenate([tokens, ids])[best]
            parents = np.concatenate([parents, layer[above]])[best]
            parents = np.where(parents < 0, -1, np.searchsorted(best, parents))
            fed = np.concatenate([fed, np.full(len(ids), -1)])[best]
            scores = scores[best]
            gain, expected = float(scores.sum()) - expected, float(scores.sum())
            if depth == deepest or gain <= self.threshold:
                break
            layer = np.flatnonzero(best >= old)
            layer_scores = scores[layer]
            above_fed = np.where(parents[layer] < 0, -1, fed[parents[layer]])
            fed[layer] = np.arange(n_fed, n_fed + len(layer))
            n_fed += len(layer)
            logits = yield from self._draft.extending(tokens[layer], above_fed, draft_vocab=True)
        self._tree, self._fed = DraftTree(tokens, parents, path_probs=scores), fed
        return expected

    def _children(
        self, logits: torch.Tensor, scores: FloatArray, cutoff: float
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Select the children that score above ``cutoff``, by parent, then by id.

        Args:
            logits: ``[rows, vocab]`` of the parents.
            scores: ``[rows]`` of the parents.
            cutoff: 0 in the first layer, where the best ``nodes`` are taken.

        Returns:
            ``[m]`` row of the parent, the target's id, and the score.
        """
        # A GPU returns a fixed number, because counting them first would be one more wait. On a CPU
        # a comparison takes less than a search for the largest of many rows.
        at_root = len(scores) == 1 and cutoff == 0.0
        graphs = self._graphs
        children = None if graphs is None else graphs.best(logits, scores)
        if children is None:
            probs = logits.softmax(-1) if self._sampling.greedy else self._sampling.probs(logits)
            if at_root or probs.is_cuda:
                reached = to_device(scores, probs.device).to(probs.dtype)
                children = _best(self._draft, probs, reached, self.nodes)
            else:
                products = probs * torch.from_numpy(scores).to(probs.dtype)[:, None]
                positions = torch.nonzero(products.flatten() > cutoff).view(-1)
                children = _pack_children(self._draft, positions, products)
        positions, tokens, values = children.cpu().numpy()  # the one copy of a layer
        mask = values > cutoff
        positions, values = positions[mask].astype(np.int64), values[mask]
        order = slice(None) if at_root else np.argsort(positions)
        above = (positions // logits.shape[-1])[order]
        return above, tokens[mask].astype(np.int64)[order], np.minimum(values[order], scores[above])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if outcome.tree is not self._tree:  # cut by the engine: held tokens are read again
            self._draft.drop_nodes()
            return
        path = self._fed[outcome.path]
        self._draft.commit_path(path[path >= 0])

    def report(self) -> Mapping[str, ReportValue]:
        return {**self._draft.report(), "expected_per_step": self._expected}


def _best(draft: DraftLM, probs: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Select the ``count`` best children, the best first, without waiting for the device.

    Args:
        probs: ``[rows, vocab]`` of the parents.
        scores: ``[rows]`` of the parents.
    """
    products = probs * scores[:, None]
    positions = products.flatten().topk(min(count, products.numel())).indices
    return _pack_children(draft, positions, products)


def _pack_children(draft: DraftLM, positions: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Stack positions, the target's ids and scores: ``[3, m]`` float64, exact for ids."""
    ids = draft.to_target_ids(positions % products.shape[-1])
    return torch.stack([positions.double(), ids.double(), products.flatten()[positions].double()])


class _Graphs(GraphRecorder):
    """`_best` of a layer's logits as CUDA graphs, for layers of 1, 2, 4, ... nodes.

    Args:
        nodes: largest layer, and number of children returned.
        dtype: of the models; logits have no fewer digits than float32.
    """

    def __init__(self, draft: DraftLM, nodes: int, dtype: torch.dtype) -> None:
        super().__init__(draft.device)
        widths = [1 << bits for bits in range((nodes - 1).bit_length() + 1)]
        dtype = torch.promote_types(dtype, torch.float32)
        with torch.inference_mode(False):  # they may be written to outside of that mode, too
            sizes = widths[-1], draft.vocab_size
            self._logits = torch.zeros(sizes, dtype=dtype, device=self.device)
            self._scores = self._logits.new_zeros(widths[-1])

        def best(logits: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (_best(draft, logits.softmax(-1), scores, nodes),)

        self._steps: dict[int, RecordedCall] = {}
        for rows in widths:
            call = RecordedCall(self, best, self._logits[:rows], self._scores[:rows])
            if self.record(call, f"the best children of {rows} nodes"):
                self._steps[rows] = call

    def best(self, logits: torch.Tensor, scores: FloatArray) -> torch.Tensor | None:
        """Run `_best` as a graph; valid until the next call. None if no graph fits."""
        n = len(scores)
        rows = 1 << (n - 1).bit_length()
        if rows not in self._steps or logits.dtype != self._logits.dtype:
            return None
        # Nodes that are padded have score 0, and so have their children.
        reached = np.zeros(rows)
        reached[:n] = scores
        fill(self._scores, reached)
        self._logits[:n] = logits
        self._steps[rows].run()
        return self._steps[rows].outputs[0]
