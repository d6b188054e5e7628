"""Recorded greedy outputs of a run folder: what replay reads. Free of torch."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, cast

import numpy as np

from specbench.arrays import IntArray
from specbench.errors import ConfigurationError, field_error
from specbench.replay import states
from specbench.results import lines
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import CANDIDATES, CASES, DONE, MANIFEST, read_records
from specbench.storage import jsonl
from specbench.storage.arrays import read_header
from specbench.storage.jsonl import RecordError

_TEXT, _NUMBER = (str, "a text"), (int, "a whole number")
_ASKED = {  # of a header
    **dict.fromkeys(("config.model.name", "config.dataset.name"), _TEXT),
    **dict.fromkeys(("run_key", "prompt_set_hash", "model.tokenizer_hash"), _TEXT),
    **dict.fromkeys(("config.generation.max_new_tokens", "config.seed"), _NUMBER),
    **dict.fromkeys(("model.vocab_size", "model.context_length"), _NUMBER),
    "model.eos_ids": (list, "a list of token ids"),
    "failed": (list, "a list of cases"),
}
# Of a record, as a turn of it has them.
_OF_RECORD = ("label", "method", "task", "category", "case_id", "turn", "stream_index", "seed")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One recorded turn.

    Attributes:
        label, method: of the run it was recorded in.
        task, category, case_id, turn, stream_index, seed: as in the record.
        prompt_ids: ``[n_prompt]``.
        output_ids: ``[n_new]``, the greedy output.
        candidates: ``[n_new, top]`` the likeliest ids at each output position, the chosen one
            first; None where the run was made without ``record=true``.
        states: file of its hidden states; None without ``record=states``.
    """

    label: str
    method: str
    task: str
    category: str
    case_id: str
    turn: int
    stream_index: int
    seed: int
    prompt_ids: IntArray
    output_ids: IntArray
    candidates: IntArray | None = None
    states: Path | None = None


class RecordedModel(TypedDict, total=False):
    """The manifest's part about the target; the rest (packing, threads) moves no token."""

    id: str | None
    revision: str | None
    dtype: str
    weights: str | None  # `engine.weights`, where passes read others than float32
    eos_ids: Required[list[int]]
    context_length: Required[int]
    vocab_size: Required[int]
    tokenizer_hash: Required[str]
    template_sha: str | None
    weights_hash: str | None


@dataclass(frozen=True)
class Traces:
    """The greedy outputs of a run.

    Attributes:
        path: the run folder.
        config: the nodes ``model``, ``dataset``, ``generation`` and ``engine`` of the run's
            configuration, and its ``seed``.
        run_key: of the run.
        prompt_set_hash: of its questions.
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
        """Hash over all ids."""
        digest = hashlib.sha256()
        for turn in self.turns.values():
            digest.update(f"{turn.label}/{turn.case_id}/{turn.turn}/{turn.stream_index}".encode())
            for ids in (turn.prompt_ids, turn.output_ids, turn.candidates):
                data = b"" if ids is None else np.ascontiguousarray(ids, dtype="<i8").tobytes()
                digest.update(data)
            if turn.states is not None:
                digest.update(json.dumps(read_header(turn.states), sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def find(self, label: str, case_id: str, turn: int) -> RecordedTurn | None:
        """The label's own recorded turn, else plain decoding's, else None."""
        own = self.turns.get((label, case_id, turn))
        return own if own is not None else self.turns.get((BASELINE, case_id, turn))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(turn.label for turn in self.turns.values()))

    def cases(self) -> dict[str, list[RecordedTurn]]:
        """The turns of each case in the order they were run: plain decoding's where it ran."""
        label = BASELINE if BASELINE in self.labels else self.labels[0]
        chosen = [turn for turn in self.turns.values() if turn.label == label]
        found: dict[str, list[RecordedTurn]] = {}
        for turn in sorted(chosen, key=lambda t: (t.stream_index, t.turn)):
            found.setdefault(turn.case_id, []).append(turn)
        return found

    @property
    def top(self) -> int:
        """Candidates recorded at every position; 0 where some turn has none."""
        turns = [turn for group in self.cases().values() for turn in group]
        return min(0 if t.candidates is None else t.candidates.shape[1] for t in turns)

    @functools.cached_property
    def hidden_states(self) -> tuple[int, frozenset[int]] | None:
        """The target's layers, and the numbers of the states that every turn has; None for none.

        Raises:
            ArtifactError: a file is damaged.
        """
        files = [turn.states for group in self.cases().values() for turn in group]
        found = [states.recorded_layers(file) for file in files if file is not None]
        if len(found) < len(files):
            return None
        return found[0][0], frozenset.intersection(*(layers for _, layers in found))


