"""Recorded greedy outputs, from a run folder or a trace pack: what replay reads. Free of torch.

A trace pack is one file of JSON lines (gzipped where its name ends in ``.gz``) that holds what
replay needs of a run and nothing else: ids of prompts and outputs, the tokenizer's hash, the names
of model and data set. No text, no time, no machine.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
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

PACK_FORMAT = "specbench-traces"
PACK_VERSION = 1

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
# Machine paths and sources inside the configuration's nodes.
_PLACES = ("cache_dir", "path", "source", "fetch")


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
        states: file of its hidden states; None without ``record=states``, and in packs.
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
        path: the run folder or the pack.
        config: the nodes ``model``, ``dataset``, ``generation`` and (but in older packs) ``engine``
            of the run's configuration, and its ``seed``.
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
    """Read a run folder or a trace pack; the last ones read are kept in memory.

    Raises:
        ConfigurationError: neither, recorded with sampling, or nothing in it can be replayed.
        RecordError: a damaged file.
    """
    path = Path(path)
    files = [path / MANIFEST, path / CASES] if path.is_dir() else [path]
    if not all(file.is_file() for file in files):
        raise ConfigurationError(
            f"runner.traces={path} must be a run folder (with {MANIFEST} and {CASES}) or a trace "
            "pack. Name a finished greedy run, or a file made by scripts/export_traces.py."
        )
    files += [path / CANDIDATES, *sorted((path / states.FOLDER).glob("*.states"))]
    stamps = tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())
    return _load(path.resolve(), stamps)


@functools.lru_cache(maxsize=4)
def _load(path: Path, stamps: tuple[tuple[int, int], ...]) -> Traces:
    traces = _read_folder(path) if path.is_dir() else _read_pack(path)
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


# --- a run folder ---------------------------------------------------------------------------------


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


# --- a trace pack ---------------------------------------------------------------------------------


def write_pack(traces: Traces, path: Path, labels: Iterable[str] | None = None) -> int:
    """Write a pack, gzipped where it ends in ``.gz``; returns the number of turns in it.

    ``labels`` keeps only these; None keeps all.

    Raises:
        ConfigurationError: no turn is left.
    """
    kept = None if labels is None else set(labels)
    turns = [t for t in traces.turns.values() if kept is None or t.label in kept]
    if not turns:
        raise ConfigurationError(
            f"none of the labels {', '.join(sorted(kept or ()))} is in {traces.path}: it has "
            f"{', '.join(sorted({t.label for t in traces.turns.values()}))}."
        )
    lines = [json.dumps(line, separators=(",", ":")) for line in _pack_lines(traces, turns)]
    data = ("\n".join(lines) + "\n").encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # the same traces give the same bytes
    temporary = path.with_name(path.name + ".tmp")
    with jsonl.reporting(path):
        temporary.write_bytes(data)
        temporary.replace(path)
    return len(turns)


def _pack_lines(traces: Traces, turns: Iterable[RecordedTurn]) -> Iterator[dict[str, Any]]:
    config = {
        key: {k: v for k, v in node.items() if k not in _PLACES} if isinstance(node, dict) else node
        for key, node in traces.config.items()
    }
    yield {
        "format": PACK_FORMAT,
        "version": PACK_VERSION,
        "model": dict(traces.model),
        "config": config,
        "run_key": traces.run_key,
        "prompt_set_hash": traces.prompt_set_hash,
        "failed": list(traces.failed),
    }
    for turn in turns:
        line = {name: getattr(turn, name) for name in RecordedTurn.__dataclass_fields__}
        del line["states"]
        for name in ("prompt_ids", "output_ids", "candidates"):
            line[name] = None if line[name] is None else line[name].tolist()
        yield line


def _read_pack(path: Path) -> Traces:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{path} is not a trace pack, or is damaged: {error}.") from error
    header: _Header | None = None
    turns: dict[tuple[str, str, int], RecordedTurn] = {}
    for number, raw in enumerate(data.splitlines(), start=1):
        try:
            line = jsonl.parse_json(raw)
            if number == 1:
                if line.get("format") != PACK_FORMAT or line.get("version") != PACK_VERSION:
                    raise ValueError(f"not a header of {PACK_FORMAT} {PACK_VERSION}")
                header = _checked_header(line)
                continue
            turn = _turn(line)
            if turns.setdefault((turn.label, turn.case_id, turn.turn), turn) is not turn:
                raise ValueError(
                    f"{turn.label}, case {turn.case_id}, turn {turn.turn} is there twice"
                )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RecordError(
                f"{path}, line {number}: not a trace pack, or damaged: {field_error(error)}."
            ) from error
    if header is None:
        raise RecordError(f"{path} is not a trace pack: it is empty.")
    return _traces(path, header, turns.values())


def _turn(line: dict[str, Any]) -> RecordedTurn:
    lines.packed_line(line)
    if line["candidates"] is not None:
        line["candidates"] = np.asarray(line["candidates"], dtype=np.int64)
    for name in ("prompt_ids", "output_ids"):
        line[name] = np.asarray(line[name], dtype=np.int64)
    return RecordedTurn(**line)


def _checked_header(header: Any) -> _Header:
    """What a pack or a manifest says; a ValueError names what a replay asks and does not find."""
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
