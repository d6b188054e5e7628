"""Load run folders into memory; reads files only, no torch and no network."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from specbench.arrays import FloatArray
from specbench.errors import ResultsError
from specbench.results.cells import NumberCell
from specbench.results.conditions import code_text, gpu_names, hardware_text, thinking
from specbench.results.jsonl_schema import ErrorLine, error_line, read_steps
from specbench.results.manifest import LabelInfo, ModelInfo, RunManifest
from specbench.results.records import (
    CASES,
    DISTURBED,
    DONE,
    ERRORS,
    MANIFEST,
    OWN_ENGINE,
    STEPS,
    SURFACE,
    CaseRecord,
    read_records,
)
from specbench.results.statistics.counted import left_out, wrong_outputs
from specbench.results.statistics.roofline import number_format
from specbench.storage.jsonl import PACKED, JsonObject, read_json, read_jsonl

# An absolute path of at least two parts, or one below the home folder.
_PATH = re.compile(r"(?<![\w.:/])(?:~|/[^\s/,;:'\"\]})]+)(?:/[^\s/,;:'\"\]})]+)+/?")
_NO_DTYPE = "dtype not recorded"
_RESAMPLES = 2000


@dataclass(frozen=True)
class Surface:
    """Times of a run's batch passes, from its ``surface.json``.

    Attributes:
        axes: values of ``k``, ``w`` and ``context``; empty where no batch was measured.
        samples_s: seconds ``[k, w, context, repeat]``.
    """

    axes: Mapping[str, Sequence[int]]
    samples_s: FloatArray

    @classmethod
    def read(cls, path: Path) -> Surface:
        batch = read_json(path).get("batch") or {"axes": {}, "samples_s": []}
        return cls(batch["axes"], np.asarray(batch["samples_s"], dtype=float))

    @property
    def repeats(self) -> int:
        return int(self.samples_s.shape[-1])

    def slowdowns(self, context: int, seed: int) -> dict[tuple[int, int], NumberCell]:
        """Compute by (k, w) a batch pass's time over a pass of one token at the same context.

        The interval is the bootstrap's, of the ratio of medians over the repeated passes.
        """
        ks, ws, repeats = self.axes["k"], self.axes["w"], self.repeats
        samples = self.samples_s[:, :, self.axes["context"].index(context), :]
        drawn = np.random.default_rng(seed).integers(0, repeats, (_RESAMPLES, repeats))
        medians, resampled = np.median(samples, axis=-1), np.median(samples[..., drawn], axis=-1)
        single = ks.index(1), ws.index(0)
        low, high = np.quantile(resampled / resampled[single], (0.025, 0.975), axis=-1)
        return {
            (k, w): NumberCell(
                float(medians[i, j] / medians[single]),
                (float(low[i, j]), float(high[i, j])) if repeats > 1 and (i, j) != single else None,
            )
            for i, k in enumerate(ks)
            for j, w in enumerate(ws)
        }


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder.

    Attributes:
        path: the folder.
        records: all of its records, in the order they were written; none of a cost run.
        complete: whether the run reached its end; also False if the last line is cut off.
        surface: the cost surface that the run measured; None of others.
    """

    path: Path
    manifest: RunManifest
    records: Sequence[CaseRecord]
    complete: bool
    surface: Surface | None = None

    @property
    def model(self) -> str:
        """The model's name in ``conf/model``, for a cost run from its manifest."""
        named = self.records[0].model if self.records else self.manifest.setting("model", "name")
        return str(named)

    @property
    def dataset(self) -> str:
        return self.records[0].dataset

    @property
    def dtype(self) -> str:
        """Format of the arithmetic, and of the weights if shorter (``engine.weights``)."""
        dtype = self._loaded.dtype or self.manifest.setting("model", "dtype")
        return number_format({"dtype": dtype or _NO_DTYPE, "weights": self._loaded.weights})

    @property
    def engine(self) -> str:
        """The engine that decoded: ours, or another one with its version and address."""
        servers = (self.manifest.servers or {}).values()
        elsewhere = {str(s["where"]) for s in servers if not s.get("this_machine", True)}
        return ", ".join([self.records[0].engine if self.records else OWN_ENGINE, *elsewhere])

    @property
    def concurrency(self) -> int:
        """Concurrent requests of a server; 1 for our engine."""
        return int(self.manifest.setting("server", "concurrency") or 1)

    @property
    def batch(self) -> int:
        """Sequences in a static batch of our engine."""
        return int(self.manifest.setting("batch", "size") or 1)

    @property
    def temperature(self) -> float:
        return float(self.manifest.setting("generation", "temperature") or 0.0)

    @property
    def max_new_tokens(self) -> int | None:
        limit = self.manifest.setting("generation", "max_new_tokens")
        return None if limit is None else int(limit)

    @property
    def experiment(self) -> str | None:
        typed = (o.lstrip("+").partition("=") for o in self.manifest.overrides)
        return next((value for key, _, value in typed if key == "experiment"), None)

    @property
    def seed(self) -> int:
        return self.manifest.seed

    @property
    def estimator(self) -> str:
        return str(self.manifest.config.get("estimator") or "paired")

    @property
    def synthetic(self) -> bool:
        return bool(self.manifest.synthetic)

    @property
    def phases(self) -> bool:
        """True if phases were measured, which makes speeds unfit for headlines."""
        return bool(self.manifest.setting("measure", "phases"))

    @property
    def gpus(self) -> list[str]:
        return gpu_names(self.manifest)

    @property
    def hardware(self) -> str:
        return hardware_text(self.manifest)

    @property
    def code(self) -> str:
        return code_text(self.manifest)

    @property
    def _loaded(self) -> ModelInfo:
        return self.manifest.model or ModelInfo()

    def parameters(self, label: str | None = None) -> int | None:
        """Return the parameters of the target, or of a label's draft model, if recorded."""
        model = self._loaded if label is None else self._loaded.drafts.get(label)
        return model.parameters if model else None

    def memory(self, label: str) -> Mapping[str, int]:
        """Return bytes of weights and caches by model (``target``, ``draft``)."""
        return self._loaded.memory.get(label, {})

    def tells_draft_time(self, label: str) -> bool:
        """Return whether the clock could separate a label's drafting from the target's passes."""
        overlapping = self._loaded.overlapping
        serial = self._loaded.overlap == "serial"
        return serial or (overlapping is not None and label not in overlapping)

    def knobs(self, label: str) -> JsonObject:
        knobs = self.manifest.labels.get(label, LabelInfo()).knobs
        server = knobs.get("server")  # a server's way of drafting has the server's keys
        return server if isinstance(server, dict) else knobs

    def terms(self, label: str) -> Mapping[str, object]:
        """Return what a label's numbers depend on besides its knobs, as far as it was recorded.

        ``dtype``, ``max_new_tokens``, ``prompt_form`` of the data set, ``template`` of the prompts
        and whether it asks for ``thinking``, ``draft`` (the last part of its id), and as sets
        ``questions`` (ids of the cases) and ``corpus`` (what the method's files were made from).
        """
        draft = self._loaded.drafts.get(label)
        files = (self._loaded.artefacts or {}).get(label, {}).values()
        corpora = {(file.get("header", {}).get("corpus") or {}).get("name") for file in files}
        terms = {
            "dtype": None if self.dtype == _NO_DTYPE else self.dtype,
            "max_new_tokens": self.max_new_tokens,
            "prompt_form": self.manifest.setting("dataset", "prompt_form"),
            "template": self.manifest.setting("model", "template"),
            "thinking": thinking(self.manifest),
            "draft": Path(draft.id).name if draft and draft.id else None,
            "questions": {record.case_id for record in self.records},
            "corpus": corpora - {None},
        }
        return {key: value for key, value in terms.items() if value is not None}

    @property
    def timing(self) -> str:
        """Source of the times: ``measured``, ``predicted`` by a cost surface, or ``none``."""
        return self.records[0].timing if self.records else "measured"

    @functools.cached_property
    def errors(self) -> Sequence[ErrorLine]:
        """The lines of ``errors.jsonl``."""
        return read_jsonl(self.path / ERRORS, error_line)[0]

    @functools.cached_property
    def superseded(self) -> Sequence[CaseRecord]:
        """The measurements that were repeated, in the order they were discarded."""
        return _records(self.path / DISTURBED, self.manifest)[0]

    @functools.cached_property
    def depths(self) -> Mapping[tuple[int, str, int, str], Sequence[int]]:
        """Depth of each step's draft by turn; empty if the run's steps were not recorded."""
        path = self.path / STEPS
        return {trace.key: trace.depth for trace in read_steps(path)} if path.exists() else {}

    @functools.cached_property
    def left_out(self) -> Mapping[str, str]:
        """The labels that do not count, with their reasons."""
        return left_out(self.records, self.manifest, self.errors)

    @functools.cached_property
    def counted(self) -> Sequence[CaseRecord]:
        """The records of the labels that count."""
        return [record for record in self.records if record.label not in self.left_out]

    @functools.cached_property
    def wrong_outputs(self) -> Mapping[str, str]:
        """The labels that may not be ranked because of their outputs."""
        return wrong_outputs(self.records, self.labels)

    @functools.cached_property
    def labels(self) -> list[str]:
        """The labels that count, in the order of the run, the baseline first."""
        recorded = dict.fromkeys(record.label for record in self.counted)
        return [label for label in {**self.manifest.labels, **recorded} if label in recorded]

    @property
    def baseline(self) -> str | None:
        """The label that speedups refer to, if the run has it."""
        return self.manifest.baseline if self.manifest.baseline in self.labels else None


