"""Records of the turns of a run, and the names of its files. Free of torch.

Every table is a function of these files, so their numbers are defined here, once.

Definitions:
    new tokens: everything after the prompt up to and including the first EOS or the limit.
    step: one target pass after prefill; it commits the accepted draft tokens and one more.
    MAT (mean accepted tokens, tau): new tokens after the first divided by steps, pooled over a
        set of turns: sum(n_new - 1) / sum(n_target_passes). 1.00 for plain decoding. A turn
        without a step counts in neither sum; a step with an empty draft counts.
    tokens/s: sum(n_decoded) / sum(decode_s); end to end: sum(n_new) / sum(wall_s).
    prefill_s: the target's pass over the prompt alone. decode_s: everything after it, all work of
        the drafter included, of which drafter_setup_s is the part outside the steps.
        wall_s = prefill_s + decode_s.
    block: all labels and turns of one case in one repeat; the unit of interleaving and of resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, get_args

from pydantic import Field, model_validator

from specbench.results.jsonl_schema import (
    Batched,
    Committed,
    Count,
    Ids,
    Line,
    Number,
    OutputIds,
    Seconds,
    Seed,
    TurnKey,
)
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject
from specbench.system.hardware import GpuState

SCHEMA_VERSION = 2  # of a folder: its manifest says it for all of its files

MANIFEST = "manifest.json"
CASES = "cases.jsonl"
ERRORS = "errors.jsonl"
DISTURBED = "disturbed.jsonl"
DIALOGUE = "dialogue.jsonl"
STEPS_LOG = "steps.jsonl"
STEPS = "steps.parquet"
SUMMARY = "summary.json"
DONE = "DONE"
REPEAT = "repeat.md"  # how to repeat and cite the run
CHANGES = "changes.diff"  # what the code had that its commit lacks, new files in full
SOURCES = "sources"  # a folder: methods whose file neither of these holds
SURFACE = "surface.json"  # of a cost run, in place of records
LEFT = (CASES, ERRORS, DISTURBED, STEPS, SUMMARY)  # what tables are made of

# Counts in ``CaseRecord.drafter``: passes that ran eagerly where a CUDA graph was meant to be.
EAGER_PASSES, EAGER_DRAFT_PASSES = "eager_passes", "eager_draft_passes"
LAUNCHED_DRAFTS = "launched_drafts"  # of a trained head, where its own work was no graph
BlockKey: TypeAlias = tuple[int, str]  # repeat and case, or the group that it was decoded in
Timing: TypeAlias = Literal["measured", "predicted", "none"]
TIMINGS: tuple[Timing, ...] = get_args(Timing)
PHASES = ("draft", "verify", "accept", "cache", "observe")  # of a step; ``other`` is the rest
AuditStatus: TypeAlias = Literal["equal", "near_tie", "bug", "not_audited", "differs"]
DIFFERS: AuditStatus = "differs"
AUDIT_STATUSES: tuple[AuditStatus, ...] = get_args(AuditStatus)[:-1]  # of our engine
OWN_ENGINE = "specbench"
LOSSY_VERIFIERS = ("typical",)  # their outputs do not follow the target's distribution
_ROUNDING = 1e-6
_FIELDS_SET: set[str] = set()  # unused, shared by all records (`CaseRecord._check_counts`)


def _absent(value: object) -> bool:
    return value is None or value == ""


def _is_own(engine: str) -> bool:
    return engine == OWN_ENGINE


class Lossless(Line):
    """The audit of a greedy output: its comparison with AR decoding."""

    verdict: AuditStatus = "not_audited"
    """``near_tie``: it differs, but every emitted token's logit is within the dtype's tolerance of
    the maximum; ``bug``: anything else. ``differs``: another engine's output is not the same
    server's plain one; the cause, e.g. rounding, is unknown here."""

    first_diff: int | None = None
    gap: Number | None = None
    """Largest ``max(logits) - logits[token]`` over the output; None where not computed."""


