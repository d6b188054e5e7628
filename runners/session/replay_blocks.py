"""Replaying one block: all labels and turns of one recorded case."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from runners.job import derive_seed
from runners.session.blocks import BlockResult, describe
from runners.session.method_runs import restore
from specbench.errors import CaseFailed
from specbench.replay.replayer import APPROXIMATE
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord, StepTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runners.job import CaseBlock, Job
    from runners.session.method_runs import MethodRun
    from specbench.replay.replayer import ReplayedTurn, Replayer
    from specbench.replay.traces import Traces, Turn

log = logging.getLogger(__name__)


class BlockReplayer:
    """Plays blocks one after the other and keeps the drafters' state scopes.

    Args:
        job: what is replayed.
        player: plays a turn.
        contenders: their drafters admitted by the player.
        traces: the recorded outputs.
        kinds: ``exact`` or ``approximate``, by label.
        forced: whether records are to be marked as made after ``resume=force``.

    Attributes:
        covered: share of each turn's passes that lay inside the surface's grid.
    """

    def __init__(
        self,
        job: Job,
        player: Replayer,
        contenders: Sequence[MethodRun],
        traces: Traces,
        kinds: Mapping[str, str],
        forced: bool,
    ) -> None:
        self._job = job
        self._player = player
        self._contenders = {contender.label: contender for contender in contenders}
        self._traces = traces
        self._kinds = kinds
        self._forced = forced
        self._timing = "predicted" if job.config["runner"]["surface"] else "none"
        self._phases = bool(job.config["measure"]["phases"]) and self._timing == "predicted"
        self._repeat: int | None = None
        self._played: dict[str, list[CaseRecord]] = {}
        self.covered: list[float] = []

    def warm_up(self, rounds: int) -> None:
        """Play the first turn with every label, then forget it: compiled code is loaded."""
        first = self._job.cases[0].case_id
        for _ in range(rounds):
            for label, contender in self._contenders.items():
                turn = self._traces.find(label, first, 0)
                if turn is not None:
                    try:
                        self._player.play(contender.drafter, turn, empty=True)
                    except Exception as error:  # fails again where it is counted
                        log.warning("warm-up of %s failed: %s", label, error)

    def run(self, block: CaseBlock) -> BlockResult:
        """Play all labels and turns of a block."""
        if block.repeat != self._repeat:
            self._repeat = block.repeat
            self._played = {label: [] for label in self._contenders}
            for contender in self._contenders.values():
                contender.drafter.reset()
        made = BlockResult()
        for number in range(len(block.case.turns)):
            for position, label in enumerate(block.order(self._job.labels)):
                self._turn(block, number, position, self._contenders[label], made)
        return made

    def _turn(
        self, block: CaseBlock, number: int, position: int, contender: MethodRun, made: BlockResult
    ) -> None:
        scope, label = contender.scope, contender.label
        common = self._common(block, number, position, contender)
        turn = self._traces.find(label, block.case.case_id, number)
        try:
            if turn is None:
                raise CaseFailed("no_trace", f"neither {label} nor {BASELINE} was recorded for it")
            empty = scope == "turn" or (scope == "prompt" and number == 0)
            played = self._player.play(contender.drafter, turn, empty=empty, seed=common["seed"])
        except Exception as error:
            failed = CaseRecord(status="failed", n_prompt=0, **common)
            made.records.append(failed)
            made.errors.append(describe(failed, error, during="replay"))
            log.warning("%s, turn %d, %s: %s", failed.case_id, number, label, error)
            if scope == "run":
                restore(contender, self._played[label], self._play_again(contender))
            else:
                contender.drafter.reset()
            return
        record = self._record(common, turn, played)
        self._played[label].append(record)
        self.covered.append(played.covered)
        made.records.append(record)
        decoded = played.decoded
        made.steps.append(
            StepTrace(
                label=label,
                case_id=record.case_id,
                turn=number,
                repeat=block.repeat,
                drafted=decoded.drafted_per_step,
                depth=decoded.depth_per_step,
                committed=decoded.committed_per_step,
                sources=decoded.sources_per_step,
            )
        )

    def _common(
        self, block: CaseBlock, number: int, position: int, contender: MethodRun
    ) -> dict[str, Any]:
        config, case = self._job.config, block.case
        return {
            "run_key": self._job.run_key,
            "label": contender.label,
            "method": contender.entry.name,
            "method_version": contender.drafter.version,
            "model": config["model"]["name"],
            "dataset": config["dataset"]["name"],
            "task": case.task,
            "category": case.category,
            "case_id": case.case_id,
            "turn": number,
            "repeat": block.repeat,
            "stream_index": block.stream_index,
            "position": position,
            "timing": self._timing,
            "state_scope": contender.scope,
            "seed": derive_seed(int(config["seed"]), case.case_id, number, block.repeat),
            "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "forced_resume": self._forced,
        }

    def _record(self, common: dict[str, Any], turn: Turn, played: ReplayedTurn) -> CaseRecord:
        decoded = played.decoded
        counted = dict(decoded.drafter)
        if self._kinds[common["label"]] == APPROXIMATE:
            counted["replay"] = APPROXIMATE
        return CaseRecord(
            **common,
            status="ok",
            n_prompt=len(turn.prompt_ids),
            n_new=len(decoded.output_ids),
            finish_reason=decoded.finish_reason,
            n_target_passes=decoded.n_target_passes,
            n_drafted=decoded.n_drafted,
            n_aux=decoded.n_aux,
            accepted_per_step=decoded.committed_per_step,
            prompt_ids=turn.prompt_ids.tolist(),
            output_ids=decoded.output_ids,
            prefill_s=played.prefill_s,
            decode_s=played.decode_s,
            drafter_setup_s=played.setup_s,
            wall_s=played.prefill_s + played.decode_s,
            phase_s=played.phase_s if self._phases else None,
            drafter=counted,
        )

    def _play_again(self, contender: MethodRun) -> Callable[[CaseRecord], None]:
        def again(record: CaseRecord) -> None:
            turn = self._traces.find(record.label, record.case_id, record.turn)
            assert turn is not None  # it was played before
            self._player.play(contender.drafter, turn, empty=False, seed=record.seed)

        return again
