"""Suffix arrays of token texts: the positions of all suffixes, in their lexicographic order.

The sorting is done by pydivsufsort where it is installed (extra ``rest``), else in numpy by prefix
doubling, which gives the same array in a few times the time. Both leave Python's lock free
most of the time, so that an array can be built in a thread while a model runs. The compiled
look-ups are in `specbench.index.suffix_queries`.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from specbench.arrays import Array

# Between two documents, so that nothing is found across their border; below every id, as the end
# of a text is below everything.
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
    """The suffix array by prefix doubling, in numpy alone: O(n log² n), O(n) memory.

    Suffixes that agree on their first k tokens share a rank. Each round orders them by the rank of
    what follows these k tokens, which doubles k; suffixes that are alone with their rank are done.
    """
    n = len(tokens)
    order = np.argsort(tokens, kind="stable")
    rank = np.empty(n, dtype=np.int64)
    slots = np.arange(n)
    active, ranks = order, _first_of_equals(tokens[order], slots)
    rank[order] = ranks
    known = 1
    while True:
        shared = _shared(ranks)
        slots, active, ranks = slots[shared], active[shared], ranks[shared]
        if not len(active):
            return order.astype(np.int32)
        behind = active + known
        inside = behind < n
        # The end of the text ranks below everything.
        following = np.where(inside, rank[np.minimum(behind, n - 1)] + 1, 0)
        key = ranks * (n + 1) + following
        by_key = np.argsort(key, kind="stable")
        active = active[by_key]
        order[slots] = active
        ranks = _first_of_equals(key[by_key], slots)
        rank[active] = ranks
        known *= 2


def _first_of_equals(values: Array, slots: Array) -> Array:
    """For each of some sorted values the slot of the first one equal to it."""
    first = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    return np.repeat(slots[first], np.diff(first, append=len(values)))


def _shared(ranks: Array) -> Array:
    """Whether each of some sorted ranks occurs more than once."""
    same = ranks[1:] == ranks[:-1]
    shared = np.zeros(len(ranks), dtype=np.bool_)
    shared[1:] = same
    shared[:-1] |= same
    return shared
