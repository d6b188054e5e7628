"""The manifest of a run folder, ``manifest.json``, as a typed value. Free of torch.

Not every run has every key: missing keys read as None or empty, unknown ones are kept and written
back.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NotRequired, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

from specbench.errors import field_error
from specbench.results.jsonl_schema import Line
from specbench.results.records import DONE, MANIFEST, SCHEMA_VERSION
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256
from specbench.storage.jsonl import JsonObject
from specbench.system.hardware import CudaSettings, GitState
from specbench.system.hardware import Hardware as Hardware  # tables name it too

BASELINE = "ar"  # the label of plain decoding
ROWS = (1, 2, 4, 8, 16, 64)  # of the passes whose cost is shown with speedups

# Keys that readers look for even where they have no value.
_NULL_IN_FILES = {"baseline", "exit_code", "git", "pair", "revision", "weights_hash"}
# Keys of what labels add, which a run without any (a replay, a cost surface) does not have.
_BY_LABEL = ("drafts", "memory", "measured")


class _Node(Line):
    """A part of the manifest. Keys without a value are not written, unknown ones are kept."""

    model_config = ConfigDict(extra="allow", frozen=False)

    @model_serializer(mode="wrap")
    def _without_absent(self, plain: SerializerFunctionWrapHandler) -> JsonObject:
        always_written = _NULL_IN_FILES | (self.model_extra or {}).keys()
        return {
            key: value
            for key, value in plain(self).items()
            if key in always_written or not (value is None or (key in _BY_LABEL and not value))
        }


class Passes(TypedDict, total=False):
    """The engine and the captured shapes of a model's passes."""

    engine: str  # ``eager`` or ``graph``
    reason: str
    graphs: list[str]  # shapes of the captured passes
    eager: dict[str, str]  # why other passes ran eagerly, by shape
    exact: str  # with engine.exact=rows, what the comparison of rows gave at load
    layers: str  # ``fused``, or why passes run the model's own layers


class ArtifactInfo(TypedDict, total=False):
    """A file that a method read."""

    path: str
    bytes: int
    sha256: str
    header: JsonObject  # of a table's file


class RowTimes(TypedDict):
    """The cost of passes by their rows."""

    context: int
    seconds: dict[str, float]
    prices: NotRequired[dict[str, list[float]]]
    """By rows, a pass's time over that of one row in the same round: its median and the ends of
    that median's 95 % interval, or the median alone where passes were too slow for six rounds.
    Predicted times have none."""


class _Loaded(_Node):
    """A model as it was loaded."""

    id: str | None = None
    """Hub id, local folder, or ``random``."""

    revision: str | None = None
    weights_hash: str | None = None
    dtype: str | None = None
    device: str | None = None
    parameters: int | None = None
    vocab_size: int | None = None
    packed: JsonObject | None = None
    passes: Passes | None = None
    self_check: JsonObject | None = None
    """Errors of our logits, and of the model's own passes, at load."""


class DraftInfo(_Loaded):
    """A label's draft model."""


class ModelInfo(_Loaded):
    """The target."""

    name: str | None = None
    """In ``conf/model``, of a cost run."""

    shape: bool | None = None
    """Whether the weights were random."""

    weights: str | None = None
    """Other than float32 that passes read."""

    eos_ids: list[int] | None = None
    context_length: int | None = None
    tokenizer_hash: str | None = None
    template_sha: str | None = None
    weight_bytes: int | None = None
    read_bytes_per_s: float | None = None
    """The device's fastest read of as many bytes as the weights have, of all in the run."""

    row_times: RowTimes | None = None
    overlap: str | None = None
    """How drafters overlapped with the target's passes."""

    overlapping: list[str] | None = None
    """Labels that drafted during those passes, if the clock inside the steps could not separate the
    two."""

    threads: int | None = None
    artefacts: dict[str, dict[str, ArtifactInfo]] | None = None
    drafts: dict[str, DraftInfo] = Field(default_factory=dict)
    memory: dict[str, dict[str, int]] = Field(default_factory=dict)
    """By label, bytes of weights and caches of ``target`` and ``draft``."""

    measured: dict[str, dict[str, int]] = Field(default_factory=dict)
    """By label, what its drafter measured in ``setup``."""

    peers: JsonObject | None = None
    """The model that transformers' own loops ran on."""

    audit: JsonObject | None = None
    """The audit's tolerance for a near tie, and how it was measured."""


class LabelInfo(_Node):
    """An entry of the run."""

    method: str | None = None
    method_version: int | None = None
    state_scope: str | None = None
    knobs: JsonObject = Field(default_factory=dict)
    budget: str | None = None
    """Where the settings are from: ``tuned``, ``published`` or ``typed``."""

    pair: JsonObject | None = None
    """The partner in a combined method."""


