"""SuffixDecoding: drafts of adaptive length from suffix trees with occurrence counts.

Paper: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025,
    arXiv 2411.04975.
Reference code studied, by its description: snowflakedb/ArcticInference
    (``suffix_decoding/cache.py``, ``csrc/suffix_decoding/suffix_tree.cc``), which vLLM wraps.
Trees: a local one of the turn's prompt and answer, and a global one of the answers of all turns,
    past and running. Every suffix of the text that a tree contains drafts; the draft with the
    highest expected number of accepted tokens is taken, the local one of equals.
Where ours differs, and why:
    - Defaults are Arctic's for suffix-only use; ``conf/method/suffix_decoding.yaml`` has vLLM's.
    - Path mode is what both serve with; the paper describes a tree, which is ``draft: tree``.
    - Memory is bounded by ``max_cached_tokens`` besides the number of requests.
    - Ties between equally frequent continuations go to the one that reached the count first.
As in the reference, the text's own end counts as an occurrence, so probabilities of rare
continuations are lower than their share.
Example: after "a b c x a b" the longest suffix that came before, "a b", was followed by c x a, each
    time it was met, one of its two ends being the text's own: c is expected with .5 and so are x
    and a after it. With ``factor`` 1 two tokens are drafted, c x.
State kept: the local tree for a turn; the global tree as ``state_scope`` says: with ``run`` over
    all cases as in the paper, with ``prompt`` over the turns of a case, so that it is empty at the
    beginning of each. At most 100 bytes for each of ``max_cached_tokens``, per tree.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge
from numba import njit

from specbench.arrays import Array, FloatArray, IntArray
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

    `score` is the expected number of accepted tokens of the last draft.
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
    def needs(self) -> Needs:
        return Needs(max_nodes=self._longest, path_probs=True)

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
        score, nodes, path_probs = self._speculate(self._local, state)
        if self.max_cached_requests != 0:
            global_draft = self._speculate(self._global, state)
            if global_draft[0] > score:
                source, (score, nodes, path_probs) = _GLOBAL, global_draft
        self.score = score
        sources = np.full(nodes.shape[1], source, dtype=np.int64)
        return DraftTree(nodes[0], nodes[1], sources=sources, path_probs=path_probs)

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


_FIRST_SIZE = 1024
# Text positions are kept modulo 2³², of which any size below is a divisor.
_MAX_TOKENS = 1 << 29


class TreeArrays(NamedTuple):
    """The whole state of one tree with room for N tokens, a power of two.

    Attributes:
        nodes: ``[2N + 2, 11]`` int32; node 0 is the root.
        buckets: ``[2N]`` int32 heads of the hash chains; the key is parent and first token.
        text: ``[N]`` int32 ring of the stored requests' tokens.
        active: ``[depth]`` int32; entry p - 1 is where the last p tokens of the request in progress
            end.
        meta: ``[5]`` int64, see the kernels' constants.
    """

    nodes: Array
    buckets: Array
    text: Array
    active: Array
    meta: Array


class SuffixTree:
    """A suffix tree with counts; see the module's text.

    Args:
        depth: longest substring that is counted.
        max_tokens: tokens of all stored requests at most, rounded up to a power of two; bounds the
            memory (100 bytes a token).
        max_requests: requests stored at most; None for any number.

    Attributes:
        arrays: for compiled code; replaced when the tree grows.
    """

    def __init__(
        self, depth: int, max_tokens: int = _MAX_TOKENS, max_requests: int | None = None
    ) -> None:
        self.max_tokens = 1 << (min(max_tokens, _MAX_TOKENS) - 1).bit_length()
        self.max_requests = max_requests
        room = min(_FIRST_SIZE, self.max_tokens)
        self.arrays = TreeArrays(
            np.empty((2 * room + 2, COLUMNS), dtype=np.int32),
            np.empty(2 * room, dtype=np.int32),
            np.empty(room, dtype=np.int32),
            np.empty(depth, dtype=np.int32),
            np.empty(N_META, dtype=np.int64),
        )
        # Positions at which the stored requests begin, the oldest first.
        self._begins: deque[int] = deque()
        self._recording = False
        self.clear()

    def __len__(self) -> int:
        return int(self.arrays.meta[TAIL]) - self._begins[0] if self._begins else 0

    @property
    def n_requests(self) -> int:
        """Requests stored, the one in progress included."""
        return len(self._begins)

    @property
    def n_nodes(self) -> int:  # without the root
        return int(self.arrays.meta[NODES])

    def clear(self) -> None:
        nodes, buckets, _, _, meta = self.arrays
        buckets.fill(NONE)
        meta[[NODES, GROWING, TAIL]] = 0
        meta[FRESH], meta[FREED] = 1, NONE
        nodes[ROOT, [PARENT, FIRST, LAST, SINGLE]] = NONE
        nodes[ROOT, [COUNT, LENGTH]] = 0
        self._begins.clear()
        self._recording = False

    def start_request(self, expected: int = 0) -> None:
        """End the request in progress and begin another, of ``expected`` tokens at most.

        Old requests make room for them now, not in its midst.
        """
        self.end_request()
        if self.max_requests == 0:
            return
        while self.max_requests is not None and self.n_requests >= self.max_requests:
            self._evict()
        while self._begins and len(self) + expected > self.max_tokens:
            self._evict()
        self._begins.append(int(self.arrays.meta[TAIL]))
        self._recording = True

    def end_request(self) -> None:
        """End the request in progress, if there is one; it stays stored."""
        self.arrays.meta[GROWING] = 0
        self._recording = False

    def extend(self, tokens: Array, begin: int, end: int) -> None:
        """Add ``tokens[begin:end]`` to the request in progress, if there is one.

        Older requests are evicted for it. A request that fills the tree alone ends here.
        """
        if not self._recording or begin >= end:
            return
        count = end - begin
        while self.n_requests > 1 and len(self) + count > self.max_tokens:
            self._evict()
        free = self.max_tokens - len(self)
        if len(self) + min(count, free) > len(self.arrays.text):
            self._grow(len(self) + min(count, free))
        append(self.arrays, tokens, begin, begin + min(count, free))
        if count > free:
            self.end_request()

    def count(self, tokens: Array) -> int:
        node, _ = locate(self.arrays, np.asarray(tokens, dtype=np.int64), 0, len(tokens))
        return 0 if node == NONE else int(self.arrays.nodes[node, COUNT])

    def _evict(self) -> None:
        begin = self._begins.popleft()
        end = self._begins[0] if self._begins else int(self.arrays.meta[TAIL])
        remove(self.arrays, begin, end)

    def _grow(self, required: int) -> None:
        old = self.arrays
        room = min(1 << (required - 1).bit_length(), self.max_tokens)
        nodes = np.empty((2 * room + 2, COLUMNS), dtype=np.int32)
        nodes[: len(old.nodes)] = old.nodes
        text = np.empty(room, dtype=np.int32)
        stored = np.arange(int(old.meta[TAIL]) - len(self), int(old.meta[TAIL]))
        text[stored & (room - 1)] = old.text[stored & (len(old.text) - 1)]
        buckets = np.full(2 * room, NONE, dtype=np.int32)
        self.arrays = TreeArrays(nodes, buckets, text, old.active, old.meta)
        rehash(self.arrays)


NONE = -1
ROOT = 0

# Columns of a node. CHAIN links the nodes of one hash bucket, NEXT also the freed nodes. SINGLE is
# the first child with count 1. BEGIN and LENGTH name the edge's label in the text, TOKEN is its
# first token.
PARENT, FIRST, LAST, SINGLE, NEXT, PREV, CHAIN, COUNT, BEGIN, LENGTH, TOKEN = range(11)
COLUMNS = 11
# Entries of ``meta``: nodes in use, never-used node, freed node, growing suffixes, end of the text.
NODES, FRESH, FREED, GROWING, TAIL = range(5)
N_META = 5

# Cacheback's hash, again: an edit there would leave stale code here.
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@njit(cache=True, inline="always")
def _mix(state: int, token: int) -> np.uint64:
    mixed = (state ^ (np.uint64(token) + _SEED)) * _MIX
    return mixed ^ (mixed >> _SHIFT)


@njit(cache=True, inline="always")
def _bucket(parent: int, token: int, buckets: Array) -> int:
    return _mix(_mix(np.uint64(0), parent), token) & np.uint64(len(buckets) - 1)


@njit(cache=True)
def _hash(nodes: Array, buckets: Array, node: int) -> None:
    bucket = _bucket(nodes[node, PARENT], nodes[node, TOKEN], buckets)
    nodes[node, CHAIN] = buckets[bucket]
    buckets[bucket] = node


@njit(cache=True)
def _unhash(nodes: Array, buckets: Array, node: int) -> None:
    bucket = _bucket(nodes[node, PARENT], nodes[node, TOKEN], buckets)
    if buckets[bucket] == node:
        buckets[bucket] = nodes[node, CHAIN]
        return
    at = buckets[bucket]
    while nodes[at, CHAIN] != node:
        at = nodes[at, CHAIN]
    nodes[at, CHAIN] = nodes[node, CHAIN]


@njit(cache=True)
def rehash(tree: tuple[Array, ...]) -> None:
    """Fill empty buckets with all nodes."""
    nodes, buckets, _, _, meta = tree
    for node in range(1, meta[FRESH]):
        if nodes[node, COUNT] > 0:
            _hash(nodes, buckets, node)


@njit(cache=True)
def _child(nodes: Array, buckets: Array, parent: int, token: int) -> np.int64:
    """Find the child whose edge begins with ``token``, or -1; try the most frequent one first."""
    node = np.int64(nodes[parent, FIRST])
    if node == NONE or nodes[node, TOKEN] == token:
        return node
    node = np.int64(buckets[_bucket(parent, token, buckets)])
    while node != NONE and (nodes[node, PARENT] != parent or nodes[node, TOKEN] != token):
        node = np.int64(nodes[node, CHAIN])
    return node


# -- children by count -----------------------------------------------------------------------------


@njit(cache=True)
def _insert_before(nodes: Array, parent: int, node: int, after: int) -> None:
    """Make ``node`` a child of ``parent`` in front of ``after``; -1 is the end."""
    before = nodes[parent, LAST] if after == NONE else nodes[after, PREV]
    _insert_between(nodes, parent, node, before, after)


@njit(cache=True)
def _insert_between(nodes: Array, parent: int, node: int, before: int, after: int) -> None:
    nodes[node, NEXT] = after
    nodes[node, PREV] = before
    if before == NONE:
        nodes[parent, FIRST] = node
    else:
        nodes[before, NEXT] = node
    if after == NONE:
        nodes[parent, LAST] = node
    else:
        nodes[after, PREV] = node


@njit(cache=True)
def _take_out(nodes: Array, node: int) -> None:
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if nodes[parent, SINGLE] == node:
        nodes[parent, SINGLE] = after
    if before == NONE:
        nodes[parent, FIRST] = after
    else:
        nodes[before, NEXT] = after
    if after == NONE:
        nodes[parent, LAST] = before
    else:
        nodes[after, PREV] = before


@njit(cache=True)
def _take_place(nodes: Array, node: int, old: int) -> None:
    """Put ``node`` where ``old`` is among its siblings; ``old`` is in no list afterwards."""
    parent, before, after = nodes[old, PARENT], nodes[old, PREV], nodes[old, NEXT]
    nodes[node, PARENT] = parent
    if nodes[parent, SINGLE] == old:
        nodes[parent, SINGLE] = node
    _insert_between(nodes, parent, node, before, after)


@njit(cache=True)
def _count_up(nodes: Array, node: int) -> None:
    parent = nodes[node, PARENT]
    nodes[node, COUNT] += 1
    count = nodes[node, COUNT]
    if parent == ROOT:
        return
    if count == 2:
        # A node may have thousands of children that were seen once: pass them all at a stroke.
        _take_out(nodes, node)
        _insert_before(nodes, parent, node, nodes[parent, SINGLE])
        return
    after = node
    while nodes[after, PREV] != NONE and nodes[nodes[after, PREV], COUNT] < count:
        after = nodes[after, PREV]
    if after != node:
        _take_out(nodes, node)
        _insert_before(nodes, parent, node, after)


@njit(cache=True)
def _count_down(nodes: Array, node: int) -> None:
    parent = nodes[node, PARENT]
    nodes[node, COUNT] -= 1
    count = nodes[node, COUNT]
    if parent == ROOT:
        return
    after = nodes[node, NEXT]
    if after != NONE and nodes[after, COUNT] > count:
        _take_out(nodes, node)
        while after != NONE and nodes[after, COUNT] > count:
            after = nodes[after, NEXT]
        _insert_before(nodes, parent, node, after)
    if count == 1:
        nodes[parent, SINGLE] = node


# -- growing ---------------------------------------------------------------------------------------


@njit(cache=True)
def _new_node(nodes: Array, meta: Array, begin: int, token: int) -> int:
    node = meta[FREED]
    if node == NONE:
        node = meta[FRESH]
        meta[FRESH] += 1
    else:
        meta[FREED] = nodes[node, NEXT]
    meta[NODES] += 1
    nodes[node, FIRST] = NONE
    nodes[node, LAST] = NONE
    nodes[node, SINGLE] = NONE
    nodes[node, COUNT] = 1
    nodes[node, BEGIN] = begin
    nodes[node, LENGTH] = 1
    nodes[node, TOKEN] = token
    return node


@njit(cache=True)
def _free(nodes: Array, meta: Array, node: int) -> None:
    nodes[node, COUNT] = 0
    nodes[node, NEXT] = meta[FREED]
    meta[FREED] = node
    meta[NODES] -= 1


@njit(cache=True)
def _advance(tree: tuple[Array, ...], node: int, token: int, position: int) -> int:
    """Move one growing suffix from the end of ``node`` over the token at ``position``."""
    nodes, buckets, text, _, meta = tree
    child = _child(nodes, buckets, node, token)
    if child == NONE:
        if node != ROOT and nodes[node, FIRST] == NONE and nodes[node, COUNT] == 1:
            nodes[node, LENGTH] += 1
            nodes[node, BEGIN] = position + 1 - nodes[node, LENGTH]
            return node
        leaf = _new_node(nodes, meta, position, token)
        nodes[leaf, PARENT] = node
        _insert_before(nodes, node, leaf, NONE)
        if nodes[node, SINGLE] == NONE:
            nodes[node, SINGLE] = leaf
        _hash(nodes, buckets, leaf)
        return leaf
    # True if nothing ends at ``node`` once this suffix has left it.
    only_suffix = (
        node != ROOT
        and nodes[node, FIRST] == nodes[node, LAST]
        and nodes[node, COUNT] == nodes[child, COUNT] + 1
    )
    if nodes[child, LENGTH] == 1:
        if not only_suffix:
            _count_up(nodes, child)
            nodes[child, BEGIN] = position
            return child
        _join(nodes, buckets, meta, node, child)
        nodes[child, BEGIN] = position + 1 - nodes[child, LENGTH]
        return child
    _unhash(nodes, buckets, child)
    nodes[child, BEGIN] += 1
    nodes[child, LENGTH] -= 1
    nodes[child, TOKEN] = text[nodes[child, BEGIN] & (len(text) - 1)]
    if only_suffix:
        nodes[node, LENGTH] += 1
        nodes[node, BEGIN] = position + 1 - nodes[node, LENGTH]
        _hash(nodes, buckets, child)
        return node
    middle = _new_node(nodes, meta, position, token)
    nodes[middle, COUNT] = nodes[child, COUNT]
    _take_place(nodes, middle, child)
    _hash(nodes, buckets, middle)
    nodes[child, PARENT] = middle
    _insert_before(nodes, middle, child, NONE)
    if nodes[child, COUNT] == 1:
        nodes[middle, SINGLE] = child
    _hash(nodes, buckets, child)
    _count_up(nodes, middle)
    return middle


@njit(cache=True)
def _join(nodes: Array, buckets: Array, meta: Array, node: int, child: int) -> None:
    """Make ``node`` and its only child one node, the child; its BEGIN is left as it was."""
    _unhash(nodes, buckets, node)
    _unhash(nodes, buckets, child)
    _take_place(nodes, child, node)
    nodes[child, TOKEN] = nodes[node, TOKEN]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    nodes[child, COUNT] = nodes[node, COUNT]
    _hash(nodes, buckets, child)
    _free(nodes, meta, node)


@njit(cache=True)
def append(tree: tuple[Array, ...], tokens: Array, begin: int, end: int) -> None:
    """Add ``tokens[begin:end]`` to the request in progress; there must be room for them."""
    _, _, text, active, meta = tree
    depth = len(active)
    for i in range(begin, end):
        token = tokens[i]
        position = meta[TAIL]
        meta[TAIL] += 1
        text[position & (len(text) - 1)] = token
        growing = min(meta[GROWING], depth - 1)
        # The longest suffix first: one that leaves a node or moves its end is then alone there.
        for k in range(growing - 1, -1, -1):
            active[k + 1] = _advance(tree, active[k], token, position)
        active[0] = _advance(tree, ROOT, token, position)
        meta[GROWING] = growing + 1


@njit(cache=True)
def remove(tree: tuple[Array, ...], begin: int, end: int) -> None:
    """Take the oldest request, stored at positions ``begin`` to ``end``, out of the tree."""
    nodes, buckets, text, active, meta = tree
    mask = len(text) - 1
    path = np.empty(len(active), dtype=np.int64)
    for first in range(begin, end):
        stop = min(first + len(active), end)
        position = first
        node = np.int64(ROOT)
        n = 0
        while position < stop:
            node = _child(nodes, buckets, node, text[position & mask])
            path[n] = node
            n += 1
            position += nodes[node, LENGTH]
        survivor = np.int64(ROOT)
        for i in range(n - 1, -1, -1):
            node = path[i]
            if nodes[node, COUNT] == 1:
                _unhash(nodes, buckets, node)
                _take_out(nodes, node)
                _free(nodes, meta, node)
            else:
                _count_down(nodes, node)
                if survivor == ROOT:
                    survivor = node
        if survivor != ROOT:
            child = np.int64(nodes[survivor, FIRST])
            only = child != NONE and child == nodes[survivor, LAST]
            if only and nodes[child, COUNT] == nodes[survivor, COUNT]:
                nodes[child, BEGIN] -= nodes[survivor, LENGTH]
                _join(nodes, buckets, meta, survivor, child)


# -- drafting --------------------------------------------------------------------------------------


@njit(cache=True)
def locate(
    tree: tuple[Array, ...], tokens: Array, begin: int, end: int
) -> tuple[np.int64, np.int64]:
    """Follow ``tokens[begin:end]`` from the root to a node and a place in its edge, or (-1, 0)."""
    nodes, buckets, text, _, _ = tree
    mask = len(text) - 1
    node = np.int64(ROOT)
    used = np.int64(0)
    for i in range(begin, end):
        if used < nodes[node, LENGTH]:
            if text[(nodes[node, BEGIN] + used) & mask] != tokens[i]:
                return np.int64(NONE), np.int64(0)
            used += 1
        else:
            node = _child(nodes, buckets, node, tokens[i])
            if node == NONE:
                return np.int64(NONE), np.int64(0)
            used = np.int64(1)
    return node, used


@njit(cache=True)
def _draft_path(
    tree: tuple[Array, ...],
    node: np.int64,
    used: np.int64,
    max_nodes: int,
    min_prob: float,
    out: Array,
    path_probs: Array,
) -> tuple[int, float]:
    nodes, _, text, _, _ = tree
    mask = len(text) - 1
    probability = 1.0
    score = 0.0
    n = 0
    while n < max_nodes:
        if used < nodes[node, LENGTH]:
            token = text[(nodes[node, BEGIN] + used) & mask]
            used += 1
        else:
            child = np.int64(nodes[node, FIRST])
            if child == NONE:
                break
            probability *= nodes[child, COUNT] / nodes[node, COUNT]
            if probability < min_prob:
                break
            node = child
            token = nodes[node, TOKEN]
            used = np.int64(1)
        out[0, n] = token
        out[1, n] = n - 1
        path_probs[n] = probability
        score += probability
        n += 1
    return n, score


@njit(cache=True)
def _draft_tree(
    tree: tuple[Array, ...],
    node: np.int64,
    used: np.int64,
    max_nodes: int,
    min_prob: float,
    out: Array,
    path_probs: Array,
) -> tuple[int, float]:
    nodes, _, text, _, _ = tree
    mask = len(text) - 1
    score = 0.0
    n = 0
    n_pushed = 0
    # Minus probability, order of pushes, node, tokens of its edge used, draft node.
    heap: Any = [(-1.0, 0, node, used, np.int64(NONE))]
    while n < max_nodes and len(heap) > 0:
        minus, order, node, used, above = heapq.heappop(heap)
        draft_node = np.int64(NONE)
        if order > 0:
            draft_node = np.int64(n)
            out[0, n] = text[(nodes[node, BEGIN] + used - 1) & mask]
            out[1, n] = above
            path_probs[n] = -minus
            score -= minus
            n += 1
        if used < nodes[node, LENGTH]:
            n_pushed += 1
            heapq.heappush(heap, (minus, n_pushed, node, used + 1, draft_node))
            continue
        child = np.int64(nodes[node, FIRST])
        while child != NONE:
            below = minus * nodes[child, COUNT] / nodes[node, COUNT]
            if -below < min_prob:
                break
            n_pushed += 1
            heapq.heappush(heap, (below, n_pushed, child, np.int64(1), draft_node))
            child = np.int64(nodes[child, NEXT])
    return n, score


@njit(cache=True)
def speculate(
    tree: tuple[Array, ...],
    tokens: Array,
    length: int,
    factor: float,
    offset: float,
    longest: int,
    min_prob: float,
    branching: bool,
) -> tuple[float, Array, Array]:
    """Draft from the suffix of the text whose draft scores best.

    A suffix of p tokens may draft ``int(factor × p + offset)`` tokens. A draft's score is the sum
    of its nodes' path probabilities: the number of tokens it is expected to get accepted. Of equal
    scores the longest suffix's counts.

    Args:
        tree: its request in progress, if any, ends as the text does.
        tokens: int64 text; only ``tokens[:length]`` counts.
        longest: nodes of a draft at most.
        min_prob: path probability below which nothing is drafted.
        branching: whether the draft is a tree, the most probable node first, or a chain of the most
            frequent continuations.

    Returns:
        The score, ``[2, nodes]`` int64 tokens and parents, and ``[nodes]`` path probabilities.
    """
    nodes, _, _, active, meta = tree
    best = np.empty((2, longest), dtype=np.int64)
    trial = np.empty((2, longest), dtype=np.int64)
    best_probs = np.empty(longest, dtype=np.float64)
    path_probs = np.empty(longest, dtype=np.float64)
    best_n, best_score = 0, 0.0
    for p in range(1, min(len(active), length)):
        if p <= meta[GROWING]:
            node = np.int64(active[p - 1])
            used = np.int64(nodes[node, LENGTH])
        else:
            node, used = locate(tree, tokens, length - p, length)
            if node == NONE:
                break
        max_nodes: Any = min(longest, np.int64(factor * p + offset))
        # No node counts for more than 1.
        if max_nodes <= 0 or max_nodes < best_score:
            continue
        if branching:
            n, score = _draft_tree(tree, node, used, max_nodes, min_prob, trial, path_probs)
        else:
            n, score = _draft_path(tree, node, used, max_nodes, min_prob, trial, path_probs)
        if score >= best_score:
            best, trial = trial, best
            best_probs, path_probs = path_probs, best_probs
            best_n, best_score = n, score
    return best_score, best[:, :best_n].copy(), best_probs[:best_n].copy()