def find_runs(paths: Iterable[Path | str], names: Sequence[str] = (CASES, MANIFEST)) -> list[Path]:
    """List all folders with these files at or below the given ones, sorted; each once.

    Raises:
        ResultsError: a path is no folder.
    """
    folders: dict[Path, Path] = {}
    for root in map(Path, paths):
        if not root.is_dir():
            raise ResultsError(f"{root} is not a folder. Name a run folder or one that holds some.")
        for folder, below, files in os.walk(root):
            below.sort()
            if set(names) <= {name.removesuffix(PACKED) for name in files}:
                folders.setdefault(Path(folder).resolve(), Path(folder))
    return sorted(folders.values())


def load_runs(paths: Iterable[Path | str]) -> list[Run]:
    """Read every run at or below the given folders.

    Runs without any record yet are left out; incomplete ones are marked.

    Raises:
        ResultsError: a path does not exist.
        specbench.storage.jsonl.RecordError: a manifest cannot be used, or ``cases.jsonl`` is
            damaged.
    """
    runs = []
    for path in find_runs(paths):
        manifest = RunManifest.read(path)
        done = (path / DONE).exists()
        if done:
            manifest.check_files(path)
        records, truncated = _records(path / CASES, manifest)
        if records:
            runs.append(Run(path, manifest, records, done and not truncated))
    return runs


