"""What a run folder says of itself: ``manifest.json`` as a typed value. Free of torch.

Not every run has every key: what is missing reads as None or empty, what is unknown is kept and
written back.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
)
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

from specbench.errors import field_error
from specbench.results.lines import Flag, Text
from specbench.results.records import DONE, MANIFEST, SCHEMA_VERSION
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256
from specbench.storage.jsonl import JsonObject
from specbench.system.noted import CudaSettings, GitState
from specbench.system.noted import Hardware as Hardware  # tables name it too

BASELINE = "ar"  # the label of plain decoding
ROWS = (1, 2, 4, 8, 16, 64)  # of the passes whose cost stands beside speedups

Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]


class _Node(BaseModel):
    """A JSON object with known keys; each class below lists them, others are kept.

    Keys without a value are written only where readers look for them (``_always``).
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    _always: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """What a file's JSON object holds.

        Raises:
            ValueError: names the field.
        """
        return cls.model_validate(data)

    def to_json(self) -> JsonObject:
        """A plain dict for the file."""
        return self.model_dump(mode="json", warnings=False)

    @model_serializer(mode="wrap")
    def _without_absent(self, plain: SerializerFunctionWrapHandler) -> JsonObject:
        always = self._always | (self.model_extra or {}).keys()
        return {k: v for k, v in plain(self).items() if v is not None or k in always}


class Passes(TypedDict, total=False):
    """How a model's passes ran.

    Attributes:
        engine: ``eager`` or ``graph``; ``reason``: why not ``graph``.
        graphs: shapes of the captured passes; ``eager``: why others ran eagerly, by shape.
        layers: which parts of the network run fused, if any.
    """

    engine: str
    reason: str
    graphs: list[str]
    eager: dict[str, str]
    layers: dict[str, dict[str, Whole]]


class ArtifactInfo(TypedDict, total=False):
    """A file that a method read; ``header``: what it says of itself, where it is a table."""

    path: Text
    bytes: Whole
    sha256: Text
    header: JsonObject


class Peers(TypedDict, total=False):
    """The model that transformers' own loops ran on."""

    attention: Text
    packed: Flag


class Replayed(TypedDict, total=False):
    """The recording that a replay reads; ``failed``: its cases that are left out."""

    run_key: Text
    sha: Text
    prompt_set_hash: Text
    failed: list[Text]


class RowTimes(TypedDict):
    """Median ``seconds`` of a pass by its rows, behind ``context`` cached tokens.

    ``prices``: by rows, a pass's time over that of one row in the same round, its median and the
    ends of that median's 95 % interval, or its median alone where passes were too slow for six
    rounds. Older runs and predicted times have none.
    """

    context: Whole
    seconds: dict[str, Number]
    prices: NotRequired[dict[str, list[Number]]]


class DraftInfo(_Node):
    """A label's draft model.

    Attributes:
        id: hub id, local folder, or ``random``; ``revision``: the hub's commit.
        parameters: how many; ``vocab_size``: ids are below it.
        packed: what its packed linears hold; ``passes``: how its passes ran.
        self_check: as in ``ModelInfo``.
    """

    _always = frozenset({"revision", "weights_hash"})

    id: Text | None = None
    revision: Text | None = None
    weights_hash: Text | None = None
    dtype: Text | None = None
    device: Text | None = None
    parameters: Whole | None = None
    vocab_size: Whole | None = None
    packed: JsonObject | None = None
    passes: Passes | None = None
    self_check: JsonObject | None = None


