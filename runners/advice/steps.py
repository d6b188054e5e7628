"""From prompts to advice: time passes, record, search, confirm live."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from scipy import stats

from runners.advice.answer import Advice, Option, Speed
from runners.run_folder.folder import is_complete
from runners.search.backends import OUT_OF_TIME, Bench, LiveRuns, Replays
from runners.search.space import (
    Candidate,
    Entries,
    Space,
    halves,
    load_spaces,
    mixed,
    successive_halving,
)
from specbench.config.run_key import key_of, run_identity
from specbench.data.cases import Case, prompt_set_hash
from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface
from specbench.replay.traces import Traces, load_traces
from specbench.results.estimate import FEWEST
from specbench.results.records import SUMMARY
from specbench.results.statistics.bootstrap import LEVEL, log_ratios, strata_of
from specbench.results.statistics.counted import WRONG, rankable
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

SETTINGS = (1, 4, 8, 16, 32)  # of each method, one after the other while there is time
FEWEST_PROMPTS, _MOST_PROMPTS = 6, 96  # half of them choose, half confirm
_FINALISTS = 2
_LOOKED_AT = 4  # settings of a method, to see whether some can be replayed
_LIVE_PROMPTS = 3  # on which methods are tried that cannot be replayed
_WARM_UP_TOKENS = 48  # of each label, before its first turn
_CONTEXT = 256.0  # cached tokens at which a plain pass is priced
_START_S = 20.0  # to start a process and load a small model
_ONE_TRIAL_S = 10.0  # of a setting of a slow method, which was begun before the search ends
# A method's time for a turn over plain decoding's: of those that were chosen, of any.
_CHOSEN_COST, _ANY_COST = 1.0, 2.0
# Shares of the minutes: for recording and confirming; for all that is run live; to replay the best
# settings on the other half; by which the last step may exceed them.
_FOR_PROMPTS, _FOR_LIVE, _FOR_PREDICTIONS, _GRACE = 0.75, 0.6, 0.05, 0.1


class Budget:
    """Counts the minutes down and says on stderr what is being done."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._end = time.monotonic() + 60 * minutes
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def say(self, text: str) -> None:
        left = max(0, round(self.left_s))
        self._console.print(f"[{left // 60}:{left % 60:02d} left] {text}")


def find(
    cases: Sequence[Case],
    questions: str,
    bench: Bench,
    folder: Path,
    budget: Budget,
    traces: Traces | None = None,
    methods: Sequence[str] | None = None,
) -> Advice:
    """Find advice on the cases in the minutes of the budget; what the folder holds is used.

    Args:
        questions: what the cases are called.
        traces: a recording of them that was there already; None: one is made.
        methods: by name; None: all that have a search space.

    Raises:
        ConfigurationError: there are too few prompts, or no such method.
    """
    spaces = load_spaces(methods)
    _check_count(len(cases), f"{questions} has {len(cases)}. Add some.")
    budget.say("timing passes of the model, once for this machine")
    steps = _Steps(cases, questions, bench, folder, budget, traces)
    steps.search(spaces)
    steps.predict()
    steps.try_live()
    steps.confirm()
    steps.advice.options.sort(key=lambda option: option.rank, reverse=True)
    return steps.advice


def subject_key(cfg: DictConfig, cases: Sequence[Case]) -> str:
    """Hash the model, the prompts and how they are answered."""
    identity = run_identity(cfg)
    subject = {key: identity[key] for key in ("model", "generation", "engine", "seed")}
    return key_of([subject, prompt_set_hash(cases)])


def _check_count(n: int, otherwise: str) -> None:
    if n < FEWEST_PROMPTS:
        raise ConfigurationError(
            f"advice takes at least {FEWEST_PROMPTS} prompts, half of them to choose by and half "
            f"to confirm: {otherwise}"
        )


