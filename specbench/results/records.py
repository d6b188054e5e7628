"""What a run writes to disk: case records, step traces, manifest. Free of torch.

Every table is a function of these files, so their numbers are defined here, once.

Definitions:
    new tokens: everything after the prompt up to and including the first EOS or the limit.
    step: one target pass after prefill; it commits the accepted draft tokens and one more.
    MAT (mean accepted tokens, tau): new tokens after the first divided by steps, pooled over a
        set of turns: sum(n_new - 1) / sum(n_target_passes). 1.00 for plain decoding. A turn
        without a step counts in neither sum; a step with an empty draft counts.
    tokens/s: sum(n_new - 1) / sum(decode_s); end to end: sum(n_new) / sum(wall_s).
    prefill_s: the target's pass over the prompt alone. decode_s: everything after it, all work of
        the drafter included, of which drafter_setup_s is the part outside the steps.
        wall_s = prefill_s + decode_s.
    block: all labels and turns of one case in one repeat; the unit of interleaving and of resume.

Files of a run folder:
    manifest.json, cases.jsonl, errors.jsonl, disturbed.jsonl (measured again), dialogue.jsonl,
    states/ (record=states), steps.jsonl (while running),
    steps.parquet, summary.json, DONE (last).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, Strict, TypeAdapter

from specbench.results import lines
from specbench.results.lines import Batched, Count, Seconds, Seed, Text
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject
from specbench.system.noted import GpuState

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
STATUSES = ("ok", "failed", "disturbed")
TIMINGS = ("measured", "predicted", "none")
PHASES = ("draft", "verify", "accept", "cache", "observe")  # of a step; ``other`` is the rest
VERDICTS = ("equal", "near_tie", "bug", "not_audited")
DIFFERS = "differs"  # the verdict on another engine's output that is not its own plain one
OWN_ENGINE = "specbench"
_COMMITTED_KEY = "accepted_per_step"  # of the tokens committed by step, in files
_ROUNDING = 1e-6
LOSSY_VERIFIERS = ("typical",)  # their outputs do not follow the target's distribution


@dataclass(frozen=True, slots=True)
class Lossless:
    """How a greedy output compares with plain decoding.

    Attributes:
        verdict: ``equal``; ``near_tie`` (differs, but every emitted token's logit is within the
            dtype's tolerance of the maximum); ``bug`` (anything else); ``not_audited``. Of another
            engine's answer ``differs``: it is not the same server's plain one, and nobody here can
            say whether rounding is why.
        first_diff: index into ``output_ids`` of the first difference, None where there is none.
        gap: largest ``max(logits) - logits[token]`` over the output, None where not computed.
    """

    verdict: Annotated[Text, lines.one_of((*VERDICTS, DIFFERS))] = "not_audited"
    first_diff: Annotated[int, Strict()] | None = None
    gap: lines.Number | None = None


Said: TypeAlias = Literal["", "steps", "positions", "totals", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server's turn says besides.

    Attributes:
        text: the answer; prompts and answers may come without ids.
        concurrency: questions asked at once; ``batch``: which of these, from 0 in the run.
        batch_s: seconds of the batch; None where a request of it failed or was repeated.
        requests: how often the question was asked until its answer came whole.
        counted: whether the server said how many steps it took.
        counters: in the server's own words.
        where: the server's address.
        bursts: seconds from the request to each arrival of tokens, those of a step together.
        batch_passes: of the server for the whole batch, its prompts' included, where it says so.
        accepted_by_position: draft tokens of the whole batch, where the server counts those.
        said: of drafts: ``steps``, ``positions``, ``totals`` alone, or ``nothing``.
    """

    text: Text
    concurrency: Count
    batch: Count
    batch_s: Annotated[Seconds, Field(gt=0)] | None = None
    requests: Count
    counted: bool = True
    where: str = ""
    counters: dict[str, Any] = field(default_factory=dict)
    bursts: list[Seconds] = field(default_factory=list)
    batch_passes: Count | None = None
    accepted_by_position: list[Count] = field(default_factory=list)
    said: Said = ""


def _check_counted(counted: dict[str, Any]) -> dict[str, Any]:
    """What tables and the rule of noise add up of what a drafter said."""
    for name, value in counted.items():
        if name.startswith(("accepted_from_", "found_by_")) and (
            type(value) is not int or value < 0
        ):
            raise ValueError(f"counts, and {name} is {value!r}")
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """One turn of one case, decoded by one method: a line of ``cases.jsonl``.

    Its key within a run is ``(repeat, case_id, turn, label)``. Times are seconds.

    Attributes:
        run_key: hash of the configuration that may move a number.
        label: unique name of the entry in this run (default: the method's name).
        method: the method's name; ``method_version``: raised when its numbers may move.
        model: the model's name in ``conf/model``; ``dataset`` in ``conf/dataset``.
        task: one of Spec-Bench's six where that applies, else the data set's own word.
        case_id: the data set's own id.
        turn: from 0; ``repeat``: from 0.
        stream_index: place of the block in the run's order, over all repeats and shards.
        position: place of the label in the block's order (0 ran first).
        n_prompt: tokens of the prompt; ``n_new``: new tokens, EOS included.
        finish_reason: ``eos``, ``length`` or ``context``; None for a failed turn.
        n_target_passes: steps; prefill is not one.
        n_drafted: draft nodes over all steps, auxiliary nodes (``n_aux``) not counted.
        committed_per_step: tokens committed by each step, bonus included; sums to ``n_new - 1``.
            In the file it is ``accepted_per_step``.
        output_ids: ``[n_new]`` the new tokens.
        timing: where the times come from: ``measured``; ``predicted`` by a cost surface (the
            target's part; drafting is measured); ``none``: a replay without a surface, all zero.
        prediction_error: of predicted times, the relative error of the label's speedup that is not
            from the choice of prompts (`specbench.results.prediction_error`); intervals hold it.
        phase_s: seconds by phase, only under ``measure=phases``.
        drafter: what the drafter counted in the turn, in its own words (``Drafter.report``):
            forwards of a draft model, age of a store, which row of a step won.
        state_scope: how long the drafter kept what it learnt: ``turn``, ``prompt`` or ``run``.
        verifier: who decided acceptance.
        seed: the turn's seed, derived from the run's; the same for all labels.
        cpu_steal, cpu_waiting, cpu_others, cpu_load, gpu: what else the machine did while the turn
            ran, see :class:`specbench.system.interference.Interference`; None where unknown.
        energy_j: joules the GPUs took over the turn, only under ``measure=energy``.
        attempt: earlier measurements of the block that were disturbed; they are in
            ``disturbed.jsonl``.
        disturbed_by: what disturbed the turn, in words; else empty. The status is ``disturbed``
            where counters say so, and ``ok`` where it only slowed together with the baseline.
        started_at: UTC, ISO 8601. ``host``: the machine's name.
        n_retokenized: of plain decoding, the tokens that Spec-Bench's ``speed.py`` counts in the
            output: its text tokenized again, minus one; None where nobody counted.
        engine: what decoded: ours, or another one with its version (``runner=serve``), whose
            turns may lack ids and single steps; ``numerics``: what that one keeps weights in.
        served: what a server's turn says besides, see `Served`.
        batch: of a turn that was decoded with others at once, see `Batched`; None: it was alone.
        prompt_sha, output_sha: SHA-256 of ids that were not kept (``scripts/keep_run.py``).
        forced_resume: whether the run was resumed with ``resume=force`` on other hardware,
            versions or code before this record was made.
    """

    run_key: Text
    label: Text
    method: Text
    method_version: Count = 1
    model: Text
    dataset: Text
    task: Text
    category: Text
    case_id: Text
    turn: Count
    repeat: Count
    stream_index: Count
    position: Count = 0
    status: Annotated[Text, lines.one_of(STATUSES)] = "failed"  # until `finished`
    n_prompt: Count = 0
    n_new: Count = 0
    finish_reason: Text | None = None
    n_target_passes: Count = 0
    n_drafted: Count = 0
    n_aux: Count = 0
    committed_per_step: Annotated[lines.Committed, Field(alias=_COMMITTED_KEY)] = field(
        default_factory=list
    )
    prompt_ids: lines.Ids = field(default_factory=list)
    output_ids: lines.OutputIds = field(default_factory=list)
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    drafter_setup_s: Seconds = 0.0
    wall_s: Seconds = 0.0
    timing: Annotated[Text, lines.one_of(TIMINGS)] = "measured"
    prediction_error: lines.Number | None = None
    phase_s: dict[str, lines.Number] | None = None
    drafter: Annotated[dict[str, Any], AfterValidator(_check_counted)] = field(default_factory=dict)
    state_scope: Text
    verifier: Text = "greedy"
    seed: Seed
    lossless: Lossless = field(default_factory=Lossless)
    cpu_steal: Seconds | None = None
    cpu_waiting: Seconds | None = None
    cpu_others: Seconds | None = None
    cpu_load: Seconds | None = None
    gpu: list[GpuState] | None = None
    energy_j: Seconds | None = None
    attempt: Count = 0
    disturbed_by: Text = ""
    started_at: Text = ""
    host: Text = ""
    n_retokenized: Count | None = None
    engine: Text = OWN_ENGINE
    numerics: Text = ""
    served: Served | None = None
    batch: Batched | None = None
    prompt_sha: Text = ""
    output_sha: Text = ""
    forced_resume: lines.Flag = False

    def finished(self, output_ids: list[int], committed: list[int], **measured: Any) -> CaseRecord:
        """The same turn decoded; ``committed`` has each step's tokens, bonus included."""
        return replace(
            self,
            status="ok",
            n_new=len(output_ids),
            output_ids=output_ids,
            n_target_passes=len(committed),
            committed_per_step=committed,
            **measured,
        )

    @property
    def lossy(self) -> bool:
        """Whether the verifier changes the distribution that the output follows."""
        return self.verifier in LOSSY_VERIFIERS

    @property
    def key(self) -> tuple[int, str, int, str]:
        return (self.repeat, self.case_id, self.turn, self.label)

    @property
    def unit(self) -> str:
        """What is measured by itself, and drawn in a bootstrap: the case, or its group."""
        return self.case_id if self.batch is None else f"group {self.batch.group}"

    @property
    def turn_id(self) -> lines.TurnLine:
        """The key as the lines of other files spell it."""
        return {
            "label": self.label,
            "case_id": self.case_id,
            "turn": self.turn,
            "repeat": self.repeat,
        }

    def to_json(self) -> JsonObject:
        """A plain dict for one line of ``cases.jsonl``; a gap that is not finite becomes None."""
        line = {_FILE_KEYS.get(name, name): value for name, value in asdict(self).items()}
        gap = self.lossless.gap
        if gap is not None and not math.isfinite(gap):
            line["lossless"]["gap"] = None
        if self.engine == OWN_ENGINE:
            for name in ("engine", "numerics", "served"):
                del line[name]
        if self.batch is None:
            del line["batch"]
        if self.prediction_error is None:
            del line["prediction_error"]
        if not self.output_sha:
            del line["prompt_sha"], line["output_sha"]
        for name in (_COMMITTED_KEY, "prompt_ids", "output_ids"):
            line[name] = [int(value) for value in line[name]]
        return line

    @staticmethod
    def from_json(line: JsonObject) -> CaseRecord:
        """The record of a line. Keys this version does not know are ignored.

        Raises:
            ValueError: a field is missing or the counts contradict each other.
        """
        if missing := _PROMISED - line.keys():
            raise ValueError(f"no field {', '.join(sorted(missing))}")
        record = _parse_record(line)
        record._check()
        return record

    def _check(self) -> None:
        """That the fields do not contradict each other."""
        n_committed = sum(self.committed_per_step)
        if self.prompt_ids and len(self.prompt_ids) != self.n_prompt:
            raise ValueError(f"n_prompt is {self.n_prompt}, prompt_ids has {len(self.prompt_ids)}")
        if self.status != "failed":
            self._check_times()
        foreign = self.engine != OWN_ENGINE
        without = not self.output_ids and (foreign or self.output_sha)
        if len(self.output_ids) != self.n_new and not without:
            raise ValueError(f"n_new is {self.n_new}, output_ids has {len(self.output_ids)}")
        if foreign and not self.committed_per_step:
            return  # a server that counts says totals
        if len(self.committed_per_step) != self.n_target_passes:
            raise ValueError(
                f"n_target_passes is {self.n_target_passes}, "
                f"{_COMMITTED_KEY} has {len(self.committed_per_step)}"
            )
        if self.n_new and n_committed != self.n_new - 1:
            raise ValueError(
                f"{_COMMITTED_KEY} sums to {n_committed}, n_new - 1 is {self.n_new - 1}"
            )

    def _check_times(self) -> None:
        """Of a finished turn: 0 only where a clock may say it, as after the prompt's pass alone."""
        parts = self.prefill_s + self.decode_s
        if self.timing == "none":
            if self.wall_s or parts:
                raise ValueError("it has times, although timing is none")
            return
        if not self.wall_s:
            raise ValueError("wall_s is 0, and a finished turn takes time")
        if parts and abs(parts - self.wall_s) > _ROUNDING * self.wall_s:
            raise ValueError(f"wall_s is {self.wall_s}, prefill_s + decode_s is {parts}")
        if parts and self.n_target_passes and not self.decode_s:
            raise ValueError(f"decode_s is 0, and {self.n_target_passes} steps take time")


_parse_record: Callable[[object], CaseRecord] = TypeAdapter(CaseRecord).validate_python
_FILE_KEYS = {"committed_per_step": _COMMITTED_KEY}
# All but these are promised to every reader of the files.
_OPTIONAL_FIELDS = (
    "method_version position n_aux timing prediction_error phase_s drafter verifier cpu_steal "
    "cpu_waiting cpu_others cpu_load gpu energy_j attempt disturbed_by started_at host "
    "n_retokenized engine numerics served batch prompt_sha output_sha forced_resume"
)
_PROMISED = {_FILE_KEYS.get(f.name, f.name) for f in fields(CaseRecord)} - {
    *_OPTIONAL_FIELDS.split()
}


def read_records(
    path: Path, *, run_key: str | None = None, labels: Collection[str] = ()
) -> tuple[list[CaseRecord], bool]:
    """The records of a ``cases.jsonl``, or of the folder that holds it; each key is there once.

    Args:
        path: the file or the folder; in ``disturbed.jsonl`` a key may stand once an attempt.
        run_key: of the run that all of them must be of; None takes any.
        labels: of that run; where there are none, any.

    Returns:
        The records and whether the last line was cut off (and is left out).

    Raises:
        specbench.storage.jsonl.RecordError: a line is not a valid record, of another run, or of a
            turn that an earlier line has already.
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
