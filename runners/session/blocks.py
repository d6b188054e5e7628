"""Measuring one block: all labels and turns of one case, interleaved turn by turn."""

from __future__ import annotations

import logging
import socket
import traceback
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.job import derive_seed
from runners.session.interference_rule import by_counters
from runners.session.method_runs import restore
from specbench.errors import CaseFailed
from specbench.results.records import CaseRecord, Lossless, StepTrace
from specbench.storage.jsonl import DiskError
from specbench.system.interference import SystemMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runners.job import CaseBlock, Job
    from runners.run_folder.baseline_cache import BaselineCache
    from runners.session.method_runs import MethodRun
    from runners.session.session import Session
    from specbench.arrays import IntArray

log = logging.getLogger(__name__)

_TRACEBACK_CHARACTERS = 4000


@dataclass(slots=True)
class BlockResult:
    """What a block leaves: records, lines for ``errors.jsonl``, step traces."""

    records: list[CaseRecord] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)


class BlockRunner:
    """Runs blocks one after the other and keeps the drafters' state scopes.

    Args:
        job: what is run.
        stage: model, engine and prompts.
        contenders: in the order of the interleaving.
        answers: plain answers computed untimed, where the run itself has none.
        done: the run's finished records; the list grows as the caller appends to it.
        forced: whether records are to be marked as made after ``resume=force``.
        watch: looks at the machine before and after every turn.
    """

    def __init__(
        self,
        job: Job,
        stage: Session,
        contenders: Sequence[MethodRun],
        answers: BaselineCache,
        done: list[CaseRecord],
        forced: bool = False,
        watch: SystemMonitor | None = None,
    ) -> None:
        self._job = job
        self._stage = stage
        self._contenders = {contender.label: contender for contender in contenders}
        self._answers = answers
        self._done = done
        self._forced = forced
        self._watch = watch or SystemMonitor()
        self._limits = job.config["measure"]["disturbed"]
        self._repeat: int | None = None
        self._attempt = 0
        self._own_dialogue = job.config["dataset"].get("dialogue", "ar") == "own"

    def run(self, block: CaseBlock) -> BlockResult:
        """Measure a block, then audit it."""
        if block.repeat != self._repeat:
            self._repeat = block.repeat
            self._restore_all(block)
        return self._measure(block)

    def run_again(self, block: CaseBlock, attempt: int) -> BlockResult:
        """Measure a finished block anew, from the state its drafters had before it.

        Args:
            block: one whose records are among the finished ones.
            attempt: how many measurements of it there were.
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
        dialogues = {label: _Dialogue() for label in self._contenders}
        for turn, user in enumerate(block.case.turns):
            made: dict[str, CaseRecord] = {}
            for position, label in enumerate(block.order(self._job.labels)):
                contender = self._contenders[label]
                blank = self._blank(block, turn, contender, position)
                made[label] = self._turn(contender, blank, user, dialogues[label], made, result)
            result.records.extend(made.values())
            if turn + 1 < len(block.case.turns):
                self._continue(dialogues, user, made)
        self._audit(result)
        return result

    def _blank(
        self, block: CaseBlock, turn: int, contender: MethodRun, position: int
    ) -> CaseRecord:
        """A record that holds all that is known before the turn is decoded, as failed."""
        config, case = self._job.config, block.case
        return CaseRecord(
            run_key=self._job.run_key,
            label=contender.label,
            method=contender.entry.name,
            method_version=contender.drafter.version,
            model=config["model"]["name"],
            dataset=config["dataset"]["name"],
            task=case.task,
            category=case.category,
            case_id=case.case_id,
            turn=turn,
            repeat=block.repeat,
            stream_index=block.stream_index,
            position=position,
            status="failed",
            n_prompt=0,
            state_scope=contender.scope,
            verifier=self._job.verifier,
            seed=derive_seed(int(config["seed"]), case.case_id, turn, block.repeat),
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            host=socket.gethostname(),
            forced_resume=self._forced,
            attempt=self._attempt,
        )

    def _turn(
        self,
        contender: MethodRun,
        record: CaseRecord,
        user: str,
        dialogue: _Dialogue,
        made: dict[str, CaseRecord],
        result: BlockResult,
    ) -> CaseRecord:
        drafter = contender.drafter
        reset_s = 0.0
        if contender.scope == "turn" or (contender.scope == "prompt" and record.turn == 0):
            reset_s = self._stage.reset(drafter)
        try:
            if dialogue.broken:
                raise CaseFailed("no_dialogue", dialogue.broken)
            prompt = self._stage.render([*dialogue.turns, (user, None)])
            record = replace(record, n_prompt=len(prompt), prompt_ids=prompt.tolist())
            if drafter.needs.reference:
                drafter.set_reference(self._reference(record, prompt, made))
            self._watch.begin()
            decoded = self._stage.decode(prompt, drafter, record.seed)
            around = self._watch.end()
        except DiskError:
            raise
        except Exception as error:
            result.errors.append(describe(record, error))
            log.warning("%s, turn %d, %s: %s", record.case_id, record.turn, record.label, error)
            self._stage.recover()
            self._restore(contender, record, [*result.records, *made.values()])
            return record
        times = decoded.timings.with_setup(reset_s)
        result.steps.append(
            StepTrace(
                label=record.label,
                case_id=record.case_id,
                turn=record.turn,
                repeat=record.repeat,
                drafted=decoded.drafted_per_step,
                depth=decoded.depth_per_step,
                committed=decoded.committed_per_step,
                sources=decoded.sources_per_step,
                step_s=times.step_s,
            )
        )
        measured = replace(
            record,
            status="ok",
            n_new=len(decoded.output_ids),
            output_ids=decoded.output_ids,
            finish_reason=decoded.finish_reason,
            n_target_passes=decoded.n_target_passes,
            n_drafted=decoded.n_drafted,
            n_aux=decoded.n_aux,
            accepted_per_step=decoded.committed_per_step,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            drafter_setup_s=times.drafter_setup_s,
            wall_s=times.wall_s,
            phase_s=times.phase_s,
            drafter=decoded.drafter,
            cpu_steal=around.cpu_steal,
            cpu_waiting=around.cpu_waiting,
            cpu_others=around.cpu_others,
            cpu_load=around.cpu_load,
            gpu=around.gpu,
            energy_j=around.energy_j,
        )
        why = by_counters(measured, self._limits)
        return replace(measured, status="disturbed", disturbed_by=why) if why else measured

    def _reference(
        self, record: CaseRecord, prompt: IntArray, made: dict[str, CaseRecord]
    ) -> IntArray:
        """The plain greedy output of the turn: the baseline's if it ran already, else computed."""
        plain = made.get(self._job.baseline or "")
        if plain is not None and self._job.greedy and _is_answer(plain, prompt):
            return np.asarray(plain.output_ids, dtype=np.int64)
        return self._answers.get(record.case_id, record.turn, prompt)

    def _continue(
        self, dialogues: dict[str, _Dialogue], user: str, made: dict[str, CaseRecord]
    ) -> None:
        """Give every label's dialogue the answer that its next turn is prompted with."""
        if self._own_dialogue:
            for label, dialogue in dialogues.items():
                dialogue.extend(user, lambda label=label: self._text_of(made[label]))
            return
        shared = _Dialogue(list(next(iter(dialogues.values())).turns))
        shared.broken = next(iter(dialogues.values())).broken
        if self._job.greedy and self._job.baseline:
            shared.extend(user, lambda: self._text_of(made[self._job.baseline]))
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
        return self._stage.text(record.output_ids)

    def _computed_text(self, record: CaseRecord, dialogue: _Dialogue, user: str) -> str:
        prompt = self._stage.render([*dialogue.turns, (user, None)])
        return self._stage.text(self._answers.get(record.case_id, record.turn, prompt))

    def _restore_all(self, block: CaseBlock) -> None:
        for contender in self._contenders.values():
            self._restore(contender, block, [])

    def _restore(
        self, contender: MethodRun, before: CaseBlock | CaseRecord, unwritten: Sequence[CaseRecord]
    ) -> None:
        """Put the drafter into the state that the finished turns of its scope give.

        Also after a failure, which may have left it half-way through a turn.

        Args:
            contender: whose drafter.
            before: blocks from this one on do not count.
            unwritten: finished turns of that block.
        """
        if contender.scope != "run":
            contender.drafter.reset()
            return
        earlier = [
            r
            for r in self._done
            if r.repeat == before.repeat and r.stream_index < before.stream_index
        ]
        restore(contender, [*earlier, *unwritten], lambda r: self._redecode(contender, r))

    def _redecode(self, contender: MethodRun, record: CaseRecord) -> None:
        prompt = np.asarray(record.prompt_ids, dtype=np.int64)
        if contender.drafter.needs.reference:
            reference = self._answers.get(record.case_id, record.turn, prompt)
            contender.drafter.set_reference(reference)
        self._stage.decode(prompt, contender.drafter, record.seed)

    def _audit(self, result: BlockResult) -> None:
        """Compare every greedy output with the baseline's; outside all timed regions."""
        baseline = self._job.baseline
        if not self._job.greedy or baseline is None:
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
                result.errors.append(describe(record, error, during="audit"))
                log.warning("%s, %s: the audit failed: %s", record.case_id, record.label, error)
                self._stage.recover()
                continue
            result.records[i] = replace(record, lossless=lossless)

    def _verdict(self, record: CaseRecord, plain: CaseRecord) -> Lossless:
        if record is plain:
            return Lossless("equal")
        if record.prompt_ids == plain.prompt_ids:
            reference = plain.output_ids
        else:  # a dialogue of its own that went elsewhere after a near tie
            prompt = np.asarray(record.prompt_ids, dtype=np.int64)
            reference = self._answers.get(record.case_id, record.turn, prompt).tolist()
        return self._stage.audit(record, reference)


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


def describe(record: CaseRecord, error: Exception, during: str = "decode") -> dict[str, Any]:
    """A line of ``errors.jsonl``.

    Args:
        record: the failed turn.
        error: why.
        during: ``decode``, ``audit`` or ``replay``.
    """
    trace = "".join(traceback.format_exception(error))
    return {
        "label": record.label,
        "case_id": record.case_id,
        "turn": record.turn,
        "repeat": record.repeat,
        "during": during,
        "type": error.kind if isinstance(error, CaseFailed) else type(error).__name__,
        "message": str(error),
        "traceback": trace[-_TRACEBACK_CHARACTERS:],
        "at": record.started_at,
    }
