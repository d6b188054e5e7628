"""Replaying one block: all labels and turns of one recorded case."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runners.job import CaseBlock, Job
from runners.session.case_records import BlockResult, begin_record, finish_record
from runners.session.method_runs import MethodRun, restore
from specbench.errors import CaseFailed
from specbench.replay.replayer import EXACT, ROUNDED, Replayer
from specbench.replay.traces import Traces, Turn
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BlockReplayer:
    """Replays blocks one after the other and keeps the drafters' state scopes.

    Attributes:
        runs: by label; their drafters prepared by the replayer.
        traces: the recorded outputs.
        kinds: how close the steps are to the live run's (``replay_kind``), by label.
        predicted: whether times are predicted by a surface.
        forced: whether records are to be marked as made after ``resume=force``.
        covered: share of each turn's passes that lay inside the surface's grid.
    """

    job: Job
    replayer: Replayer
    runs: Mapping[str, MethodRun]
    traces: Traces
    kinds: Mapping[str, str]
    predicted: bool
    forced: bool
    covered: list[float] = field(default_factory=list)
    _repeat: int | None = None
    _finished: dict[str, list[CaseRecord]] = field(default_factory=dict)

    def warm_up(self, rounds: int) -> None:
        """Replay the first turn with every label, then forget it: compiled code is loaded."""
        first = self.job.cases[0].case_id
        for _ in range(rounds):
            for label, run in self.runs.items():
                turn = self._find(label, first, 0)
                if turn is not None:
                    try:
                        self.replayer.replay_turn(run.drafter, turn, empty=True)
                    except Exception as error:  # fails again where it is counted
                        log.warning("warm-up of %s failed: %s", label, error)

    def run(self, block: CaseBlock) -> BlockResult:
        if block.repeat != self._repeat:
            self._repeat = block.repeat
            self._finished = {label: [] for label in self.runs}
            for run in self.runs.values():
                run.drafter.reset()
        made = BlockResult()
        for number in range(len(block.case.turns)):
            for position, label in enumerate(block.order(self.job.labels)):
                self._turn(block, number, position, self.runs[label], made)
        return made

    def _turn(
        self, block: CaseBlock, number: int, position: int, run: MethodRun, made: BlockResult
    ) -> None:
        label = run.label
        timing = "predicted" if self.predicted else "none"
        record = begin_record(
            self.job, block, number, run, position, timing=timing, forced_resume=self.forced
        )
        turn = self._find(label, block.case.case_id, number)
        try:
            if turn is None:
                raise CaseFailed("no_trace", f"neither {label} nor {BASELINE} was recorded for it")
            empty = run.drafter.starts_empty(number)
            replayed = self.replayer.replay_turn(run.drafter, turn, empty=empty, seed=record.seed)
        except Exception as error:
            made.records.append(record)
            made.add_error(record, error, "replay")
            log.warning("%s, turn %d, %s: %s", record.case_id, number, label, error)
            if run.scope == "run":
                restore(run, self._finished[label], self._replay_again(run))
            else:
                run.drafter.reset()
            return
        decoded = replayed.decoded
        counted = dict(decoded.drafter)
        if self.kinds[label] != EXACT:
            counted["replay"] = self.kinds[label]
        record = finish_record(
            record,
            decoded,
            n_prompt=len(turn.prompt_ids),
            prompt_ids=turn.prompt_ids.tolist(),
            prefill_s=replayed.prefill_s,
            decode_s=replayed.decode_s,
            drafter_setup_s=replayed.setup_s,
            wall_s=replayed.prefill_s + replayed.decode_s,
            phase_s=replayed.phase_s if self.job.config.measure.phases else None,
            drafter=counted,
        )
        self._finished[label].append(record)
        self.covered.append(replayed.covered)
        made.records.append(record)
        made.add_steps(record, decoded, None)

    def _find(self, label: str, case_id: str, number: int) -> Turn | None:
        """What the label is replayed on; heads on plain decoding's turn, which has states."""
        rounded = self.kinds[label] == ROUNDED
        return self.traces.find(BASELINE if rounded else label, case_id, number)

    def _replay_again(self, run: MethodRun) -> Callable[[CaseRecord], None]:
        def again(record: CaseRecord) -> None:
            turn = self._find(record.label, record.case_id, record.turn)
            assert turn is not None  # it was replayed before
            self.replayer.replay_turn(run.drafter, turn, empty=False, seed=record.seed)

        return again
