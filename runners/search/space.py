"""Search spaces: which settings of a method are tried, from ``search`` in its yaml; their entries.

For each knob a space has a list of choices, or whole numbers ``{from, to}``, with ``log: true``
where doubling matters and adding does not. Knobs that are not there keep the values that a run
would give them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from scipy.stats import qmc

from runners.job import Entry, Job
from runners.launch.dispatch import entry_of
from runners.search.halving import Candidate
from runners.session.method_runs import build_method_runs, instantiated
from specbench import paths
from specbench.config import compose
from specbench.config.compare import compose_entry
from specbench.errors import ConfigurationError, unknown_name

Space: TypeAlias = Mapping[str, Any]
Knobs: TypeAlias = dict[str, Any]

_DRAWS = 40  # for each setting wanted: spaces may be small, or have settings that are refused


def load_spaces(methods: Iterable[str] | None = None) -> dict[str, Space]:
    """The space of each method by name; None takes all methods that have one.

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
    """Up to ``count`` different settings: the method's own (no knobs), the least, then others.

    The least has the first of all choices and the lowest of all numbers, since where rows are dear
    the smallest draft often pays best. The others are a scrambled Halton sequence: however many are
    taken, they fill the space evenly, and more of them begin with the same ones. Where ``usable``
    says no, the next one is taken.
    """
    found: dict[str, Knobs] = {"{}": {}}
    contradicting: set[str] = set()
    points = qmc.Halton(len(space), rng=seed).random(count * _DRAWS)
    for point in [[0.0] * len(space), *points]:
        if len(found) >= count:
            break
        knobs = {
            key: _value(values, float(at))
            for (key, values), at in zip(space.items(), point, strict=True)
        }
        key = json.dumps(knobs, sort_keys=True)
        if key not in found and key not in contradicting:
            if usable(knobs):
                found[key] = knobs
            else:
                contradicting.add(key)
    return list(found.values())


def _value(values: Any, at: float) -> Any:
    """The value at a place in [0, 1); each choice, and each whole number, has a part of it."""
    if isinstance(values, list):
        return values[int(at * len(values))]
    low, high = int(values["from"]), int(values["to"])
    if values.get("log", False):
        # The ends of the numbers' shares: from `low` up to `high + 1`, each number its own.
        return min(high, int(low * math.exp(at * math.log((high + 1) / low))))
    return low + int(at * (high + 1 - low))


class Entries:
    """Settings of methods as entries of runs with one configuration; each is composed once.

    Args:
        cfg: of a run; its method does not matter.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.config = compose.typed(cfg)
        self._made: dict[str, Entry] = {}

    def entry(self, method: str, knobs: Mapping[str, Any]) -> Entry:
        """The entry of a setting.

        Raises:
            ConfigurationError: an unknown knob, or a value of another type.
        """
        key = json.dumps([method, knobs], sort_keys=True)
        if key not in self._made:
            self._made[key] = entry_of(compose_entry(self.cfg, {"method": method, **knobs}))
        return self._made[key]

    def candidates(
        self, spaces: Mapping[str, Space], count: int, seed: int
    ) -> dict[str, list[Candidate]]:
        """``count`` settings of each method that its class takes; fewer of a smaller space."""
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
        """Why a method cannot run with this configuration, and what to type; "" where it can."""
        try:
            entries = (self.entry(method, {}),)
            build_method_runs(Job(self.config, (), {}, "", Path(), entries, ()))
        except ConfigurationError as error:
            return str(error)
        return ""


def typed(knobs: Mapping[str, Any], prefix: str = "method") -> list[str]:
    """Knobs as words of a command line: ``method.num_tokens=4``."""
    words: list[str] = []
    for key, value in knobs.items():
        name = f"{prefix}.{key}" if prefix else key
        words += typed(value, name) if isinstance(value, Mapping) else [f"{name}={_written(value)}"]
    return words


def shown(knobs: Mapping[str, Any]) -> str:
    """Knobs in a cell of a table."""
    return " ".join(typed(knobs, "")) or "its own"


def _written(value: Any) -> str:
    """A value as Hydra reads it: no quotes around the words of a list or a mapping."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)
