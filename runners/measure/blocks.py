"""The one loop over a run's blocks: all labels and turns of a case, interleaved turn by turn.

An `OutputSource` decodes the turns: our engine (`live.py`), a recording (``runners/replay.py``) or
another engine's server (`served.py`). Dialogues, state scopes, failures, records and the comparison
with plain decoding are the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from runners.job import CaseBlock, Job, derive_seed
from runners.measure.interference_rule import by_counters
from runners.measure.method_runs import MethodRun, feed
from runners.run_folder.resumable_files import BlockKey, BlockResult
from specbench.arrays import first_difference
from specbench.errors import CaseFailed, WarmUpFailed, first_line
from specbench.results.jsonl_schema import StepTrace
from specbench.results.records import CaseRecord, Lossless
from specbench.storage.jsonl import DiskError, failure

if TYPE_CHECKING:  # torch, which a finished run does not need
    from specbench.decoding.turn import DecodeResult

log = logging.getLogger(__name__)

# Plain prose with a few repeats, so that drafters that look for repeats draft tokens.
WARM_UP_TEXT = """\
The harbour master keeps two books. In the first book he writes the name of every ship that
enters the harbour, the hour at which it enters, and the depth of water below its keel. In the
second book he writes the name of every ship that leaves the harbour, the hour at which it
leaves, and the cargo that it carries. At the end of the month he compares the two books line by
line: a ship that stands in the first book but not in the second is still in the harbour. When the
numbers do not agree, he walks along the quay and counts the ships himself, because a book can be
wrong and a ship cannot. Then he corrects the books, signs both, and begins a new page.
"""


@dataclass(slots=True)
class Dialogue:
    """The turns that a label's next prompt in a block quotes, or why it has none (``broken``)."""

    pairs: list[tuple[str, str]] = field(default_factory=list)
    broken: CaseFailed | None = None


@dataclass(slots=True)
class Turn:
    """One label's turn of one block, from the prompt to the record.

    Attributes:
        record: its fields so far; its status is ``failed`` until it is finished.
        batch: number of its batch in the run.
        siblings: this turn and those of the labels that ran before in the block, by label.
        slot: its slot in the batch, where ``run`` may have its own drafter.
        trace: its steps, if the engine reports them.
    """

    run: MethodRun
    block: CaseBlock
    record: CaseRecord
    dialogue: Dialogue
    batch: int
    siblings: Mapping[str, Turn]
    slot: int = 0
    trace: StepTrace | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.error = self.dialogue.broken

    @property
    def question(self) -> str:
        return self.block.case.turns[self.record.turn]

    def finish_decoded(
        self, decoded: DecodeResult, step_s: Sequence[float] | None, **measured: Any
    ) -> None:
        """Complete the record of a turn of our own loop, with the trace of its steps.

        ``measured``: further fields of the record.
        """
        self.trace = StepTrace(
            **self.record.turn_id,
            drafted=decoded.drafted_per_step,
            depth=decoded.depth_per_step,
            committed=decoded.committed_per_step,
            sources=None if decoded.sources_per_step is None else [*decoded.sources_per_step],
            step_s=list(step_s) if step_s else None,  # another loop may not report them
        )
        self.record = self.record.finished(
            decoded.output_ids,
            decoded.committed_per_step,
            finish_reason=decoded.finish_reason,
            n_drafted=decoded.n_drafted,
            n_aux=decoded.n_aux,
            **{"drafter": decoded.drafter, **measured},
        )


class OutputSource:
    """Decodes the turns of a run and measures their times.

    Attributes:
        during: the stage in which a turn fails, for ``errors.jsonl``.
        refusals: errors of the warm-up that end the run.
    """

    during = "decode"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, job: Job) -> None:
        self.job = job

    def warm_up(self, run: MethodRun) -> None:
        """Decode a text that is not measured."""
        raise NotImplementedError

    def order(self, block: CaseBlock, batch: int) -> tuple[str, ...]:
        """Return the labels in the order of a block, or of a batch by its first block."""
        return block.order(self.job.labels, self.job.config.seed)

    def begin_batch(self) -> None:
        """Forget what was learnt from earlier blocks and must not speed up the next ones."""

    def for_slot(self, run: MethodRun, slot: int) -> MethodRun:
        """Return the label's run for a slot of a batch, which may have its own drafter."""
        return run

    def begin(self, record: CaseRecord) -> CaseRecord:
        """Fill in what the record says of the engine before the turn is decoded."""
        raise NotImplementedError

    def decode_turns(self, turns: Sequence[Turn]) -> None:
        """Decode turns of one label together, except those with an ``error``."""
        ask_each(turns, self.decode_turn)

    def decode_turn(self, turn: Turn) -> None:
        """Decode a turn and complete its record; an exception makes it a failed turn."""
        raise NotImplementedError

    def previous_answer(self, turn: Turn) -> str:
        """Return a turn's output as the label's next turn quotes it; CaseFailed: there is none."""
        return ""

    def compare(self, record: CaseRecord, plain: CaseRecord) -> Lossless:
        """Compare a greedy output with plain decoding's, outside all timed regions."""
        return record.lossless

    def decode_again(self, run: MethodRun, record: CaseRecord) -> None:
        """Show a finished turn again to a drafter that reads more than tokens, untimed."""

    def recover(self, error: Exception, running: str, before: str) -> None:
        """Free what ``running`` left allocated when it raised ``error``; see `check_device`."""