def _records(path: Path, manifest: RunManifest) -> tuple[list[CaseRecord], bool]:
    return read_records(path, run_key=manifest.run_key, labels=manifest.labels)


def load_surfaces(paths: Iterable[Path | str], *, by_hand: bool = False) -> list[Run]:
    """Read the cost surfaces of experiments (``by_hand``: of all runs) below the folders.

    Raises:
        ResultsError: a path does not exist.
        specbench.storage.jsonl.RecordError: a manifest or a surface cannot be used.
    """
    runs = [
        Run(path, RunManifest.read(path), (), True, Surface.read(path / SURFACE))
        for path in find_runs(paths, (SURFACE, MANIFEST, DONE))
    ]
    return [run for run in runs if by_hand or run.experiment is not None]


def usable_runs(
    paths: Sequence[Path | str], include_incomplete: bool = False, surfaces: bool = False
) -> tuple[list[Run], list[Run]]:
    """Read the runs to show, and the incomplete ones that are not.

    A run is left out if another one here has its records: a merged shard, or a recording
    of plain decoding only that another run replays. Cost surfaces are runs without records.

    Raises:
        ResultsError: nothing is left to show; says what to type.
    """
    runs = load_runs(paths)
    merged = {run.manifest.run_key for run in runs if run.manifest.merged_from}
    replayed = {run.manifest.traces.get("run_key") for run in runs if run.manifest.traces}
    usable: list[Run] = []
    hidden: list[Run] = []
    for run in runs:
        key = run.manifest.run_key
        shard = run.manifest.shard is not None and key in merged
        if not shard and not (key in replayed and run.labels == [run.baseline]):
            (usable if run.complete or include_incomplete else hidden).append(run)
    usable += load_surfaces(paths) if surfaces else []
    if usable:
        return usable, hidden
    where = ", ".join(map(str, paths))
    if hidden:
        raise ResultsError(
            f"no complete run at or below {where}; incomplete: "
            f"{', '.join(str(run.path) for run in hidden)}. Repeat their commands to finish them, "
            "or add --incomplete."
        )
    raise ResultsError(
        f"no run at or below {where}: a run folder holds {MANIFEST} and {CASES} with at least one "
        "record. Make one: python run.py"
    )


def last_parts(text: str) -> str:
    """Return the text with each absolute path in it cut to its last part: ``…/b.jsonl``."""
    return _PATH.sub(lambda path: f"…/{PurePath(path[0]).name}", text)
