"""RACER: the most frequent continuations of the text's suffixes, and a tree of last logits.

Paper: "RACER: Retrieval-Augmented Contextual Rapid Speculative Decoding", Findings of ACL 2026,
    arXiv 2604.14885.
Reference code studied: hkr04/RACER at fc494a3 (``racer/automaton/src/automaton.cpp``,
    ``evaluation/inference_racer.py``).
Method: an Aho-Corasick automaton of the 10-grams of prompt and answer, with counts, reads the
    text. Each suffix of two tokens or more that it contains drafts its continuations; of all their
    nodes the most frequent ones are taken, and the rest of the rows goes to a tree that Token
    Recycling's table fills: for each token its candidates by the target's latest logits. The root
    has eight children there, which have 4, 2, 1, 1 ... themselves; their children have as many,
    halved from one to the next, and with each level below.
Where ours differs, and why:
    - Siblings come in the order in which they were first met. The reference uses the order of its
      hash map, which decides between equally frequent nodes.
    - The reference adds a padding token to an empty draft.
    - A dialogue's later turn counts only new 10-grams; the reference counts all again.
As in the reference: nodes are counted once for each suffix that they continue, equal branches are
merged afterwards, so a draft may be smaller than its budget; fail links are set after the prompt's
pass, and later nodes have none; nodes lose theirs when a draft or a failed match touches them; a
node used again leaves those below it behind; the automaton does not read the prompt itself; a
token's candidates learn from all rows, the prompt's and rejected ones too.
Checked: 5,539 of 5,539 steps equal those of the authors' code, compiled with our order
    of siblings. ``tests/methods/racer_reference.py`` is the same in plain objects.
Example: the prompt is "a b c a b d". After the answer's "a b" the automaton has met c and d after
    these two, and the table says that e and c follow b: c and d are drafted, then e.
State kept: the automaton, 60 bytes for each of ``max_nodes``, and the table, 4 bytes for each of
    ``vocab × k``. The reference empties neither between questions (``paper_scope: run``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from numba import njit

from specbench.arrays import Array, IntArray
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome
from specbench.draft_structures.adjacency_matrix import AdjacencyMatrix
from specbench.draft_structures.static_tree import RankPath, StaticTree


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
        self._n_read = 0  # tokens of the text that the automaton has counted

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
        self._trie = (  # nodes, buckets, meta
            np.empty((self.max_nodes, COLUMNS), dtype=np.int32),
            np.empty(1 << self.max_nodes.bit_length(), dtype=np.int32),
            np.empty(4, dtype=np.int64),
        )
        clear(*self._trie)
        # Compiles, or loads what was compiled before, outside any clock.
        state = DecodeState(np.zeros(self.ngram + 2, dtype=np.int64), 1)
        self.begin(state)
        self.propose(state)
        read_step(*self._trie, state.buffer, 0, 2, self.ngram)
        self.reset()

    def reset(self) -> None:
        self._matrix.clear()
        clear(*self._trie)
        self._n_read = 0

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        tokens = torch.from_numpy(np.ascontiguousarray(prompt)).to(self._matrix.rows.device)
        self._matrix.update(tokens, logits)

    def begin(self, state: DecodeState) -> None:
        n_counted = min(self._n_read, state.n_seen)
        self._n_read = state.n_prompt
        read_prompt(*self._trie, state.buffer, n_counted, state.n_prompt, self.ngram)

    def propose(self, state: DecodeState) -> DraftTree:
        tokens = self._matrix.fill(state.root).cpu().numpy()
        limits = self.capacity, self.least_depth
        drafted = draft(*self._trie, state.root, *limits, tokens, self._tree.parents)
        return DraftTree(drafted[0], drafted[1])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        begin = self._n_read
        if outcome.logits is not None:
            # Not necessarily the tree proposed: the engine may have cut it, or `union` merged it.
            tokens = np.concatenate((state.buffer[begin : begin + 1], outcome.tree.tokens))
            device = self._matrix.rows.device
            self._matrix.update(torch.from_numpy(tokens).to(device), outcome.logits)
        # The next root is read when it is drafted from; a stop rule may have cut it off.
        whole = len(outcome.committed) > len(outcome.path)
        self._n_read = state.length - 1 if whole else state.length
        read_step(*self._trie, state.buffer, begin, self._n_read, self.ngram)


def logits_tree(k: int, n_nodes: int) -> StaticTree:
    """Build the first ``n_nodes`` nodes, breadth first, of the logits' tree without its root."""
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


