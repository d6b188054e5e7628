"""Settings measured without the model: recorded answers replayed, passes priced by a surface."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from runners.search.space import Candidate, CaseCost, Entries
from runners.session.method_runs import MethodRun, find_heads, fitting, instantiated
from specbench.artifacts import resolve
from specbench.config.compose import build_model
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError, NeedsNotMet, SpecBenchError
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import Replayer, replay_kind
from specbench.replay.traces import RecordedTurn, Traces
from specbench.results.manifest import BASELINE
from specbench.storage import jsonl

OUT_OF_TIME = "the minutes ended before it was tried"


class Replays:
    """Measures candidates on recorded cases; a `runners.search.space.Measure`.

    ``file`` keeps the costs on these traces of plain decoding and this surface: a search that was
    interrupted goes on. After ``until`` (of ``time.monotonic()``) nothing is measured: what is
    missing is `OUT_OF_TIME`.
    """

    def __init__(self, entries: Entries, traces: Traces, surface: CostSurface, file: Path) -> None:
        self.until = math.inf
        self._entries, self._config, self._traces = entries, entries.config, traces
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
        self._file = file
        self._earlier: dict[str, Candidate] = {}
        for line in jsonl.mend_jsonl(file, dict):
            costs = {case: CaseCost(**cost) for case, cost in line.pop("costs").items()}
            candidate = Candidate(**line, costs=costs)
            self._earlier[candidate.key] = candidate

    def kind(self, method: str, knobs: dict[str, object]) -> str | None:
        """Tell how close a setting's replay is to a live run; None: there is none."""
        try:
            return replay_kind(instantiated(self._entries.entry(method, knobs)), self._traces)
        except NeedsNotMet:
            return None

    def slow_build(self, method: str) -> str:
        """Say what to type for a file that takes the model minutes; "": none is missing."""
        needs = instantiated(self._entries.entry(method, {})).needs
        for artifact in needs.artifacts:
            if artifact.path is None and artifact.per_model:
                path = resolve.default_path(
                    artifact,
                    tokenizer=resolve.NamedTokenizer(self._traces.model["tokenizer_hash"], list),
                    cache_dir=self._config.cache_dir,
                    model_key=self._replayer.model_key(),
                )
                if not path.is_file():
                    command = artifact.command_for(build_model(self._config.model))
                    return f"the model makes its file in minutes. Type: {command}"
        return ""

    def refuse_unfit(self, candidates: Sequence[Candidate]) -> None:
        """Refuse settings that do not fit the method's files: one of them would end a whole run."""
        for one in candidates:
            try:
                self._prepared(one)
            except NeedsNotMet:
                pass  # of replays alone
            except ConfigurationError as error:
                one.refused = str(error)

    def __call__(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        for candidate in tqdm(candidates, "replaying", disable=None, leave=False):
            if (earlier := self._earlier.get(candidate.key)) is not None:
                costs = {case: earlier.costs[case] for case in cases if case in earlier.costs}
                candidate.costs = {**costs, **candidate.costs}
                candidate.refused = candidate.refused or earlier.refused
            missing = [case for case in cases if case not in candidate.costs]
            if candidate.refused or not missing:
                continue
            if time.monotonic() > self.until:
                candidate.refused = OUT_OF_TIME
                continue
            try:
                self._measure(candidate, cases, missing)
            except SpecBenchError as error:
                candidate.refused = str(error)
            self._earlier[candidate.key] = replace(candidate, costs=dict(candidate.costs))
            jsonl.append_jsonl(self._file, [asdict(candidate)])

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
        entry = self._entries.entry(one.method, one.knobs)
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
        costs = dict.fromkeys(cases, (0, 0.0))
        for turn, played in zip(turns, self._replayer.replay_turns(drafter, turns), strict=True):
            tokens, seconds = costs[turn.case_id]
            n_decoded = len(played.decoded.output_ids) - 1
            costs[turn.case_id] = tokens + n_decoded, seconds + played.decode_s
        return costs
