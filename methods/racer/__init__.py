"""RACER: the most frequent continuations of the text's suffixes, and a tree of last logits.

Paper: "RACER: Retrieval-Augmented Contextual Rapid Speculative Decoding", Findings of ACL 2026,
    arXiv 2604.14885.
Reference code studied: hkr04/RACER at fc494a3 (``racer/automaton/src/automaton.cpp``,
    ``evaluation/inference_racer.py``).
Method: an Aho-Corasick automaton of the 10-grams of prompt and answer, with counts, reads the
    text. Each suffix of two tokens or more that it knows drafts what followed; of all their nodes
    the most frequent ones are taken, and the rest of the rows goes to a tree that Token Recycling's
    table fills: for each token the candidates after it, as the target's logits last said. The root
    has eight children there, which have 4, 2, 1, 1 ... themselves; their children have as many,
    halved from one to the next, and with each level below.
Where ours differs, and why:
    - Siblings come in the order in which they were first met. The reference's order is that of its
      hash map, and of equally frequent nodes it says which are drafted.
    - The reference adds a padding token where it drafts nothing.
    - Of a dialogue's later turn only new 10-grams are counted; the reference counts all again.
As in the reference: nodes are counted once for each suffix that they continue, equal branches are
merged afterwards, so a draft may be smaller than its budget; fail links are set after the prompt's
pass, and later nodes have none; nodes lose theirs when a draft or a failed match touches them; a
node used again leaves those below it behind; the automaton does not read the prompt itself; a
token's candidates learn from all rows, the prompt's and rejected ones too.
Checked: drives identical steps in 5,539 of 5,539 beside the authors' code, compiled with our order
    of siblings. ``tests/methods/racer_reference.py`` is the same in plain objects.
State kept: the automaton, 60 bytes for each of ``max_nodes``, and the table, 4 bytes for each of
    ``vocab × k``. The reference empties neither between questions (``paper_scope: run``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge

from methods.racer.automaton import Automaton
from specbench.arrays import IntArray
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome
from specbench.index.adjacency_matrix import AdjacencyMatrix
from specbench.index.static_tree import RankPath, StaticTree


@dataclass(kw_only=True, eq=False)
class Racer(Drafter):
    """RACER: the most frequent continuations of the text's suffixes, and a tree of last logits.

    Attributes:
        capacity: rows of the target pass at most, the root included.
        ngram: tokens of an n-gram in the automaton.
        max_nodes: nodes of the automaton at most; those used least recently make room.
        least_depth: tokens of a suffix at least that is drafted from.
        k: candidates kept per token, and children of the root in the logits' tree.
        learn_prompt: fill the table from the prompt's logits too.
    """

    name: str = "racer"
    paper_scope: Scope = "run"
    capacity: Annotated[int, Ge(2)] = 64
    ngram: Annotated[int, Ge(2)] = 10
    max_nodes: int = 10_000
    least_depth: Positive = 2
    k: Positive = 8
    learn_prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 * self.ngram + 2
        self._require(self.max_nodes >= least, "max_nodes", f"at least {least} with this ngram")
        self._tree = logits_tree(self.k, self.capacity - 1)
        self._read = 0  # tokens of the text that the automaton has counted

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens_only=False,
            logits=True,
            prompt_logits=self.learn_prompt,
            max_nodes=self.capacity - 1,
        )

    def setup(self, context: DraftContext) -> None:
        inside = self.k <= context.vocab_size
        self._require(inside, "k", f"at most the vocabulary's size, {context.vocab_size}")
        device = "cpu" if context.target is None else context.target.device
        self._matrix = AdjacencyMatrix(context.vocab_size, self.k, device)
        self._matrix.prepare(self._tree)
        self._automaton = Automaton(self.max_nodes)
        # Compiles, or loads what was compiled before, outside any clock.
        state = DecodeState(np.zeros(self.ngram + 2, dtype=np.int64), 1)
        self.begin(state)
        self.propose(state)
        self._automaton.read_step(state.buffer, 0, 2, self.ngram)
        self.reset()

    def reset(self) -> None:
        self._matrix.clear()
        self._automaton.clear()
        self._read = 0

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        tokens = torch.from_numpy(np.ascontiguousarray(prompt)).to(self._matrix.rows.device)
        self._matrix.update(tokens, logits)

    def begin(self, state: DecodeState) -> None:
        known = min(self._read, state.n_seen)
        self._read = state.n_prompt
        self._automaton.read_prompt(state.buffer, known, state.n_prompt, self.ngram)

    def propose(self, state: DecodeState) -> DraftTree:
        tokens = self._matrix.fill(state.root).cpu().numpy()
        drafted = self._automaton.draft(
            state.root, self.capacity, self.least_depth, tokens, self._tree.parents
        )
        return DraftTree(drafted[0], drafted[1])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        begin = self._read
        if outcome.logits is not None:
            # Not necessarily the tree proposed: the engine may have cut it, or `union` merged it.
            tokens = np.concatenate((state.buffer[begin : begin + 1], outcome.tree.tokens))
            device = self._matrix.rows.device
            self._matrix.update(torch.from_numpy(tokens).to(device), outcome.logits)
        # The next root is read when it is drafted from; a stop rule may have cut it off.
        whole = len(outcome.committed) > len(outcome.path)
        self._read = state.length - 1 if whole else state.length
        self._automaton.read_step(state.buffer, begin, self._read, self.ngram)


def logits_tree(k: int, n_nodes: int) -> StaticTree:
    """The first ``n_nodes`` nodes, breadth first, of the logits' tree without its root."""
    paths: list[RankPath] = []
    queue: list[tuple[RankPath, int]] = [((), k)]
    for path, breadth in queue:
        below = breadth if len(path) == 1 else breadth // 2
        for rank in range(min(breadth, n_nodes - len(paths))):
            paths.append((*path, rank))
            queue.append((paths[-1], max(1, below)))
            below //= 2
        if len(paths) == n_nodes:
            break
    return StaticTree.from_paths(paths)