# The automaton: a trie of n-grams with counts and fail links. Nodes are rows of one array, named by
# their numbers, so a node that is used again keeps its number: old pointers to it then point to the
# new node, as in the reference code.
NONE = -1

# Columns of ``nodes``. CHAIN links nodes of one bucket, NEWER and OLDER all nodes by their use.
TOKEN, PARENT, FAIL, COUNT, DEPTH = 0, 1, 2, 3, 4
FIRST, LAST, LEFT, RIGHT = 5, 6, 7, 8  # first and last child; siblings
CHAIN, NEWER, OLDER = 9, 10, 11
COLUMNS = 12

# Entries of ``meta``.
ROOT, STATE, NEWEST, OLDEST = 0, 1, 2, 3

_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@njit(cache=True)
def clear(nodes: Array, buckets: Array, meta: Array) -> None:
    """Empty all nodes; the last one is the root."""
    buckets[:] = NONE
    n = len(nodes)
    for node in range(n):
        _empty(nodes, node)
        nodes[node, NEWER] = node - 1
        nodes[node, OLDER] = node + 1
    nodes[n - 1, OLDER] = NONE
    meta[NEWEST], meta[OLDEST] = 0, n - 1
    meta[ROOT] = meta[STATE] = n - 1
    nodes[n - 1, FAIL] = n - 1
    _touch(nodes, meta, n - 1)


@njit(cache=True)
def _empty(nodes: Array, node: int) -> None:
    for column in (TOKEN, PARENT, FAIL, FIRST, LAST, LEFT, RIGHT, CHAIN):
        nodes[node, column] = NONE
    nodes[node, COUNT] = nodes[node, DEPTH] = 0


@njit(cache=True)
def _touch(nodes: Array, meta: Array, node: int) -> None:
    """Make a node the one used last."""
    if meta[NEWEST] == node:
        return
    newer, older = nodes[node, NEWER], nodes[node, OLDER]
    nodes[newer, OLDER] = older
    if older == NONE:
        meta[OLDEST] = newer
    else:
        nodes[older, NEWER] = newer
    nodes[node, NEWER], nodes[node, OLDER] = NONE, meta[NEWEST]
    nodes[meta[NEWEST], NEWER] = node
    meta[NEWEST] = node


@njit(cache=True)
def _touch_up(nodes: Array, meta: Array, node: int) -> None:
    """Touch a node and all above it; as in the reference, they lose their fail links."""
    at = np.int64(node)
    while at != NONE:
        nodes[at, FAIL] = meta[ROOT]
        _touch(nodes, meta, at)
        at = np.int64(nodes[at, PARENT])


@njit(cache=True)
def _bucket(buckets: Array, parent: int, token: int) -> np.int64:
    state = (np.uint64(parent) + _SEED) * _MIX
    state = (state ^ (state >> _SHIFT) ^ np.uint64(token)) * _MIX
    return np.int64((state ^ (state >> _SHIFT)) & np.uint64(len(buckets) - 1))


@njit(cache=True)
def _child(nodes: Array, buckets: Array, parent: int, token: int) -> np.int64:
    node = np.int64(buckets[_bucket(buckets, parent, token)])
    while node != NONE and (nodes[node, PARENT] != parent or nodes[node, TOKEN] != token):
        node = np.int64(nodes[node, CHAIN])
    return node


