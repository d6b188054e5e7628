"""Settings of methods: their spaces, their entries, and the best of them by successive halving.

A method's yaml has its space (``search``): for each knob a list of choices, or whole numbers
``{from, to}``, with ``log: true`` where doubling matters and adding does not. Knobs that are not
there keep the values that a run would give them.

Halving tries all settings on a few cases, the better half on twice as many, and so on (Jamieson and
Talwalkar 2016, arXiv 1502.07943). Every method gets the same number of settings, cases and rounds,
so that none is better off for having been searched harder.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from omegaconf import DictConfig, OmegaConf
from scipy.stats import qmc

from runners.job import Entry, Job
from runners.launch.dispatch import entry_of
from runners.session.method_runs import build_method_runs, instantiated
from specbench import paths
from specbench.config import compose
from specbench.config.compare import compose_entry
from specbench.data.cases import Case
from specbench.errors import ConfigurationError, unknown_name

Space: TypeAlias = Mapping[str, Any]
Knobs: TypeAlias = dict[str, Any]

ROUNDS = 3
_DRAWS = 40  # for each setting: spaces may be small, or have settings that are refused


@dataclass(frozen=True, slots=True)
class CaseCost:
    """What a case took with a setting, and with plain decoding: tokens after the first, seconds."""

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float


@dataclass(eq=False)
class Candidate:
    """A setting of a method and what was measured of it.

    Attributes:
        knobs: what differs from the method's own setting.
        costs: by case.
        refused: why the setting cannot be used; "" where it can.
    """

    method: str
    knobs: Knobs
    costs: dict[str, CaseCost] = field(default_factory=dict)
    refused: str = ""

    @property
    def key(self) -> str:
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
    candidates: Mapping[str, Sequence[Candidate]], cases: Sequence[str], measure: Measure
) -> dict[str, list[Candidate]]:
    """Search the settings of each method; all methods' survivors of a round are measured together.

    Args:
        candidates: by method; the first of each, its own setting, is measured on all cases.
        cases: in the order in which they are taken; the first round takes a quarter of them.

    Returns:
        By method the settings that were measured on all cases, the best first.
    """
    left = {method: list(tried) for method, tried in candidates.items()}
    for rounds_left in reversed(range(ROUNDS)):
        chosen = cases[: math.ceil(len(cases) / (1 << rounds_left))]
        measure([candidate for tried in left.values() for candidate in tried], chosen)
        for method, tried in left.items():
            usable = [candidate for candidate in tried if not candidate.refused]
            usable.sort(key=lambda c: c.speedup(chosen), reverse=True)  # stable: earlier first
            if rounds_left:
                better = usable[: math.ceil(len(usable) / 2)]
                own = [c for c in candidates[method][:1] if c in usable and c not in better]
                usable = better + own
            left[method] = usable
    return left


def mixed(cases: Sequence[Case], seed: int) -> list[Case]:
    """Order the cases by seed so that every beginning holds each task as often as it can."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, Case]] = []
    for index in np.random.default_rng(seed).permutation(len(cases)):
        ranked.append((seen[cases[index].task], cases[index]))
        seen[cases[index].task] += 1
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def halves(cases: Sequence[Case], seed: int) -> tuple[list[Case], list[Case]]:
    """Split cases to choose by from cases to confirm on, each task as evenly as it goes."""
    ordered = sorted(mixed(cases, seed), key=lambda case: case.task)
    return mixed(ordered[::2], seed), mixed(ordered[1::2], seed)


def load_spaces(methods: Iterable[str] | None = None) -> dict[str, Space]:
    """Read the space of each method by name; None takes all methods that have one.

    Raises:
        ConfigurationError: there is no such method, or its yaml has no ``search``.
    """
    names = compose.option_names("method")
    spaces: dict[str, Space] = {}
    for method in names if methods is None else methods:
        if method not in names:
            raise unknown_name("method", method, names)
        node: Any = OmegaConf.load(paths.CONF_DIR / "method" / f"{method}.yaml")
        space: Any = OmegaConf.to_container(node.get("search") or OmegaConf.create())
        if space:
            spaces[method] = space
        elif methods is not None:
            raise ConfigurationError(
                f"method={method} has no search space: add `search` to conf/method/{method}.yaml, "
                "e.g. search: {num_tokens: {from: 1, to: 32, log: true}}."
            )
    return spaces


