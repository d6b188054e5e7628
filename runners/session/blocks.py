"""Measuring one block: all labels and turns of one case, interleaved turn by turn."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from runners.job import CaseBlock, Job
from runners.run_folder.baseline_cache import BaselineCache
from runners.session.case_records import BlockResult, begin_record, finish_record
from runners.session.interference_rule import by_counters
from runners.session.method_runs import MethodRun, restore
from runners.session.session import Session
from specbench.arrays import IntArray
from specbench.errors import CaseFailed
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord, Lossless
from specbench.storage.jsonl import DiskError
from specbench.system.interference import SystemMonitor

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BlockRunner:
    """Runs blocks one after the other and keeps the drafters' state scopes.

    Attributes:
        runs: by label, in the order of the interleaving.
        answers: plain answers computed untimed, where the run itself has none.
        done: the run's finished records; the list grows as the caller appends to it.
        forced: whether records are to be marked as made after ``resume=force``.
        watch: looks at the machine before and after every turn.
    """

    job: Job
    session: Session
    runs: Mapping[str, MethodRun]
    answers: BaselineCache
    done: list[CaseRecord]
    forced: bool = False
    watch: SystemMonitor = field(default_factory=SystemMonitor)
    _repeat: int | None = None
    _attempt: int = 0

    def run(self, block: CaseBlock) -> BlockResult:
        """Measure a block, then audit it."""
        if block.repeat != self._repeat:
            self._repeat = block.repeat
            self._restore_all(block)
        return self._measure(block)

    def run_again(self, block: CaseBlock, attempt: int) -> BlockResult:
        """Measure a finished block anew, from the state its drafters had before it.

        ``attempt`` is how many measurements of it there were.
        """
        self._repeat = None  # whatever follows must put the drafters into its own state
        self._attempt = attempt
        self._restore_all(block)
        try:
            return self._measure(block)
        finally:
            self._attempt = 0

    def _measure(self, block: CaseBlock) -> BlockResult:
        result = BlockResult()
        dialogues = {label: _Dialogue() for label in self.runs}
        for turn, user in enumerate(block.case.turns):
            made: dict[str, CaseRecord] = {}
            for position, label in enumerate(block.order(self.job.labels)):
                run = self.runs[label]
                blank = begin_record(
                    self.job,
                    block,
                    turn,
                    run,
                    position,
                    verifier=self.job.verifier,
                    host=socket.gethostname(),
                    forced_resume=self.forced,
                    attempt=self._attempt,
                )
                made[label] = self._turn(run, blank, user, dialogues[label], made, result)
            result.records.extend(made.values())
            if turn + 1 < len(block.case.turns):
                self._continue(dialogues, user, made)
        self._audit(result)
        return result

    def _turn(
        self,
        run: MethodRun,
        record: CaseRecord,
        user: str,
        dialogue: _Dialogue,
        made: dict[str, CaseRecord],
        result: BlockResult,
    ) -> CaseRecord:
        drafter = run.drafter
        reset_s = 0.0
        if drafter.starts_empty(record.turn):
            reset_s = self.session.reset(drafter)
        try:
            if dialogue.broken:
                raise CaseFailed("no_dialogue", dialogue.broken)
            prompt = self.session.render([*dialogue.turns, (user, None)])
            record = replace(record, n_prompt=len(prompt), prompt_ids=prompt.tolist())
            if drafter.needs.reference:
                drafter.set_reference(self._reference(record, prompt, made))
            self.watch.begin()
            decoded = self.session.decode(prompt, drafter, record.seed)
            around = self.watch.end()
        except DiskError:
            raise
        except Exception as error:
            result.add_error(record, error, "decode")
            log.warning("%s, turn %d, %s: %s", record.case_id, record.turn, record.label, error)
            self.session.recover()
            self._restore(run, record, [*result.records, *made.values()])
            return record
        times = decoded.timings.with_setup(reset_s)
        result.add_steps(record, decoded, times.step_s)
        measured = finish_record(
            record,
            decoded,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            drafter_setup_s=times.drafter_setup_s,
            wall_s=times.wall_s,
            phase_s=times.phase_s,
            n_retokenized=self.session.retokenized(decoded.output_ids)
            if run.entry.name == BASELINE
            else None,
            **asdict(around),
        )
        why = by_counters(measured, self.job.config.measure.disturbed)
        return replace(measured, status="disturbed", disturbed_by=why) if why else measured

    def _reference(
        self, record: CaseRecord, prompt: IntArray, made: dict[str, CaseRecord]
    ) -> IntArray:
        """The plain greedy output of the turn: the baseline's if it ran already, else computed."""
        plain = made.get(self.job.baseline or "")
        if plain is not None and self.job.greedy and _is_answer(plain, prompt):
            return np.asarray(plain.output_ids, dtype=np.int64)
        return self.answers.get(record.case_id, record.turn, prompt)

    def _continue(
        self, dialogues: dict[str, _Dialogue], user: str, made: dict[str, CaseRecord]
    ) -> None:
        """Give every label's dialogue the answer that its next turn is prompted with."""
        if self.job.config.dataset.dialogue == "own":
            for label, dialogue in dialogues.items():
                dialogue.extend(user, partial(self._text_of, made[label]))
            return
        shared = _Dialogue(list(next(iter(dialogues.values())).turns))
        shared.broken = next(iter(dialogues.values())).broken
        if self.job.greedy and self.job.baseline:
            shared.extend(user, partial(self._text_of, made[self.job.baseline]))
        else:
            case = next(iter(made.values()))
            shared.extend(user, lambda: self._computed_text(case, shared, user))
        for dialogue in dialogues.values():
            dialogue.turns, dialogue.broken = list(shared.turns), shared.broken

    def _text_of(self, record: CaseRecord) -> str:
        if record.status == "failed":
            raise CaseFailed(
                "no_dialogue",
                f"turn {record.turn} of {record.label} failed, and its answer is part of the next "
                "turn's prompt",
            )
        return self.session.text(record.output_ids)

    def _computed_text(self, record: CaseRecord, dialogue: _Dialogue, user: str) -> str:
        prompt = self.session.render([*dialogue.turns, (user, None)])
        return self.session.text(self.answers.get(record.case_id, record.turn, prompt).tolist())

    def _restore_all(self, block: CaseBlock) -> None:
        for run in self.runs.values():
            self._restore(run, block, [])

    def _restore(
        self, run: MethodRun, before: CaseBlock | CaseRecord, unwritten: Sequence[CaseRecord]
    ) -> None:
        """Put the drafter into the state that the finished turns of its scope give.

        Also after a failure, which may have left it half-way through a turn. Blocks from ``before``
        on do not count, but the finished turns of that block in ``unwritten`` do.
        """
        if run.scope != "run":
            run.drafter.reset()
            return
        earlier = [
            r
            for r in self.done
            if r.repeat == before.repeat and r.stream_index < before.stream_index
        ]
        restore(run, [*earlier, *unwritten], lambda r: self._redecode(run, r))

    def _redecode(self, run: MethodRun, record: CaseRecord) -> None:
        prompt = np.asarray(record.prompt_ids, dtype=np.int64)
        if run.drafter.needs.reference:
            reference = self.answers.get(record.case_id, record.turn, prompt)
            run.drafter.set_reference(reference)
        self.session.decode(prompt, run.drafter, record.seed)

    def _audit(self, result: BlockResult) -> None:
        """Compare every greedy output with the baseline's; outside all timed regions."""
        baseline = self.job.baseline
        if not self.job.greedy or baseline is None:
            return
        plain = {r.turn: r for r in result.records if r.label == baseline and r.status != "failed"}
        for i, record in enumerate(result.records):
            if record.status == "failed" or record.turn not in plain:
                continue
            try:
                lossless = self._verdict(record, plain[record.turn])
            except DiskError:
                raise
            except Exception as error:
                result.add_error(record, error, "audit")
                log.warning("%s, %s: the audit failed: %s", record.case_id, record.label, error)
                self.session.recover()
                continue
            result.records[i] = replace(record, lossless=lossless)

    def _verdict(self, record: CaseRecord, plain: CaseRecord) -> Lossless:
        if record is plain:
            return Lossless("equal")
        if record.prompt_ids == plain.prompt_ids:
            reference = plain.output_ids
        else:  # a dialogue of its own that went elsewhere after a near tie
            prompt = np.asarray(record.prompt_ids, dtype=np.int64)
            reference = self.answers.get(record.case_id, record.turn, prompt).tolist()
        return self.session.audit(record, reference)


@dataclass(slots=True)
class _Dialogue:
    """What a label's next prompt is made of: (user, answer) pairs, or why there is none."""

    turns: list[tuple[str, str | None]] = field(default_factory=list)
    broken: str = ""

    def extend(self, user: str, answer: Callable[[], str]) -> None:
        if self.broken:
            return
        try:
            self.turns.append((user, answer()))
        except DiskError:
            raise
        except Exception as error:
            self.broken = str(error) or type(error).__name__


def _is_answer(record: CaseRecord, prompt: IntArray) -> bool:
    return record.status != "failed" and list(record.prompt_ids) == prompt.tolist()
