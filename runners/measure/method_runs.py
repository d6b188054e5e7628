"""The methods of a run as live objects: built, checked against the run, set up, restored."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import hydra.utils
import numpy as np

from runners.job import Entry, Job
from specbench.arrays import IntArray
from specbench.artifacts import resolve
from specbench.config.compose import build_model, option_names, pair_name
from specbench.config.schema import RunConfig, draft_weights
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftTree, StepOutcome
from specbench.errors import (
    ArtifactError,
    ConfigurationError,
    MethodCannotRun,
    NeedsNotMet,
    WeightsNotFound,
    first_line,
)
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.models.heads import folder as head_folder
from specbench.results.manifest import ArtifactInfo, DraftInfo, LabelInfo
from specbench.results.records import CaseRecord
from specbench.system import host_memory

if TYPE_CHECKING:  # torch, which a replay does not need
    from transformers import PreTrainedTokenizerBase

    from specbench.models.draft.model import DraftModel

_MASK_BYTES = 4


@dataclass(slots=True)
class MethodRun:
    """One label of the run with its drafter.

    Attributes:
        measured: what the drafter measured in ``setup``, or in an earlier start of the run.
        draft: its draft model and the manifest's entry for it.
        last: the turn that the drafter saw last; None after a reset.
    """

    entry: Entry
    drafter: Drafter
    measured: dict[str, int] = field(default_factory=dict)
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    heads: Mapping[str, Path] = field(default_factory=dict)
    draft: tuple[DraftModel, DraftInfo] | None = None
    last: CaseRecord | None = None

    def seen(self, record: CaseRecord) -> IntArray:
        """Return the tokens of the case's turn before this one, if the drafter still has them."""
        last = self.last
        if last is None or self.drafter.starts_empty(record.turn):
            return NO_TOKENS
        if (last.repeat, last.case_id, last.turn + 1) != record.key[:3]:
            return NO_TOKENS
        return np.array([*last.prompt_ids, *last.output_ids], dtype=np.int64)

    def clone(self, draft: DraftModel | None) -> MethodRun:
        """Copy the label's run for another slot of a batch, before its drafter's setup."""
        cloned_draft = (draft, self.draft[1]) if draft and self.draft else None
        return replace(self, drafter=copy.deepcopy(self.drafter), draft=cloned_draft)

    def forget(self) -> None:
        self.drafter.reset()
        self.last = None

    @property
    def label(self) -> str:
        return self.entry.label

    @property
    def scope(self) -> str:
        return self.drafter.state_scope

    def describe(self) -> LabelInfo:
        """Describe the label for the manifest."""
        return LabelInfo(
            method=self.entry.name,
            method_version=self.drafter.version,
            state_scope=self.scope,
            knobs=dict(self.entry.method),
            budget=self.entry.budget,
            pair=None if self.entry.pair is None else asdict(self.entry.pair),
        )


def build_method_runs(job: Job, drafters: Mapping[str, Drafter] | None = None) -> list[MethodRun]:
    """Instantiate every entry's drafter and check its needs against the run.

    ``drafters``: drafters by label that the caller made; only their needs are checked.

    Raises:
        MethodCannotRun: a method cannot work in this run; says what to change.
        ConfigurationError: a knob is out of range, or a class is not a drafter.
    """
    runs = []
    for entry in job.entries:
        with as_method_cannot_run(entry):
            drafter = (drafters or {}).get(entry.label) or make_drafter(entry)
            _check(drafter, entry, job)
        runs.append(MethodRun(entry, drafter))
    return runs


@contextlib.contextmanager
def as_method_cannot_run(entry: Entry) -> Iterator[None]:
    """Raise what a method lacks inside as MethodCannotRun of its label."""
    try:
        yield
    except (NeedsNotMet, WeightsNotFound, ArtifactError) as error:
        raise MethodCannotRun(entry.label, str(error)) from error


def make_drafter(entry: Entry) -> Drafter:
    """Instantiate the drafter that an entry's node describes, not set up.

    Raises:
        ConfigurationError: a knob is out of range, or the class is not a drafter.
        NeedsNotMet: its knobs need more memory than there is.
    """
    if not issubclass(hydra.utils.get_class(entry.method["_target_"]), Drafter):
        raise ConfigurationError(
            f"method={entry.name}: {entry.method['_target_']} must be a "
            "specbench.decoding.drafter.Drafter."
        )
    knobs = {key: value for key, value in entry.method.items() if key != "server"}
    try:
        drafter: Drafter = hydra.utils.instantiate(knobs, _convert_="all")
    except hydra.errors.InstantiationException as error:
        # Hydra wraps what a constructor raises; our own messages are meant for the user.
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, MemoryError | OverflowError):
            raise _too_large(entry, first_line(error.__cause__)) from error
        raise ConfigurationError(f"method={entry.name} (label {entry.label!r}): {error}") from error
    return drafter


