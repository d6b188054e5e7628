"""From prompts to advice: time passes, record, search, confirm live."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy import stats

from runners.advice.answer import LIVE, REPLAYED, Advice, Option, Speed, finalists, prompts_for
from runners.advice.bench import Bench, folder_of
from runners.advice.budget import FEWEST_PROMPTS, START_S, Budget
from runners.run_folder.folder import is_complete
from runners.search.entries import Entries, mapping_of
from runners.search.halving import Candidate, Searched, successive_halving
from runners.search.live import fill_in
from runners.search.replayed import Replays
from runners.search.space import Space, load_spaces
from runners.search.split import halves, mixed
from runners.search.trials import OUT_OF_TIME, remembered
from specbench.data.cases import Case
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.replay.cost_surface import CostSurface
from specbench.replay.traces import Traces, load_traces
from specbench.results.estimate import FEWEST, Interval
from specbench.results.records import SUMMARY
from specbench.results.statistics.bootstrap import LEVEL, log_ratios, strata_of
from specbench.results.statistics.counted import WRONG, rankable
from specbench.results.summary_schema import Summary, SummaryRow
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

SETTINGS = (1, 4, 8, 16, 32)  # of each method, one after the other while there is time
_LOOKED_AT = 4  # settings of a method, to see whether some can be replayed
_LIVE_PROMPTS = 3  # on which methods are tried that cannot be replayed
_WARM_UP_TOKENS = 48  # of each label, before its first turn
_CONTEXT = 256.0  # cached tokens at which a plain pass is priced
# A method's time for a turn over plain decoding's: of those that were chosen, of any.
_CHOSEN_COST, _LABEL_COST = 1.0, 3.0


@dataclass(frozen=True)
class Wanted:
    """What advice is wanted on.

    Attributes:
        cases: all that there are.
        questions: what they are called.
        traces: a recording of them that was there already; None: one is made.
        methods: by name; None: all that have a search space.
    """

    cases: Sequence[Case]
    questions: str
    traces: Traces | None = None
    methods: Sequence[str] | None = None


def find(wanted: Wanted, bench: Bench, folder: Path, budget: Budget) -> Advice:
    """Advice on the prompts, in the minutes of the budget; what the folder holds is used.

    Raises:
        ConfigurationError: there are too few prompts, or no such method.
    """
    spaces = load_spaces(wanted.methods)
    _enough(len(wanted.cases), f"{wanted.questions} has {len(wanted.cases)}. Add some.")
    budget.say("timing passes of the model, once for this machine")
    surface = bench.surface()
    steps = _Steps(wanted, bench, folder, budget, surface)
    steps.record()
    steps.search(spaces)
    steps.predict()
    steps.confirm()  # first: what stands on it is the answer, whatever the rest takes
    steps.try_live()
    steps.confirm()
    return steps.advice()


def _enough(n: int, otherwise: str) -> None:
    if n < FEWEST_PROMPTS:
        raise ConfigurationError(
            f"advice takes at least {FEWEST_PROMPTS} prompts, half of them to choose by and half "
            f"to confirm: {otherwise}"
        )


class _Steps:
    """One advice in the making."""

    def __init__(
        self, wanted: Wanted, bench: Bench, folder: Path, budget: Budget, surface: Path
    ) -> None:
        self._wanted, self._bench, self._folder, self._budget = wanted, bench, folder, budget
        self._surface = CostSurface.read(surface)
        self._surface_sha = file_sha256(surface)[:8]
        self._entries = Entries(bench.cfg)
        self._seed = int(bench.cfg.seed)
        self._options: list[Option] = []
        self._best: dict[str, Candidate] = {}
        self._only_live: dict[str, str] = {}
        self._not_run: dict[str, str] = {}
        self._notes: list[str] = []
        self._more: list[str] = []
        self._undecided = ""
        self._confirmed: Sequence[Case] = ()

    # -- plain decoding, recorded ------------------------------------------------------------------

    def record(self) -> None:
        """Plain decoding on as many prompts as the minutes are worth; then the two halves."""
        cases = list(self._wanted.cases)
        if self._wanted.traces is not None:
            traces = self._wanted.traces
        else:
            affordable = self._budget.prompts(len(cases), self._plain_s(cases) / len(cases))
            n = max(affordable, self._recorded_before(len(cases)))
            if n < len(cases):
                self._more.append(f"use more of the {len(cases)} prompts (now {n})")
            cases = mixed(cases, self._seed)[:n]
            self._budget.say(f"recording plain decoding on {n} prompts")
            traces = load_traces(self._bench.record(cases, self._folder / f"recorded-{n}"))
        there = traces.cases()
        cases = [case for case in cases if case.case_id in there]
        _enough(len(cases), f"plain decoding answered {len(cases)}. Shorten the others.")
        self._choosing, self._confirming = halves(cases, self._seed)
        self._tasks = {case.case_id: case.task for case in cases}
        self._replays = Replays(self._entries, traces, self._surface)
        self._trials = self._folder / f"replayed-{traces.sha[:8]}-{self._surface_sha}.jsonl"

    def _recorded_before(self, most: int) -> int:
        """Prompts of the largest recording in the folder: more minutes never use fewer."""
        done = [path for path in self._folder.glob("recorded-*") if is_complete(path)]
        numbers = [int(path.name.partition("-")[2]) for path in done]
        return max((n for n in numbers if n <= most), default=0)

    def _plain_s(self, cases: Sequence[Case], others: float = 0.0) -> float:
        """Predicted seconds of a live run on cases; ``others``: turns' time beside plain ones'."""
        one = np.ones(1)
        pass_s = float(self._surface.pass_s(one, one, _CONTEXT * one)[0])
        turns = sum(len(case.turns) for case in cases)
        tokens = turns * int(self._bench.cfg.generation.max_new_tokens) + _WARM_UP_TOKENS
        return pass_s * tokens * (1 + others)

    @property
    def _confirm_s(self) -> float:
        return self._plain_s(self._confirming, 2 * _CHOSEN_COST)

    @property
    def _live_s(self) -> float:
        """Of the run of methods that cannot be replayed."""
        return self._plain_s(self._choosing[:_LIVE_PROMPTS], _LABEL_COST * len(self._only_live))

    # -- settings ----------------------------------------------------------------------------------

    def search(self, spaces: Mapping[str, Space]) -> None:
        """Replay the settings of each method, more of them while there is time."""
        ids = [case.case_id for case in self._choosing]
        chosen = {m: space for m, space in spaces.items() if self._can_be_replayed(m, space)}
        # The rest is for live runs.
        keep = self._budget.keep_for_live(self._confirm_s, self._live_s)
        found: dict[str, Searched] = {}
        complete = 0
        for count in SETTINGS:
            made = self._entries.candidates(chosen, count, self._seed)
            many = f"up to {count} settings" if count > 1 else "the setting of their own"
            self._budget.say(f"replaying {len(made)} methods, {many} of each")
            searched = successive_halving(made, ids, self._measure(keep))
            late = any(OUT_OF_TIME in one.refused for one in searched.values())
            if not late or not found:  # of a cut round, the one before it has even effort
                found, complete = searched, 0 if late else count
            if late:
                break
        if complete < SETTINGS[-1]:
            self._more.append(f"try more settings of each method (now {complete})")
        for method, one in found.items():
            if one.best is None:
                self._not_run[method] = "; ".join(one.refused)
                continue
            score = one.best.speedup(ids)
            self._best[method] = one.best
            self._options.append(
                Option(method, one.best.knobs, REPLAYED, score, one.tried, one.effort)
            )

    def _measure(self, keep_s: float = -math.inf) -> Any:
        """Replays that are kept, as long as more than ``keep_s`` seconds are left."""
        return remembered(
            self._replays,
            self._trials,
            after=lambda one: self._budget.say_now_and_then(f"replayed {one.method}"),
            stop=lambda: self._budget.left_s < keep_s,
        )

    def _can_be_replayed(self, method: str, space: Space) -> bool:
        """Whether some of its settings can; else it is noted as one to try live, or as none."""
        if reason := self._entries.why_not(method):
            self._not_run[method] = reason
            return False
        if command := self._replays.slow_build(method):
            self._not_run[method] = f"a file that the model makes in minutes is missing: {command}"
            return False
        first = self._entries.candidates({method: space}, _LOOKED_AT, self._seed)[method]
        for one in first:
            try:
                self._replays.kind(method, one.knobs)
                self._only_live.pop(method, None)
                return True
            except NeedsNotMet as error:
                self._only_live[method] = str(error)
        return False

    def try_live(self) -> None:
        """One small run of the methods that cannot be replayed, at their own settings."""
        if not self._only_live:
            return
        cases = self._choosing[:_LIVE_PROMPTS]
        made = {method: Candidate(method, {}) for method in self._only_live}
        items = [mapping_of(method, {}) for method in made]
        path = folder_of(self._folder, "live", items, cases)
        needed = self._live_s
        if not is_complete(path) and not self._budget.affords(needed):
            minutes = self._budget.minutes + (needed + START_S - self._budget.left_s) / 60
            for method in made:
                self._not_run[method] = (
                    "it needs the model, and the minutes left no time to try it live. Type "
                    f"minutes={max(minutes, self._budget.minutes) + 1:.0f}"
                )
            self._more.append(f"try {len(made)} methods that need the model")
            return
        self._budget.say(f"trying {len(made)} methods live, which cannot be replayed")
        ids = [case.case_id for case in cases]
        fill_in(made, self._bench.live(items, cases, path), ids)
        for method, one in made.items():
            if one.costs and not one.refused:
                score = one.speedup(ids)
                self._options.append(Option(method, {}, LIVE, score, 1, len(one.costs)))
            else:
                self._not_run[method] = one.refused

    # -- the other half ----------------------------------------------------------------------------

    def predict(self) -> None:
        """Predicted speedups on the prompts that nothing was chosen by."""
        ids = [case.case_id for case in self._confirming]
        self._measure()([*self._best.values()], ids)
        error, words = self._surface.stated_error
        for option in self._options:
            one = self._best.get(option.method)
            if one is None or one.refused:
                continue
            option.predicted = self._speed(one, ids, error)
            for task in dict.fromkeys(self._tasks[case] for case in ids):
                own = [case for case in ids if self._tasks[case] == task]
                option.predicted_by_task[task] = self._speed(one, own, error)

        if any(option.predicted for option in self._options):
            self._notes.append(f"PREDICTED: {words}.")

    def _speed(self, one: Candidate, ids: Sequence[str], error: float) -> Speed:
        value, interval = predicted(one, ids, self._tasks, error, self._seed)
        return Speed(value, interval, len(ids))

    def confirm(self) -> None:
        """The first two and plain decoding live, on prompts that nothing was chosen by.

        Again where one that was tried live has come among the two.
        """
        chosen = finalists(self._options)
        unmeasured = [option.method for option in chosen if not option.measured]
        if not unmeasured:
            return
        items = [mapping_of(o.method, o.knobs) for o in chosen]
        by_size = [self._confirming[:n] for n in range(len(self._confirming), FEWEST - 1, -1)]
        for cases in by_size:
            path = folder_of(self._folder, "confirmed", items, cases)
            seconds = self._plain_s(cases, _CHOSEN_COST * len(chosen))
            if is_complete(path) or self._budget.affords(seconds, last=True):
                break
        else:
            late = "the first choice" if len(unmeasured) == len(chosen) else unmeasured[0]
            self._more.append(f"confirm {late} live")
            return
        names = " and ".join(o.method for o in chosen)
        self._budget.say(f"confirming {names} live on {len(cases)} prompts")
        run = self._bench.live(items, cases, path)
        self._confirmed = cases
        self._undecided = ""
        summary = cast("Summary", jsonl.read_json(run / SUMMARY))
        rows = {(row["label"], row["task"]): row for row in summary["rows"]}
        for option in chosen:
            _note_measured(option, rows, summary)
            if not option.exact:
                self._notes.append(
                    f"{option.method}: its outputs, or plain decoding's own, are wrong by more "
                    f"than rounding (see {run}): it is not advised."
                )
            elif option is chosen[0] and not (option.joint and option.joint[0] > 1):
                n = prompts_for(option)
                how = f"about {2 * n} prompts" if n else "more prompts"
                self._undecided = f"tell {option.method} from plain decoding, with {how}"

    # -- the answer --------------------------------------------------------------------------------

    def advice(self) -> Advice:
        """What was found so far."""
        self._options.sort(
            key=lambda o: (o.measured.value if o.measured else 0.0, o.score), reverse=True
        )
        wanted = list(dict.fromkeys(filter(None, [*self._more, self._undecided])))
        more = f"More minutes would: {'; '.join(wanted)}." if wanted else ""
        self._notes = list(dict.fromkeys(self._notes))
        if any(option.way == LIVE for option in self._options):
            self._notes.append(
                f"'live': methods that cannot be replayed, tried at their own setting on "
                f"{min(_LIVE_PROMPTS, len(self._choosing))} of the prompts for choosing."
            )
        return Advice(
            model=str(self._bench.cfg.model.name),
            questions=self._wanted.questions,
            minutes=self._budget.minutes,
            choosing=len(self._choosing),
            confirming=len(self._confirmed) or len(self._confirming),
            options=self._options,
            not_run=self._not_run,
            more=more,
            folder=str(self._folder),
            notes=self._notes,
        )


def predicted(
    one: Candidate, cases: Sequence[str], tasks: Mapping[str, str], error: float, seed: int = 0
) -> tuple[float, Interval | None]:
    """The speedup on the cases, and its 95 % interval; None of fewer than three cases.

    Args:
        tasks: of each case.
        error: relative error of the prediction, see `CostSurface.stated_error`.
    """
    value, costs = one.speedup(cases), [one.costs[case] for case in cases]
    plain = np.array([c.tokens / c.plain_tokens * c.plain_seconds for c in costs])
    own = np.array([c.seconds for c in costs])
    above, below = (np.stack([times[:, None]] * 2) for times in (plain, own))  # in its only repeat
    ratios = log_ratios(above, below, strata_of([tasks[case] for case in cases]), seed)
    if ratios is None:
        return value, None
    t = float(stats.t.ppf((1 + LEVEL) / 2, ratios.freedom[0])) * float(ratios.errors[0])
    half = math.hypot(t, float(stats.norm.ppf((1 + LEVEL) / 2)) * error)
    return value, (value * math.exp(-half), value * math.exp(half))


def _note_measured(
    option: Option, rows: Mapping[tuple[str, str], SummaryRow], summary: Summary
) -> None:
    """Write what a confirming run says into the option."""
    for (label, task), row in rows.items():
        if label != option.method or row["speedup"] is None:
            continue
        speed = Speed(row["speedup"], row["speedup_ci"], row["n_timed"])
        if task == OVERALL:
            option.measured, option.joint = speed, speed.interval
            standings = summary["against_best"].items()
            wrong = [name for name, standing in standings if standing == WRONG]
            option.exact = bool(rankable([label], wrong))
        else:
            option.measured_by_task[task] = speed
    for pair in summary["pairs"]:
        if pair["family"] == "ar" and pair["first"] == option.method and pair["ratio_ci"]:
            low, high = pair["ratio_ci"]
            option.joint = (low, high)
