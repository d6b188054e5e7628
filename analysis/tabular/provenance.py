"""Where a report's numbers come from: how methods were set, on what they ran, in which folders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.runs.load import Run
from analysis.tabular.table import ResultTable
from specbench.results.estimate import ABSENT, Cell
from specbench.results.manifest import LabelInfo
from specbench.storage.jsonl import JsonObject

# Of a manifest; what is left out is long and stands there.
_ENVIRONMENT = ("model", "hardware", "versions", "git", "threads", "prompt_set_hash")
_LONG = {"packed", "drafts"}
_NOT_KNOBS = {"name", "version", "state_scope", "paper_scope", "_target_"}


@dataclass(frozen=True)
class Environment:
    """What runs were measured on, and which of them."""

    title: str
    facts: Mapping[str, str]
    runs: list[str] = field(default_factory=list)


def settings(runs: Iterable[Run]) -> list[ResultTable]:
    """A table per method: every setting that was run, once, with the number of its runs."""
    counts: dict[str, Counter[tuple[str, str, str]]] = {}
    for run in runs:
        for label in run.labels:
            entry = run.manifest.labels.get(label, LabelInfo())
            knobs = {key: v for key, v in run.knobs(label).items() if key not in _NOT_KNOBS}
            setting = (label, entry.state_scope or ABSENT, json.dumps(knobs))
            counts.setdefault(entry.method or label, Counter())[setting] += 1
    return [_settings_table(method, found) for method, found in sorted(counts.items())]


def _settings_table(method: str, found: Mapping[tuple[str, str, str], int]) -> ResultTable:
    knobs = [json.loads(text) for _, _, text in found]
    names = list(dict.fromkeys(key for setting in knobs for key in setting))
    rows: list[dict[str, Cell]] = [
        {
            "label": label,
            "state kept per": scope,
            **{key: _plain(own.get(key)) for key in names},
            "runs": str(count),
        }
        for ((label, scope, _), count), own in zip(found.items(), knobs, strict=True)
    ]
    return ResultTable.of(method, "", rows)


def environments(runs: Iterable[Run]) -> list[Environment]:
    """Model, hardware, versions and code of the runs; runs that agree in all of it once."""
    found: dict[str, Environment] = {}
    for run in runs:
        manifest = run.manifest.to_json()
        facts = dict(_flat({key: manifest[key] for key in _ENVIRONMENT if manifest.get(key)}))
        new = Environment(f"{run.hardware}, {run.code}", facts)
        found.setdefault(json.dumps(facts), new).runs.append(str(run.path))
    return list(found.values())


def _flat(node: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, dict):
            if key not in _LONG:
                yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sources(runs: Iterable[Run]) -> ResultTable:
    """The run folders, so that every number can be traced to its records."""
    rows: list[dict[str, Cell]] = [
        {
            "folder": str(run.path),
            "experiment": run.experiment or ABSENT,
            "typed": " ".join(run.manifest.overrides) or ABSENT,
            "began": min((record.started_at for record in run.records), default="")[:19] or ABSENT,
            "turns": str(len(run.records)),
            "run key": (run.manifest.run_key or ABSENT)[:8],
            "seed": str(run.seed),
        }
        for run in runs
    ]
    return ResultTable.of("Runs", "", rows)