@njit(cache=True)
def _unchain(nodes: Array, buckets: Array, node: int) -> None:
    bucket = _bucket(buckets, nodes[node, PARENT], nodes[node, TOKEN])
    if buckets[bucket] == node:
        buckets[bucket] = nodes[node, CHAIN]
        return
    at = buckets[bucket]
    while nodes[at, CHAIN] != node:
        at = nodes[at, CHAIN]
    nodes[at, CHAIN] = nodes[node, CHAIN]


@njit(cache=True)
def _new_child(nodes: Array, buckets: Array, meta: Array, parent: int, token: int) -> np.int64:
    """Add a child in the row of the least recently used node, which may have children.

    These keep the number of their lost parent, and are reached no more from the root.
    """
    node = np.int64(meta[OLDEST])
    above = nodes[node, PARENT]
    if above != NONE and _child(nodes, buckets, above, nodes[node, TOKEN]) == node:
        _unchain(nodes, buckets, node)
        left, right = nodes[node, LEFT], nodes[node, RIGHT]
        if left == NONE:
            nodes[above, FIRST] = right
        else:
            nodes[left, RIGHT] = right
        if right == NONE:
            nodes[above, LAST] = left
        else:
            nodes[right, LEFT] = left
    lost = nodes[node, FIRST]
    while lost != NONE:
        _unchain(nodes, buckets, lost)
        lost = nodes[lost, RIGHT]
    _empty(nodes, node)
    nodes[node, FAIL] = meta[ROOT]
    nodes[node, TOKEN], nodes[node, PARENT] = token, parent
    nodes[node, DEPTH] = nodes[parent, DEPTH] + 1
    last = nodes[parent, LAST]
    nodes[node, LEFT] = last
    nodes[parent, LAST] = node
    if last == NONE:
        nodes[parent, FIRST] = node
    else:
        nodes[last, RIGHT] = node
    bucket = _bucket(buckets, parent, token)
    nodes[node, CHAIN] = buckets[bucket]
    buckets[bucket] = node
    _touch(nodes, meta, node)
    return node


@njit(cache=True)
def _insert(nodes: Array, buckets: Array, meta: Array, text: Array, begin: int, end: int) -> None:
    """Count ``text[begin:end]`` and its beginnings."""
    node = np.int64(meta[ROOT])
    nodes[node, COUNT] += 1
    for i in range(begin, end):
        _touch(nodes, meta, node)
        child = _child(nodes, buckets, node, text[i])
        if child == NONE:
            child = _new_child(nodes, buckets, meta, node, text[i])
        node = child
        nodes[node, COUNT] += 1
    _touch(nodes, meta, node)


@njit(cache=True)
def read_prompt(
    nodes: Array, buckets: Array, meta: Array, text: Array, begin: int, end: int, n: int
) -> None:
    """Count the n-grams that end after ``begin``, up to ``end``; then link all nodes."""
    for last in range(max(begin + 1, n), end + 1):
        _insert(nodes, buckets, meta, text, last - n, last)
    _link(nodes, buckets, meta)


@njit(cache=True)
def _link(nodes: Array, buckets: Array, meta: Array) -> None:
    """Set every fail link: to the longest proper suffix that is in the trie."""
    root = np.int64(meta[ROOT])
    queue = np.empty(len(nodes), dtype=np.int64)
    filled = 0
    child = np.int64(nodes[root, FIRST])
    while child != NONE:
        nodes[child, FAIL] = root
        queue[filled] = child
        filled += 1
        child = np.int64(nodes[child, RIGHT])
    done = 0
    while done < filled:
        above = queue[done]
        done += 1
        child = np.int64(nodes[above, FIRST])
        while child != NONE:
            token = nodes[child, TOKEN]
            fail = np.int64(nodes[above, FAIL])
            target = _child(nodes, buckets, fail, token)
            while fail != root and target == NONE:
                fail = np.int64(nodes[fail, FAIL])
                target = _child(nodes, buckets, fail, token)
            nodes[child, FAIL] = root if target == NONE else target
            queue[filled] = child
            filled += 1
            child = np.int64(nodes[child, RIGHT])


