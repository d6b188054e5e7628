"""From folders of results to runs in memory; files only, no torch and no network."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from specbench.errors import ResultsError
from specbench.results.records import (
    CASES,
    DONE,
    MANIFEST,
    SCHEMA_VERSION,
    CaseRecord,
    read_records,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SURFACE = "surface.json"  # of a cost run, in place of records
# Left out of the frame: lists as long as a text.
_LONG_FIELDS = ("prompt_ids", "output_ids", "accepted_per_step")


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        path: the folder.
        manifest: its manifest as it stands in the file.
        records: all of its records, in the order they were written; none of a cost run.
        complete: whether the run reached its end; False too where the last line is cut off.
        surface: the cost surface that the run measured, as it stands in its file; None of others.
    """

    path: Path
    manifest: Mapping[str, Any]
    records: Sequence[CaseRecord]
    complete: bool
    surface: Mapping[str, Any] | None = None

    def _config(self, group: str, key: str) -> Any:
        return (self.manifest.get("config", {}).get(group) or {}).get(key)

    @property
    def model(self) -> str:
        """The model's name in ``conf/model``."""
        return self.records[0].model

    @property
    def dataset(self) -> str:
        """The data set's name in ``conf/dataset``."""
        return self.records[0].dataset

    @property
    def dtype(self) -> str:
        """The model's number format, as far as the manifest knows it."""
        dtype = (self.manifest.get("model") or {}).get("dtype") or self._config("model", "dtype")
        return str(dtype or "dtype not recorded").removeprefix("torch.")

    @property
    def temperature(self) -> float:
        """Of the sampling; 0 is greedy."""
        return float(self._config("generation", "temperature") or 0.0)

    @property
    def max_new_tokens(self) -> int | None:
        """At most so many new tokens a turn, None where the manifest does not say."""
        limit = self._config("generation", "max_new_tokens")
        return None if limit is None else int(limit)

    @functools.cached_property
    def questions(self) -> Mapping[str, int]:
        """The cases that were asked, by id, each with a checksum of its first turn's prompt."""
        prompts: dict[str, Sequence[int]] = {}
        for record in self.records:
            if record.turn == 0:
                prompts[record.case_id] = prompts.get(record.case_id) or record.prompt_ids
        return {case: zlib.crc32(str(list(ids)).encode()) for case, ids in prompts.items()}

    @property
    def overlap(self) -> str:
        """How drafters worked beside the target's passes; "" where the manifest does not say."""
        return str((self.manifest.get("model") or {}).get("overlap") or "")

    @property
    def experiment(self) -> str | None:
        """The ``experiment`` that was typed, None for other runs."""
        for override in self.manifest.get("overrides") or ():
            key, _, value = str(override).lstrip("+").partition("=")
            if key == "experiment":
                return value
        return None

    @property
    def verifier(self) -> str:
        """Who decided acceptance of the labels that draft."""
        drafting = [record.verifier for record in self.records if record.label != self.baseline]
        return drafting[0] if drafting else self.records[0].verifier

    @property
    def labels(self) -> list[str]:
        """In the order of the run, the baseline first."""
        known = list(self.manifest.get("labels") or {})
        found = dict.fromkeys(record.label for record in self.records)
        return [label for label in known if label in found] + [
            label for label in found if label not in known
        ]

    @property
    def baseline(self) -> str | None:
        """The label that speedups refer to, None where the run has none."""
        baseline = self.manifest.get("baseline", "ar")
        return baseline if baseline in self.labels else None

    @property
    def seed(self) -> int:
        """The run's seed, which the intervals use too."""
        return int(self.manifest.get("seed") or 0)

    @property
    def estimator(self) -> str:
        """How the run's own table was computed."""
        return str(self.manifest.get("config", {}).get("estimator") or "paired")

    @property
    def synthetic(self) -> bool:
        """Whether the records were made up (fixtures of the tests)."""
        return bool(self.manifest.get("synthetic"))

    @property
    def imported(self) -> str | None:
        """Whose files the records were read from, None for a run of ours."""
        return (self.manifest.get("imported") or {}).get("from")

    @property
    def phases(self) -> bool:
        """Whether the clock looked into the steps, which makes speeds no headline numbers."""
        return bool(self._config("measure", "phases"))

    @property
    def timing(self) -> str:
        """Where the times come from: ``measured``, ``predicted`` by a cost surface, or ``none``."""
        return self.records[0].timing

    @property
    def _subject(self) -> Mapping[str, Any]:
        """What the times belong to: the cost surface's model and machine, else the run's."""
        surface = self.manifest.get("surface")
        if surface is None:
            return self.manifest
        return {"model": surface["model"], **surface["machine"]}

    @property
    def _machine(self) -> Mapping[str, Any]:
        return self._subject.get("hardware") or {}

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs, where the run used one."""
        device = (self._subject.get("model") or {}).get("device") or self._config("model", "device")
        if not str(device).startswith("cuda"):
            return []
        return [gpu["name"] for gpu in self._machine.get("gpus", [])]

    @property
    def hardware(self) -> str:
        """What the run was measured on, in words."""
        gpus = self.gpus
        if gpus:
            return ", ".join(f"{gpus.count(name)} {name}" for name in dict.fromkeys(gpus))
        machine = self._machine
        if not machine.get("cpu"):
            return "hardware not recorded"
        count = machine.get("cpus_usable") or machine.get("cpus")
        return f"{machine['cpu']}, {cpus(count)}" if count else str(machine["cpu"])

    @property
    def code(self) -> str:
        """The commit, and whether the code differed from it."""
        git = self.manifest.get("git") or {}
        if not git.get("commit"):
            return "commit not recorded"
        return f"commit {git['commit'][:10]}{' with changes' if git.get('dirty') else ''}"

    def parameters(self, label: str | None = None) -> float | None:
        """Parameters of the target, or of a label's draft model, where the manifest knows them."""
        node = self.manifest.get("model") or {}
        if label is not None:
            node = (node.get("drafts") or {}).get(label) or {}
        count = node.get("parameters")
        return None if count is None else float(count)

    def memory(self, label: str) -> Mapping[str, int]:
        """Bytes of weights and caches by model (``target``, ``draft``) that a label needs."""
        return ((self.manifest.get("model") or {}).get("memory") or {}).get(label) or {}

    def knobs(self, label: str) -> Mapping[str, Any]:
        """The settings of a label's method."""
        return ((self.manifest.get("labels") or {}).get(label) or {}).get("knobs") or {}


