"""Suffix arrays of token texts: the positions of all suffixes, in their lexicographic order.

pydivsufsort sorts them if it is installed (extra ``rest``), otherwise numpy by prefix doubling,
which gives the same array in a few times the time. Both release Python's lock most of the time, so
an array can be built in a thread while a model runs. The compiled
look-ups are below: ranges, SSD's draft, REST's draft tree.

Arguments of these that recur: ``tokens [n]`` int32 with separators (-1) between documents,
``suffixes [n]`` int32 its suffix array, ``text`` int64 the committed ids, of which
``text[:length]`` counts. Matches of a query are adjacent in the suffix array, in the order of
their continuations, so equal continuations are neighbours and are counted without a hash table.
"""

from __future__ import annotations

import importlib.util

import numpy as np
from numba import njit

from specbench.arrays import Array

# Between two documents, so that no match crosses their border; below every id, as the end of a
# text is below everything.
SEPARATOR = -1


def build_suffix_array(tokens: Array) -> Array:
    """Sort the suffixes of a text.

    Args:
        tokens: ``[n]`` int32 ids; `SEPARATOR` may be among them. A suffix that is the beginning
            of another one comes before it.

    Returns:
        ``[n]`` int32 start positions.

    Raises:
        ValueError: the text has 2^31 tokens or more; build several arrays.
    """
    if len(tokens) > np.iinfo(np.int32).max:
        raise ValueError(f"a suffix array holds fewer than 2^31 tokens, not {len(tokens)}")
    if len(tokens) < 2:
        return np.arange(len(tokens), dtype=np.int32)
    if importlib.util.find_spec("pydivsufsort") is None:
        return sort_by_doubling(tokens)
    from pydivsufsort import divsufsort

    suffixes: Array = divsufsort(np.ascontiguousarray(tokens, dtype=np.int32))
    return suffixes.astype(np.int32, copy=False)


def sort_by_doubling(tokens: Array) -> Array:
    """Build the suffix array by prefix doubling, in numpy alone: O(n log² n), O(n) memory.

    Suffixes that agree on their first k tokens share a rank. Each round orders them by the rank of
    the suffix after these k tokens, which doubles k; suffixes with a unique rank are done.
    """
    n = len(tokens)
    order = np.argsort(tokens, kind="stable")
    rank = np.empty(n, dtype=np.int64)
    slots = np.arange(n)
    active, ranks = order, _first_of_equals(tokens[order], slots)
    rank[order] = ranks
    sorted_tokens = 1  # of each suffix
    while True:
        shared = _shared(ranks)
        slots, active, ranks = slots[shared], active[shared], ranks[shared]
        if not len(active):
            return order.astype(np.int32)
        after = active + sorted_tokens
        inside = after < n
        # The end of the text ranks below everything.
        following = np.where(inside, rank[np.minimum(after, n - 1)] + 1, 0)
        key = ranks * (n + 1) + following
        by_key = np.argsort(key, kind="stable")
        active = active[by_key]
        order[slots] = active
        ranks = _first_of_equals(key[by_key], slots)
        rank[active] = ranks
        sorted_tokens *= 2


def _first_of_equals(values: Array, slots: Array) -> Array:
    """Return, for each sorted value, the slot of the first value equal to it."""
    first = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    return np.repeat(slots[first], np.diff(first, append=len(values)))


def _shared(ranks: Array) -> Array:
    """Mark sorted ranks that occur more than once."""
    same = ranks[1:] == ranks[:-1]
    shared = np.zeros(len(ranks), dtype=np.bool_)
    shared[1:] = same
    shared[:-1] |= same
    return shared


@njit(cache=True)
def _compare(tokens: Array, position: int, text: Array, start: int, count: int) -> int:
    """Compare the suffix at ``position``, cut to ``count`` tokens, with the query."""
    available = min(count, len(tokens) - position)
    for i in range(available):
        left, right = tokens[position + i], text[start + i]
        if left != right:
            return -1 if left < right else 1
    return 0 if available == count else -1


@njit(cache=True)
def find_range(
    tokens: Array, suffixes: Array, text: Array, start: int, count: int
) -> tuple[int, int]:
    """Find the range ``[first, last)`` of suffixes that begin with the query.

    The query is ``text[start : start + count]``.
    """
    low, high = 0, len(suffixes)
    # The second search stops at the first suffix that this one found to be larger.
    above = high
    while low < high:
        middle = (low + high) >> 1
        order = _compare(tokens, suffixes[middle], text, start, count)
        if order < 0:
            low = middle + 1
        else:
            high = middle
            if order > 0:
                above = middle
    first = low
    if first == len(suffixes) or _compare(tokens, suffixes[first], text, start, count) != 0:
        return 0, 0
    high = above
    while low < high:
        middle = (low + high) >> 1
        if _compare(tokens, suffixes[middle], text, start, count) <= 0:
            low = middle + 1
        else:
            high = middle
    return first, low