def settings(
    space: Space, count: int, seed: int, usable: Callable[[Knobs], bool] = lambda _: True
) -> list[Knobs]:
    """Choose up to ``count`` settings: the method's own (no knobs), the least, then others.

    The least has the first of all choices and the lowest of all numbers, since where rows are dear
    the smallest draft often pays best. The others are a scrambled Halton sequence: however many are
    taken, they fill the space evenly, and more of them begin with the same ones.
    """
    chosen: list[Knobs] = [{}]
    refused: list[Knobs] = []
    points = qmc.Halton(len(space), rng=seed).random(count * _DRAWS)
    for point in [[0.0] * len(space), *points]:
        if len(chosen) >= count:
            break
        pairs = zip(space.items(), point, strict=True)
        knobs = {key: _value(values, float(at)) for (key, values), at in pairs}
        if knobs not in chosen and knobs not in refused:
            (chosen if usable(knobs) else refused).append(knobs)
    return chosen


def _value(values: Any, at: float) -> Any:
    """The value at a point in [0, 1); each choice, and each whole number, has a part of it."""
    if isinstance(values, list):
        return values[int(at * len(values))]
    low, high = int(values["from"]), int(values["to"])
    if values.get("log", False):
        # The ends of the numbers' shares: from `low` up to `high + 1`, each number its own.
        return min(high, int(low * math.exp(at * math.log((high + 1) / low))))
    return low + int(at * (high + 1 - low))


class Entries:
    """Settings of methods as entries of runs with one configuration; each is composed once.

    ``cfg``: of a run; its method does not matter.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg, self.config = cfg, compose.typed(cfg)
        self._entries: dict[str, Entry] = {}

    def entry(self, method: str, knobs: Mapping[str, Any]) -> Entry:
        """Compose a setting (ConfigurationError: an unknown knob, or a value of another type)."""
        key = json.dumps([method, knobs], sort_keys=True)
        if key not in self._entries:
            self._entries[key] = entry_of(compose_entry(self.cfg, {"method": method, **knobs}))
        return self._entries[key]

    def candidates(
        self, spaces: Mapping[str, Space], count: int, seed: int
    ) -> dict[str, list[Candidate]]:
        """Give ``count`` settings of each method that its class takes; fewer of a small space."""
        return {
            method: [
                Candidate(method, knobs)
                for knobs in settings(space, count, seed, partial(self._is_taken, method))
            ]
            for method, space in spaces.items()
        }

    def _is_taken(self, method: str, knobs: Knobs) -> bool:
        try:
            instantiated(self.entry(method, knobs))
        except ConfigurationError:
            return False
        return True

    def why_not(self, method: str) -> str:
        """Say why a method cannot run with this configuration, and what to type; "": it can."""
        try:
            entries = (self.entry(method, {}),)
            build_method_runs(Job(self.config, (), {}, "", Path(), entries, ()))
        except ConfigurationError as error:
            return str(error)
        return ""


def typed(knobs: Mapping[str, Any], prefix: str = "method.") -> list[str]:
    """Write knobs as words of a command line: ``method.num_tokens=4``."""
    words: list[str] = []
    for key, value in knobs.items():
        if isinstance(value, Mapping):
            words += typed(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={_written(value)}")
    return words


def shown(knobs: Mapping[str, Any]) -> str:
    """Write knobs for a cell of a table."""
    return " ".join(typed(knobs, "")) or "its own"


def _written(value: Any) -> str:
    """A value as Hydra reads it: no quotes around the words of a list or a mapping."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
