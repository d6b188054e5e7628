"""Token Recycling: draft trees from the candidates that earlier target passes threw away.

Paper: "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
    Recycling", ACL 2025, arXiv 2408.08696.
Reference code studied: Luowaterbi/TokenRecycling (``evaluation/inference_recycling.py`` and its
    tree template).
Method: a matrix holds the top k candidates seen after every token of the vocabulary. A static tree
    is filled from it level by level, and the logits of every verified row, accepted or not,
    overwrite the rows of their tokens.
Trees: the template of the reference code, 80 nodes in 6 levels (the paper counts the root among its
    80). Trees of other sizes, as in the paper's Figure 3, follow our own rule, because neither
    paper nor code has one (``specbench.draft_structures.static_tree.grow_tree``): at 80 nodes and 6
    levels it shares 70 of the template's 80 nodes. ``tree: sam_60`` is that of SAM-Decoding's
    Token Recycling (also in Spec-Bench's copy): 60 nodes in levels of 7, 20, 21, 8 and 4.
Where ours differs, and why:
    - The paper writes rows of repeated tokens in parallel, in no defined order. ``update: last`` is
      one of its outcomes, always the same one; the paper finds it slightly better.
      ``parallel`` mixes the occurrences entry by entry as the paper describes, in a fixed order.
    - The first draft comes after the prompt's pass and hangs below the first new token; the
      reference's hangs below the prompt's last token.
    - int32 instead of int64 halves the matrix: 1 MB at 32000 tokens.
As in the reference, unknown rows draft token 0, the last step of a turn teaches only where its
    bonus is the end token (an end token among the accepted ones, and the length limit, stop the
    turn before the update), and the prompt's logits are not used unless ``learn_prompt`` says so.
Example: with ``levels: [2, 2]`` and rows a: (b, c), b: (d, e), c: (f, g), the tree after a has b
    and c below the root and d and e below b.
State kept: the matrix, ``vocab × k`` numbers. Kept over all cases (``state_scope: run``) it is the
    paper's hot start, but for warm-up prompts, which teach nothing here; ``prompt`` and ``turn``
    start cold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import (
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.draft_structures.adjacency_matrix import AdjacencyMatrix, MatrixGraphs
from specbench.draft_structures.static_tree import (
    StaticTree,
    grow_tree,
    tree_files,
    tree_of_knobs,
    tree_of_levels,
)
from specbench.errors import ConfigurationError

_BREADTH, _DEPTH = 80, 6  # the paper's tree


@dataclass(kw_only=True, eq=False)
class TokenRecycling(Drafter):
    """Token Recycling: a tree of candidates that earlier target passes threw away.

    Attributes:
        k: candidates kept per token.
        update: whose logits count for a token that occurs several times in one pass: ``last``,
            ``first`` or ``parallel`` (a fixed mixture).
        learn_prompt: fill the matrix from the logits of the prompt too.
        tree: ``template``, the reference code's, ``sam_60``, or another method's
            (``medusa_63``, ``eagle_25``), or a JSON file with each node's ranks from the root; not
            with the three below.
        breadth: nodes of a grown tree (the paper's Figure 3 calls the number of nodes breadth);
            80 where only ``depth`` is given, null for the template.
        depth: levels of a grown tree; 6 where only ``breadth`` is given, null for the template.
        levels: nodes of each level of a tree, instead of ``breadth`` and ``depth``.

    Raises:
        ConfigurationError: a value is out of range, or no tree has the requested shape.
    """

    name: str = "token_recycling"
    version: int = 2
    paper_scope: Scope = "run"
    k: Positive = 8
    update: Literal["last", "first", "parallel"] = "last"
    learn_prompt: bool = False
    tree: str = "template"
    breadth: Positive | None = None
    depth: Positive | None = None
    levels: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tree = self._shape()
        self._ranks = self._tree.ranks
        if self._tree.n_ranks > self.k:
            raise ConfigurationError(
                f"method.k={self.k} is too small for method.tree={self.tree}, which takes "
                f"{self._tree.n_ranks} candidates per node: raise it, or let a tree grow with "
                f"method.breadth={_BREADTH}."
            )

    @property
    def shape(self) -> StaticTree:
        """The tree that its drafts fill; their ``sources`` are its ranks."""
        return self._tree

    @property
    def needs(self) -> Needs:
        return Needs(
            artifacts=tree_files(self.tree),
            tokens_only=False,
            logits=True,
            prompt_logits=self.learn_prompt,
            max_nodes=len(self._tree),
        )

    def setup(self, context: DraftContext) -> None:
        inside = self.k <= context.vocab_size
        self._require(inside, "k", f"at most the vocabulary's size, {context.vocab_size}")
        device = "cpu" if context.target is None else context.target.device
        self._eos = context.eos_ids
        self._matrix = AdjacencyMatrix(context.vocab_size, self.k, device)
        self._matrix.prepare(self._tree)
        self._graphs: MatrixGraphs | None = None
        if context.target is not None and context.target.graph_tokens:
            self._graphs = MatrixGraphs(
                self._matrix, len(self._tree), context.target.dtype, self.update
            )
            self._matrix.clear()  # recording has written to it

    def reset(self) -> None:
        self._matrix.clear()

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        matrix = self._matrix
        tokens = torch.from_numpy(np.ascontiguousarray(prompt)).to(matrix.rows.device)
        matrix.update(tokens, logits, self.update)

    def propose(self, state: DecodeState) -> DraftTree:
        tokens = None if self._graphs is None else self._graphs.fill(state.root)
        if tokens is None:
            tokens = self._matrix.fill(state.root)
        on_host = tokens.device.type == "cpu"
        return DraftTree(
            tokens.numpy() if on_host else tokens, self._tree.parents, sources=self._ranks
        )

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if outcome.logits is None or (outcome.finished and not self._ended_by_bonus(outcome)):
            return
        # Not necessarily the tree proposed: the engine may have cut it, or `union` merged it.
        matrix, drafted = self._matrix, outcome.tree.tokens
        root = int(state.buffer[state.length - len(outcome.committed) - 1])
        if self._graphs is not None and self._graphs.update(root, drafted, outcome.logits):
            return
        if isinstance(drafted, np.ndarray):
            drafted = torch.from_numpy(drafted).to(matrix.rows.device)
        tokens = torch.cat([drafted.new_full((1,), root), drafted])
        matrix.update(tokens, outcome.logits, self.update)

    def _ended_by_bonus(self, outcome: StepOutcome) -> bool:
        whole = len(outcome.committed) == len(outcome.path) + 1
        return whole and int(outcome.committed[-1]) in self._eos

    def _shape(self) -> StaticTree:
        knobs = [key for key in ("breadth", "depth", "levels") if getattr(self, key) is not None]
        if self.tree != "template" and knobs:
            raise ConfigurationError(
                f"method.tree={self.tree} is a whole tree: type method.{knobs[0]}=null."
            )
        if not knobs:
            return tree_of_knobs(self.tree, None, "template")
        if self.levels is not None and len(knobs) > 1:
            raise ConfigurationError(
                f"method.levels={self.levels} gives the whole shape of the tree: leave out "
                "method.breadth and method.depth."
            )
        try:
            if self.levels is not None:
                return tree_of_levels(self.k, self.levels)
            return grow_tree(self.k, self.breadth or _BREADTH, self.depth or _DEPTH)
        except ValueError as error:
            raise ConfigurationError(
                f"method.{knobs[0]}={getattr(self, knobs[0])} cannot make a tree: {error}."
            ) from error