def cpus(count: int | None) -> str:
    """How many CPUs, in words; records of old may not say."""
    if count is None:
        return "an unknown number of CPUs"
    return "1 CPU" if count == 1 else f"{count} CPUs"


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """All run folders at or below the given ones, sorted; each once.

    Raises:
        ResultsError: a path does not exist.
    """
    return _folders_with((CASES, MANIFEST), paths)


def _folders_with(names: tuple[str, ...], paths: Iterable[Path | str]) -> list[Path]:
    found: dict[Path, Path] = {}
    for root in map(Path, paths):
        if not root.is_dir():
            raise ResultsError(f"{root} is no folder. Name a run folder or one that holds some.")
        for folder, below, files in os.walk(root):
            below.sort()
            if set(names) <= set(files):
                path = Path(folder)
                found.setdefault(path.resolve(), path)
    return sorted(found.values())


def load_runs(paths: Iterable[Path | str]) -> list[Run]:
    """Read every run at or below the given folders.

    Runs without any record yet are left out; incomplete ones are marked.

    Raises:
        ResultsError: a path does not exist, or a manifest cannot be used.
        specbench.storage.jsonl.RecordError: ``cases.jsonl`` is damaged.
    """
    runs = []
    for path in find_runs(paths):
        manifest = _read_manifest(path / MANIFEST)
        records, truncated = read_records(path)
        if records:
            complete = (path / DONE).exists() and not truncated
            runs.append(Run(path, manifest, records, complete))
    return runs


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultsError(
            f"{path}: schema_version is {version!r}, this program reads {SCHEMA_VERSION}. Use the "
            "version of the program that wrote it."
        )
    return dict(manifest)


