"""Time target passes by their number of rows: the verification cost of a draft.

A drafting method's speedup is at most its MAT over its verification cost in passes of one row.
Ids are random: the time of a dense model's pass does not depend on them. One time covers the pass,
the accepted path with its copy to the host, and the cache's work: a whole step without the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from specbench.arrays import IntArray
from specbench.decoding.device import seconds
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.models.batch_target import BatchTarget
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from specbench.results.manifest import ROWS, RowTimes

_BRANCH = 8  # a node's parent is at most this far before it: branches of mixed length
_FEW = 4  # rows of most methods' passes, at most
_ROUNDS_OF_FEW = (15, 60)  # at least and at most
_ROUNDS = (6, 15)  # of more rows: an interval takes six
_ENOUGH_S = 1.0  # of passes, after which no further round begins
_FEWEST = 3  # rounds, once these took `_LONGEST_S`
_LONGEST_S = 20.0  # a cost then has no interval
_OUTSIDE = 0.025  # chance that the true median lies beyond an end of its interval


def random_tree(nodes: int, vocab: int, rng: np.random.Generator) -> DraftTree:
    """Draft a tree of random ids."""
    parents = np.array([rng.integers(max(-1, i - _BRANCH), i) for i in range(nodes)], np.int64)
    return DraftTree(rng.integers(0, vocab, nodes), parents)


def pass_s(target: Target, tree: DraftTree, context: int) -> float:
    """Time one step's work for the target; the cache is left as it was."""
    verifier = GreedyVerifier()

    def step() -> None:
        scores = target.forward(0, tree)
        accepted_path = verifier.verify(tree, scores)
        target.commit(tree, accepted_path.path)

    pass_time = seconds(step, target.device)
    target.cache.truncate(context)
    return pass_time


def sequences_pass_s(batch: BatchTarget, sequences: int, tree: DraftTree, context: int) -> float:
    """Time one step of the first ``sequences`` of a batch together, each with ``tree``."""
    verifier = GreedyVerifier()

    def step() -> None:
        for slot in range(sequences):
            batch.check(slot, tree)
        scores = batch.forward([(slot, 0, tree) for slot in range(sequences)])
        for read, slot_scores in zip(batch.slots, scores, strict=False):
            read.commit(tree, verifier.verify(tree, slot_scores).path)

    pass_time = seconds(step, batch.device)
    for read in batch.slots[:sequences]:
        read.cache.truncate(context)
    return pass_time


def time_rows(target: Target, prompt: IntArray, limit: int, seed: int) -> RowTimes:
    """Measure median seconds of passes by rows after ``prompt [n]``, and their verification costs.

    Rounds of few rows come first, and one of 64 leaves none of them out. Each round visits its
    numbers of rows in a new order, one row among them: a cost is a ratio within a round, which a
    busy moment that lasts longer than a round does not change.

    Args:
        limit: rows that the model's context has room for. Captured passes are also limited to the
            size that the run's methods need.
    """
    rng = np.random.default_rng(seed)
    if not isinstance(target, GraphTarget):
        target.reserve(len(prompt), ROWS[-1] - 1)
    target.prefill(prompt)
    limit = min(limit, target.max_nodes + 1, target.free_rows() + 1)
    trees = {n: random_tree(n - 1, target.vocab_size, rng) for n in ROWS if n <= limit}
    once = partial(pass_s, target, context=len(prompt))
    for tree in trees.values():
        once(tree)  # the first of a size may allocate

    def round_of(numbers: Sequence[int]) -> dict[int, float]:
        return {rows: once(trees[rows]) for rows in rng.permutation(numbers).tolist()}

    few_rows, more_rows = [n for n in trees if n <= _FEW], [n for n in trees if n > _FEW]
    rounds = _rounds(partial(round_of, few_rows), *_ROUNDS_OF_FEW)
    if more_rows:
        rounds += _rounds(partial(round_of, [1, *more_rows]), *_ROUNDS)
    return {
        "context": len(prompt),
        "seconds": {
            str(rows): float(np.median([times[rows] for times in rounds if rows in times]))
            for rows in trees
        },
        "prices": {
            str(rows): median_with_ends([t[rows] / t[1] for t in rounds if rows in t])
            for rows in trees
            if rows > 1
        },
    }


def _rounds(
    round_once: Callable[[], dict[int, float]], least: int, most: int
) -> list[dict[int, float]]:
    rounds: list[dict[int, float]] = []
    while len(rounds) < most:
        spent_s = sum(sum(times.values()) for times in rounds)
        finished = len(rounds) >= least and spent_s >= _ENOUGH_S
        if finished or (len(rounds) >= _FEWEST and spent_s >= _LONGEST_S):
            break
        rounds.append(round_once())
    return rounds


def median_with_ends(values: Sequence[float]) -> list[float]:
    """Return the median and, from six values on, the ends of its 95 % interval.

    The interval lies between two of the values, whatever their distribution. With fewer than six,
    even the smallest and the largest are too close together, so there are no ends.
    """
    ordered, n = sorted(values), len(values)
    outside, beyond = 0, 1
    while beyond / 2**n <= _OUTSIDE:
        outside += 1
        beyond += math.comb(n, outside)
    ends = [ordered[outside - 1], ordered[n - outside]] if outside else []
    return [float(value) for value in (np.median(ordered), *ends)]
