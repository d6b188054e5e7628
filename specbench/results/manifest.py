"""What a run folder says of itself: ``manifest.json`` as a typed value. Free of torch.

Folders of earlier versions, of other programs' files and of tests lack some keys, and a later
version may add some: what is missing reads as None or empty, what is unknown is kept in ``extra``
and written back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from specbench.results.records import DONE, MANIFEST, SCHEMA_VERSION
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256
from specbench.storage.jsonl import JsonObject

BASELINE = "ar"  # the label of plain decoding

# Written also where they are None: readers of the file look for them.
_ALWAYS = {"always": True}


@dataclass(kw_only=True)
class _Node:
    """A JSON object with known keys; each class below lists them."""

    extra: JsonObject = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: JsonObject) -> Self:
        known = {f.name for f in fields(cls)} - {"extra"}
        values = {key: value for key, value in data.items() if key in known}
        hints = get_type_hints(cls)
        for key, value in values.items():
            if not _fits(value, hints[key]):
                raise ValueError(f"{key} is {value!r:.60}, which it cannot be")
        return cls(**values, extra={k: v for k, v in data.items() if k not in known})

    def to_json(self) -> JsonObject:
        """A plain dict; keys without a value are left out unless readers look for them."""
        found: JsonObject = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "extra" or (value is None and not f.metadata.get("always")):
                continue
            found[f.name] = _plain(value)
        return found | self.extra


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type, as far as JSON can tell."""
    if hint is Any:
        return True
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (UnionType, Union):
        return any(_fits(value, part) for part in inner)
    if kind is float:
        return type(value) in (int, float)
    if kind is int:
        return type(value) is int
    if not isinstance(value, kind):
        return False
    if kind is list and inner:
        return all(_fits(item, inner[0]) for item in value)
    if kind is dict and inner:
        return all(_fits(item, inner[1]) for item in value.values())
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, _Node):
        return value.to_json()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@dataclass(kw_only=True)
class DraftInfo(_Node):
    """A label's draft model.

    Attributes:
        id: hub id, local folder, or ``random``; ``revision``: the hub's commit.
        parameters: how many; ``vocab_size``: ids are below it.
        packed: what its packed linears hold; ``passes``: how its passes ran.
        self_check: as in ``ModelInfo``.
    """

    id: str | None = None
    revision: str | None = field(default=None, metadata=_ALWAYS)
    weights_hash: str | None = field(default=None, metadata=_ALWAYS)
    dtype: str | None = None
    device: str | None = None
    parameters: int | None = None
    vocab_size: int | None = None
    packed: JsonObject | None = None
    passes: JsonObject | None = None
    self_check: JsonObject | None = None


@dataclass(kw_only=True)
class ModelInfo(_Node):
    """The target as it was loaded.

    Attributes:
        name: in ``conf/model``, of a cost run; ``shape``: whether its weights were random.
        id: hub id or local folder; ``revision``: the hub's commit.
        weights_hash: SHA-256 over local weight files.
        weight_bytes: read by a pass of one row.
        copy_bytes_per_s: the device's copy bandwidth at the run's start; ``read_bytes_per_s``: its
            fastest read of as many bytes as the weights have, of all in the run.
        packed: what packed linears hold; ``passes``: which engine ran the passes, and why eagerly.
        overlap: how drafters worked beside the target's passes.
        overlapping: labels that drafted during those passes; only where the clock was inside the
            steps and could not tell the two apart.
        artefacts: by label and name, facts about the files that its method read.
        drafts: by label, its draft model.
        memory: by label, bytes of weights and caches of ``target`` and ``draft``.
        measured: by label, what its drafter measured in ``setup``.
        peers: the copy that transformers' own loops ran on.
        self_check: how far our logits were from the model's own when it was loaded, and how far
            its own passes were from each other.
        audit: what the audit takes for a near tie, and how that was measured.
    """

    name: str | None = None
    id: str | None = None
    revision: str | None = field(default=None, metadata=_ALWAYS)
    weights_hash: str | None = field(default=None, metadata=_ALWAYS)
    shape: bool | None = None
    dtype: str | None = None
    device: str | None = None
    eos_ids: list[int] | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    tokenizer_hash: str | None = None
    template_sha: str | None = None
    parameters: int | None = None
    weight_bytes: int | None = None
    copy_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    packed: JsonObject | None = None
    passes: JsonObject | None = None
    overlap: str | None = None
    overlapping: list[str] | None = None
    threads: int | None = None
    artefacts: dict[str, JsonObject] | None = None
    drafts: dict[str, DraftInfo] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    measured: dict[str, dict[str, int]] = field(default_factory=dict)
    peers: JsonObject | None = None
    self_check: JsonObject | None = None
    audit: JsonObject | None = None

    @classmethod
    def from_json(cls, data: JsonObject) -> Self:
        drafts = {
            label: DraftInfo.from_json(draft) for label, draft in (data.get("drafts") or {}).items()
        }
        return super().from_json({**data, "drafts": drafts})

    def to_json(self) -> JsonObject:
        """As every node; what labels add is left out where none ran (a replay, a cost surface)."""
        found = super().to_json()
        if not self.memory:
            by_label = ("drafts", "memory", "measured")
            found = {k: v for k, v in found.items() if v or k not in by_label}
        return found


@dataclass(kw_only=True)
class LabelInfo(_Node):
    """An entry of the run: its method, how long it kept state, its settings, its pair's."""

    method: str | None = None
    method_version: int | None = None
    state_scope: str | None = None
    knobs: JsonObject = field(default_factory=dict)
    pair: JsonObject | None = field(default=None, metadata=_ALWAYS)


