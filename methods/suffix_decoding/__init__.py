"""SuffixDecoding: drafts of adaptive length from suffix trees with occurrence counts.

Paper: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025,
    arXiv 2411.04975.
Reference code studied, by its description: snowflakedb/ArcticInference
    (``suffix_decoding/cache.py``, ``csrc/suffix_decoding/suffix_tree.cc``), which vLLM wraps.
Trees: a local one of the turn's prompt and answer, and a global one of the answers of all turns,
    past and running. Every suffix of the text that a tree knows drafts; the draft with the highest
    expected number of accepted tokens is taken, the local one of equals.
Where ours differs, and why:
    - Defaults are Arctic's for suffix-only use; ``conf/method/suffix_decoding.yaml`` has vLLM's.
    - Path mode is what both serve with; the paper describes a tree, which is ``draft: tree``.
    - Memory is bounded by ``max_cached_tokens`` besides the number of requests.
    - Equally frequent continuations are ordered by which of them reached the count first.
As in the reference, the text's own end counts as an occurrence, so probabilities of rare
continuations are lower than their share.
State kept: the local tree for a turn; the global tree as ``state_scope`` says: with ``run`` over
    all cases as in the paper, with ``prompt`` over the turns of a case, so that it is empty at the
    beginning of each. At most 100 bytes for each of ``max_cached_tokens``, per tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from methods.suffix_decoding.kernels import speculate
from methods.suffix_decoding.tree import SuffixTree
from specbench.arrays import FloatArray, IntArray
from specbench.config.schema import NotNegative, Positive, Share
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome

_LOCAL, _GLOBAL = 0, 1


@dataclass(kw_only=True, eq=False)
class SuffixDecoding(Drafter):
    """SuffixDecoding: drafts of adaptive length from suffix trees with counts.

    Attributes:
        depth: tokens of the match and its continuation together, at most.
        factor: draft tokens per token of the match.
        offset: draft tokens besides these.
        min_token_prob: path probability below which nothing is drafted.
        max_spec_tokens: draft nodes at most; None is ``depth``.
        draft: ``path`` (a chain) or ``tree``.
        max_cached_requests: answers in the global tree at most; 0 for no global tree, -1 for any
            number.
        max_cached_tokens: tokens of a tree at most, rounded up to a power of two.

    `score` tells how many tokens of the last draft are expected to be accepted.
    """

    name: str = "suffix_decoding"
    paper_scope: Scope = "run"
    depth: Annotated[int, Ge(2)] = 64
    factor: NotNegative = 1.0
    offset: float = 0.0
    min_token_prob: Share = 0.1
    max_spec_tokens: Positive | None = 16
    draft: Literal["path", "tree"] = "path"
    max_cached_requests: Annotated[int, Ge(-1)] = 100_000
    max_cached_tokens: Positive = 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.score = 0.0
        self._longest = self.depth if self.max_spec_tokens is None else self.max_spec_tokens

    @property
    def source_names(self) -> tuple[str, ...]:
        return ("local", "global")

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=self._longest, survival=True)

    def setup(self, context: DraftContext) -> None:
        requests = None if self.max_cached_requests < 0 else self.max_cached_requests
        self._local = SuffixTree(self.depth, self.max_cached_tokens)
        self._global = SuffixTree(self.depth, self.max_cached_tokens, requests)
        # Compiles, or loads what was compiled before, outside any clock.
        tree = SuffixTree(self.depth, 8, 1)
        for _ in range(2):
            tree.start_request()
            tree.extend(np.zeros(4, dtype=np.int64), 0, 4)
        self._speculate(tree, DecodeState(np.zeros(4, dtype=np.int64), 1))

    def reset(self) -> None:
        self._local.clear()
        self._global.clear()

    def begin(self, state: DecodeState) -> None:
        self._local.clear()
        self._local.start_request()
        self._local.extend(state.buffer, 0, state.length)
        self._global.start_request(state.length - state.n_prompt + state.remaining)
        self._global.extend(state.buffer, state.n_prompt, state.length)

    def propose(self, state: DecodeState) -> DraftTree:
        source = _LOCAL
        score, nodes, chances = self._speculate(self._local, state)
        if self.max_cached_requests != 0:
            other = self._speculate(self._global, state)
            if other[0] > score:
                source, (score, nodes, chances) = _GLOBAL, other
        self.score = score
        sources = np.full(nodes.shape[1], source, dtype=np.int64)
        return DraftTree(nodes[0], nodes[1], sources=sources, survival=chances)

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        begin = state.length - len(outcome.committed)
        self._local.extend(state.buffer, begin, state.length)
        self._global.extend(state.buffer, begin, state.length)

    def end(self, state: DecodeState) -> None:
        self._global.end_request()

    def _speculate(
        self, tree: SuffixTree, state: DecodeState
    ) -> tuple[float, IntArray, FloatArray]:
        drafted: tuple[float, IntArray, FloatArray] = speculate(
            tree.arrays,
            state.buffer,
            state.length,
            float(self.factor),
            float(self.offset),
            self._longest,
            float(self.min_token_prob),
            self.draft == "tree",
        )
        return drafted