def ask_each(turns: Sequence[Turn], ask: Callable[[Turn], None]) -> None:
    """Call ``ask`` on each turn that has no ``error``; an exception becomes the turn's error."""
    for turn in turns:
        if turn.error is None:
            turn.error = failure(partial(ask, turn))


def require_ok(record: CaseRecord) -> CaseRecord:
    """Return the record if it did not fail; without its output there is no next turn."""
    if record.status == "failed":
        raise CaseFailed(
            "no_dialogue",
            f"turn {record.turn} of {record.label} failed, and its answer is part of the next "
            "turn's prompt",
        )
    return record


def without_reasoning(text: str, *, opened: bool = False) -> str:
    """Return an output's text after its ``<think>`` part, empty where that part has no end.

    Args:
        opened: whether the prompt ends in ``<think>``, so that the text begins within that part.
    """
    if "</think>" in text:
        return text.rpartition("</think>")[2].lstrip()
    return "" if opened or text.lstrip().startswith("<think>") else text


@dataclass(slots=True)
class BlockRunner:
    """Runs blocks one after the other and keeps the drafters' state scopes.

    Attributes:
        runs: by label, in the order of the interleaving.
        done: the run's finished records; the list grows as the caller appends to it.
        forced: whether records are marked as made after ``resume=force``.
        started: whether an earlier start left records, of every label.
    """

    job: Job
    runs: Mapping[str, MethodRun]
    source: OutputSource
    done: list[CaseRecord]
    forced: bool = False
    started: bool = False
    _repeat: int | None = None
    _last: str = "nothing"  # the turn that was decoded last

    def warm_up(self, rounds: int) -> None:
        """Let every label decode text that is never measured, then forget it.

        Allocators, kernels and compiled code are then as the measured cases find them.

        Raises:
            WarmUpFailed: labels failed it. If the run has records of them, they are measured all
                the same: their measured turns count, and so does every later failure.
        """
        failed: dict[str, str] = {}
        for run in [run for _ in range(rounds) for run in self.runs.values()]:
            if run.label in failed:
                continue
            try:
                self.source.warm_up(run)
                self._last = f"the warm-up of {run.label}"
            except self.source.refusals:
                raise
            except Exception as error:
                log.warning("warm-up of %s failed: %s", run.label, error)
                failed[run.label] = f"It failed in its warm-up ({first_line(error)})."
                self.source.recover(error, f"the warm-up of {run.label}", self._last)
        if failed and not self.started:
            raise WarmUpFailed(failed)
        for run in self.runs.values():
            run.forget()

    def run(self, batch: Sequence[CaseBlock], number: int = 0, attempt: int = 0) -> BlockResult:
        """Measure blocks that are decoded together; compare their outputs with the baseline's.

        Args:
            batch: blocks of one repeat; ``number``: the batch's number in the run.
            attempt: how often the block was measured before. Above 0, its drafters start from the
                state that they had before it.
        """
        first = batch[0]
        if attempt or first.repeat != self._repeat:
            for run in self.runs.values():
                self._restore(run, first, ())
        # Whatever follows a block that is measured again must put drafters into its own state.
        self._repeat = None if attempt else first.repeat
        self.source.begin_batch()
        result = BlockResult()
        dialogues = {(b.key, label): Dialogue() for b in batch for label in self.runs}
        for nth in range(max(len(block.case.turns) for block in batch)):
            blocks = [(slot, b) for slot, b in enumerate(batch) if nth < len(b.case.turns)]
            turns_by_block: dict[BlockKey, dict[str, Turn]] = {block.key: {} for _, block in blocks}
            for position, label in enumerate(self.source.order(first, number)):
                turns = []
                for slot, block in blocks:
                    record = self._new_record(block, nth, label, position, attempt)
                    dialogue, siblings = dialogues[block.key, label], turns_by_block[block.key]
                    run = self.source.for_slot(self.runs[label], slot)
                    siblings[label] = Turn(run, block, record, dialogue, number, siblings, slot)
                    turns.append(siblings[label])
                self.source.decode_turns(turns)
                for turn in turns:
                    self._close(turn, result)
            for by_label in turns_by_block.values():
                for turn in by_label.values():
                    self._extend_dialogue(turn)
        noise = by_counters(result.records, self.job.config.measure.disturbed)
        result.records = [
            r.replace(status="disturbed", disturbed_by=noise[r.key]) if r.key in noise else r
            for r in result.records
        ]
        self._compare(result)
        return result

    def _new_record(
        self, block: CaseBlock, turn: int, label: str, position: int, attempt: int
    ) -> CaseRecord:
        """Make a turn's record before it is decoded, with status ``failed``."""
        config, case, run = self.job.config, block.case, self.runs[label]
        record = CaseRecord(
            run_key=self.job.run_key,
            label=label,
            method=run.entry.name,
            method_version=run.drafter.version,
            model=config.model.name,
            dataset=config.dataset.name,
            task=case.task,
            category=case.category,
            case_id=case.case_id,
            turn=turn,
            repeat=block.repeat,
            stream_index=block.stream_index,
            position=position,
            state_scope=run.scope,
            seed=derive_seed(config.seed, case.case_id, turn, block.repeat),
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            attempt=attempt,
            forced_resume=self.forced,
        )
        return self.source.begin(record)

    def _close(self, turn: Turn, result: BlockResult) -> None:
        """Add a decoded turn to the result, or its error."""
        record = turn.record
        where = f"{record.case_id}, turn {record.turn}, {record.label}"
        if turn.error is None:
            result.steps += [turn.trace] if turn.trace else []
            turn.run.last, self._last = record, where
        else:
            self._add_failure(result, record, turn.error, self.source.during, where)
            self._restore(turn.run, record, result.records)
        result.records.append(record)

    def _add_failure(
        self, result: BlockResult, record: CaseRecord, error: Exception, during: str, subject: str
    ) -> None:
        result.add_error(record, error, during)
        log.warning("%s: %s", subject, error)
        self.source.recover(error, subject, self._last)

    def _extend_dialogue(self, turn: Turn) -> None:
        """Add to a label's dialogue the output that its next prompt quotes."""
        dialogue = turn.dialogue
        if turn.record.turn + 1 < len(turn.block.case.turns) and dialogue.broken is None:
            try:
                dialogue.pairs.append((turn.question, self.source.previous_answer(turn)))
            except DiskError:
                raise
            except Exception as error:
                dialogue.broken = CaseFailed("no_dialogue", str(error) or type(error).__name__)

    def _restore(
        self, run: MethodRun, before: CaseBlock | CaseRecord, unwritten: Iterable[CaseRecord]
    ) -> None:
        """Put the drafter into the state that the finished turns of its scope give.

        This is also needed after a failure, which may have left it half-way through a turn. Blocks
        from ``before`` on do not count, but the finished turns of that block in ``unwritten`` do.
        """
        run.forget()
        if run.scope != "run":
            return
        earlier = [
            record
            for record in self.done
            if record.repeat == before.repeat and record.stream_index < before.stream_index
        ]
        for record in [*earlier, *unwritten]:
            if record.label != run.label or record.status == "failed":
                continue
            if run.drafter.needs.tokens_only:
                feed(run.drafter, record, run.seen(record))
            else:
                self.source.decode_again(run, record)
            run.last = record

    def _compare(self, result: BlockResult) -> None:
        """Compare every prompt with the baseline's, and every greedy output."""
        plain = {
            record.key[:3]: record
            for record in result.records
            if record.label == self.job.baseline and record.status != "failed"
        }
        for i, record in enumerate(result.records):
            reference = plain.get(record.key[:3])
            if record.status == "failed" or reference is None:
                continue
            try:
                self._check_prompt(record, reference)
                if self.job.greedy:
                    lossless = self.source.compare(record, reference)
                    result.records[i] = record.replace(lossless=lossless)
            except DiskError:
                raise
            except Exception as error:
                audit = f"the audit of {record.case_id}, {record.label}"
                self._add_failure(result, record, error, "audit", audit)

    def _check_prompt(self, record: CaseRecord, plain: CaseRecord) -> None:
        """Refuse a prompt that differs from the baseline's if both quote the same outputs."""
        quotes_alike = record.turn == 0 or self.job.config.dataset.dialogue == "ar"
        both_known = record.prompt_ids and plain.prompt_ids
        if quotes_alike and both_known and record.prompt_ids != plain.prompt_ids:
            at = first_difference(record.prompt_ids, plain.prompt_ids)
            raise CaseFailed(
                "prompts_differ",
                f"{record.label} had another prompt than {plain.label} (from token {at} on), "
                "so the two cannot be compared",
            )
