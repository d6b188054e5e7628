"""What a run is called where it is published: its id, its group, a label's setting."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from analysis.runs.load import Run
from analysis.runs.settings import flat, typed_value, without_names

LONGEST = 128  # letters of a group or a name, as W&B allows
# Keys besides a method's knobs that set two runs of a label on one model and data set apart.
_CONDITIONS = {"dataset", "generation", "verifier", "engine", "pair", "state_scope"}


def run_id(run: Run) -> str:
    """The W&B id of a run folder: random, made with the folder and kept by whoever resumes it.

    Folders that are older than such ids have one of their run key and name. Merged shards have the
    first one's manifest, and are another run.
    """
    made = run.manifest.folder_id
    if made is not None and not run.manifest.merged_from:
        return made
    return hashed(f"{made or run.manifest.run_key}/{run.path.resolve().name}")


def hashed(text: str) -> str:
    """Sixteen digits that a text always gives."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def group_of(run: Run) -> str:
    """The experiment, else the sweep's folder, else the run's.

    Sweeps without an ``output_dir`` have no folder to themselves: theirs is named by the keys that
    were typed, which all jobs of a sweep have in common.
    """
    folder, manifest = run.path.resolve(), run.manifest
    if run.experiment or not manifest.swept:
        return run.experiment or folder.name
    if root := manifest.config.get("output_dir"):
        return Path(root).name
    keys = (key for key, _ in _typed(run) if not key.startswith(("logger", "hydra")))
    return f"{folder.parent.name}: {', '.join(keys)}"[:LONGEST]


def setting_of(run: Run, label: str) -> str:
    """The label with what was typed for it, ``ngrammys k=1, w=2``.

    A run is published by itself and knows no other settings. Where they stand is in other keys:
    model and data set; choices of a whole group (``generation=greedy``) are none.
    """
    config, known = run.manifest.config, flat(run.manifest.identity or {})
    method = config.get("method") or {}
    own = {}
    if label == (method.get("label") or method.get("name")):
        typed = ((key.removeprefix("method."), value) for key, value in _typed(run))
        own = {key: value for key, value in typed if key in run.knobs(label)}
    for extra in config.get("compare") or ():
        if isinstance(extra, Mapping) and label == (extra.get("label") or extra.get("method")):
            own = {k: typed_value(v) for k, v in without_names(extra).items() if k != "method"}
    for key, value in _typed(run):
        if key in known and key.partition(".")[0] in _CONDITIONS:
            own.setdefault(key, value)
    words = ", ".join(f"{key}={value}" for key, value in own.items())
    return f"{label} {words}".rstrip()


def _typed(run: Run) -> list[tuple[str, str]]:
    pairs = (override.lstrip("+~").partition("=") for override in run.manifest.overrides)
    return [(key, value) for key, _, value in pairs]
