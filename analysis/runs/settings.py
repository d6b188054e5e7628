"""What labels of one name differ in, over several runs: knobs first, then what else was set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from analysis.runs.load import Run

# A label of a run.
Labelled: TypeAlias = "tuple[Run, str]"
# Of the settings that a manifest records, those that are none.
NAMES = {"_target_", "name", "label", "version"}
# Of a run's, those that say nothing of its labels, or nothing to a reader.
_ASIDE = {*NAMES, "compare", "traces_sha", "surface_sha"}
# Those of a run's settings that decide its questions and under which conditions it answers them.
_CONDITIONS = {"dataset", "generation", "verifier", "seed"}


def varied_knobs(labels: Sequence[Labelled]) -> list[dict[str, object]]:
    """For each label of a run, the knobs that tell it from other labels of its name."""
    varied: list[dict[str, object]] = [{} for _ in labels]
    for places in _by_label(labels):
        each = [without_names(labels[i][0].knobs(labels[i][1])) for i in places]
        for i, own in zip(places, apart(each), strict=True):
            varied[i] = own
    return varied


def other_settings(labels: Sequence[Labelled]) -> list[dict[str, object]]:
    """Of each label of a run what else its run was told, as far as the runs differ in that.

    Keys are those that a user types; a label's own knobs are left out.
    """
    each = apart([flat(run.manifest.identity or {}) for run, _ in labels])
    others = []
    for (run, label), settings in zip(labels, each, strict=True):
        own = {f"method.{knob}": value for knob, value in run.knobs(label).items()}
        keys = [key for key in settings if key.rpartition(".")[2] not in _ASIDE]
        others.append({k: settings[k] for k in keys if k not in own or own[k] != settings[k]})
    return others


def setting_words(labels: Sequence[Labelled]) -> list[str]:
    """For each label of a run, what tells it from other labels of its name, as it is typed.

    ``leader_len=1, follower_len=3`` are the label's own knobs. Where labels have the same ones, as
    a method that runs beside another one in a sweep, what else their runs were told is added:
    ``method.leader_len=1``. "" where there is one of the name, or nothing differs.
    """
    words = [settings_text(own) for own in varied_knobs(labels)]
    for places in _by_label(labels):
        if len({words[i] for i in places}) < len(places):
            for i, more in zip(places, other_settings([labels[i] for i in places]), strict=True):
                words[i] = ", ".join(filter(None, [words[i], settings_text(more)]))
    return words


def run_words(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Of each group of runs what questions or conditions set it apart from others, as it is typed.

    ``dataset.path=b.jsonl``; methods and their knobs are what labels say.
    """
    shared = []
    for runs in groups:
        first, *others = [flat(run.manifest.identity or {}) for run in runs]
        keys = [k for k in first if k.partition(".")[0] in _CONDITIONS]
        keys = [k for k in keys if k.rpartition(".")[2] not in _ASIDE]
        shared.append({k: first[k] for k in keys if all(o.get(k) == first[k] for o in others)})
    return [settings_text(own) for own in _with_short_paths(apart(shared))]


def _with_short_paths(each: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The settings with each path by its last part where no other one has the same."""
    shorter = [dict(own) for own in each]
    for key in {key for own in each for key in own if key.endswith(".path")}:
        paths = {str(own[key]) for own in each if own.get(key) is not None}
        if len({Path(path).name for path in paths}) == len(paths):
            for own in shorter:
                own |= {key: Path(str(own[key])).name} if own.get(key) is not None else {}
    return shorter


def _by_label(labels: Sequence[Labelled]) -> list[list[int]]:
    """The places of each label that is there more than once."""
    places: dict[str, list[int]] = {}
    for i, (_, label) in enumerate(labels):
        places.setdefault(label, []).append(i)
    return [of_label for of_label in places.values() if len(of_label) > 1]


def apart(each: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Of settings by key those that are not the same in all."""
    keys = dict.fromkeys(key for own in each for key in own)
    differing = [key for key in keys if any(own.get(key) != each[0].get(key) for own in each)]
    return [{key: own[key] for key in differing if key in own} for own in each]


def without_names(knobs: Mapping[str, object]) -> dict[str, object]:
    """Knobs alone, without what calls a label or its method."""
    return {key: value for key, value in knobs.items() if key not in NAMES}


def flat(node: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Leaves of nested settings by their dotted keys."""
    leaves: dict[str, object] = {}
    for key, value in node.items():
        leaf = {f"{above}{key}": value}
        leaves |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else leaf
    return leaves


def settings_text(settings: Mapping[str, object]) -> str:
    """Write settings as a user types them: ``leader_len=1, follower_len=3``."""
    return ", ".join(f"{key}={typed_value(value)}" for key, value in settings.items())


def typed_value(value: object) -> str:
    """A value as a user types it: ``true``, ``null``, text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
