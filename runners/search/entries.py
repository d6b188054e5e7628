"""Settings as entries of a run, just as ``compare=[...]`` makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runners.job import Entry, Job
from runners.launch.dispatch import entry_of
from runners.search.halving import Candidate
from runners.search.space import Knobs, Space, settings
from runners.session.method_runs import build_method_runs, instantiated
from specbench.config import compose
from specbench.config.compare import compose_entry
from specbench.errors import ConfigurationError


def mapping_of(method: str, knobs: Mapping[str, Any], label: str | None = None) -> dict[str, Any]:
    """An item of ``compare``."""
    return {"method": method, **({"label": label} if label else {}), **knobs}


class Entries:
    """The settings of methods in runs with one configuration; each is composed once.

    Args:
        cfg: of a run; its method does not matter.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.config = compose.typed(cfg)
        self._made: dict[tuple[str, str], Entry] = {}

    def entry(self, method: str, knobs: Mapping[str, Any]) -> Entry:
        """The entry of a setting.

        Raises:
            ConfigurationError: an unknown knob, or a value of another type.
        """
        key = (method, json.dumps(knobs, sort_keys=True))
        if key not in self._made:
            self._made[key] = entry_of(compose_entry(self.cfg, mapping_of(method, knobs)))
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
            own = self.entry(method, {})
            build_method_runs(Job(self.config, (), {}, "", Path(), (own,), ()))
        except ConfigurationError as error:
            return str(error)
        return ""