class _Steps:
    """One advice in the making, once plain decoding is recorded."""

    def __init__(
        self,
        cases: Sequence[Case],
        questions: str,
        bench: Bench,
        folder: Path,
        budget: Budget,
        traces: Traces | None,
    ) -> None:
        self._bench, self._folder, self._budget = bench, folder, budget
        surface = bench.surface()
        self._surface = CostSurface.read(surface)
        self._entries = Entries(bench.cfg)
        self._seed = int(bench.cfg.seed)
        self._key = subject_key(bench.cfg, cases)
        traces = traces or self._record(cases)
        recorded = [case for case in cases if case.case_id in traces.cases()]
        _check_count(len(recorded), f"plain decoding answered {len(recorded)}. Shorten the others.")
        self._choosing, self._confirming = halves(recorded, self._seed)
        self._ids = [case.case_id for case in self._choosing]
        file = folder / f"replayed-{traces.sha[:8]}-{file_sha256(surface)[:8]}.jsonl"
        self._replays = Replays(self._entries, traces, self._surface, file)
        self._best: dict[str, Candidate] = {}
        self._live_only: list[Candidate] = []
        counts = len(self._choosing), len(self._confirming)
        model = str(bench.cfg.model.name)
        self.advice = Advice(model, questions, budget.minutes, *counts, folder=str(folder))
        if len(recorded) < len(cases):
            more = f"use more of the {len(cases)} prompts ({len(recorded)} now)"
            self.advice.more.append(more)

    def _record(self, cases: Sequence[Case]) -> Traces:
        """Plain decoding on all prompts, or on as many as the minutes suffice for."""
        # A prompt is recorded, and every second one is confirmed with plain decoding beside it.
        turns = 1 + (1 + _FINALISTS * _CHOSEN_COST) / 2
        left_s = _FOR_PROMPTS * (self._budget.left_s - 2 * _START_S)
        affordable = int(left_s / (turns * self._plain_s(cases) / len(cases)))
        name = f"recorded-{self._key}-"
        done = [path for path in self._folder.glob(f"{name}*") if is_complete(path)]
        earlier = [int(path.name.removeprefix(name)) for path in done]
        n = min(len(cases), max(FEWEST_PROMPTS, min(_MOST_PROMPTS, affordable), *earlier))
        self._budget.say(f"recording plain decoding on {n} of {len(cases)} prompts")
        self._bench.record(mixed(cases, self._seed)[:n], self._folder / f"{name}{n}")
        return load_traces(self._folder / f"{name}{n}")

    def _plain_s(self, cases: Sequence[Case], others: float = 0.0) -> float:
        """Predicted seconds of a live run on cases; ``others``: turns' time beside plain ones'."""
        one = np.ones(1)
        pass_s = float(self._surface.pass_s(one, one, _CONTEXT * one)[0])
        turns = sum(len(case.turns) for case in cases)
        tokens = turns * int(self._bench.cfg.generation.max_new_tokens) + _WARM_UP_TOKENS
        return max(pass_s, 1e-6) * tokens * (1 + others)

    @property
    def _confirm_s(self) -> float:
        return _START_S + self._plain_s(self._confirming, _FINALISTS * _CHOSEN_COST)

    @property
    def _live_s(self) -> float:
        """Of the run of methods that cannot be replayed."""
        cases = self._choosing[:_LIVE_PROMPTS]
        return _START_S + self._plain_s(cases, _ANY_COST * len(self._live_only))

    def search(self, spaces: Mapping[str, Space]) -> None:
        """Replay the settings of each method, more of them while there is time."""
        first = self._entries.candidates(spaces, _LOOKED_AT, self._seed)
        chosen: dict[str, Space] = {}
        for method, space in spaces.items():
            if why := self._entries.why_not(method) or self._replays.slow_build(method):
                self.advice.not_run[method] = why
            elif any(self._replays.kind(method, c.knobs) for c in first[method]):
                chosen[method] = space
            else:
                self._live_only.append(Candidate(method, {}))
        if not chosen:
            return
        minutes_s = 60 * self._budget.minutes
        later_s = self._confirm_s + _FOR_PREDICTIONS * minutes_s
        if later_s + self._live_s <= _FOR_LIVE * minutes_s:
            later_s += self._live_s
        self._replays.until = time.monotonic() + self._budget.left_s - later_s - _ONE_TRIAL_S
        complete = 0
        for count in SETTINGS:
            tried = self._entries.candidates(chosen, count, self._seed)
            self._budget.say(f"replaying {len(tried)} methods, up to {count} settings of each")
            best = successive_halving(tried, self._ids, self._replays)
            late = any(c.refused == OUT_OF_TIME for cs in tried.values() for c in cs)
            if late and complete:
                break  # the smaller search before it has even effort
            self._best = {method: finalists[0] for method, finalists in best.items() if finalists}
            complete = count
            if late:
                break
        for method in chosen:
            self._add(self._best.get(method) or tried[method][0])
        if complete < SETTINGS[-1]:
            self.advice.more.append(f"try more settings of each method ({complete} now)")

    def _add(self, candidate: Candidate) -> None:
        if candidate.refused:
            self.advice.not_run[candidate.method] = candidate.refused
        else:
            score = candidate.speedup(self._ids)
            self.advice.options.append(Option(candidate.method, candidate.knobs, score))

    def predict(self) -> None:
        """Predict speedups on the prompts that nothing was chosen by."""
        if not self._best:
            return
        self._replays.until = math.inf
        self._replays([*self._best.values()], [case.case_id for case in self._confirming])
        error, words = self._surface.stated_error
        for option in self.advice.options:
            candidate = self._best[option.method]
            if not candidate.refused:
                option.predicted = predicted(candidate, self._confirming, error, self._seed)
        self.advice.notes.append(f"PREDICTED: {words}.")

    def try_live(self) -> None:
        """Run the methods that cannot be replayed on a few prompts, at their own settings."""
        if not self._live_only:
            return
        cases, ids = self._choosing[:_LIVE_PROMPTS], self._ids[:_LIVE_PROMPTS]
        names = [candidate.method for candidate in self._live_only]
        runs = LiveRuns(self._bench, cases, self._folder / f"live-{self._key}")
        fits = self._live_s + self._confirm_s <= self._budget.left_s
        if not fits and not runs.is_done(self._live_only, ids):
            minutes = math.ceil(2 * self._budget.minutes)
            why = f"no time was left to run it live. Type minutes={minutes}"
            self.advice.not_run |= dict.fromkeys(names, why)
            self.advice.more.append(f"try {len(names)} methods that cannot be replayed")
            return
        self._budget.say(f"trying {len(names)} methods live, which cannot be replayed")
        runs(self._live_only, ids)
        for candidate in self._live_only:
            self._add(candidate)
        self.advice.notes.append(
            f"{', '.join(names)}: cannot be replayed, tried at their own settings on {len(cases)} "
            "of the prompts for choosing."
        )

    def confirm(self) -> None:
        """Run the first two and plain decoding on prompts that nothing was chosen by."""
        finalists = sorted(self.advice.options, key=lambda o: o.score, reverse=True)[:_FINALISTS]
        items = [{"method": option.method, **option.knobs} for option in finalists]
        left_s = self._budget.left_s + 60 * _GRACE * self._budget.minutes
        for n in range(len(self._confirming), FEWEST - 1, -1) if finalists else ():
            cases = self._confirming[:n]
            key = key_of([self._key, items, [case.case_id for case in cases]])
            path = self._folder / f"confirmed-{key}"
            needed_s = _START_S + self._plain_s(cases, _CHOSEN_COST * len(finalists))
            if is_complete(path) or needed_s <= left_s:
                break
        else:
            self.advice.more += ["confirm the first choice live"] if finalists else []
            return
        names = " and ".join(option.method for option in finalists)
        self._budget.say(f"confirming {names} live on {n} prompts")
        self._bench.live(items, cases, path)
        self.advice.confirming = n
        summary = cast("Summary", jsonl.read_json(path / SUMMARY))
        for option in finalists:
            _note_measured(option, summary)
            if not option.exact:
                self.advice.notes.append(
                    f"{option.method}: its outputs, or plain decoding's own, are wrong by more "
                    f"than rounding (see {path}): it is not advised."
                )