class Served(Line):
    """The additional fields of a turn that a server answered."""

    text: str
    """The answer; prompts and answers may come without ids."""

    n_thought: Count = 0
    """Characters of reasoning at the text's beginning, which no later prompt quotes."""

    n_first: Count = 1
    """Tokens that came together first; all of them, where no decoding could be seen."""

    concurrency: Count
    """Questions asked at once."""

    batch: Count
    batch_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds of the batch; None where a request of it failed or was repeated."""

    requests: Count
    """Requests until the answer came whole."""

    counted: bool = True
    """Whether the server said how many steps it took."""

    where: str = ""
    counters: dict[str, Any] = Field(default_factory=dict)
    bursts: list[Seconds] = Field(default_factory=list)
    """Seconds from the request to each arrival of tokens, those of a step together."""


class CaseRecord(TurnKey):
    """One turn of one case, decoded by one method: a line of ``cases.jsonl``.

    Its key within a run is ``(repeat, case_id, turn, label)``; turns and repeats count from 0.
    Times are seconds. A new record is of a turn not decoded yet; `finished` adds the output.
    """

    run_key: str
    method: str
    method_version: Count = 1
    model: str
    dataset: str
    task: str
    """One of Spec-Bench's six if that applies, else the data set's name for it."""

    category: str
    stream_index: Count
    """Index of the block in the run's order, over all repeats and shards."""

    position: Count = 0
    """Index of the label in the block's order; 0 ran first."""

    status: Literal["ok", "failed", "disturbed"] = "failed"
    n_prompt: Count = 0
    n_new: Count = 0
    """New tokens, EOS included."""

    finish_reason: str | None = None
    """``eos``, ``length`` or ``context``; None for a failed turn."""

    n_target_passes: Count = 0
    n_drafted: Count = 0
    """Draft nodes over all steps, auxiliary ones (``n_aux``) not counted."""

    n_aux: Count = 0
    committed_per_step: Committed = Field(alias="accepted_per_step", default_factory=list)
    """Tokens committed by each step, bonus included; they sum to ``n_new - 1``."""

    prompt_ids: Ids = Field(default_factory=list)
    output_ids: OutputIds = Field(default_factory=list)
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    drafter_setup_s: Seconds = 0.0
    wall_s: Seconds = 0.0
    timing: Timing = "measured"
    """``predicted`` by a cost surface: the target's part; drafting is measured. ``none``: a replay
    without a surface, all times are 0."""

    prediction_error: Annotated[Number | None, Field(exclude_if=_absent)] = None
    """Relative error of a predicted speedup that is not from the choice of prompts
    (`specbench.results.prediction_error`); intervals include it."""

    phase_s: dict[str, Number] | None = None
    drafter: dict[str, Any] = Field(default_factory=dict)
    """The drafter's own counts in the turn (``Drafter.report``): forwards of a draft model, age of
    a store, which row of a step won."""

    state_scope: str
    """How long the drafter kept what it learnt: ``turn``, ``prompt`` or ``run``."""

    verifier: str = "greedy"
    seed: Seed
    """The turn's, derived from the run's; the same for all labels."""

    lossless: Lossless = Lossless()
    cpu_steal: Seconds | None = None
    """This and the next four: what else the machine did while the turn ran, see
    `specbench.system.interference.Interference`; None where unknown."""

    cpu_waiting: Seconds | None = None
    cpu_others: Seconds | None = None
    cpu_load: Seconds | None = None
    gpu: list[GpuState] | None = None
    energy_j: Seconds | None = None
    """Joules the GPUs took over the turn, only under ``measure=energy``."""

    attempt: Count = 0
    """Earlier measurements of the block that were disturbed; they are in ``disturbed.jsonl``."""

    disturbed_by: str = ""
    started_at: str = ""
    host: str = ""
    n_retokenized: Count | None = None
    """For AR decoding, the tokens that Spec-Bench's ``speed.py`` counts in the output: its text
    tokenized again, minus one; None if not counted."""

    engine: Annotated[str, Field(exclude_if=_is_own)] = OWN_ENGINE
    """What decoded: ours, or another one with its version (``runner=serve``), whose turns may lack
    ids and single steps."""

    numerics: Annotated[str, Field(exclude_if=_absent)] = ""
    served: Annotated[Served | None, Field(exclude_if=_absent)] = None
    batch: Annotated[Batched | None, Field(exclude_if=_absent)] = None
    """None: the turn was decoded alone."""

    prompt_sha: Annotated[str, Field(exclude_if=_absent)] = ""
    """SHA-256 of ids that were not kept (``scripts/keep_run.py``), as ``output_sha``."""

    output_sha: Annotated[str, Field(exclude_if=_absent)] = ""
    forced_resume: bool = False
    """Whether the run was resumed with ``resume=force`` on other hardware, versions or code before
    this record was made."""

    def finished(
        self, output_ids: Sequence[int], committed: Sequence[int], **measured: Any
    ) -> Self:
        """Return the same turn decoded; ``committed`` has each step's tokens, bonus included."""
        decoded = {
            "status": "ok",
            "n_new": len(output_ids),
            "output_ids": [int(token) for token in output_ids],
            "n_target_passes": len(committed),
            "committed_per_step": [int(count) for count in committed],
        }
        return self.replace(**(decoded | measured))

    @property
    def n_decoded(self) -> int:
        """Tokens that ``decode_s`` is the time of: all after those that came first."""
        return max(0, self.n_new - (self.served.n_first if self.served else 1))

    @property
    def lossy(self) -> bool:
        """True if the verifier changes the distribution of the output."""
        return self.verifier in LOSSY_VERIFIERS

    @property
    def unit(self) -> str:
        """The unit of measurement and of the bootstrap: the case, or its group."""
        return self.case_id if self.batch is None else f"group {self.batch.group}"

    @property
    def block(self) -> BlockKey:
        """The unit in its repeat, which counts whole or not at all."""
        return self.repeat, self.unit

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        """Refuse fields that contradict each other."""
        # One set for all: a run holds thousands of records, and each set of its own takes 2 kB.
        object.__setattr__(self, "__pydantic_fields_set__", _FIELDS_SET)
        steps, committed = len(self.committed_per_step), sum(self.committed_per_step)
        if self.prompt_ids and len(self.prompt_ids) != self.n_prompt:
            raise ValueError(f"n_prompt is {self.n_prompt}, prompt_ids has {len(self.prompt_ids)}")
        if self.status != "failed":
            self._check_times()
        foreign = self.engine != OWN_ENGINE
        without = not self.output_ids and (foreign or self.output_sha)
        if len(self.output_ids) != self.n_new and not without:
            raise ValueError(f"n_new is {self.n_new}, output_ids has {len(self.output_ids)}")
        if foreign and not steps:
            return self  # a server that counts says totals
        if steps != self.n_target_passes:
            raise ValueError(
                f"n_target_passes is {self.n_target_passes}, accepted_per_step has {steps}"
            )
        if self.n_new and committed != self.n_new - 1:
            raise ValueError(
                f"accepted_per_step sums to {committed}, n_new - 1 is {self.n_new - 1}"
            )
        return self

    def _check_times(self) -> None:
        """Check a finished turn's times; 0 is valid only where no step was timed."""
        parts = self.prefill_s + self.decode_s
        if self.timing == "none":
            if self.wall_s or parts:
                raise ValueError("it has times, although timing is none")
        elif not self.wall_s:
            raise ValueError("wall_s is 0, and a finished turn takes time")
        elif parts and abs(parts - self.wall_s) > _ROUNDING * self.wall_s:
            raise ValueError(f"wall_s is {self.wall_s}, prefill_s + decode_s is {parts}")
        elif parts and self.n_target_passes and self.n_decoded and not self.decode_s:
            raise ValueError(f"decode_s is 0, and {self.n_target_passes} steps take time")


