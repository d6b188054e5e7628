"""Successive halving: all settings on a few cases, the better half on twice as many, and so on.

Every method gets the same number of settings, cases and rounds, so that none is better off for
having been searched harder. (Jamieson and Talwalkar 2016, arXiv 1502.07943.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from runners.search.space import Knobs

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
    knobs: Knobs
    costs: dict[str, CaseCost] = field(default_factory=dict)
    refused: str = ""

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


@dataclass(frozen=True)
class Searched:
    """What a search of a method came to.

    Attributes:
        best: first by speedup on all cases; None where every setting was refused.
        finalists: settings that were measured on all cases, the best first.
        tried: settings that were measured; ``refused``: others, by what was said of them.
        effort: cases times settings that were measured.
    """

    best: Candidate | None
    finalists: list[Candidate]
    tried: int
    refused: dict[str, int]
    effort: int


def successive_halving(
    candidates: Mapping[str, Sequence[Candidate]],
    cases: Sequence[str],
    measure: Measure,
    rounds: int = ROUNDS,
) -> dict[str, Searched]:
    """Search the settings of each method; all methods' survivors of a round are measured together.

    Args:
        candidates: by method; the first of each, its own setting, is measured on all cases.
        cases: in the order in which they are taken.
        rounds: the first measures all settings on ``len(cases) / 2**(rounds - 1)`` cases.
    """
    left = {method: list(found) for method, found in candidates.items()}
    for number in range(rounds):
        chosen = cases[: cases_of_round(len(cases), number, rounds)]
        measure([one for found in left.values() for one in found], chosen)
        for method, found in left.items():
            usable = [one for one in found if not one.refused]
            usable.sort(key=lambda one: one.speedup(chosen), reverse=True)  # stable: earlier first
            if number + 1 < rounds:
                kept = usable[: math.ceil(len(usable) / 2)]
                own = candidates[method][:1]
                usable = kept + [one for one in own if one not in kept and not one.refused]
            left[method] = usable
    return {m: _searched(candidates[m], finalists) for m, finalists in left.items()}


def cases_of_round(n_cases: int, number: int, rounds: int) -> int:
    """Cases that a round (from 0) measures on, at least one; the last one takes all."""
    return math.ceil(n_cases / (1 << (rounds - 1 - number)))


def _searched(candidates: Sequence[Candidate], finalists: list[Candidate]) -> Searched:
    refused: dict[str, int] = {}
    for one in candidates:
        if one.refused:
            refused[one.refused] = refused.get(one.refused, 0) + 1
    return Searched(
        best=finalists[0] if finalists else None,
        finalists=finalists,
        tried=sum(1 for one in candidates if one.costs),
        refused=refused,
        effort=sum(len(one.costs) for one in candidates),
    )
