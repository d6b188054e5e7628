"""N-Grammys' draft rows, compiled: n-grams of the text, then continuations from a bigram table.

All compiled code of the method is here, because numba's cache on disk notices a change in a
function's own file only, not in what it calls in another one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specbench.arrays import Array

_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@njit(cache=True)
def _hash(text: Array, start: int, count: int) -> np.uint64:
    state = _SEED
    for i in range(start, start + count):
        state = (state ^ np.uint64(text[i])) * _MIX
        state ^= state >> _SHIFT
    return state


@njit(cache=True)
def _equal(text: Array, start: int, other: int, count: int) -> bool:
    for i in range(count):  # noqa: SIM110 (numba compiles no generator expressions)
        if text[start + i] != text[other + i]:
            return False
    return True


@njit(cache=True)
def context_rows(text: Array, length: int, query: int, width: int, rows: Array) -> int:
    """Find continuations of the text's last tokens, the most frequent first.

    Only whole windows of ``query + width`` tokens inside the text count. Ties go to the
    continuation that occurred later.

    Args:
        text: int64 ids, of which ``text[:length]`` counts.
        query: last tokens that must match (q).
        width: tokens that follow (w).
        rows: int64 ``[k, >= width]``, written; their number is returned.
    """
    tail = length - query
    last_start = tail - width  # of a match; its window ends with the text at the latest
    if last_start < 0:
        return 0
    matches = np.empty(last_start + 1, dtype=np.int64)
    n_matches = 0
    first = text[tail]
    for start in range(last_start, -1, -1):
        if text[start] == first and _equal(text, start, tail, query):
            matches[n_matches] = start + query
            n_matches += 1
    if n_matches == 0:
        return 0
    # Group equal windows by hashing, in the order of their latest occurrence.
    mask = 1
    while mask < 2 * n_matches:
        mask <<= 1
    mask -= 1
    slots = np.full(mask + 1, -1, dtype=np.int64)
    begins = np.empty(n_matches, dtype=np.int64)
    times = np.zeros(n_matches, dtype=np.int64)
    n_groups = 0
    for i in range(n_matches):
        begin = matches[i]
        slot = np.int64(_hash(text, begin, width) & np.uint64(mask))
        while slots[slot] >= 0 and not _equal(text, begins[slots[slot]], begin, width):
            slot = (slot + 1) & mask
        if slots[slot] < 0:
            slots[slot] = n_groups
            begins[n_groups] = begin
            n_groups += 1
        times[slots[slot]] += 1
    # The best len(rows) groups, by insertion; an equal one never passes an earlier one.
    best = np.empty(len(rows), dtype=np.int64)
    n_best = 0
    for group in range(n_groups):
        if n_best == len(rows):
            if times[group] <= times[best[n_best - 1]]:
                continue
            at = n_best - 1
        else:
            at = n_best
            n_best += 1
        while at > 0 and times[best[at - 1]] < times[group]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = group
    for i in range(n_best):
        for j in range(width):
            rows[i, j] = text[begins[best[i]] + j]
    return n_best


@njit(cache=True)
def table_rows(table: Array, firsts: Array, width: int, rows: Array, done: int) -> int:
    """Write rows that begin with given tokens and continue with each token's best next token.

    Rows equal to one of the first ``done`` rows are skipped.

    Args:
        table: int32 ``[vocab, K]`` most probable next tokens, best first.
        firsts: first ids of rows, best first.
        rows: int64 ``[k, >= width]``, written from row ``done`` on; the number of all is returned.
    """
    given = done
    for first in firsts:
        if done == len(rows):
            break
        token = np.int64(first)
        rows[done, 0] = token
        for j in range(1, width):
            token = np.int64(table[token, 0])
            rows[done, j] = token
        new = True
        for i in range(given):
            if _shared(rows, i, done, width) == width:
                new = False
                break
        done += new
    return done


@njit(cache=True)
def _shared(rows: Array, row: int, other: int, width: int) -> int:
    """Count the tokens that two rows share from their beginning."""
    for j in range(width):
        if rows[row, j] != rows[other, j]:
            return j
    return width


@njit(cache=True)
def merge_rows(
    rows: Array, count: int, width: int, tokens: Array, parents: Array, owners: Array
) -> int:
    """Merge rows into a tree that shares their common beginnings.

    Args:
        rows: int64 ``[>= count, >= width]``.
        tokens, parents, owners: int64 ``[>= count * width]``, written: nodes, and the first row
            of each. The number of nodes is returned.
    """
    n = 0
    path = np.empty((count, width), dtype=np.int64)
    for i in range(count):
        # The earlier row with the longest common beginning lends its nodes.
        shared, lender = 0, -1
        for earlier in range(i):
            same = _shared(rows, earlier, i, width)
            if same > shared:
                shared, lender = same, earlier
        for j in range(width):
            if j < shared:
                path[i, j] = path[lender, j]
                continue
            tokens[n] = rows[i, j]
            parents[n] = path[i, j - 1] if j else -1
            owners[n] = i
            path[i, j] = n
            n += 1
    return n
