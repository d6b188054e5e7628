"""Union: the branches of several drafters in one tree, under one node budget.

Paper: none; ours. It shows what the drafters reach together: every part proposes, equal branches
    are shared, and each accepted token is traced to the part it came from.
Merging (`merge_trees`): ``fill: ranked`` takes nodes of all parts by their cost,
    the sum over a node's path of its rank among its siblings (a part's own order of preference) and
    ``depth_cost``; of equal costs, the part first in priority. ``fill: priority`` takes all of the
    first part up to its quota, then the next. A shared node takes one place and is credited to the
    first part in priority that has it. Nodes beyond the budget are left out.
Each part observes the outcome of its own nodes: the verified nodes of its tree, the
    accepted ones among them, and their rows of the target's choices, logits and hidden states. The
    committed tokens are the same for all. A part's auxiliary nodes (Lookahead's window) are never
    shared and go first.
Recorded for each turn (``drafter`` in the records): the accepted draft tokens credited to each part
    (``accepted_from_<name>``), and those that it had in its verified tree (``found_by_<name>``).
On a GPU, drafts on the device are copied to the host once a step.
Example: parts draft "a b" and "a c": the tree has a, with b and c below it. If "a c" is accepted,
    a is credited to the first part and c to the second, whose tree had both.
State kept: what the parts keep, all under the union's own state scope.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, MinLen
from numba import njit

from specbench.arrays import Array, IntArray
from specbench.config.schema import Count, Positive
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.errors import unknown_name

_ANY = np.iinfo(np.int64).max
_ROOT_ROW = np.zeros(1, dtype=np.int64)


@dataclass(kw_only=True, eq=False)
class Union(Composite):
    """Union: the branches of several drafters, merged into one tree with one node budget.

    Attributes:
        drafters: the parts, by their methods' names in a configuration (which turns them into
            drafters), or drafters.
        max_nodes: nodes of the merged tree at most.
        fill: ``ranked`` or ``priority``, see the module's text.
        priority: names of parts that come first, in order; the others follow as in ``drafters``.
        quotas: for each of ``drafters`` the nodes it may take places for, null for no limit; None
            for no limits at all.
        depth_cost: what a level costs in ``ranked``, in places among siblings.

    Raises:
        ConfigurationError: a value is out of range, or a part cannot work in a union.
    """

    name: str = "union"
    drafters: Annotated[list[Any], MinLen(1)] = field(
        default_factory=lambda: ["cacheback", "token_recycling", "sam"]
    )
    max_nodes: Positive = 80
    fill: Literal["ranked", "priority"] = "ranked"
    priority: list[str] | None = None
    quotas: list[Count | None] | None = None
    depth_cost: Annotated[float, Gt(0)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.priority or ():
            if name not in self.source_names:
                raise unknown_name("entry of method.priority", name, self.source_names)
        quotas = self.quotas or [None] * len(self.drafters)
        self._require(len(quotas) == len(self.drafters), "quotas", "as long as method.drafters")
        first = list(self.priority or ())
        ranks = [first.index(n) if n in first else len(first) for n in self.source_names]
        # Indices into ``drafters``, the first in priority first.
        self._order = np.array(sorted(range(len(ranks)), key=ranks.__getitem__), dtype=np.int64)
        limits = [quotas[i] for i in self._order]
        self._limits = np.array([_ANY if q is None else q for q in limits], dtype=np.int64)
        self._proposed: list[tuple[DraftTree, IntArray]] = []
        self._credited = self._found_by = np.zeros(len(self.drafters), dtype=np.int64)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(
            part.name if isinstance(part, Drafter) else str(part) for part in self.drafters
        )

    @property
    def entries(self) -> list[Any]:
        return self.drafters

    @property
    def own_needs(self) -> Needs:
        return Needs(max_nodes=self.max_nodes)

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        self._ordered_parts = [self.drafters[i] for i in self._order]
        self._needs = [part.needs for part in self._ordered_parts]
        # Compiles, or loads what was compiled before, outside any clock.
        chain = DraftTree.chain(np.zeros(2, dtype=np.int64))
        merged = self._merge([chain] * len(self._ordered_parts))
        self._view(0, len(merged), NO_TOKENS)
        self._proposed = []

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._proposed = []
        self._credited = np.zeros(len(self.drafters), dtype=np.int64)
        self._found_by = np.zeros(len(self.drafters), dtype=np.int64)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        trees = []
        for part in self._ordered_parts:
            trees.append((yield from part.drafting(state)))
        return self._merge(trees)

    def overlap(self, state: DecodeState, tree: DraftTree) -> None:
        for i, part in enumerate(self._ordered_parts):
            if self._needs[i].overlap:
                part.overlap(state, self._view(i, len(tree), NO_TOKENS)[0])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if outcome.tree.sources is not None:
            np.add.at(self._credited, outcome.tree.sources[outcome.path], 1)
        for i, part in enumerate(self._ordered_parts):
            tree, path, rows = self._view(i, len(outcome.tree), outcome.path)
            self._found_by[self._order[i]] += len(path)
            needs = self._needs[i]
            next_tokens = outcome.next_tokens
            hidden = tree_hidden = None
            if outcome.hidden is not None and needs.hidden_layers:
                # Other parts' tokens too: a head must have read all committed tokens.
                hidden = {layer: outcome.hidden[layer] for layer in needs.hidden_layers}
            if outcome.tree_hidden is not None and needs.tree_hidden:
                tree_hidden = {
                    layer: outcome.tree_hidden[layer][rows] for layer in needs.hidden_layers
                }
            logits = None
            if outcome.logits is not None and needs.logits:
                logits = outcome.logits[rows]
            seen = StepOutcome(
                tree=tree,
                path=path,
                committed=outcome.committed,
                next_tokens=None if next_tokens is None else next_tokens[rows],
                logits=logits,
                hidden=hidden,
                tree_hidden=tree_hidden,
                finished=outcome.finished,
            )
            part.observe(state, seen)

    def report(self) -> dict[str, ReportValue]:
        counts: Counter[str] = Counter()  # two parts may be the same method
        for prefix, by_part in (("accepted_from", self._credited), ("found_by", self._found_by)):
            for name, count in zip(self.source_names, by_part.tolist(), strict=True):
                counts[f"{prefix}_{name}"] += count
        return {**super().report(), **counts}

    def _merge(self, trees: list[DraftTree]) -> DraftTree:
        """Merge the parts' trees, which are in the order of priority."""
        lengths = [len(tree) for tree in trees]
        offsets = np.zeros(len(trees) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        nodes, aux, trie_nodes = merge_trees(
            np.concatenate([_host(tree.tokens) for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([np.zeros(len(t), np.bool_) if t.aux is None else t.aux for t in trees]),
            offsets,
            self.max_nodes,
            self._limits,
            float(self.depth_cost),
            self.fill == "priority",
        )
        self._proposed = [
            (tree, trie_nodes[offsets[i] : offsets[i + 1]]) for i, tree in enumerate(trees)
        ]
        return DraftTree(
            nodes[0], nodes[1], aux=aux if aux.any() else None, sources=self._order[nodes[2]]
        )

    def _view(
        self, part: int, n_verified: int, path: IntArray
    ) -> tuple[DraftTree, IntArray, IntArray]:
        """Return a part's verified tree, its accepted nodes and its rows of the target's scores."""
        if not self._proposed:
            return DraftTree.empty(), NO_TOKENS, _ROOT_ROW
        tree, trie_nodes = self._proposed[part]
        verified, rows, accepted = part_view(trie_nodes, tree.parents, n_verified, path)
        return tree.take(verified), accepted, np.concatenate([_ROOT_ROW, rows + 1])


def _host(tokens: Any) -> IntArray:
    return tokens if isinstance(tokens, np.ndarray) else tokens.cpu().numpy()


NONE = -1
LEFT_OUT = -2

# Added cost of an auxiliary node: tiny, so that it follows its parent at once.
_AUX_COST = 1e-6


@njit(cache=True)
def _costs(parents: Array, aux: Array, offsets: Array, depth_cost: float) -> Array:
    """Sum each node's cost along its path: rank among siblings plus ``depth_cost``."""
    cost = np.zeros(len(parents), dtype=np.float64)
    children = np.zeros(len(parents) + 1, dtype=np.int64)
    for part in range(len(offsets) - 1):
        base = offsets[part]
        children[:] = 0
        for node in range(base, offsets[part + 1]):
            parent = parents[node]
            above = 0.0 if parent == NONE else cost[base + parent]
            if aux[node]:
                cost[node] = above + _AUX_COST
            else:
                cost[node] = above + children[parent + 1] + depth_cost
                children[parent + 1] += 1
    return cost


@njit(cache=True)
def merge_trees(
    tokens: Array,
    parents: Array,
    aux: Array,
    offsets: Array,
    max_nodes: int,
    quotas: Array,
    depth_cost: float,
    by_part: bool,
) -> tuple[Array, Array, Array]:
    """Merge several trees into one trie, equal branches shared.

    Nodes are taken one after the other; a node whose branch is in the trie already is shared and
    costs nothing, any other one takes a place while its part's quota and ``max_nodes`` last. A node
    whose parent was left out is left out. Auxiliary nodes are never shared.

    Args:
        tokens: ``[n]`` int64 of all trees, one after the other, the first in priority first.
        parents: ``[n]`` int64, each within its own tree; -1 is the root.
        aux: ``[n]`` bool.
        offsets: ``[parts + 1]`` int64: tree i has the nodes ``offsets[i] : offsets[i + 1]``.
        max_nodes: nodes of the trie at most.
        quotas: ``[parts]`` int64: nodes that a tree may take places for.
        depth_cost: above 0, what a level costs; a place among its siblings costs 1. Within a tree,
            and between trees unless ``by_part``, the cheaper path goes first.
        by_part: whether a tree is finished before the next one begins.

    Returns:
        ``[3, m]`` int64 tokens, parents and part of each node (the first in priority that has it);
        ``[m]`` bool, auxiliary; ``[n]`` int64, the node that each given node became, or `LEFT_OUT`.
    """
    n = len(parents)
    cost = _costs(parents, aux, offsets, depth_cost)
    part_of = np.empty(n, dtype=np.int64)
    for part in range(len(offsets) - 1):
        part_of[offsets[part] : offsets[part + 1]] = part
    # Stable: of equal costs the first in priority comes first, and parents before children.
    order = np.argsort(cost, kind="mergesort")
    if by_part:
        order = order[np.argsort(part_of[order], kind="mergesort")]

    out = np.empty((3, max_nodes), dtype=np.int64)
    out_aux = np.zeros(max_nodes, dtype=np.bool_)
    # Children of a trie node are linked; entry 0 is the root.
    first = np.full(max_nodes + 1, NONE, dtype=np.int64)
    following = np.full(max_nodes + 1, NONE, dtype=np.int64)
    trie_nodes = np.full(n, LEFT_OUT, dtype=np.int64)
    taken = np.zeros(len(offsets) - 1, dtype=np.int64)
    m = 0
    for i in range(n):
        node = order[i]
        part = part_of[node]
        above = parents[node]
        if above != NONE:
            above = trie_nodes[offsets[part] + above]
            if above == LEFT_OUT:
                continue
        if not aux[node]:
            child = first[above + 1]
            while child != NONE and out[0, child] != tokens[node]:
                child = following[child]
            if child != NONE:
                trie_nodes[node] = child
                out[2, child] = min(out[2, child], part)
                continue
        if m == max_nodes or taken[part] == quotas[part]:
            continue
        trie_nodes[node] = m
        taken[part] += 1
        out[0, m] = tokens[node]
        out[1, m] = above
        out[2, m] = part
        out_aux[m] = aux[node]
        if not aux[node]:
            following[m] = first[above + 1]
            first[above + 1] = m
        m += 1
    return out[:, :m].copy(), out_aux[:m].copy(), trie_nodes


@njit(cache=True)
def part_view(
    trie_nodes: Array, parents: Array, n_verified: int, path: Array
) -> tuple[Array, Array, Array]:
    """Map the verified part of the trie back to one part's tree.

    Args:
        trie_nodes: the trie's node for each node of the part, as of `merge_trees`.
        n_verified: nodes of the trie that were verified, from the first.
        path: accepted nodes of the trie.

    Returns:
        ``[m]`` the part's verified nodes, their nodes in the trie, and which of them are accepted.
    """
    n = len(trie_nodes)
    verified = np.empty(n, dtype=np.int64)
    new_parents = np.empty(n, dtype=np.int64)
    rows = np.empty(n, dtype=np.int64)
    renumbered = np.full(n, NONE, dtype=np.int64)
    m = 0
    for node in range(n):
        if trie_nodes[node] == LEFT_OUT or trie_nodes[node] >= n_verified:
            continue
        renumbered[node] = m
        verified[m] = node
        new_parents[m] = NONE if parents[node] == NONE else renumbered[parents[node]]
        rows[m] = trie_nodes[node]
        m += 1
    # A part's tree is closed towards the root, so it has a first stretch of the path. Its deepest
    # node leads up to the others: the part may have two nodes for one.
    for depth in range(len(path) - 1, -1, -1):
        for node in range(m):
            if rows[node] == path[depth]:
                accepted = np.empty(depth + 1, dtype=np.int64)
                at = node
                for k in range(depth, -1, -1):
                    accepted[k] = at
                    at = new_parents[at]
                return verified[:m].copy(), rows[:m].copy(), accepted
    return verified[:m].copy(), rows[:m].copy(), np.empty(0, dtype=np.int64)
