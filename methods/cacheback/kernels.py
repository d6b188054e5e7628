"""All compiled code of Cacheback's tables: LRU operations, frozen look-ups, growing a draft tree.

One file, because numba's cache on disk notices a change in a function's own file only, not in
what it calls in another one: split up, an edit would leave stale machine code behind.

Hash chains find entries and doubly linked lists keep them by recency, so every operation on a table
is O(1). `methods.cacheback.table` and `methods.cacheback.frozen_table` own and describe the arrays;
`grow_tree` defines the order in which a tree is drafted.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specbench.arrays import Array

NONE = -1

# Columns of both entry arrays. NEWER and OLDER link the recency list; OLDER also links free slots.
NEWER, OLDER, CHAIN = 0, 1, 2
# Further columns of a leader: most and least recent follower, number of them; then its tokens.
FIRST, LAST, COUNT, LEADER_TOKENS = 3, 4, 5, 6
# Further column of a follower: its leader; then its tokens.
OWNER, FOLLOWER_TOKENS = 3, 4

# Entries of ``meta``.
LEADERS, FOLLOWERS = 0, 1  # entries in use
FREE_LEADER, FREE_FOLLOWER = 2, 3  # heads of the lists of freed slots
FRESH_LEADER, FRESH_FOLLOWER = 4, 5  # slots from here on were never used
MOST_RECENT, LEAST_RECENT = 6, 7
LEADER_LEN, FOLLOWER_LEN, LEADER_CAPACITY, FOLLOWER_CAPACITY = 8, 9, 10, 11
N_META = 12

DYNAMIC, FROZEN = 0, 1

# Columns of the scratch array; row 0 is the root, so 0 also means "no such node".
_TOKEN, _PARENT, _CHILD, _LAST_CHILD, _SIBLING, _SOURCE, _QUEUED, _QUEUE, _POSITION = range(9)
SCRATCH = 9
# Entries of the counters.
_NODES, _LEAVES, _ROOM, _FULL = range(4)

_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@njit(cache=True, inline="always")
def _mix(state: int, token: int) -> np.uint64:
    """Add one token to the state: multiply, then fold the high bits into the low ones."""
    mixed = (state ^ (np.uint64(token) + _SEED)) * _MIX
    return mixed ^ (mixed >> _SHIFT)


@njit(cache=True, inline="always")
def hash_tokens(seed: int, tokens: Array, start: int, count: int) -> int:
    """Hash ``tokens[start : start + count]`` to uint64; ``seed`` distinguishes owners."""
    state = _mix(np.uint64(0), seed)
    for i in range(start, start + count):
        state = _mix(state, tokens[i])
    return state


@njit(cache=True, inline="always")
def _equal(rows: Array, row: int, column: int, key: Array, start: int, count: int) -> bool:
    for i in range(count):  # noqa: SIM110 (numba compiles no generator expressions)
        if rows[row, column + i] != key[start + i]:
            return False
    return True


@njit(cache=True)
def find_leader(table: tuple[Array, ...], key: Array, start: int) -> np.int64:
    """Return the slot of the leader ``key[start : start + leader_len]``, or -1."""
    leaders, _, buckets, _, meta = table
    length = meta[LEADER_LEN]
    bucket = hash_tokens(0, key, start, length) & np.uint64(len(buckets) - 1)
    slot = np.int64(buckets[bucket])
    while slot != NONE:
        if _equal(leaders, slot, LEADER_TOKENS, key, start, length):
            return slot
        slot = np.int64(leaders[slot, CHAIN])
    return np.int64(NONE)


@njit(cache=True)
def touch_leader(table: tuple[Array, ...], slot: int) -> None:
    """Make a leader the most recent one."""
    leaders, _, _, _, meta = table
    if meta[MOST_RECENT] != slot:
        _unlink(leaders, meta, MOST_RECENT, LEAST_RECENT, slot)
        _push(leaders, meta, MOST_RECENT, LEAST_RECENT, slot)


# A recency list links the entries of one array; its two ends are entries ``most`` and ``least`` of
# ``ends``: of ``meta`` for the leaders, of its leader's row for each list of followers.


@njit(cache=True, inline="always")
def _push(entries: Array, ends: Array, most: int, least: int, slot: int) -> None:
    """Put ``slot`` at the recent end."""
    recent = ends[most]
    entries[slot, NEWER] = NONE
    entries[slot, OLDER] = recent
    if recent == NONE:
        ends[least] = slot
    else:
        entries[recent, NEWER] = slot
    ends[most] = slot


@njit(cache=True, inline="always")
def _unlink(entries: Array, ends: Array, most: int, least: int, slot: int) -> None:
    newer, older = entries[slot, NEWER], entries[slot, OLDER]
    if newer == NONE:
        ends[most] = older
    else:
        entries[newer, OLDER] = older
    if older == NONE:
        ends[least] = newer
    else:
        entries[older, NEWER] = newer


@njit(cache=True)
def _unchain(entries: Array, buckets: Array, bucket: int, slot: int) -> None:
    if buckets[bucket] == slot:
        buckets[bucket] = entries[slot, CHAIN]
        return
    at = buckets[bucket]
    while entries[at, CHAIN] != slot:
        at = entries[at, CHAIN]
    entries[at, CHAIN] = entries[slot, CHAIN]


@njit(cache=True)
def _follower_bucket(table: tuple[Array, ...], slot: int) -> int:
    _, followers, _, buckets, meta = table
    hashed = hash_tokens(
        followers[slot, OWNER], followers[slot], FOLLOWER_TOKENS, meta[FOLLOWER_LEN]
    )
    return hashed & np.uint64(len(buckets) - 1)


@njit(cache=True)
def _free_follower(table: tuple[Array, ...], slot: int) -> None:
    _, followers, _, buckets, meta = table
    _unchain(followers, buckets, _follower_bucket(table, slot), slot)
    followers[slot, OLDER] = meta[FREE_FOLLOWER]
    meta[FREE_FOLLOWER] = slot
    meta[FOLLOWERS] -= 1


@njit(cache=True)
def _evict_leader(table: tuple[Array, ...]) -> None:
    leaders, followers, buckets, _, meta = table
    slot = meta[LEAST_RECENT]
    follower = np.int64(leaders[slot, FIRST])
    while follower != NONE:
        older = np.int64(followers[follower, OLDER])
        _free_follower(table, follower)
        follower = older
    _unlink(leaders, meta, MOST_RECENT, LEAST_RECENT, slot)
    hashed = hash_tokens(0, leaders[slot], LEADER_TOKENS, meta[LEADER_LEN])
    _unchain(leaders, buckets, hashed & np.uint64(len(buckets) - 1), slot)
    leaders[slot, OLDER] = meta[FREE_LEADER]
    meta[FREE_LEADER] = slot
    meta[LEADERS] -= 1


@njit(cache=True)
def _take_slot(entries: Array, meta: Array, used: int, free: int, fresh: int) -> int:
    slot = meta[free]
    if slot != NONE:
        meta[free] = entries[slot, OLDER]
    else:
        slot = meta[fresh]
        meta[fresh] += 1
    meta[used] += 1
    return slot


@njit(cache=True)
def _put_leader(table: tuple[Array, ...], tokens: Array, start: int) -> int:
    leaders, _, buckets, _, meta = table
    slot = find_leader(table, tokens, start)
    if slot != NONE:
        touch_leader(table, slot)
        return slot
    if meta[LEADERS] == meta[LEADER_CAPACITY]:
        _evict_leader(table)
    slot = _take_slot(leaders, meta, LEADERS, FREE_LEADER, FRESH_LEADER)
    length = meta[LEADER_LEN]
    for i in range(length):
        leaders[slot, LEADER_TOKENS + i] = tokens[start + i]
    leaders[slot, FIRST] = NONE
    leaders[slot, LAST] = NONE
    leaders[slot, COUNT] = 0
    bucket = hash_tokens(0, tokens, start, length) & np.uint64(len(buckets) - 1)
    leaders[slot, CHAIN] = buckets[bucket]
    buckets[bucket] = slot
    _push(leaders, meta, MOST_RECENT, LEAST_RECENT, slot)
    return slot


@njit(cache=True)
def _put_follower(table: tuple[Array, ...], owner: int, tokens: Array, start: int) -> None:
    leaders, followers, _, buckets, meta = table
    length = meta[FOLLOWER_LEN]
    bucket = hash_tokens(owner, tokens, start, length) & np.uint64(len(buckets) - 1)
    slot = np.int64(buckets[bucket])
    while slot != NONE:
        same = _equal(followers, slot, FOLLOWER_TOKENS, tokens, start, length)
        if same and followers[slot, OWNER] == owner:
            if followers[slot, NEWER] != NONE:
                _unlink(followers, leaders[owner], FIRST, LAST, slot)
                _push(followers, leaders[owner], FIRST, LAST, slot)
            return
        slot = np.int64(followers[slot, CHAIN])
    if leaders[owner, COUNT] == meta[FOLLOWER_CAPACITY]:
        oldest = np.int64(leaders[owner, LAST])
        _unlink(followers, leaders[owner], FIRST, LAST, oldest)
        _free_follower(table, oldest)
    else:
        leaders[owner, COUNT] += 1
    slot = _take_slot(followers, meta, FOLLOWERS, FREE_FOLLOWER, FRESH_FOLLOWER)
    followers[slot, OWNER] = owner
    for i in range(length):
        followers[slot, FOLLOWER_TOKENS + i] = tokens[start + i]
    followers[slot, CHAIN] = buckets[bucket]
    buckets[bucket] = slot
    _push(followers, leaders[owner], FIRST, LAST, slot)


@njit(cache=True)
def insert_windows(table: tuple[Array, ...], tokens: Array, begin: int, end: int) -> int:
    """Insert the windows that end at ``begin .. end - 1``; return where room ran out, or end."""
    leaders, followers, _, _, meta = table
    leader_len, window = meta[LEADER_LEN], meta[LEADER_LEN] + meta[FOLLOWER_LEN]
    limit = meta[LEADER_CAPACITY] * meta[FOLLOWER_CAPACITY]
    for last in range(max(begin, window - 1), end):
        # At the capacities no room is needed: the entry evicts one before it takes its slot.
        if meta[LEADERS] == len(leaders) < meta[LEADER_CAPACITY]:
            return last
        if meta[FOLLOWERS] == len(followers) < limit:
            return last
        start = last + 1 - window
        owner = _put_leader(table, tokens, start)
        _put_follower(table, owner, tokens, start + leader_len)
    return end


@njit(cache=True)
def rechain(table: tuple[Array, ...]) -> None:
    """Rebuild the hash chains after the buckets were replaced, by walking the recency lists."""
    leaders, followers, leader_buckets, follower_buckets, meta = table
    leader = meta[MOST_RECENT]
    while leader != NONE:
        hashed = hash_tokens(0, leaders[leader], LEADER_TOKENS, meta[LEADER_LEN])
        bucket = hashed & np.uint64(len(leader_buckets) - 1)
        leaders[leader, CHAIN] = leader_buckets[bucket]
        leader_buckets[bucket] = leader
        follower = np.int64(leaders[leader, FIRST])
        while follower != NONE:
            bucket = _follower_bucket(table, follower)
            followers[follower, CHAIN] = follower_buckets[bucket]
            follower_buckets[bucket] = follower
            follower = np.int64(followers[follower, OLDER])
        leader = np.int64(leaders[leader, OLDER])


@njit(cache=True)
def find_frozen(table: tuple[Array, ...], key: Array, start: int) -> np.int64:
    """Return the index of the leader ``key[start : start + leader_len]``, or -1."""
    leaders, buckets, _, _ = table
    length = leaders.shape[1]
    mask = np.int64(len(buckets) - 1)
    at = np.int64(hash_tokens(0, key, start, length) & np.uint64(mask))
    while buckets[at] != NONE:
        index = np.int64(buckets[at])
        if _equal(leaders, index, 0, key, start, length):
            return index
        at = (at + 1) & mask
    return np.int64(NONE)


@njit(cache=True)
def index_leaders(leaders: Array, buckets: Array) -> None:
    """Fill a frozen table's empty hash index."""
    mask = np.int64(len(buckets) - 1)
    for index in range(len(leaders)):
        hashed = hash_tokens(0, leaders[index], 0, leaders.shape[1])
        at = np.int64(hashed & np.uint64(mask))
        while buckets[at] != NONE:
            at = (at + 1) & mask
        buckets[at] = index


