"""What answers the turns of a replay: recorded outputs, one text at a time or in lock-step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runners.job import Job
from runners.session.batching import seat_turns
from runners.session.blocks import Answers, Turn
from runners.session.method_runs import MethodRun
from specbench.errors import CaseFailed
from specbench.replay.cost_surface import CostSurface
from specbench.replay.lock_step import TextSteps, group_times
from specbench.replay.replay_kind import APPROXIMATE, EXACT, ROUNDED
from specbench.replay.replayer import ReplayedTurn, Replayer, ReplayRequest
from specbench.replay.traces import RecordedTurn, Traces
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord


class RecordedAnswers(Answers):
    """Recorded turns replayed by the engine's own loop.

    Attributes:
        covered: share of each turn's, or group's, passes that lay inside the surface's grid.

    Args:
        kinds: by label, how close its steps are to the live run's (`replay_kind`).
        error: of speedups predicted by a surface; None: there are no times.
    """

    during = "replay"

    def __init__(
        self,
        job: Job,
        replayer: Replayer,
        traces: Traces,
        kinds: Mapping[str, str],
        error: float | None,
    ) -> None:
        super().__init__(job)
        self._replayer, self._traces, self._kinds = replayer, traces, kinds
        self._timing, self._error = "none" if error is None else "predicted", error
        self.covered: list[float] = []
        self._steps: dict[str, int] = defaultdict(int)
        self._decode_s: dict[str, float] = defaultdict(float)

    def begin(self, record: CaseRecord) -> CaseRecord:
        return replace(record, timing=self._timing, prediction_error=self._error)

    def answer_one(self, turn: Turn) -> None:
        asked = self._asked(turn)
        replayed = self._replayer.replay_turn(
            asked.drafter, asked.turn, empty=asked.empty, seed=asked.seed, seen=asked.seen
        )
        self.covered.append(replayed.covered)
        self._finish(turn, asked.turn, replayed)

    def _asked(self, turn: Turn) -> ReplayRequest:
        record, drafter = turn.record, turn.run.drafter
        recorded = self._recorded(record.label, record.case_id, record.turn)
        empty = drafter.starts_empty(record.turn)
        return ReplayRequest(drafter, recorded, empty, record.seed, turn.run.seen(record))

    def _finish(self, turn: Turn, recorded: RecordedTurn, replayed: ReplayedTurn) -> None:
        record = turn.record
        kind = self._kinds[record.label]
        self._steps[record.label] += replayed.decoded.n_target_passes
        self._decode_s[record.label] += replayed.decode_s
        turn.finish_decoded(
            replayed.decoded,
            None,
            n_prompt=len(recorded.prompt_ids),
            prompt_ids=recorded.prompt_ids.tolist(),
            prefill_s=replayed.prefill_s,
            decode_s=replayed.decode_s,
            drafter_setup_s=replayed.setup_s,
            wall_s=replayed.prefill_s + replayed.decode_s,
            phase_s=replayed.phase_s if self.job.config.measure.phases else None,
            drafter={**replayed.decoded.drafter, **({} if kind == EXACT else {"replay": kind})},
        )

    def _recorded(self, label: str, case_id: str, number: int) -> RecordedTurn:
        """What the label is replayed on: plain decoding's turn where it reads what only that has.

        Those are hidden states and, where the label's own text went elsewhere, candidates.
        """
        kind = self._kinds[label]
        recorded = self._traces.find(BASELINE if kind == ROUNDED else label, case_id, number)
        if recorded is not None and kind == APPROXIMATE and recorded.candidates is None:
            recorded = self._traces.find(BASELINE, case_id, number)
        if recorded is None:
            raise CaseFailed("no_trace", f"neither {label} nor {BASELINE} was recorded for it")
        return recorded

    def quicker_steps(self) -> dict[str, float]:
        """Labels whose steps are predicted to take less than plain decoding's, by that share.

        Their speedup exceeds their MAT. A draft makes no pass shorter, so it is the context: they
        take fewer steps where texts are long, or plain decoding's own share of the time was noisy.
        """
        step_s = {label: self._decode_s[label] / n for label, n in self._steps.items() if n}
        plain = step_s.get(BASELINE)
        if not plain:
            return {}
        return {label: 1.0 - s / plain for label, s in step_s.items() if s < plain}

    def decode_again(self, run: MethodRun, record: CaseRecord) -> None:
        recorded = self._recorded(record.label, record.case_id, record.turn)
        seen = run.seen(record)
        self._replayer.replay_turn(run.drafter, recorded, empty=False, seed=record.seed, seen=seen)

    def warm_up(self, run: MethodRun) -> None:
        first = self._recorded(run.label, self.job.cases[0].case_id, 0)
        self._replayer.replay_turn(run.drafter, first, empty=True)


class GroupedAnswers(RecordedAnswers):
    """Recorded turns decoded and priced in lock-step.

    Args:
        seats: by label, with a drafter for each seat.
    """

    def __init__(
        self,
        job: Job,
        replayer: Replayer,
        traces: Traces,
        kinds: Mapping[str, str],
        error: float | None,
        surface: CostSurface,
        seats: Mapping[str, Sequence[MethodRun]],
    ) -> None:
        super().__init__(job, replayer, traces, kinds, error)
        self._surface, self._seats = surface, seats

    def seated(self, run: MethodRun, seat: int) -> MethodRun:
        return self._seats[run.label][seat]

    def answer(self, turns: Sequence[Turn]) -> None:
        asked: dict[int, ReplayRequest] = {}

        def ask(turn: Turn) -> None:
            asked[turn.seat] = self._asked(turn)

        able = seat_turns(self.job, turns, ask)
        if not able:
            return
        steps: list[TextSteps] = []
        together: list[Turn] = []
        made = self._replayer.replay_group(asked)
        for turn in able:
            replayed = made[turn.seat]
            if isinstance(replayed, Exception):
                turn.error = replayed
                continue
            assert replayed.steps is not None
            self._finish(turn, asked[turn.seat].turn, replayed)
            steps.append(replayed.steps)
            together.append(turn)
        times = group_times(steps, self._surface)
        self.covered.append(times.covered)
        for turn in together:
            decode_s = times.setup_s + math.fsum(times.step_s[: turn.record.n_target_passes])
            turn.record = replace(
                turn.record,
                prefill_s=times.prefill_s,
                decode_s=decode_s,
                drafter_setup_s=times.setup_s,
                wall_s=times.prefill_s + decode_s,
                batch=turn.record.batch and replace(turn.record.batch, full_s=times.full_s),
            )