Key = TypeVar("Key")


def group_by(
    records: Iterable[CaseRecord], key: Callable[[CaseRecord], Key]
) -> dict[Key, list[CaseRecord]]:
    """Put records together that have the same key, in their order."""
    groups: dict[Key, list[CaseRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def read_records(
    path: Path, *, run_key: str | None = None, labels: Collection[str] = ()
) -> tuple[list[CaseRecord], bool]:
    """Read the records of a ``cases.jsonl``, or of its folder; each key is there once.

    Args:
        path: the file or the folder; in ``disturbed.jsonl`` a key may occur once per attempt.
        run_key: of the run that all of them must be of; None takes any.
        labels: of that run; where there are none, any.

    Returns:
        The records and whether the last line was cut off (and is left out).

    Raises:
        specbench.storage.jsonl.RecordError: a line is not a valid record, of another run, or of a
            turn that an earlier line has.
    """
    path = path / CASES if path.is_dir() else path
    first: dict[tuple[Any, ...], int] = {}

    def parse(line: JsonObject) -> CaseRecord:
        record = CaseRecord.from_json(line)
        if run_key is not None and record.run_key != run_key:
            raise ValueError(f"run_key is {record.run_key!r}, this folder's run is {run_key!r}")
        if labels and record.label not in labels:
            raise ValueError(f"label {record.label!r} is not one of {', '.join(labels)}")
        key = (*record.key, record.attempt if path.name == DISTURBED else 0)
        if key in first:
            raise ValueError(
                f"label {record.label}, case {record.case_id}, turn {record.turn}, repeat "
                f"{record.repeat} is in line {first[key]} already"
            )
        first[key] = len(first) + 1  # each line before this one has a key of its own
        return record

    return jsonl.read_jsonl(path, parse)
