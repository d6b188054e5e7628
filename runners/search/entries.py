"""Settings as entries of a run, just as ``compare=[...]`` makes them."""

from __future__ import annotations

from collections.abc import Mapping
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


def entry(cfg: DictConfig, method: str, knobs: Mapping[str, Any]) -> Entry:
    """The entry of a setting in a run with this configuration.

    Raises:
        ConfigurationError: an unknown knob, or a value of another type.
    """
    return entry_of(compose_entry(cfg, mapping_of(method, knobs)))


def candidates(
    cfg: DictConfig, spaces: Mapping[str, Space], count: int, seed: int
) -> dict[str, list[Candidate]]:
    """``count`` settings of each method that its class takes; fewer where the space is smaller."""

    def usable(method: str, knobs: Knobs) -> bool:
        try:
            instantiated(entry(cfg, method, knobs))
        except ConfigurationError:
            return False
        return True

    return {
        method: [
            Candidate(method, knobs)
            for knobs in settings(space, count, seed, lambda k, m=method: usable(m, k))  # type: ignore[misc]
        ]
        for method, space in spaces.items()
    }


def why_not(cfg: DictConfig, method: str) -> str:
    """Why a method cannot run with this configuration, and what to type; "" where it can."""
    try:
        own = entry(cfg, method, {})
        config = compose.typed(cfg)
        build_method_runs(Job(config, (), {}, "", Path(), (own,), ()))
    except ConfigurationError as error:
        return str(error)
    return ""