@njit(cache=True, inline="always")
def _append(work: Array, counters: Array, parent: int, token: int, source: int) -> int:
    node = counters[_NODES] + 1
    counters[_NODES] = node
    counters[_ROOM] -= 1
    work[node, _TOKEN] = token
    work[node, _PARENT] = parent
    work[node, _CHILD] = 0
    work[node, _LAST_CHILD] = 0
    work[node, _SIBLING] = 0
    work[node, _SOURCE] = source
    work[node, _QUEUED] = 0
    if work[parent, _CHILD] == 0:
        work[parent, _CHILD] = node
    else:
        work[work[parent, _LAST_CHILD], _SIBLING] = node
    work[parent, _LAST_CHILD] = node
    return node


@njit(cache=True)
def _add(
    work: Array,
    counters: Array,
    leaf: np.int64,
    follower: Array,
    count: int,
    merge: int,
    source: int,
) -> None:
    """Hang the first ``count`` tokens of ``follower`` below ``leaf``."""
    if not merge and counters[_ROOM] < count:
        counters[_FULL] = 1
        return
    node = leaf
    for i in range(count):
        token = follower[i]
        child = np.int64(0)
        if merge:
            child = work[node, _CHILD]
            while child != 0 and work[child, _TOKEN] != token:
                child = work[child, _SIBLING]
        if child == 0:
            if counters[_ROOM] <= 0:
                counters[_FULL] = 1
                return
            child = _append(work, counters, node, token, source)
        node = child
    if work[node, _QUEUED] == 0:
        work[node, _QUEUED] = 1
        work[counters[_LEAVES], _QUEUE] = node
        counters[_LEAVES] += 1


