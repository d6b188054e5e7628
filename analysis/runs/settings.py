"""Differences between labels of one name over several runs: knobs, then other settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from analysis.runs.load import Run

Labelled: TypeAlias = "tuple[Run, str]"  # a label of a run
Settings: TypeAlias = "dict[str, object]"
# Keys of a manifest's settings that are names.
NAMES = {"_target_", "name", "label", "version"}
# Keys of a run's settings that say nothing about its labels or mean nothing to a reader.
_ASIDE = {*NAMES, "compare", "traces_sha", "surface_sha"}
# Keys of a run's settings that decide its questions and the conditions of decoding.
_CONDITIONS = {"dataset", "generation", "verifier", "seed"}


def varied_knobs(labels: Sequence[Labelled]) -> list[Settings]:
    """Return for each label of a run the knobs in which it differs from others of its name."""
    varied: list[Settings] = [{} for _ in labels]
    for indices in _by_label(labels):
        knobs = [without_names(labels[i][0].knobs(labels[i][1])) for i in indices]
        for i, differing in zip(indices, differing_settings(knobs), strict=True):
            varied[i] = differing
    return varied


def other_settings(labels: Sequence[Labelled]) -> list[Settings]:
    """Return for each label its run's other settings, as far as the runs differ in them.

    Keys are those that a user types; a label's own knobs are left out.
    """
    others = []
    differing = differing_settings([_recorded_settings(run) for run, _ in labels])
    for (run, label), settings in zip(labels, differing, strict=True):
        knobs = {f"method.{knob}": value for knob, value in run.knobs(label).items()}
        others.append({k: v for k, v in settings.items() if k not in knobs or knobs[k] != v})
    return others


def setting_texts(labels: Sequence[Labelled]) -> list[str]:
    """Format the settings in which each label differs from others of its name, as typed.

    ``leader_len=1, follower_len=3`` are the label's own knobs. If labels have the same ones, like
    a method that is not swept itself, the other settings of their runs are added:
    ``method.leader_len=1``. "" if the name is unique or nothing differs.
    """
    texts = [settings_text(differing) for differing in varied_knobs(labels)]
    for indices in _by_label(labels):
        if len({texts[i] for i in indices}) < len(indices):
            others = other_settings([labels[i] for i in indices])
            for i, more in zip(indices, others, strict=True):
                texts[i] = ", ".join(filter(None, [texts[i], settings_text(more)]))
    return texts


def run_texts(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Format the questions or conditions in which each group of runs differs, as typed.

    ``dataset.path=b.jsonl``; methods and their knobs belong to labels. A path is shown by its
    last part if no other path has the same.
    """
    shared = []
    for runs in groups:
        first, *others = [_recorded_settings(run) for run in runs]
        same = {k: v for k, v in first.items() if all(o.get(k) == v for o in others)}
        shared.append({k: v for k, v in same.items() if k.partition(".")[0] in _CONDITIONS})
    differing = differing_settings(shared)
    for key in {key for settings in differing for key in settings if key.endswith(".path")}:
        paths = {str(s[key]) for s in differing if s.get(key) is not None}
        if len({Path(path).name for path in paths}) == len(paths):
            for settings in differing:
                if settings.get(key) is not None:
                    settings[key] = Path(str(settings[key])).name
    return [settings_text(settings) for settings in differing]


def _recorded_settings(run: Run) -> Settings:
    settings = flat(run.manifest.identity or {})
    return {k: v for k, v in settings.items() if k.rpartition(".")[2] not in _ASIDE}


def _by_label(labels: Sequence[Labelled]) -> list[list[int]]:
    """Return the indices of each label that occurs more than once."""
    indices: dict[str, list[int]] = {}
    for i, (_, label) in enumerate(labels):
        indices.setdefault(label, []).append(i)
    return [of_label for of_label in indices.values() if len(of_label) > 1]


def differing_settings(settings: Sequence[Mapping[str, object]]) -> list[Settings]:
    """Return of each mapping the keys whose values are not the same in all mappings."""
    keys = dict.fromkeys(key for knobs in settings for key in knobs)
    first = settings[0] if settings else {}
    differing = [key for key in keys if any(k.get(key) != first.get(key) for k in settings)]
    return [{key: knobs[key] for key in differing if key in knobs} for knobs in settings]


def without_names(knobs: Mapping[str, object]) -> Settings:
    """Return the knobs without the names of a label or its method."""
    return {key: value for key, value in knobs.items() if key not in NAMES}


def flat(node: Mapping[str, object], above: str = "") -> Settings:
    """Flatten nested settings to dotted keys."""
    leaves: Settings = {}
    for key, value in node.items():
        leaf = {f"{above}{key}": value}
        leaves |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else leaf
    return leaves


def settings_text(settings: Mapping[str, object]) -> str:
    """Write settings as a user types them: ``leader_len=1, follower_len=3``."""
    return ", ".join(f"{key}={typed_value(value)}" for key, value in settings.items())


def typed_value(value: object) -> str:
    """Format a value as a user types it: ``true``, ``null``, text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