def load_traces(path: Path | str) -> Traces:
    """Read a run folder; the last ones read are kept in memory.

    Raises:
        ConfigurationError: it is none, recorded with sampling, or nothing in it can be replayed.
        RecordError: a damaged file.
    """
    path = Path(path)
    files = [path / MANIFEST, path / CASES]
    if not all(file.is_file() for file in files):
        raise ConfigurationError(
            f"runner.traces={path} must be the folder of a finished greedy run (with {MANIFEST} "
            f"and {CASES})."
        )
    files += [path / CANDIDATES, *sorted((path / states.FOLDER).glob("*.states"))]
    stamps = tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())
    return _load(path.resolve(), stamps)


@functools.lru_cache(maxsize=4)
def _load(path: Path, stamps: tuple[tuple[int, int], ...]) -> Traces:
    traces = _read_folder(path)
    temperature = traces.config["generation"].get("temperature", 0)
    if temperature:
        raise ConfigurationError(
            f"runner.traces={path} was sampled (generation.temperature={temperature}); only greedy "
            "outputs can be replayed. Record one with generation.temperature=0."
        )
    if not traces.turns:
        raise ConfigurationError(
            f"runner.traces={path} has no finished turn to replay. Finish the run first: repeat "
            "its command."
        )
    return traces


class _Header(TypedDict):
    model: RecordedModel
    config: Mapping[str, Any]
    run_key: str
    prompt_set_hash: str
    failed: list[str]


def _traces(path: Path, header: _Header, turns: Iterable[RecordedTurn]) -> Traces:
    return Traces(
        path=path,
        model=header["model"],
        config=header["config"],
        run_key=header["run_key"],
        prompt_set_hash=header["prompt_set_hash"],
        turns={(t.label, t.case_id, t.turn): t for t in turns},
        failed=tuple(header["failed"]),
    )


def _read_folder(path: Path) -> Traces:
    manifest = RunManifest.read(path)
    try:
        config = manifest.config
        if manifest.model is None:
            raise KeyError("model")
        model = {key: getattr(manifest.model, key) for key in RecordedModel.__annotations__}
        if model["vocab_size"] is None:  # not in manifests of older runs
            model["vocab_size"] = config["model"]["shape_config"]["vocab_size"]
        header = _checked_header(
            {
                "model": model,
                "config": {
                    **{key: config[key] for key in ("model", "dataset", "generation", "seed")},
                    "engine": config.get("engine", {}),
                },
                "run_key": manifest.run_key,
                "prompt_set_hash": manifest.prompt_set_hash,
                "failed": [],
            }
        )
    except KeyError as error:
        raise RecordError(
            f"{path / MANIFEST} lacks {error}: the run never loaded its model, or was not made by "
            "this program. Name another one."
        ) from error
    except (TypeError, ValueError) as error:
        raise RecordError(f"{path / MANIFEST} is damaged: {error}. Name another run.") from error
    if (path / DONE).exists():
        manifest.check_files(path, (CASES,))
    rows, _ = jsonl.read_jsonl(path / CANDIDATES, lines.candidates_line)
    candidates = {(line["label"], line["case_id"], line["turn"]): line["top"] for line in rows}
    found, _ = read_records(path, run_key=manifest.run_key, labels=manifest.labels)
    failed: dict[str, None] = {}
    plain = {(r.case_id, r.turn): r for r in found if r.label == BASELINE and not r.repeat}
    turns = []
    for record in found:
        if record.repeat:
            continue
        if record.status == "failed":
            failed.setdefault(record.case_id)
            continue
        top = candidates.get((record.label, record.case_id, record.turn))
        beside = plain.get((record.case_id, record.turn))
        if top is None and beside is not None and beside.output_ids == record.output_ids:
            top = candidates.get((BASELINE, record.case_id, record.turn))  # of the same text
        kept = states.path_of(path, record.stream_index, record.turn)
        turns.append(
            RecordedTurn(
                **{name: getattr(record, name) for name in _OF_RECORD},
                prompt_ids=np.asarray(record.prompt_ids, dtype=np.int64),
                output_ids=np.asarray(record.output_ids, dtype=np.int64),
                candidates=None if top is None else np.asarray(top, dtype=np.int64),
                states=kept if record.label == BASELINE and kept.is_file() else None,
            )
        )
    header["failed"] = list(failed)
    # A case is replayed whole or not at all.
    return _traces(path, header, [turn for turn in turns if turn.case_id not in failed])


def _checked_header(header: Any) -> _Header:
    """What a manifest says; a ValueError names what a replay asks and does not find."""
    for path, (kind, said) in _ASKED.items():
        value: Any = header
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise ValueError(f"there is no {path}")
            value = value[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path} is {value!r:.60}, not {said}")
    try:
        lines.ids(header["model"]["eos_ids"])
    except ValueError as error:
        raise ValueError(f"model.eos_ids: {field_error(error)}") from error
    return cast("_Header", header)
