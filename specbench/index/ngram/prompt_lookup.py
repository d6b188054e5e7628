"""Finding an earlier occurrence of the text's last tokens, compiled: a linear scan per length."""

from __future__ import annotations

from numba import njit

from specbench.arrays import Array

# Which match is taken, and whether its continuation may be short.
OLDEST_FULL, OLDEST, NEWEST = 0, 1, 2


@njit(cache=True)
def find_continuation(
    tokens: Array, length: int, longest: int, shortest: int, count: int, rule: int
) -> tuple[int, int]:
    """Where the last tokens occurred before, trying n-grams from ``longest`` to ``shortest``.

    Args:
        tokens: int64 text; only ``tokens[:length]`` counts.
        count: tokens wanted after the match.
        rule: `OLDEST_FULL`: the oldest match with all ``count`` tokens after it, and which ends
            more than n tokens before the text's end. `OLDEST`: the oldest match, however few
            tokens follow. `NEWEST`: the newest match with all ``count`` tokens after it, else the
            match with the most tokens after it.

    Returns:
        Start and length of the continuation; the length is 0 where there is none.
    """
    for n in range(min(longest, length - 1), shortest - 1, -1):
        tail = length - n
        last = tokens[length - 1]
        fallback = -1
        newest = -1
        for start in range(n, length):
            # ``start`` is where the continuation would begin; the match ends right before it.
            if tokens[start - 1] != last:
                continue
            same = True
            for i in range(1, n):
                if tokens[start - 1 - i] != tokens[length - 1 - i]:
                    same = False
                    break
            if not same:
                continue
            full = start + count <= length
            if rule == OLDEST:
                return start, min(count, length - start)
            if rule == OLDEST_FULL:
                if full and start < tail:
                    return start, count
                # Later matches have fewer tokens after them and end nearer to the text's end.
                break
            elif full:
                newest = start
            elif fallback < 0:
                fallback = start
        if newest >= 0:
            return newest, count
        if fallback >= 0:
            return fallback, length - fallback
    return 0, 0