@njit(cache=True)
def read_step(
    nodes: Array, buckets: Array, meta: Array, text: Array, begin: int, end: int, n: int
) -> None:
    """Count the n-grams that end after ``begin``, newest first; then move the state to the end.

    The state has read ``text[begin]`` already, when it was the root of a draft.
    """
    for last in range(end, max(begin, n - 1), -1):
        _insert(nodes, buckets, meta, text, last - n, last)
    root, node = np.int64(meta[ROOT]), np.int64(meta[STATE])
    for i in range(begin + 1, end):
        _touch(nodes, meta, node)
        child = _child(nodes, buckets, node, text[i])
        if child == NONE:
            while node != root and child == NONE:
                node = np.int64(nodes[node, FAIL])
                child = _child(nodes, buckets, node, text[i])
            _touch_up(nodes, meta, node)
        if child != NONE:
            node = child
    if end > begin + 1:
        _touch(nodes, meta, node)
        meta[STATE] = node


@njit(cache=True)
def _borders(
    nodes: Array, buckets: Array, meta: Array, root_token: int, least_depth: int
) -> IntArray:
    """Find the nodes of the text's suffixes that end with the root's token, longest first.

    The state moves to the first of them, however short.
    """
    borders = np.empty(len(nodes), dtype=np.int64)
    n, moved = 0, False
    root, node = np.int64(meta[ROOT]), np.int64(meta[STATE])
    while True:
        child = _child(nodes, buckets, node, root_token)
        if child != NONE:
            if nodes[child, DEPTH] >= least_depth:
                borders[n] = child
                n += 1
            if not moved:
                meta[STATE] = child
                moved = True
        if node == root or n == len(borders):
            break
        node = np.int64(nodes[node, FAIL])
    for i in range(n):
        _touch_up(nodes, meta, borders[i])
    return borders[:n]


@njit(cache=True)
def _worse(nodes: Array, entry: Array, other: Array) -> bool:
    """Test whether ``entry`` is dropped first: rarer, then deeper, then larger numbers."""
    a, b = entry[0], other[0]
    if nodes[a, COUNT] != nodes[b, COUNT]:
        return nodes[a, COUNT] < nodes[b, COUNT]
    if nodes[a, DEPTH] != nodes[b, DEPTH]:
        return nodes[a, DEPTH] > nodes[b, DEPTH]
    return a > b or (a == b and entry[1] > other[1])


@njit(cache=True)
def _most_frequent(nodes: Array, borders: Array, limit: int) -> Array:
    """Select ``[m, 2]`` the most frequent nodes at or below the borders, each with its border.

    In the order of their numbers. The search goes level by level and ends at one that adds none.
    """
    chosen = np.empty((limit, 2), dtype=np.int64)
    size, worst = 0, 0
    level = np.empty((len(borders), 2), dtype=np.int64)
    level[:, 0] = borders
    level[:, 1] = borders
    while len(level):
        added, below = False, 0
        for i in range(len(level)):
            node = level[i, 0]
            if size < limit:
                chosen[size] = level[i]
                if size == 0 or _worse(nodes, chosen[size], chosen[worst]):
                    worst = size
                size += 1
                added = True
            elif nodes[node, COUNT] > nodes[chosen[worst, 0], COUNT]:
                chosen[worst] = level[i]
                for j in range(size):
                    if _worse(nodes, chosen[j], chosen[worst]):
                        worst = j
                added = True
            child = nodes[node, FIRST]
            while child != NONE:
                below += 1
                child = nodes[child, RIGHT]
        if not added:
            break
        deeper = np.empty((below, 2), dtype=np.int64)
        n = 0
        for i in range(len(level)):
            child = nodes[level[i, 0], FIRST]
            while child != NONE:
                deeper[n, 0], deeper[n, 1] = child, level[i, 1]
                n += 1
                child = nodes[child, RIGHT]
        level = deeper
    # Insertion sort: a few dozen entries.
    for i in range(1, size):
        a, b = chosen[i, 0], chosen[i, 1]
        j = i
        while j > 0 and (chosen[j - 1, 0] > a or (chosen[j - 1, 0] == a and chosen[j - 1, 1] > b)):
            chosen[j] = chosen[j - 1]
            j -= 1
        chosen[j, 0], chosen[j, 1] = a, b
    return chosen[:size]