@dataclass(kw_only=True)
class Start(_Node):
    """A process that began or resumed the run."""

    at: str | None = None
    host: str | None = None
    pid: int | None = None
    records_found: int = 0
    blocks_redone: int = 0


@dataclass(kw_only=True)
class RunManifest(_Node):
    """``manifest.json``.

    Attributes:
        folder_id: made up for each folder; the run key is that of every machine's same command.
        run_key: hash of ``identity``, the part of ``config`` that may move a number.
        status: ``running``, ``complete``, ``interrupted`` or ``failed``.
        config: the composed configuration; ``overrides``: what was typed.
        labels: in the order of the interleaving.
        baseline: the label that speedups refer to.
        hardware, versions, git, cuda_settings: as `specbench.system.environment.describe` gives
            them.
        model: None until the model was loaded.
        surface: model and machine of the cost surface that a replay's times are predicted with.
        traces: what a replay replays; ``replay``: by label, whether its steps are exact.
        servers: by label, the engine that answered, as it describes itself (``runner=serve``).
        synthetic: records that were made up; ``imported``: whose files they were read from;
            ``merged_from``: the parts they were joined of; ``mixed_conditions``: what differed
            among the parts' hardware, versions and code.
        files: SHA-256 of each file that the run left when it was done.
    """

    schema_version: int = SCHEMA_VERSION
    folder_id: str | None = None
    run_key: str | None = None
    status: str | None = None
    exit_code: int | None = field(default=None, metadata=_ALWAYS)
    config: JsonObject = field(default_factory=dict)
    identity: JsonObject | None = None
    overrides: list[str] = field(default_factory=list)
    labels: dict[str, LabelInfo] = field(default_factory=dict)
    baseline: str | None = field(default=None, metadata=_ALWAYS)
    seed: int = 0
    n_cases: int | None = None
    prompt_set_hash: str | None = None
    hardware: JsonObject = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git: JsonObject | None = field(default=None, metadata=_ALWAYS)
    cuda_settings: JsonObject = field(default_factory=dict)
    forced_resume: bool = False
    starts: list[Start] = field(default_factory=list)
    model: ModelInfo | None = None
    ended_at: str | None = None
    surface: JsonObject | None = None
    traces: JsonObject | None = None
    replay: dict[str, str] | None = None
    replay_s: float | None = None
    notes: list[str] | None = None
    servers: dict[str, JsonObject] | None = None
    synthetic: bool | None = None
    imported: JsonObject | None = None
    merged_from: list[str] | None = None
    mixed_conditions: list[str] | None = None
    files: dict[str, str] | None = None

    @classmethod
    def from_json(cls, data: JsonObject) -> Self:
        """The manifest that a file's JSON object holds.

        Raises:
            ValueError: another version of the program wrote it.
        """
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, this program reads {SCHEMA_VERSION}")
        # null stands for "not recorded" in files of others.
        values = {key: value for key, value in data.items() if value is not None}
        if "baseline" not in data:
            values["baseline"] = BASELINE  # files of others do not say
        labels = values.get("labels", {}).items()
        values["labels"] = {label: LabelInfo.from_json(info or {}) for label, info in labels}
        values["starts"] = [Start.from_json(start) for start in values.get("starts", [])]
        if "model" in values:
            values["model"] = ModelInfo.from_json(values["model"])
        return super().from_json(values)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a run folder.

        Raises:
            specbench.storage.jsonl.RecordError: it cannot be read, or another version wrote it.
        """
        path = folder / MANIFEST
        data = jsonl.read_json(path)
        try:
            return cls.from_json(data)
        except (ValueError, TypeError, AttributeError) as error:
            raise jsonl.RecordError(
                f"{path}: {error}. Use the version of the program that wrote it."
            ) from error

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest.

        Raises:
            specbench.storage.jsonl.DiskError: the disk is full or broken.
        """
        jsonl.write_json(folder / MANIFEST, self.to_json())

    def seal(self, folder: Path, names: Iterable[str]) -> None:
        """Note what a finished run's files are, those of them that are there."""
        there = [name for name in names if (folder / name).is_file()]
        self.files = {name: file_sha256(folder / name) for name in there}

    def check_files(self, folder: Path, names: Collection[str] = ()) -> None:
        """Refuse a finished folder whose files are not those that the run left.

        ``names``: these alone; without any, all.

        Raises:
            specbench.storage.jsonl.RecordError: a file is missing, or was changed since.
        """
        for name, digest in (self.files or {}).items():
            path = folder / name
            if names and name not in names:
                continue
            if not path.is_file() or file_sha256(path) != digest:
                state = "was changed" if path.is_file() else "is missing"
                raise jsonl.RecordError(
                    f"{path} {state} after the run was done, so its numbers are not shown. Put the "
                    f"file back; or delete {folder / DONE} and repeat the run's command, which "
                    "keeps what is whole and measures the rest; or type fresh=true."
                )

    @property
    def shard(self) -> tuple[int, int] | None:
        """``(i, n)`` of ``shard=i/n``; None for a whole run."""
        shard = (self.identity or {}).get("shard")
        if shard is None:
            return None
        i, n = str(shard).split("/")
        return int(i), int(n)

    def setting(self, group: str, key: str) -> Any:
        """A value of the composed configuration, e.g. ``setting("model", "name")``, or None."""
        node = self.config.get(group)
        return node.get(key) if isinstance(node, dict) else None
