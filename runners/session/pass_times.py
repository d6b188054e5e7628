"""What a target pass costs by its number of rows: the price at which tokens are accepted.

A drafting method's speedup is at most its MAT over the price of its passes, in passes of one row.
Ids are random: the time of a dense model's pass does not depend on them. One time is the pass, the
verdict with its copy to the host, and the cache's work: all of a step but the drafter.
"""

from __future__ import annotations

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
_ROUNDS = (3, 15)  # of all numbers of rows, at least and at most
_ENOUGH_S = 1.0  # of passes, from which no further round begins


def random_tree(nodes: int, vocab: int, rng: np.random.Generator) -> DraftTree:
    """A tree of random ids."""
    parents = np.array([rng.integers(max(-1, i - _BRANCH), i) for i in range(nodes)], np.int64)
    return DraftTree(rng.integers(0, vocab, nodes), parents)


def pass_s(target: Target, tree: DraftTree, context: int) -> float:
    """Seconds of one step's work for the target; the cache is left as it was."""
    verifier = GreedyVerifier()

    def step() -> None:
        scores = target.forward(0, tree)
        verdict = verifier.verify(tree, scores)
        target.commit(tree, verdict.path)

    taken = seconds(step, target.device)
    target.cache.truncate(context)
    return taken


def texts_pass_s(batch: BatchTarget, texts: int, tree: DraftTree, context: int) -> float:
    """`pass_s` of the first ``texts`` of a batch together, each with ``tree``."""
    verifier = GreedyVerifier()

    def step() -> None:
        for seat in range(texts):
            batch.check(seat, tree)
        scores = batch.forward([(seat, 0, tree) for seat in range(texts)])
        for read, own in zip(batch.seats, scores, strict=False):
            read.commit(tree, verifier.verify(tree, own).path)

    taken = seconds(step, batch.device)
    for read in batch.seats[:texts]:
        read.cache.truncate(context)
    return taken


def time_rows(target: Target, prompt: IntArray, most: int, seed: int) -> RowTimes:
    """Median seconds of passes with some numbers of rows behind ``prompt [n]``, interleaved.

    Each round visits them in a new order.

    Args:
        most: rows that the model's context has room for. Captured passes are no larger than the
            run's methods need them, either.
    """
    rng = np.random.default_rng(seed)
    if not isinstance(target, GraphTarget):
        target.reserve(len(prompt), ROWS[-1] - 1)
    target.prefill(prompt)
    most = min(most, target.max_nodes + 1, target.free_rows() + 1)
    trees = {n: random_tree(n - 1, target.vocab_size, rng) for n in ROWS if n <= most}
    once = partial(pass_s, target, context=len(prompt))
    for tree in trees.values():
        once(tree)  # the first of a size may allocate
    times: dict[int, list[float]] = {rows: [] for rows in trees}
    least, limit = _ROUNDS
    for number in range(limit):
        if number >= least and sum(map(sum, times.values())) >= _ENOUGH_S:
            break
        for rows in rng.permutation(list(trees)).tolist():
            times[rows].append(once(trees[rows]))
    medians = {str(rows): float(np.median(found)) for rows, found in times.items()}
    return {"context": len(prompt), "seconds": medians}