class ModelInfo(_Node):
    """The target as it was loaded.

    Attributes:
        name: in ``conf/model``, of a cost run; ``shape``: whether its weights were random.
        id: hub id or local folder; ``revision``: the hub's commit.
        weights_hash: SHA-256 over local weight files.
        weights: other than float32 that passes read; ``weight_bytes``: by a pass of one row.
        copy_bytes_per_s: the device's copy bandwidth at the run's start; ``read_bytes_per_s``: its
            fastest read of as many bytes as the weights have, of all in the run.
        row_times: what passes cost by their rows, timed after the warm-up.
        packed: what packed linears hold; ``passes``: which engine ran the passes, and why eagerly.
        overlap: how drafters worked beside the target's passes.
        overlapping: labels that drafted during those passes; only where the clock was inside the
            steps and could not tell the two apart.
        artefacts: by label and name, facts about the files that its method read.
        drafts: by label, its draft model.
        threads_on: how many of the process's threads may run on which CPUs, once all have computed.
        memory: by label, bytes of weights and caches of ``target`` and ``draft``.
        measured: by label, what its drafter measured in ``setup``.
        self_check: how far our logits, and its own passes, were from the model's own at load.
        audit: what the audit takes for a near tie, and how that was measured.
    """

    _always = frozenset({"revision", "weights_hash"})

    name: Text | None = None
    id: Text | None = None
    revision: Text | None = None
    weights_hash: Text | None = None
    shape: Flag | None = None
    dtype: Text | None = None
    weights: Text | None = None
    device: Text | None = None
    eos_ids: list[Whole] | None = None
    context_length: Whole | None = None
    vocab_size: Whole | None = None
    tokenizer_hash: Text | None = None
    template_sha: Text | None = None
    parameters: Whole | None = None
    weight_bytes: Whole | None = None
    copy_bytes_per_s: Number | None = None
    read_bytes_per_s: Number | None = None
    row_times: RowTimes | None = None
    packed: JsonObject | None = None
    passes: Passes | None = None
    overlap: Text | None = None
    overlapping: list[Text] | None = None
    threads: Whole | None = None
    threads_on: dict[str, Whole] | None = None
    artefacts: dict[str, dict[str, ArtifactInfo]] | None = None
    drafts: dict[str, DraftInfo] = Field(default_factory=dict)
    memory: dict[str, dict[str, Whole]] = Field(default_factory=dict)
    measured: dict[str, dict[str, Whole]] = Field(default_factory=dict)
    peers: Peers | None = None
    self_check: JsonObject | None = None
    audit: JsonObject | None = None

    @model_serializer(mode="wrap")
    def _without_labels(self, plain: SerializerFunctionWrapHandler) -> JsonObject:
        """What labels add is left out where none ran (a replay, a cost surface)."""
        found = _Node._without_absent(self, plain)
        by_label = () if self.memory else ("drafts", "memory", "measured")
        return {k: v for k, v in found.items() if v or k not in by_label}


class LabelInfo(_Node):
    """An entry of the run: its method, how long it kept state, its settings, its pair's."""

    _always = frozenset({"pair"})

    method: Text | None = None
    method_version: Whole | None = None
    state_scope: Text | None = None
    knobs: JsonObject = Field(default_factory=dict)
    budget: Text | None = None  # where these are from: tuned, published, typed
    pair: JsonObject | None = None


class Start(_Node):
    """A process that began or resumed the run; ``clock_mhz``: the CPUs' frequency then."""

    at: Text | None = None
    clock_mhz: Whole | None = None
    host: Text | None = None
    pid: Whole | None = None
    records_found: Whole = 0
    blocks_redone: Whole = 0


