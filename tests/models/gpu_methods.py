"""Methods built from their yaml files without Hydra, which machines with GPUs seldom have."""

from __future__ import annotations

import importlib
from typing import Any

import yaml

from specbench.decoding.drafter import Drafter
from specbench.paths import CONF_DIR

FOLDER = CONF_DIR / "method"
PART_KNOBS = ("auxiliary", "drafters")  # name other methods, as specbench.config.compose has them
# Knobs that a timed method has otherwise than its yaml: nothing may depend on a thread's turn.
TIMED: dict[str, dict[str, Any]] = {"ssd": {"rebuild": "sync"}}


def names() -> list[str]:
    """Every method, by its yaml."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.yaml"))


def build(name: str, **changed: Any) -> Drafter:
    """The drafter of a method's yaml, with some knobs changed; no pair file is looked at."""
    knobs = _knobs(name) | changed
    knobs.pop("label", None)
    knobs = {k: v for k, v in knobs.items() if not str(v).startswith("${")}  # the run's
    for key in PART_KNOBS:
        if key in knobs:
            knobs[key] = _parts(knobs[key])
    module, _, cls = knobs.pop("_target_").rpartition(".")
    drafter: Drafter = getattr(importlib.import_module(module), cls)(**knobs)
    return drafter


def setting(drafter: Drafter, changed: dict[str, Any]) -> str:
    """What a row of a table says of the drafter: budget, what differs from its yaml, toy files."""
    words = [f"at most {drafter.needs.max_nodes} nodes"]
    if hasattr(drafter, "total_draft_len"):
        words.append(f"total_draft_len={drafter.total_draft_len}")
    words += [f"{key}={getattr(drafter, key)}" for key in changed]
    return ", ".join([*words, *(f"toy {file.name}" for file in drafter.needs.artifacts)])


def _knobs(name: str) -> dict[str, Any]:
    """What the file says, over what the files say that it starts from."""
    own = _read(name)
    knobs: dict[str, Any] = {}
    for base in own.pop("defaults", ["_self_"]):
        knobs |= own if base == "_self_" else _knobs(base)
    return knobs


def _read(name: str) -> dict[str, Any]:
    node: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return node


def _parts(value: Any) -> Any:
    if isinstance(value, list):
        return [_parts(entry) for entry in value]
    if isinstance(value, dict) and "method" in value:
        return build(value["method"], **{k: v for k, v in value.items() if k != "method"})
    return build(value) if isinstance(value, str) else value
