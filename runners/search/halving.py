"""Successive halving: all settings on a few cases, the better half on twice as many, and so on.

Every method gets the same number of settings, cases and rounds, so that none is better off for
having been searched harder. (Jamieson and Talwalkar 2016, arXiv 1502.07943.)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from specbench.data.cases import Case

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class CaseCost:
    """What a case took with a setting, and with plain decoding: tokens after the first, seconds."""

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float


@dataclass(eq=False)
class Candidate:
    """A setting of a method and what is known of it.

    Attributes:
        knobs: what differs from the method's own setting.
        costs: by case.
        refused: why the setting cannot be used; "" where it can.
    """

    method: str
    knobs: dict[str, Any]
    costs: dict[str, CaseCost] = field(default_factory=dict)
    refused: str = ""

    @property
    def key(self) -> str:
        """The setting as text."""
        return json.dumps([self.method, self.knobs], sort_keys=True)

    def speedup(self, cases: Sequence[str]) -> float:
        """Tokens/s over plain decoding's, pooled over the cases; 0 of a refused setting."""
        costs = [self.costs[case] for case in cases if case in self.costs]
        seconds, plain = sum(c.seconds for c in costs), sum(c.plain_seconds for c in costs)
        tokens, plain_tokens = sum(c.tokens for c in costs), sum(c.plain_tokens for c in costs)
        if self.refused or not (seconds and plain_tokens):
            return 0.0
        return tokens * plain / (seconds * plain_tokens)


# Fills in `costs` of each candidate for each case that is missing, or `refused`.
Measure: TypeAlias = Callable[[Sequence[Candidate], Sequence[str]], None]


def successive_halving(
    candidates: Mapping[str, Sequence[Candidate]],
    cases: Sequence[str],
    measure: Measure,
    rounds: int = ROUNDS,
) -> dict[str, list[Candidate]]:
    """Search the settings of each method; all methods' survivors of a round are measured together.

    Args:
        candidates: by method; the first of each, its own setting, is measured on all cases.
        cases: in the order in which they are taken.
        rounds: the first measures all settings on ``len(cases) / 2**(rounds - 1)`` cases.

    Returns:
        By method the settings that were measured on all cases, the best first.
    """
    left = {method: list(tried) for method, tried in candidates.items()}
    for number in range(rounds):
        chosen = cases[: cases_of_round(len(cases), number, rounds)]
        measure([candidate for tried in left.values() for candidate in tried], chosen)
        for method, tried in left.items():
            usable = [candidate for candidate in tried if not candidate.refused]
            usable.sort(key=lambda c: c.speedup(chosen), reverse=True)  # stable: earlier first
            if number + 1 < rounds:
                own, better = candidates[method][:1], usable[: math.ceil(len(usable) / 2)]
                usable = better + [c for c in own if c not in better and not c.refused]
            left[method] = usable
    return left


def cases_of_round(n_cases: int, number: int, rounds: int) -> int:
    """Cases that a round (from 0) measures on, at least one; the last one takes all."""
    return math.ceil(n_cases / (1 << (rounds - 1 - number)))


def mixed(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in a seeded order in which every beginning holds each task as often as it can."""
    seen: Counter[str] = Counter()
    places: list[tuple[int, Case]] = []
    for index in np.random.default_rng(seed).permutation(len(cases)):
        places.append((seen[cases[index].task], cases[index]))
        seen[cases[index].task] += 1
    return [case for _, case in sorted(places, key=lambda place: place[0])]


def halves(cases: Sequence[Case], seed: int) -> tuple[list[Case], list[Case]]:
    """Cases to choose by and cases to confirm on: disjoint, tasks divided as evenly as it goes."""
    ordered = sorted(mixed(cases, seed), key=lambda case: case.task)
    return mixed(ordered[::2], seed), mixed(ordered[1::2], seed)