class RunManifest(_Node):
    """``manifest.json``.

    Attributes:
        folder_id: made up for each folder; the run key is the same on every machine.
        run_key: hash of ``identity``, the part of ``config`` that may move a number.
        status: ``running``, ``complete``, ``interrupted`` or ``failed``.
        config: the composed configuration; ``overrides``: what was typed; ``swept``:
            whether the run is one job of a sweep.
        labels: in the order of the interleaving.
        baseline: the label that speedups refer to.
        hardware, versions, git, code, cuda_settings: as `specbench.system.environment.describe`
            gives them.
        model: None until the model was loaded.
        surface: model and machine of the cost surface that a replay's times are predicted with.
        replay: by label, whether its steps are exact.
        servers: by label, the engine that answered, as it describes itself (``runner=serve``).
        synthetic: records that were made up; ``imported``: whose files they were read from;
            ``merged_from``: the parts they were joined of; ``mixed_conditions``: what differed
            among the parts' hardware, versions and code.
        files: SHA-256 of each file that the run left when it was done.
    """

    _always = frozenset({"exit_code", "baseline", "git"})

    schema_version: Whole = SCHEMA_VERSION
    folder_id: Text | None = None
    run_key: Text | None = None
    status: Text | None = None
    exit_code: Whole | None = None
    config: JsonObject = Field(default_factory=dict)
    identity: JsonObject | None = None
    overrides: list[Text] = Field(default_factory=list)
    swept: Flag | None = None
    labels: dict[str, LabelInfo] = Field(default_factory=dict)
    baseline: Text | None = None
    seed: Whole = 0
    n_cases: Whole | None = None
    prompt_set_hash: Text | None = None
    hardware: Hardware = Field(default_factory=Hardware)
    versions: dict[str, Text] = Field(default_factory=dict)
    git: GitState | None = None
    code: Text | None = None
    cuda_settings: CudaSettings = Field(default_factory=dict)
    forced_resume: Flag = False
    starts: list[Start] = Field(default_factory=list)
    model: ModelInfo | None = None
    ended_at: Text | None = None
    surface: JsonObject | None = None
    traces: Replayed | None = None
    replay: dict[str, Text] | None = None
    replay_s: Number | None = None
    left_out: dict[str, Text] | None = None
    notes: list[Text] | None = None
    servers: dict[str, JsonObject] | None = None
    synthetic: Flag | None = None
    imported: JsonObject | None = None
    merged_from: list[Text] | None = None
    mixed_conditions: list[Text] | None = None
    files: dict[str, Text] | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """The manifest that a file's JSON object holds.

        Raises:
            ValueError: names the field; or another version of the program wrote it.
        """
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, this program reads {SCHEMA_VERSION}")
        return super().from_json({"baseline": BASELINE, **data})

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
        except ValueError as error:
            raise jsonl.RecordError(
                f"{path}: {field_error(error)}. Use the version of the program that wrote it."
            ) from error

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest.

        Raises:
            specbench.storage.jsonl.DiskError: the disk is full or broken.
        """
        jsonl.write_json(folder / MANIFEST, self.to_json())

    def finish(self, folder: Path, names: Iterable[str]) -> None:
        """Write the manifest of a finished run, and ``DONE`` last, which vouches for it.

        Args:
            names: of the run's other files; the manifest vouches for those that are there.

        Raises:
            specbench.storage.jsonl.DiskError: the disk is full or broken.
        """
        there = [name for name in names if (folder / name).is_file()]
        self.files = {name: file_sha256(folder / name) for name in there}
        self.write(folder)
        jsonl.write_text(folder / DONE, f"{file_sha256(folder / MANIFEST)}\n")

    def check_files(self, folder: Path, needed: Collection[str] | None = None) -> None:
        """Refuse a finished folder whose files are not those that the run left.

        ``needed``: of its files, those that must be there; None: all.

        Raises:
            specbench.storage.jsonl.RecordError: a file is missing, or was changed since.
        """
        digests = dict(self.files or {})
        done = folder / DONE
        if done.is_file():
            digests[MANIFEST] = done.read_text(encoding="utf-8", errors="replace").strip()
        for name, digest in digests.items():
            path = folder / name
            if not path.is_file() and needed is not None and name not in needed:
                continue
            if not path.is_file() or file_sha256(path) != digest:
                state = "was changed" if path.is_file() else "is missing"
                if name == MANIFEST:
                    raise jsonl.RecordError(
                        f"{path} {state} after the run was done, so its numbers are not shown. Put "
                        "the file back, or measure anew: fresh=true."
                    )
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

    @property
    def command(self) -> str:
        """The line to paste: ``python run.py 'compare=[pld,sam]'``."""
        return shlex.join(["python", "run.py", *self.overrides])

    def setting(self, group: str, key: str) -> Any:
        """A value of the composed configuration, e.g. ``setting("model", "name")``, or None."""
        node = self.config.get(group)
        return node.get(key) if isinstance(node, dict) else None