def load_surfaces(paths: Iterable[Path | str], *, by_hand: bool = False) -> list[Run]:
    """The cost surfaces that experiments measured at or below the given folders.

    Args:
        paths: run folders, or folders that hold some.
        by_hand: those of no experiment too.

    Raises:
        ResultsError: a manifest or a surface cannot be used.
    """
    runs = []
    for path in _folders_with((SURFACE, MANIFEST, DONE), paths):
        manifest = _read_manifest(path / MANIFEST)
        try:
            surface = json.loads((path / SURFACE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultsError(f"{path / SURFACE} cannot be read: {error}.") from error
        run = Run(path, manifest, (), True, surface)
        if by_hand or run.experiment is not None:
            runs.append(run)
    return runs


def parts_of_others(runs: Sequence[Run]) -> list[Run]:
    """Runs whose records are in another one's too, and would count twice beside it.

    These are shards that :mod:`analysis.merge` has joined, and plain decoding that was recorded for
    a replay (``runner.traces``) and that every replay has as its baseline. A recording that has
    other labels as well is a measurement of its own.
    """
    merged = {_key(run) for run in runs if run.manifest.get("merged_from")}
    replayed = {(run.manifest.get("traces") or {}).get("run_key") for run in runs} - {None}
    return [
        run
        for run in runs
        if ((run.manifest.get("identity") or {}).get("shard") and _key(run) in merged)
        or (_key(run) in replayed and run.labels == [run.baseline])
    ]


def _key(run: Run) -> Any:
    return run.manifest.get("run_key")


def usable_runs(
    paths: Sequence[Path | str], include_incomplete: bool = False, surfaces: bool = False
) -> tuple[list[Run], list[Run]]:
    """The runs to show, and the incomplete ones that are not.

    A run that is but a part of another one here (:func:`parts_of_others`) stands in no table.

    Args:
        paths: folders, searched recursively.
        include_incomplete: show those too.
        surfaces: show cost surfaces too, as runs without records.

    Raises:
        ResultsError: nothing is left to show; says what to type.
    """
    runs = load_runs(paths)
    parts = {run.path for run in parts_of_others(runs)}
    runs = [run for run in runs if run.path not in parts]
    shown = [run for run in runs if run.complete or include_incomplete]
    shown += load_surfaces(paths) if surfaces else []
    hidden = [run for run in runs if not (run.complete or include_incomplete)]
    if not shown:
        where = ", ".join(map(str, paths))
        if hidden:
            names = ", ".join(str(run.path) for run in hidden)
            raise ResultsError(
                f"no complete run at or below {where}; incomplete: {names}. Repeat their commands "
                "to finish them, or add --incomplete."
            )
        raise ResultsError(
            f"no run at or below {where}: a run folder holds {MANIFEST} and {CASES} with at least "
            "one record. Make one: python run.py"
        )
    return shown, hidden


def frame(runs: Iterable[Run]) -> pd.DataFrame:
    """All records as one tidy frame: a row per turn, with the run's folder beside the fields.

    Token lists are left out; ``lossless`` becomes ``verdict``, ``first_diff`` and ``gap``.
    """
    names = [f.name for f in dataclasses.fields(CaseRecord) if f.name not in _LONG_FIELDS]
    rows = []
    for run in runs:
        for record in run.records:
            row = {"run": str(run.path), **{name: getattr(record, name) for name in names}}
            lossless = row.pop("lossless")
            row |= {
                "verdict": lossless.verdict,
                "first_diff": lossless.first_diff,
                "gap": lossless.gap,
            }
            rows.append(row)
    return pd.DataFrame(rows)
