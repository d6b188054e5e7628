"""Replaying one block: all labels and turns of one recorded case."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from runners.job import CaseBlock, Job
from runners.session.case_records import BlockResult, begin_record, finish_record
from runners.session.method_runs import MethodRun, restore
from specbench.errors import CaseFailed
from specbench.replay.replayer import APPROXIMATE, Replayer
from specbench.replay.traces import Traces
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord

log = logging.getLogger(__name__)


class BlockReplayer:
    """Replays blocks one after the other and keeps the drafters' state scopes.

    Args:
        job: what is replayed.
        replayer: replays a turn.
        runs: their drafters prepared by the replayer.
        traces: the recorded outputs.
        kinds: ``exact`` or ``approximate``, by label.
        predicted: whether times are predicted by a surface.
        forced: whether records are to be marked as made after ``resume=force``.

    Attributes:
        covered: share of each turn's passes that lay inside the surface's grid.
    """

    def __init__(
        self,
        job: Job,
        replayer: Replayer,
        runs: Sequence[MethodRun],
        traces: Traces,
        kinds: Mapping[str, str],
        predicted: bool,
        forced: bool,
    ) -> None:
        self._job = job
        self._replayer = replayer
        self._runs = {run.label: run for run in runs}
        self._traces = traces
        self._kinds = kinds
        self._forced = forced
        self._timing = "predicted" if predicted else "none"
        self._phases = job.config.measure.phases and predicted
        self._repeat: int | None = None
        self._finished: dict[str, list[CaseRecord]] = {}
        self.covered: list[float] = []

    def warm_up(self, rounds: int) -> None:
        """Replay the first turn with every label, then forget it: compiled code is loaded."""
        first = self._job.cases[0].case_id
        for _ in range(rounds):
            for label, run in self._runs.items():
                turn = self._traces.find(label, first, 0)
                if turn is not None:
                    try:
                        self._replayer.replay_turn(run.drafter, turn, empty=True)
                    except Exception as error:  # fails again where it is counted
                        log.warning("warm-up of %s failed: %s", label, error)

    def run(self, block: CaseBlock) -> BlockResult:
        if block.repeat != self._repeat:
            self._repeat = block.repeat
            self._finished = {label: [] for label in self._runs}
            for run in self._runs.values():
                run.drafter.reset()
        made = BlockResult()
        for number in range(len(block.case.turns)):
            for position, label in enumerate(block.order(self._job.labels)):
                self._turn(block, number, position, self._runs[label], made)
        return made

    def _turn(
        self, block: CaseBlock, number: int, position: int, run: MethodRun, made: BlockResult
    ) -> None:
        scope, label = run.scope, run.label
        record = begin_record(
            self._job, block, number, run, position, timing=self._timing, forced_resume=self._forced
        )
        turn = self._traces.find(label, block.case.case_id, number)
        try:
            if turn is None:
                raise CaseFailed("no_trace", f"neither {label} nor {BASELINE} was recorded for it")
            empty = scope == "turn" or (scope == "prompt" and number == 0)
            replayed = self._replayer.replay_turn(run.drafter, turn, empty=empty, seed=record.seed)
        except Exception as error:
            made.records.append(record)
            made.add_error(record, error, "replay")
            log.warning("%s, turn %d, %s: %s", record.case_id, number, label, error)
            if scope == "run":
                restore(run, self._finished[label], self._replay_again(run))
            else:
                run.drafter.reset()
            return
        decoded = replayed.decoded
        counted = dict(decoded.drafter)
        if self._kinds[label] == APPROXIMATE:
            counted["replay"] = APPROXIMATE
        record = finish_record(
            record,
            decoded,
            n_prompt=len(turn.prompt_ids),
            prompt_ids=turn.prompt_ids.tolist(),
            prefill_s=replayed.prefill_s,
            decode_s=replayed.decode_s,
            drafter_setup_s=replayed.setup_s,
            wall_s=replayed.prefill_s + replayed.decode_s,
            phase_s=replayed.phase_s if self._phases else None,
            drafter=counted,
        )
        self._finished[label].append(record)
        self.covered.append(replayed.covered)
        made.records.append(record)
        made.add_steps(record, decoded, None)

    def _replay_again(self, run: MethodRun) -> Callable[[CaseRecord], None]:
        def again(record: CaseRecord) -> None:
            turn = self._traces.find(record.label, record.case_id, record.turn)
            assert turn is not None  # it was replayed before
            self._replayer.replay_turn(run.drafter, turn, empty=False, seed=record.seed)

        return again
