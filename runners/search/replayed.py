"""Settings measured without the model: recorded answers replayed, passes priced by a surface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from runners.search import entries
from runners.search.halving import Candidate, CaseCost
from runners.session.method_runs import MethodRun, find_heads, fitting, instantiated
from specbench.config import compose
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError, SpecBenchError
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import Replayer, replay_kind
from specbench.replay.traces import RecordedTurn, Traces
from specbench.results.manifest import BASELINE


class Replays:
    """Measures candidates on recorded cases; a `runners.search.halving.Measure`.

    Args:
        cfg: a run's configuration, with the recording's model; its methods do not matter.
        traces: of plain decoding.
        surface: of the machine that is asked about.

    Attributes:
        outside: largest share of a candidate's passes that the surface does not cover.
    """

    def __init__(self, cfg: DictConfig, traces: Traces, surface: CostSurface) -> None:
        self._cfg, self._config, self._traces = cfg, compose.typed(cfg), traces
        self._replayer = Replayer(
            traces,
            surface,
            model=self._config.model,
            cache_dir=Path(self._config.cache_dir),
            seed=int(traces.config["seed"]),
        )
        self._cases = traces.cases()
        self._warm: set[str] = set()
        self._plain: dict[str, tuple[int, float]] = {}

    def kind(self, method: str, knobs: dict[str, object]) -> str:
        """How close a setting's replay is to a live run, see `replay_kind`.

        Raises:
            NeedsNotMet: it cannot be replayed.
        """
        return replay_kind(instantiated(entries.entry(self._cfg, method, knobs)), self._traces)

    def __call__(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        for one in candidates:
            missing = [case for case in cases if case not in one.costs]
            if one.refused or not missing:
                continue
            try:
                self._measure(one, cases, missing)
            except (ConfigurationError, SpecBenchError) as error:
                one.refused = str(error)

    def _measure(self, one: Candidate, cases: Sequence[str], missing: Sequence[str]) -> None:
        drafter = self._prepared(one)
        if one.method not in self._warm:  # what is compiled at first use is not drafting
            self._replayer.replay_turns(drafter, self._cases[missing[0]])
            self._warm.add(one.method)
        # What a drafter keeps from case to case it must have seen.
        asked = list(cases) if drafter.state_scope == "run" else missing
        for case, (tokens, seconds) in self._replayed(drafter, asked).items():
            one.costs[case] = CaseCost(tokens, seconds, *self._plain_cost(case))

    def _prepared(self, one: Candidate) -> Drafter:
        entry = entries.entry(self._cfg, one.method, one.knobs)
        run = MethodRun(entry, instantiated(entry))
        heads = find_heads(self._config, run)
        with fitting(entry):
            return self._replayer.prepare(run.drafter, heads)

    def _plain_cost(self, case: str) -> tuple[int, float]:
        if case not in self._plain:
            drafter = self._prepared(Candidate(BASELINE, {}))
            self._plain |= self._replayed(drafter, [case])
        return self._plain[case]

    def _replayed(self, drafter: Drafter, cases: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Tokens after the first of each turn, and predicted seconds, by case."""
        turns: list[RecordedTurn] = [turn for case in cases for turn in self._cases[case]]
        found = {case: (0, 0.0) for case in cases}
        for turn, played in zip(turns, self._replayer.replay_turns(drafter, turns), strict=True):
            tokens, seconds = found[turn.case_id]
            made = len(played.decoded.output_ids) - 1
            found[turn.case_id] = tokens + made, seconds + played.decode_s
        return found