def _check(drafter: Drafter, entry: Entry, job: Job) -> None:
    needs, config = drafter.needs, job.config
    mask = _MASK_BYTES * (needs.max_nodes + 1) ** 2 if needs.layout == "tree" else 0
    if mask > host_memory.total_bytes():
        raise _too_large(entry, f"drafts of up to {needs.max_nodes} nodes take {mask / 1e9:.0f} GB")
    if not needs.sampling and not job.greedy:
        raise NeedsNotMet(
            f"method={entry.name} works only greedily, but generation.temperature="
            f"{config.generation.temperature}. Type generation.temperature=0."
        )
    if needs.draft_model:
        weights_of_draft = draft_weights(entry.draft, config.model)
        if weights_of_draft is None:
            pair = pair_name(entry.name, config.model.name)
            pair_override = f"pair={pair}, " if pair in option_names("pair") else ""
            raise NeedsNotMet(
                f"method={entry.name} needs a draft model for model={config.model.name}, and none "
                f"is named. Type {pair_override}pair.draft.path=FOLDER, pair.draft.id=HUB_ID, or "
                "pair=random_draft, which shows that everything works."
            )
        loading.model_files_present(weights_of_draft)
    for name in needs.heads:
        head_folder.find(name, entry.heads, config.model)
    if drafter.state_scope == "run" and job.shard[1] > 1:
        raise ConfigurationError(
            f"shard={config.shard} cannot be combined with state_scope=run (method="
            f"{entry.name}): every block learns from all before it. Drop shard, or type "
            "state_scope=prompt, and method.state_scope=prompt where it keeps its own."
        )


@contextlib.contextmanager
def as_needs_not_met(entry: Entry) -> Iterator[None]:
    """Raise what ``setup`` cannot allocate inside as NeedsNotMet: its knobs decide that."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:
        too_large = isinstance(error, MemoryError | OverflowError)  # torch and numpy have others
        if too_large or re.search(r"allocate|out of memory|overflow|too (big|large)", str(error)):
            raise _too_large(entry, first_line(error)) from error
        raise


def _too_large(entry: Entry, why: str) -> NeedsNotMet:
    return NeedsNotMet(
        f"method={entry.name} (label {entry.label!r}) does not fit into memory with its knobs: "
        f"{why}. Type smaller ones."
    )


def find_artifacts(
    config: RunConfig, run: MethodRun, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, Path]:
    """Find the artifacts of a label by name; build missing ones where that is allowed.

    Raises:
        NeedsNotMet: one is missing and cannot be built here.
    """
    needed = run.drafter.needs.artifacts
    per_model = any(artifact.per_model for artifact in needed)
    return resolve.resolve(
        needed,
        tokenizer=tokenizer,
        bundled=config.model.embedded,
        cache_dir=Path(config.cache_dir),
        model_key=weights.model_key(config) if per_model else None,
        model_name=build_model(config.model),
    )


def find_heads(config: RunConfig, run: MethodRun) -> dict[str, Path]:
    """Find the folders of a label's heads by name; download those that only the hub has.

    Raises:
        WeightsNotFound: a head's weights are not available.
    """
    names, paths = run.drafter.needs.heads, run.entry.heads
    folders = {n: head_folder.find(n, paths, config.model, fetch=True) for n in names}
    return {name: path for name, path in folders.items() if path is not None}


def describe_files(runs: Iterable[MethodRun]) -> dict[str, dict[str, ArtifactInfo]]:
    """Describe by label its artifacts and the weights of its heads, for the manifest."""
    described = {}
    for run in runs:
        weight_files = {f"head {n}": head_folder.weight_file(p) for n, p in run.heads.items()}
        paths_read = {**run.artifacts, **{n: file for n, file in weight_files.items() if file}}
        if paths_read:
            described[run.label] = {n: resolve.describe(p) for n, p in paths_read.items()}
    return described


def feed(drafter: Drafter, record: CaseRecord, seen: IntArray) -> None:
    """Show a drafter a recorded turn step by step, as if it had drafted nothing."""
    output = np.asarray(record.output_ids, dtype=np.int64)
    state = DecodeState(np.asarray(record.prompt_ids, dtype=np.int64), len(output), seen=seen)
    state.commit(output[:1])
    drafter.begin(state)
    position = 1
    for count in record.committed_per_step:
        committed = output[position : position + count]
        position += count
        state.step += 1
        state.commit(committed)
        drafter.observe(
            state,
            StepOutcome(
                tree=DraftTree.empty(),
                path=NO_TOKENS,
                committed=committed,
                next_tokens=None,
                finished=position == len(output),
            ),
        )
    drafter.end(state)
