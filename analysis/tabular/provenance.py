"""Where a report's numbers come from: how methods were set, on what they ran, in which folders.

A report is sent to others, so a path is shown by its last part, and sizes in units that are read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from analysis.runs.comparisons import run_names
from analysis.runs.load import Run
from analysis.runs.settings import flat
from analysis.tabular.table import ResultTable
from specbench.results.estimate import ABSENT, Cell
from specbench.results.manifest import LabelInfo
from specbench.results.records import CHANGES, SOURCES

# The keys that the report shows; the manifest has the others.
_ENVIRONMENT = ("model", "hardware", "versions", "git", "threads", "prompt_set_hash")
_LONG = {"packed", "drafts"}
# Two folders and more, or a file in the home folder, from the file system's root.
_PATH = re.compile(r"(?<![\w.:/])(?:~|/[^\s/,;:'\"\]})]+)(?:/[^\s/,;:'\"\]})]+)+/?")
_UNITS = {"bytes_per_s": "GB/s", "bytes": "GB"}
_MOST_CODE = 100_000  # characters of a file of code on a page
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


def environments(runs: Sequence[Run]) -> list[Environment]:
    """Model, hardware, versions and code of the runs; runs that agree in all of it once."""
    found: dict[str, Environment] = {}
    names = run_names(runs)
    for run in runs:
        manifest = run.manifest.to_json()
        said = flat({key: manifest[key] for key in _ENVIRONMENT if manifest.get(key)})
        kept = {key: value for key, value in said.items() if not _LONG.intersection(key.split("."))}
        facts = {key: _in_unit(key, value) for key, value in kept.items()}
        new = Environment(f"{run.hardware}, {run.code}", facts)
        found.setdefault(json.dumps(facts), new).runs.append(names[run.path])
    return list(found.values())


def _in_unit(key: str, value: Any) -> str:
    """A number of bytes as one that is read: ``43.99 GB/s``."""
    unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), None)
    if unit and isinstance(value, int | float):
        return f"{value / 1e9:.4g} {unit}"
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return ABSENT
    return last_parts(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def last_parts(text: str) -> str:
    """The text with each absolute path in it cut to its last part: ``…/b.jsonl``."""
    return _PATH.sub(lambda found: f"…/{PurePath(found[0]).name}", text)


def uncommitted(runs: Sequence[Run]) -> dict[str, str]:
    """Code that no commit holds, by run and file: its differences, and methods from elsewhere."""
    names = run_names(runs)
    found = {
        f"{names[run.path]}/{file.relative_to(run.path)}": file.read_text(encoding="utf-8")
        for run in runs
        for file in [run.path / CHANGES, *sorted((run.path / SOURCES).rglob("*.py"))]
        if file.exists()
    }
    return {
        name: text if len(text) <= _MOST_CODE else f"{text[:_MOST_CODE]}\n[cut here: see the file]"
        for name, text in found.items()
    }


def sources(runs: Sequence[Run]) -> ResultTable:
    """The run folders, so that every number can be traced to its records."""
    names = run_names(runs)
    rows: list[dict[str, Cell]] = [
        {
            "folder": names[run.path],
            "experiment": run.experiment or ABSENT,
            "command": last_parts(run.manifest.command),
            "began": min((record.started_at for record in run.records), default="")[:19] or ABSENT,
            "turns": str(len(run.records)),
            "run key": (run.manifest.run_key or ABSENT)[:8],
            "seed": str(run.seed),
        }
        for run in runs
    ]
    return ResultTable.of("Runs", "", rows)