@njit(cache=True)
def _ends(token: int, ends: Array) -> bool:
    for end in ends:  # noqa: SIM110 (numba compiles no generator expressions)
        if token == end:
            return True
    return False


@njit(cache=True)
def _usable(tokens: Array, start: int, count: int, ends: Array) -> int:
    """Count a continuation's tokens: at most ``count``, to the document's end or an end token."""
    available = min(count, len(tokens) - start)
    for i in range(available):
        token = tokens[start + i]
        if token < 0:
            return i
        if _ends(token, ends):
            return i + 1
    return available


@njit(cache=True)
def _same(tokens: Array, first: int, second: int, count: int) -> bool:
    for i in range(count):  # noqa: SIM110 (numba compiles no generator expressions)
        if tokens[first + i] != tokens[second + i]:
            return False
    return True


@njit(cache=True)
def frequent_continuation(
    tokens: Array,
    suffixes: Array,
    text: Array,
    length: int,
    longest: int,
    shortest: int,
    count: int,
    limit: int,
    ends: Array,
    out: Array,
) -> tuple[int, int]:
    """Find the most frequent continuation of the text's last tokens, for the longest match.

    Args:
        longest, shortest: tokens of the first and of the last query.
        count: most tokens of a continuation.
        limit: most matches read; of more, this many evenly spaced over the range.
        ends: int64 ids after which a continuation stops.
        out: int64 ``[count]``, written.

    Returns:
        Tokens written (0: no match) and the length of the query that matched. On ties the
        continuation that occurred last in ``tokens`` is taken. A match without a continuation
        does not count.
    """
    for query in range(min(longest, length), shortest - 1, -1):
        first, last = find_range(tokens, suffixes, text, length - query, query)
        total = last - first
        if total == 0:
            continue
        n_read = min(total, limit)
        best, best_size, best_times = -1, 0, 0
        group, size, times = -1, 0, 0  # the newest of the current run of equals
        for i in range(n_read):
            start = suffixes[first + (i * total) // n_read] + query
            usable = _usable(tokens, start, count, ends)
            if usable == 0:
                continue
            if usable == size and _same(tokens, start, group, size):
                times += 1
                group = max(group, start)
            else:
                group, size, times = start, usable, 1
            if times > best_times or (times == best_times and group > best):
                best, best_size, best_times = group, size, times
        if best_times > 0:
            for i in range(best_size):
                out[i] = tokens[best + i]
            return best_size, query
    return 0, 0


@njit(cache=True)
def _gather(
    tokens: Array, suffixes: Array, first: int, last: int, skip: int, limit: int, even: bool,
    rows: Array, sizes: Array, done: int,
) -> int:  # fmt: skip
    """Copy the continuations of a range after the first ``done`` rows; return the row count."""
    total = last - first
    taken = min(total, limit)
    width = rows.shape[1]
    for i in range(taken):
        offset = (i * total) // taken if even else i
        start = suffixes[first + offset] + skip
        size = min(width, len(tokens) - start)
        for j in range(size):
            token = tokens[start + j]
            if token < 0:
                size = j
                break
            rows[done, j] = token
        sizes[done] = size
        done += 1
    return done


@njit(cache=True)
def _agreement(rows: Array, sizes: Array, first: int, second: int) -> int:
    count = min(sizes[first], sizes[second])
    for i in range(count):
        if rows[first, i] != rows[second, i]:
            return i
    return count


@njit(cache=True)
def _merge(rows: Array, sizes: Array, order: Array, begin: int, middle: int, end: int) -> None:
    """Merge two sorted stretches of ``order``; on ties the first stretch comes first."""
    merged = np.empty(end - begin, dtype=order.dtype)
    left, right = begin, middle
    for k in range(end - begin):
        if left < middle and right < end:
            a, b = order[left], order[right]
            same = _agreement(rows, sizes, a, b)
            if same == sizes[a] or same == sizes[b]:
                take_left = sizes[a] <= sizes[b]
            else:
                take_left = rows[a, same] <= rows[b, same]
        else:
            take_left = left < middle
        if take_left:
            merged[k] = order[left]
            left += 1
        else:
            merged[k] = order[right]
            right += 1
    order[begin:end] = merged


@njit(cache=True)
def _rank_prefixes(rows: Array, sizes: Array, order: Array, prefixes: Array) -> int:
    """Rank the most frequent prefixes of sorted continuations.

    More frequent ones come first, on ties shorter ones, then those that sort first; so a prefix
    comes after its own prefixes.

    Args:
        rows: ``[>= m, width]`` continuations.
        sizes: ``[>= m]`` tokens of each.
        order: ``[m]`` rows in lexicographic order.
        prefixes: ``[k, 3]`` int64, written: rank key, index in ``order`` of the first continuation
            with the prefix, tokens of the prefix.

    Returns:
        Prefixes written.
    """
    count, width = len(order), rows.shape[1]
    opened = np.zeros(width + 1, dtype=np.int64)
    n_prefixes, depth = 0, 0
    for i in range(count + 1):
        same = 0
        if 0 < i < count:
            same = _agreement(rows, sizes, order[i - 1], order[i])
        # Prefixes longer than the part shared by the neighbours end here.
        for d in range(depth, same, -1):
            times = i - opened[d]
            key = (times * (width + 1) + (width - d)) * count + (count - 1 - opened[d])
            if n_prefixes == len(prefixes):
                if key < prefixes[n_prefixes - 1, 0]:
                    continue
                at = n_prefixes - 1
            else:
                at = n_prefixes
                n_prefixes += 1
            while at > 0 and prefixes[at - 1, 0] < key:
                prefixes[at] = prefixes[at - 1]
                at -= 1
            prefixes[at, 0], prefixes[at, 1], prefixes[at, 2] = key, opened[d], d
        if i < count:
            depth = sizes[order[i]]
            for d in range(same + 1, depth + 1):
                opened[d] = i
    return n_prefixes


@njit(cache=True)
def _cut(rows: Array, order: Array, prefixes: Array, n_prefixes: int, choices: int) -> int:
    """REST's ``cut_to_choices``: drop prefixes with most distinct tokens until the sum fits.

    The sum counts the distinct tokens of every prefix, shared ones repeatedly. On ties the last in
    rank is dropped first. Returns how many are left.
    """
    distinct = np.zeros(n_prefixes, dtype=np.int64)
    total = 0
    for i in range(n_prefixes):
        row = rows[order[prefixes[i, 1]]]
        for j in range(prefixes[i, 2]):
            new = True
            for earlier in range(j):
                if row[earlier] == row[j]:
                    new = False
                    break
            distinct[i] += new
        total += distinct[i]
    for most in range(rows.shape[1], 0, -1):
        for i in range(n_prefixes - 1, -1, -1):
            if total <= choices:
                break
            if distinct[i] == most:
                total -= most
                distinct[i] = 0
    left = 0
    for i in range(n_prefixes):
        if distinct[i] > 0:
            prefixes[left] = prefixes[i]
            left += 1
    return left


@njit(cache=True)
def retrieve_tree(
    tokens: Array, suffixes: Array, offsets: Array, text: Array, length: int, longest: int,
    shortest: int, limit: int, even: bool, choices: int, cut: bool, rows: Array, sizes: Array,
    out_tokens: Array, out_parents: Array,
) -> tuple[int, int]:  # fmt: skip
    """Build REST's draft tree for the longest span of the text's last tokens that occurs anywhere.

    Args:
        tokens: the chunks' texts one after the other.
        suffixes: the chunks' suffix arrays one after the other, positions within the chunk.
        offsets: ``[chunks + 1]`` where each chunk begins.
        longest, shortest: tokens of the first and of the last span tried.
        limit: most continuations taken from a chunk.
        even: of more, take this many evenly spaced; False takes the first in lexicographic order.
        choices: most prefixes, and the bound of the cut.
        cut: apply the reference's cut.
        rows: int32 ``[chunks * limit, width]`` scratch; a continuation has ``width`` tokens.
        sizes: int64 ``[chunks * limit]`` scratch.
        out_tokens, out_parents: int64 ``[choices]``, written: nodes by depth, within one by rank.

    Returns:
        Nodes written and the span that matched (0: none).
    """
    n_chunks = len(offsets) - 1
    borders = np.zeros(n_chunks + 1, dtype=np.int64)
    count, span = 0, min(longest, length)
    while span >= shortest:
        hits = 0
        for c in range(n_chunks):
            begin, end = offsets[c], offsets[c + 1]
            first, last = find_range(
                tokens[begin:end], suffixes[begin:end], text, length - span, span
            )
            hits += last - first
            count = _gather(
                tokens[begin:end], suffixes[begin:end], first, last, span, limit, even,
                rows, sizes, count,
            )  # fmt: skip
            borders[c + 1] = count
        if hits > 0:
            break
        span -= 1
    if span < shortest:
        return 0, 0
    order = np.arange(count)
    for c in range(1, n_chunks):
        _merge(rows, sizes, order, 0, borders[c], borders[c + 1])
    prefixes = np.empty((choices, 3), dtype=np.int64)
    n_prefixes = _rank_prefixes(rows, sizes, order, prefixes)
    if cut:
        n_prefixes = _cut(rows, order, prefixes, n_prefixes, choices)
    placed = np.empty(n_prefixes, dtype=np.int64)
    n, level_begin, level_end = 0, 0, 0
    for depth in range(1, rows.shape[1] + 1):
        for i in range(n_prefixes):
            if prefixes[i, 2] != depth:
                continue
            # The parent has the nearest index at or before the child's.
            parent, nearest = -1, -1
            for above in range(level_begin, level_end):
                index = prefixes[placed[above], 1]
                if nearest < index <= prefixes[i, 1]:
                    parent, nearest = above, index
            out_tokens[n] = rows[order[prefixes[i, 1]], depth - 1]
            out_parents[n] = parent
            placed[n] = i
            n += 1
        level_begin, level_end = level_end, n
    return n, span
