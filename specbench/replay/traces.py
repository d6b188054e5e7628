"""Recorded greedy outputs of a run folder, the input of a replay. Free of torch."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

from specbench.arrays import IntArray
from specbench.errors import ConfigurationError, field_error
from specbench.replay import states
from specbench.results.jsonl_schema import STRICT, Count, Ids, Seed
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import CASES, DONE, MANIFEST, read_records
from specbench.results.statistics.counted import failing_labels
from specbench.storage.arrays import read_header
from specbench.storage.jsonl import RecordError

_NODES = ("model", "dataset", "generation", "engine", "seed")  # of configurations
_TURN_FIELDS = ("label", "task", "category", "case_id", "turn", "stream_index", "seed")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One recorded turn; ``states``: file of its hidden states, with ``record=states``."""

    label: str
    task: str
    category: str
    case_id: str
    turn: int
    stream_index: int
    seed: int
    prompt_ids: IntArray  # [n_prompt]
    output_ids: IntArray  # [n_new], greedy
    states: Path | None = None


class RecordedModel(TypedDict, total=False):
    """The manifest's facts of the target that affect tokens; packing and threads do not."""

    id: str | None
    revision: str | None
    dtype: str | None
    weights: str | None
    template_sha: str | None
    weights_hash: str | None
    eos_ids: Ids
    context_length: Count
    vocab_size: Count
    tokenizer_hash: str


class _Named(TypedDict):
    name: str


class _Generation(TypedDict):
    max_new_tokens: Count


@with_config(STRICT | ConfigDict(extra="allow"))
class _Config(TypedDict):
    model: _Named
    dataset: _Named
    generation: _Generation
    seed: Seed


@with_config(STRICT)
class _Header(TypedDict):
    """The part of a manifest that a replay needs."""

    model: RecordedModel
    config: _Config
    run_key: str
    prompt_set_hash: str


@dataclass(frozen=True)
class Traces:
    """The greedy outputs of a run.

    Attributes:
        config: the nodes ``model``, ``dataset``, ``generation``, ``engine`` and ``seed``.
        turns: by ``(label, case_id, turn)``; first repeat, failed ones left out.
        failed: cases with a turn that failed when it was recorded.
    """

    path: Path
    model: RecordedModel
    config: Mapping[str, Any]
    run_key: str
    prompt_set_hash: str
    turns: Mapping[tuple[str, str, int], RecordedTurn]
    failed: tuple[str, ...]

    @functools.cached_property
    def sha(self) -> str:
        digest = hashlib.sha256()
        for turn in self.turns.values():
            digest.update(f"{turn.label}/{turn.case_id}/{turn.turn}/{turn.stream_index}".encode())
            for ids in (turn.prompt_ids, turn.output_ids):
                digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
            if turn.states is not None:
                digest.update(json.dumps(read_header(turn.states), sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def find(self, label: str, case_id: str, turn: int) -> RecordedTurn | None:
        keys = ((name, case_id, turn) for name in (label, BASELINE))
        return next((self.turns[key] for key in keys if key in self.turns), None)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(turn.label for turn in self.turns.values()))

    def cases(self) -> dict[str, list[RecordedTurn]]:
        """List each case's turns in the order they were run: plain decoding's where it ran."""
        label = BASELINE if BASELINE in self.labels else self.labels[0]
        by_case: dict[str, list[RecordedTurn]] = {}
        for turn in sorted(self.turns.values(), key=lambda t: (t.stream_index, t.turn)):
            if turn.label == label:
                by_case.setdefault(turn.case_id, []).append(turn)
        return by_case

    @functools.cached_property
    def hidden_states(self) -> tuple[int, frozenset[int]] | None:
        """The target's layers, and the numbers of the states that every turn has; None for none.

        Raises:
            ArtifactError: a file is damaged.
        """
        files = [turn.states for group in self.cases().values() for turn in group]
        recorded = [states.recorded_layers(file) for file in files if file is not None]
        if len(recorded) < len(files):
            return None
        return recorded[0][0], frozenset.intersection(*(layers for _, layers in recorded))


def load_traces(path: Path | str) -> Traces:
    """Read a run folder; the last ones read are kept in memory.

    Raises:
        ConfigurationError: not a run folder, recorded with sampling, or without a replayable turn.
        RecordError: a damaged file.
    """
    path = Path(path)
    files = [path / MANIFEST, path / CASES]
    if not all(file.is_file() for file in files):
        raise ConfigurationError(
            f"runner.traces={path} must be the folder of a finished greedy run (with {MANIFEST} "
            f"and {CASES})."
        )
    files += sorted((path / states.FOLDER).glob("*.states"))
    return _load(path.resolve(), tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files))


@functools.lru_cache(maxsize=4)
def _load(path: Path, stamps: tuple[tuple[int, int], ...]) -> Traces:
    manifest = RunManifest.read(path)
    model = {key: getattr(manifest.model, key, None) for key in RecordedModel.__annotations__}
    config = {key: manifest.config[key] for key in _NODES if key in manifest.config}
    header: dict[str, Any] = {
        "run_key": manifest.run_key,
        "prompt_set_hash": manifest.prompt_set_hash,
    }
    try:
        TypeAdapter(_Header).validate_python({"model": model, "config": config, **header})
    except ValueError as error:
        raise RecordError(
            f"{path / MANIFEST}: {field_error(error)}: the run never loaded its model, or the file "
            "is damaged. Name another run."
        ) from error
    if temperature := config["generation"].get("temperature", 0):
        raise ConfigurationError(
            f"runner.traces={path} was sampled (generation.temperature={temperature}); only greedy "
            "outputs can be replayed. Record one with generation.temperature=0."
        )
    if (path / DONE).exists():
        manifest.check_files(path, (CASES,))
    records, _ = read_records(path, run_key=manifest.run_key, labels=manifest.labels)
    failing = failing_labels(records, manifest.labels)
    records = [r for r in records if not (r.repeat or r.label in failing)]
    failed = tuple(dict.fromkeys(r.case_id for r in records if r.status == "failed"))
    turns = {}
    for record in records:
        if record.case_id in failed:  # a case is replayed whole or not at all
            continue
        file = states.path_of(path, record.stream_index, record.turn)
        turns[record.label, record.case_id, record.turn] = RecordedTurn(
            **{name: getattr(record, name) for name in _TURN_FIELDS},
            prompt_ids=np.asarray(record.prompt_ids, dtype=np.int64),
            output_ids=np.asarray(record.output_ids, dtype=np.int64),
            states=file if record.label == BASELINE and file.is_file() else None,
        )
    if not turns:
        raise ConfigurationError(
            f"runner.traces={path} has no finished turn to replay. Finish the run first: repeat "
            "its command."
        )
    recorded = cast(RecordedModel, model)
    return Traces(path, recorded, config, **header, turns=turns, failed=failed)
