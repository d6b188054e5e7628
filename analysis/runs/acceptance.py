"""Acceptance taken apart: by depth in the draft, by position in the answer, over the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from analysis.runs.estimates import pooled_ratio, steps
from specbench.results.estimate import Estimate
from specbench.results.records import CaseRecord


def by_depth(
    records: Sequence[CaseRecord], seed: int = 0, deepest: int = 12
) -> list[tuple[int, Estimate]]:
    """By depth from 1 to where nothing is accepted: share of steps that accepted so many tokens."""
    return _shares(records, lambda depth: steps, seed, deepest)


def where_the_one_before(
    records: Sequence[CaseRecord], seed: int = 0, deepest: int = 12
) -> list[tuple[int, Estimate]]:
    """As :func:`by_depth`, of the steps that accepted the token before it alone."""
    return _shares(records, lambda depth: _accepted(depth - 1), seed, deepest)


def _accepted(depth: int) -> Callable[[CaseRecord], float]:
    return lambda record: sum(n > depth for n in record.accepted_per_step)


def _shares(
    records: Sequence[CaseRecord],
    among: Callable[[int], Callable[[CaseRecord], float]],
    seed: int,
    deepest: int,
) -> list[tuple[int, Estimate]]:
    reached = max((n - 1 for record in records for n in record.accepted_per_step), default=0)
    return [
        (depth, pooled_ratio(records, _accepted(depth), among(depth), seed, 1))
        for depth in range(1, min(reached, deepest) + 1)
    ]


def by_position(
    records: Sequence[CaseRecord], width: int = 16, seed: int = 0
) -> list[tuple[float, Estimate]]:
    """MAT of one label's steps that begin within each stretch of the answer.

    Returns:
        Middle of the stretch in tokens of the answer, and MAT.
    """
    longest = max((record.n_new for record in records), default=0)

    def steps_of(record: CaseRecord, stretch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        counts = np.asarray(record.accepted_per_step, dtype=np.int64)
        begins = 1 + np.cumsum(counts) - counts  # the first token came from the prompt's pass
        inside: np.ndarray[Any, np.dtype[np.int64]] = counts[begins // width == stretch]
        return inside

    def committed(stretch: int) -> Callable[[CaseRecord], float]:
        return lambda record: int(steps_of(record, stretch).sum())

    def passes(stretch: int) -> Callable[[CaseRecord], float]:
        return lambda record: len(steps_of(record, stretch))

    return [
        ((stretch + 0.5) * width, pooled_ratio(records, committed(stretch), passes(stretch), seed))
        for stretch in range((longest + width - 1) // width)
    ]


def stream_parts(records: Sequence[CaseRecord], parts: int) -> list[tuple[float, list[CaseRecord]]]:
    """The turns of one label in (at most) so many equal parts of the stream of requests.

    Returns:
        Tokens (prompt and answer) of the requests finished by the part's middle, and its turns.
    """
    turns = sorted(
        (record for record in records if record.status != "failed"),
        key=lambda record: (record.stream_index, record.turn),
    )
    seen = 0
    found = []
    for part in np.array_split(np.arange(len(turns)), max(1, min(parts, len(turns)))):
        members = [turns[i] for i in part]
        size = sum(turn.n_prompt + turn.n_new for turn in members)
        found.append((seen + size / 2, members))
        seen += size
    return found