@njit(cache=True)
def _read_key(work: Array, leaf: int, buffer: Array, length: int, key: Array) -> int:
    """Fill ``key`` from its end with the last tokens of text and path; return their number."""
    size = len(key)
    filled = 0
    node = leaf
    while node != 0 and filled < size:
        filled += 1
        key[size - filled] = work[node, _TOKEN]
        node = work[node, _PARENT]
    at = length
    while at > 0 and filled < size:
        at -= 1
        filled += 1
        key[size - filled] = buffer[at]
    return filled


@njit(cache=True)
def _emit(work: Array, n: int) -> Array:
    out = np.empty((3, n), dtype=np.int64)
    work[0, _POSITION] = -1
    position = 0
    node = work[0, _CHILD]
    while node != 0:
        out[0, position] = work[node, _TOKEN]
        out[1, position] = work[work[node, _PARENT], _POSITION]
        out[2, position] = work[node, _SOURCE]
        work[node, _POSITION] = position
        position += 1
        if work[node, _CHILD] != 0:
            node = work[node, _CHILD]
        else:
            while node != 0 and work[node, _SIBLING] == 0:
                node = work[node, _PARENT]
            node = work[node, _SIBLING]
    return out


@njit(cache=True)
def grow_tree(
    buffer: Array,
    length: int,
    budget: int,
    reserve: int,
    merge: int,
    order: Array,
    dynamic: Array,
    frozen: Array,
    work: Array,
    key: Array,
) -> int:
    """Grow one draft tree below the last of ``buffer[:length]``.

    The order is the reference's. A leaf is looked up in all tables at once. Followers are taken in
    table order, in a dynamic table from most to least recent, in a frozen one from frequent to
    rare. The root comes first and may spend ``budget - reserve`` nodes; then the leaves, in the
    order of their creation, share the rest plus ``reserve``. The first follower that does not fit
    ends the root's turn or, below it, the tree. A look-up touches the leader in dynamic tables,
    nothing else.

    Unmerged, every follower is a separate chain, even where siblings share their first token.
    Merged, a follower shares existing nodes and only new nodes count, so a budget is spent on
    distinct nodes; the follower that exhausts it is cut there.

    Nodes are numbered depth-first in pre-order, children in the order of their creation.

    Args:
        buffer: int64; ``buffer[:length]`` are the committed tokens.
        budget: maximum nodes of the tree.
        reserve: part of these reserved for the second level and deeper.
        merge: share equal nodes below one parent.
        order: ``[tables, 2]`` int64: `DYNAMIC` or `FROZEN`, and the index among its kind.
        dynamic, frozen: at least one ``TableArrays`` and ``FrozenArrays``, also if not in use.
        work, key: int64 scratch, ``[budget + 1, SCRATCH]`` and ``[longest leader]``.

    Returns:
        ``[3, nodes]`` int64: tokens, parents (-1 is the root) and table index of each node.
    """
    counters = np.zeros(4, dtype=np.int64)
    counters[_ROOM] = budget - reserve
    leader_slots = np.empty(len(order), dtype=np.int64)
    work[0, _CHILD] = 0
    work[0, _SIBLING] = 0
    work[0, _QUEUE] = 0
    counters[_LEAVES] = 1
    head = 0
    while head < counters[_LEAVES]:
        leaf = work[head, _QUEUE]
        filled = _read_key(work, leaf, buffer, length, key)
        for t in range(len(order)):
            leader_slots[t] = NONE
            if order[t, 0] == DYNAMIC:
                table = dynamic[order[t, 1]]
                if filled >= table.meta[LEADER_LEN]:
                    leader_slots[t] = find_leader(table, key, len(key) - table.meta[LEADER_LEN])
                    if leader_slots[t] != NONE:
                        touch_leader(table, leader_slots[t])
            else:
                fixed = frozen[order[t, 1]]
                if filled >= fixed.leaders.shape[1]:
                    leader_slots[t] = find_frozen(fixed, key, len(key) - fixed.leaders.shape[1])
        for t in range(len(order)):
            if leader_slots[t] == NONE:
                continue
            if order[t, 0] == DYNAMIC:
                table = dynamic[order[t, 1]]
                size = table.meta[FOLLOWER_LEN]
                row = np.int64(table.leaders[leader_slots[t], FIRST])
                while row != NONE and counters[_FULL] == 0:
                    follower = table.followers[row, FOLLOWER_TOKENS:]
                    _add(work, counters, leaf, follower, size, merge, t)
                    row = np.int64(table.followers[row, OLDER])
            else:
                fixed = frozen[order[t, 1]]
                size = fixed.followers.shape[1]
                row = fixed.offsets[leader_slots[t]]
                end = fixed.offsets[leader_slots[t] + 1]
                while row < end and counters[_FULL] == 0:
                    _add(work, counters, leaf, fixed.followers[row], size, merge, t)
                    row += 1
            if counters[_FULL] != 0:
                break
        if head == 0:
            counters[_ROOM] += reserve
            if reserve > 0:
                counters[_FULL] = 0
        if counters[_FULL] != 0:
            break
        head += 1
    return _emit(work, counters[_NODES])