# Rows of the array that the draft is made in; column 0 is the root.
_TOKEN, _ABOVE, _CHILD, _SIBLING, _YOUNGEST = range(5)


@njit(cache=True)
def _add_path(trie: Array, size: int, path: Array, length: int) -> int:
    """Add the tokens ``path[:length]`` below the root; existing nodes are shared."""
    at = 0
    for i in range(length - 1, -1, -1):  # paths are noted from their ends
        token = path[i]
        child = trie[_CHILD, at]
        while child > 0 and trie[_TOKEN, child] != token:
            child = trie[_SIBLING, child]
        if child <= 0:
            child = size
            trie[_TOKEN, child], trie[_ABOVE, child] = token, at
            trie[_CHILD, child] = trie[_SIBLING, child] = trie[_YOUNGEST, child] = 0
            if trie[_CHILD, at] == 0:
                trie[_CHILD, at] = child
            else:
                trie[_SIBLING, trie[_YOUNGEST, at]] = child
            trie[_YOUNGEST, at] = child
            size += 1
        at = child
    return size


@njit(cache=True)
def draft(
    nodes: Array, buckets: Array, meta: Array, root: int, limit: int, least_depth: int,
    tokens: Array, parents: Array,
) -> IntArray:  # fmt: skip
    """Draft a tree below a root, which the state reads.

    Args:
        limit: nodes of the trie at most that are drafted from, each counted for every suffix of the
            text that it continues; the rest of the limit goes to the logits' tree, whose root takes
            one.
        least_depth: tokens of a suffix at least, the root included.
        tokens, parents: int64 of the logits' tree, breadth first.

    Returns:
        ``[2, n]`` int64 tokens and parents, breadth first.
    """
    borders = _borders(nodes, buckets, meta, root, least_depth)
    chosen = _most_frequent(nodes, borders, limit)
    rest = min(max(0, limit - len(chosen) - 1), len(tokens))
    trie = np.zeros((5, 1 + len(chosen) + rest), dtype=np.int64)
    size = 1
    path = np.empty(len(nodes) + len(tokens), dtype=np.int64)
    for i in range(len(chosen)):
        node, border = chosen[i]
        inner = False
        for j in range(len(chosen)):
            if nodes[chosen[j, 0], PARENT] == node and chosen[j, 1] == border:
                inner = True
                break
        if inner:
            continue
        length = 0
        while node != border:
            path[length] = nodes[node, TOKEN]
            length += 1
            node = np.int64(nodes[node, PARENT])
        size = _add_path(trie, size, path, length)
    inside = np.zeros(rest, dtype=np.bool_)
    for i in range(rest):
        if parents[i] >= 0:
            inside[parents[i]] = True
    for i in range(rest):
        if inside[i]:
            continue
        length, at = 0, i
        while at >= 0:
            path[length] = tokens[at]
            length += 1
            at = parents[at]
        size = _add_path(trie, size, path, length)
    drafted = np.empty((2, size - 1), dtype=np.int64)
    queue = np.zeros(size, dtype=np.int64)
    n, done = 0, -1
    while done < n:
        child = trie[_CHILD, 0 if done < 0 else queue[done]]
        while child > 0:
            queue[n] = child
            drafted[0, n], drafted[1, n] = trie[_TOKEN, child], done
            n += 1
            child = trie[_SIBLING, child]
        done += 1
    return drafted