def predicted(candidate: Candidate, cases: Sequence[Case], error: float, seed: int) -> Speed:
    """Estimate the speedup on the cases and its 95 % interval, None of fewer than three cases.

    ``error``: relative error of the prediction, see `CostSurface.stated_error`.
    """
    ids = [case.case_id for case in cases]
    value, costs = candidate.speedup(ids), [candidate.costs[case] for case in ids]
    plain = np.array([c.tokens / c.plain_tokens * c.plain_seconds for c in costs])
    drafted = np.array([c.seconds for c in costs])
    above, below = (np.stack([s[:, None]] * 2) for s in (plain, drafted))  # in its only repeat
    ratios = log_ratios(above, below, strata_of([case.task for case in cases]), seed)
    if ratios is None:
        return Speed(value, None, len(ids))
    t = float(stats.t.ppf((1 + LEVEL) / 2, ratios.freedom[0])) * float(ratios.errors[0])
    half = math.hypot(t, float(stats.norm.ppf((1 + LEVEL) / 2)) * error)
    return Speed(value, (value * math.exp(-half), value * math.exp(half)), len(ids))


def _note_measured(option: Option, summary: Summary) -> None:
    standings = summary["against_best"].items()
    wrong = [label for label, standing in standings if standing == WRONG]
    option.exact = bool(rankable([option.method], wrong))
    rows = [r for r in summary["rows"] if (r["label"], r["task"]) == (option.method, OVERALL)]
    if not rows or rows[0]["speedup"] is None:
        return
    interval = rows[0]["speedup_ci"]
    for pair in summary["pairs"]:  # an interval that holds together with the other finalist's
        if pair["family"] == "ar" and pair["first"] == option.method and pair["ratio_ci"]:
            interval = pair["ratio_ci"]
    option.measured = Speed(
        rows[0]["speedup"], interval and (interval[0], interval[1]), rows[0]["n_timed"]
    )