class Start(_Node):
    """A process that began or resumed the run."""

    at: str | None = None
    host: str | None = None
    pid: int | None = None
    records_found: int = 0
    blocks_redone: int = 0


class RunManifest(_Node):
    """``manifest.json``."""

    schema_version: int = SCHEMA_VERSION
    folder_id: str | None = None
    """Made up for each folder; the run key is the same on every machine."""

    run_key: str | None = None
    status: str | None = None
    """``running``, ``complete``, ``interrupted`` or ``failed``."""

    exit_code: int | None = None
    config: JsonObject = Field(default_factory=dict)
    identity: JsonObject | None = None
    """The part of ``config`` that may move a number."""

    overrides: list[str] = Field(default_factory=list)
    swept: bool | None = None
    labels: dict[str, LabelInfo] = Field(default_factory=dict)
    """In the order of the interleaving."""

    baseline: str | None = BASELINE
    seed: int = 0
    n_cases: int | None = None
    prompt_set_hash: str | None = None
    hardware: Hardware = Field(default_factory=Hardware)
    """This and the next four as `specbench.system.environment.describe` gives them."""

    versions: dict[str, str] = Field(default_factory=dict)
    git: GitState | None = None
    code: str | None = None
    cuda_settings: CudaSettings = Field(default_factory=dict)
    forced_resume: bool = False
    starts: list[Start] = Field(default_factory=list)
    model: ModelInfo | None = None
    ended_at: str | None = None
    surface: JsonObject | None = None
    """Model and machine of the cost surface that a replay's times are predicted with."""

    traces: JsonObject | None = None
    replay: dict[str, str] | None = None
    """By label, whether its steps are exact."""

    replay_s: float | None = None
    left_out: dict[str, str] | None = None
    notes: list[str] | None = None
    servers: dict[str, JsonObject] | None = None
    """By label, the engine that answered, as it describes itself (``runner=serve``)."""

    synthetic: bool | None = None
    imported: JsonObject | None = None
    merged_from: list[str] | None = None
    mixed_conditions: list[str] | None = None
    """What differed among these parts' hardware, versions and code."""

    files: dict[str, str] | None = None
    """SHA-256 of each file that the run left when it was done."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a run folder.

        Raises:
            specbench.storage.jsonl.RecordError: it cannot be read, or another version wrote it.
        """
        path = folder / MANIFEST
        data = jsonl.read_json(path)
        try:
            version = data.get("schema_version")
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {version!r}, it must be {SCHEMA_VERSION}")
            return cls.from_json(data)
        except ValueError as error:
            raise jsonl.RecordError(
                f"{path}: {field_error(error)}. Use the version of the program that wrote it."
            ) from error

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest."""
        jsonl.write_json(folder / MANIFEST, self.to_json())

    def finish(self, folder: Path, names: Iterable[str]) -> None:
        """Write the manifest of a finished run, and ``DONE`` last, which vouches for it.

        ``names``: of the run's other files; the manifest vouches for those that are there.
        """
        present = [name for name in names if (folder / name).is_file()]
        self.files = {name: file_sha256(folder / name) for name in present}
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
            exists = path.is_file()
            optional = needed is not None and name not in needed
            if file_sha256(path) != digest if exists else not optional:
                state = "was changed" if exists else "is missing"
                keep = f"delete {done} and repeat the command, which keeps what is whole, or "
                raise jsonl.RecordError(
                    f"{path} {state} after the run was done, so its numbers are not shown. Put the "
                    f"file back, {'' if name == MANIFEST else keep}or measure again: fresh=true."
                )

    @property
    def timed_model(self) -> ModelInfo:
        """The model that times belong to: the cost surface's, where they are predicted."""
        if self.surface:
            return ModelInfo.from_json(self.surface.get("model") or {})
        return self.model or ModelInfo()

    @property
    def timed_hardware(self) -> Hardware:
        """The machine that times belong to, likewise."""
        machine = self.surface.get("machine") or {} if self.surface else {"hardware": self.hardware}
        return machine.get("hardware") or Hardware()

    @property
    def batch_size(self) -> int:
        """Sequences that our engine decoded at once."""
        return int(self.setting("batch", "size") or 1)

    @property
    def shard(self) -> tuple[int, int] | None:
        """``(i, n)`` of ``shard=i/n``; None for a whole run."""
        i, _, n = str((self.identity or {}).get("shard") or "").partition("/")
        return (int(i), int(n)) if n else None

    @property
    def command(self) -> str:
        """The line to paste: ``python run.py 'compare=[pld,sam]'``."""
        return shlex.join(["python", "run.py", *self.overrides])

    def setting(self, group: str, key: str) -> Any:
        """Look up a value of the composed configuration: ``setting("model", "name")``, or None."""
        node = self.config.get(group)
        return node.get(key) if isinstance(node, dict) else None
