"""Which method for these prompts: ``python run.py advise prompts=FILE minutes=10``, or `advise`.

It times passes, records plain decoding, searches settings by replays, and confirms the best two
live. The advice is a decision, its setting and one command to paste; then a table.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from annotated_types import Gt, Lt
from omegaconf import DictConfig
from pydantic import TypeAdapter
from rich.console import Console
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.comparison import CallerInput, call, read_input
from runners.cost import Cost
from runners.job import Job
from runners.launch.dispatch import entry_of
from runners.run_folder.folder import is_complete, make_folder
from runners.search import (
    OUT_OF_TIME,
    Bench,
    Candidate,
    Entries,
    LiveRuns,
    Replays,
    Space,
    format_knobs,
    format_overrides,
    load_spaces,
    mix_tasks,
    split_halves,
    successive_halving,
    surface_job,
)
from specbench.config import compose
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import RECORD_STATES
from specbench.config.validate import check_values
from specbench.data.cases import Case, load_cases, prompt_set_hash
from specbench.errors import ConfigurationError, unknown_name
from specbench.models import loading
from specbench.models.restore import restored_on_exit
from specbench.paths import file_name, typed_path
from specbench.replay.cost_surface import CostSurface
from specbench.replay.traces import Traces, load_traces
from specbench.results.cells import ABSENT, FEWEST, Cell, Interval, NumberCell
from specbench.results.fitted_table import FittedTable, columns_of
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import SUMMARY, SURFACE
from specbench.results.statistics.bootstrap import LEVEL, log_ratios, strata_of
from specbench.results.statistics.counted import WRONG, rankable
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

FILE, PAGE = "advice.json", "advice.txt"
USE, PLAIN, UNDECIDED, UNCONFIRMED, UNTRIED = "use", "plain", "undecided", "unconfirmed", "untried"
MINUTES = 10.0
MAX_NEW_TOKENS = 64  # where nothing else is typed: a prompt then takes seconds
_WORD = "advise"
_KEYS = ("prompts", "run", "minutes", "methods", "output_dir")
_TOKENS_KEY = "generation.max_new_tokens"
_USAGE = (
    'Type python run.py advise prompts=FILE (a prompt a line, or {"prompt": ...}), dataset=NAME, '
    "or run=DIR (a finished run), and model=..., minutes=10, methods=[pld,sam], output_dir=DIR as "
    "wanted. docs/advise.md explains them."
)
# Keys that advice decides itself, or that would change what its runs measure.
_DECIDED = ("method", "compare", "runner", "baseline", "record", "repeats", "shard", "fresh")

SETTINGS = (1, 4, 8, 16, 32)  # numbers of settings per method, tried in turn while there is time
FEWEST_PROMPTS, _MOST_PROMPTS = 6, 96  # half of them choose, half confirm
_FINALISTS = 2
_LOOKED_AT = 4  # settings of a method that are checked for whether they can be replayed
_LIVE_PROMPTS = 3  # for methods that cannot be replayed
_WARM_UP_TOKENS = 48  # of each label, before its first turn
_CONTEXT = 256.0  # cached tokens at which a plain pass's time is predicted
_START_S = 20.0  # to start a process and load a small model
_ONE_TRIAL_S = 10.0  # for a slow method's setting that starts just before the search ends
# A method's time for a turn relative to plain decoding's: of a finalist, of any method.
_CHOSEN_COST, _ANY_COST = 1.0, 2.0
# Shares of the minutes: for recording and confirming; for all live runs; for replays of the best
# settings on the other half; by which the last step may exceed the minutes.
_FOR_PROMPTS, _FOR_LIVE, _FOR_PREDICTIONS, _GRACE = 0.75, 0.6, 0.05, 0.1


@dataclass(frozen=True)
class Speed:
    """A speedup over plain decoding on some prompts; fewer than three give no interval."""

    value: float
    interval: Interval | None
    prompts: int

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f} (too few prompts for an interval)"
        return f"{self.value:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"


@dataclass
class Option:
    """A method with its best setting among those tried.

    Attributes:
        score: the speedup on the prompts for choosing, by which the setting was chosen.
        predicted: the predicted speedup on the prompts for confirming.
        measured: the live speedup on these; the intervals of both finalists hold jointly.
        exact: False where outputs differed from plain decoding's for more than rounding.
    """

    method: str
    knobs: Mapping[str, Any]
    score: float
    predicted: Speed | None = None
    measured: Speed | None = None
    exact: bool = True

    @property
    def ends(self) -> Interval:
        """The ends of the measured interval; 0 and infinity without one."""
        return (self.measured.interval if self.measured else None) or (0.0, math.inf)

    @property
    def rank(self) -> tuple[float, float, float]:
        """The sort key: measured speedup, then predicted speedup, then score."""
        measured, predicted = (s.value if s else 0.0 for s in (self.measured, self.predicted))
        return measured, predicted, self.score

    @property
    def prompts_to_decide(self) -> int | None:
        """Prompts for confirming that would make the measured speedup significant."""
        if self.measured is None or self.measured.interval is None or self.measured.value <= 1:
            return None
        low, high = self.measured.interval
        ratio = math.log(high / low) / 2 / math.log(self.measured.value)
        return max(self.measured.prompts + 1, math.ceil(self.measured.prompts * ratio**2))


@dataclass
class Advice:
    """The advice of `advise`; as text it is the decision, the command and the table.

    Attributes:
        options: the methods that were tried, the best first.
        not_run: by method why it did not run, and what to type.
        more: what more minutes would do.
        command: the command to paste; "" where there is nothing to type.
        folder: where the advice's files are.
    """

    model: str
    questions: str
    minutes: float
    choosing: int
    confirming: int
    options: list[Option] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: str = ""
    folder: str = ""

    @property
    def option(self) -> Option | None:
        """The option that the decision is about; None where no method was tried."""
        exact = [option for option in self.options if option.exact]
        measured = [option for option in exact if option.measured]
        faster = [option for option in measured if option.ends[0] > 1]
        undecided = [option for option in measured if option.ends[1] >= 1]
        if chosen := faster or undecided or measured:
            return max(chosen, key=lambda option: option.rank)
        return max(exact, key=lambda option: option.score, default=None)

    @property
    def decision(self) -> str:
        """Use it, use plain decoding, undecided, not confirmed, or nothing was tried."""
        option = self.option
        if option is None or option.measured is None:
            return UNCONFIRMED if option else UNTRIED
        return USE if option.ends[0] > 1 else PLAIN if option.ends[1] < 1 else UNDECIDED

    @property
    def best(self) -> Option | None:
        """The fastest option that is significantly faster than plain decoding."""
        return self.option if self.decision == USE else None

    @property
    def item(self) -> dict[str, Any]:
        """The item of ``compare`` for the decision: a method with its knobs, or plain decoding."""
        best = self.best
        return {"method": best.method, **best.knobs} if best else {"method": BASELINE}

    @property
    def undecided(self) -> list[str]:
        measured = [option.method for option in self.options if option.exact and option.measured]
        return measured or ([self.option.method] if self.option else [])

    @property
    def minutes_to_decide(self) -> int:
        """Estimated minutes that would decide what these did not."""
        n_needed = self.option.prompts_to_decide if self.option else None
        return math.ceil(self.minutes * (n_needed / self.confirming if n_needed else 2))

    @property
    def lines(self) -> list[str]:
        """The decision with its numbers, its setting, the command and its purpose."""
        option, decision = self.option, self.decision
        if option is None:
            why = "the minutes ended first" if self.more else "the reasons are below"
            lines = [f"Undecided: no method was tried ({why})."]
        elif option.measured is None:
            speed = f"predicted {option.predicted}" if option.predicted else f"{option.score:.2f}"
            lines = [f"Not confirmed: {option.method} may be the fastest ({speed}), not run live."]
        else:
            begins = {
                USE: f"Use {option.method}: measured",
                PLAIN: f"Use plain decoding: {option.method} was measured at",
                UNDECIDED: f"Undecided: {option.method} may pay, measured",
            }
            predicted = f"; predicted {option.predicted}" if option.predicted else ""
            lines = [
                f"{begins[decision]} {option.measured} times plain decoding's speed on "
                f"{option.measured.prompts} prompts that it was not chosen by{predicted}."
            ]
        if option is not None and decision != PLAIN:
            lines.append(f"Setting: {format_knobs(option.knobs)}")
        if self.command:
            purpose = {USE: "To use it", PLAIN: "To use it", UNCONFIRMED: "To confirm it"}
            label = purpose.get(decision, "To decide")
            if decision == UNDECIDED and option and (n_prompts := option.prompts_to_decide):
                prompts = self.choosing + self.confirming
                label += f", with about {2 * n_prompts} prompts ({prompts} now)"
            lines.append(f"{label}:\n    {self.command}")
        return lines

    @property
    def remarks(self) -> list[str]:
        """Lines below the table: methods that were not tried, notes, what more minutes would do."""
        by_reason: dict[str, list[str]] = {}
        for method, reason in self.not_run.items():
            by_reason.setdefault(" ".join(reason.split()), []).append(method)
        lines = [f"not tried: {', '.join(names)}: {why}" for why, names in by_reason.items()]
        lines += [f"note: {note}" for note in self.notes]
        return lines + ([f"More minutes would: {'; '.join(self.more)}."] if self.more else [])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "decision": self.decision, "sentence": self.lines[0]}

    def write(self, folder: Path) -> None:
        """Write what is printed, and all fields as JSON, into the folder."""
        jsonl.write_json(folder / FILE, self.to_json())
        jsonl.write_text(folder / PAGE, f"{self}\n")

    def __str__(self) -> str:
        terminal = Console(width=120, color_system=None)
        with terminal.capture() as printed:
            show(self, terminal)
        return str(printed.get()).strip()


def show(advice: Advice, console: Console) -> None:
    """Print the decision, its setting, the command, the table and what was not tried."""

    def write(lines: list[str]) -> None:
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def cell(speed: Speed | None) -> Cell:
        if speed is None:
            return ABSENT
        return NumberCell(speed.value, speed.interval, few=speed.prompts < FEWEST, compares=True)

    write(["", *advice.lines, ""])
    rows: list[dict[str, Cell]] = [
        {
            "method": option.method,
            "measured speedup [95 %]": cell(option.measured),
            "PREDICTED speedup [95 %]": cell(option.predicted),
            "setting": format_knobs(option.knobs),
        }
        for option in advice.options
    ]
    if rows:
        caption = (
            f"{advice.model} on {advice.questions}: settings chosen by {advice.choosing} prompts, "
            f"both speedups on {advice.confirming} others. PREDICTED: recorded answers replayed, "
            "pass times from this machine's cost surface. Measured: live, interleaved with plain "
            "decoding."
        )
        console.print(FittedTable(columns_of(rows), "", caption))
    write(advice.remarks)


class TimeBudget:
    """Counts the minutes down and writes the current step to stderr."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._end = time.monotonic() + 60 * minutes
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def say(self, text: str) -> None:
        left_s = max(0, round(self.left_s))
        self._console.print(f"[{left_s // 60}:{left_s % 60:02d} left] {text}")


def find(
    cases: Sequence[Case],
    questions: str,
    bench: Bench,
    folder: Path,
    budget: TimeBudget,
    traces: Traces | None = None,
    methods: Sequence[str] | None = None,
) -> Advice:
    """Find advice on the cases within the time budget; reuses the folder's finished runs.

    Args:
        questions: the name of the cases.
        traces: an earlier recording of them; None: they are recorded.
        methods: by name; None: all that have a search space.

    Raises:
        ConfigurationError: there are too few prompts, or no such method.
    """
    spaces = load_spaces(methods)
    _check_count(len(cases), f"{questions} has {len(cases)}. Add some.")
    budget.say("timing passes of the model, once for this machine")
    steps = _Pipeline(cases, questions, bench, folder, budget, traces)
    steps.search(spaces)
    steps.predict()
    steps.try_live()
    steps.confirm()
    steps.advice.options.sort(key=lambda option: option.rank, reverse=True)
    return steps.advice


def subject_key(cfg: DictConfig, cases: Sequence[Case]) -> str:
    """Hash the model, the prompts and the generation settings."""
    identity = run_identity(cfg)
    subject = {key: identity[key] for key in ("model", "generation", "engine", "seed")}
    return key_of([subject, prompt_set_hash(cases)])


def _check_count(n: int, otherwise: str) -> None:
    if n < FEWEST_PROMPTS:
        raise ConfigurationError(
            f"advice takes at least {FEWEST_PROMPTS} prompts, half of them to choose by and half "
            f"to confirm: {otherwise}"
        )


class _Pipeline:
    """The steps of one advice after plain decoding is recorded."""

    def __init__(
        self,
        cases: Sequence[Case],
        questions: str,
        bench: Bench,
        folder: Path,
        budget: TimeBudget,
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
        self._choosing, self._confirming = split_halves(recorded, self._seed)
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
        """Record plain decoding on all prompts, or on as many as the minutes suffice for."""
        # Every prompt is recorded; every second one is confirmed together with plain decoding.
        turns = 1 + (1 + _FINALISTS * _CHOSEN_COST) / 2
        left_s = _FOR_PROMPTS * (self._budget.left_s - 2 * _START_S)
        affordable = int(left_s / (turns * self._plain_s(cases) / len(cases)))
        name = f"recorded-{self._key}-"
        done = [path for path in self._folder.glob(f"{name}*") if is_complete(path)]
        earlier = [int(path.name.removeprefix(name)) for path in done]
        n = min(len(cases), max(FEWEST_PROMPTS, min(_MOST_PROMPTS, affordable), *earlier))
        self._budget.say(f"recording plain decoding on {n} of {len(cases)} prompts")
        self._bench.record(mix_tasks(cases, self._seed)[:n], self._folder / f"{name}{n}")
        return load_traces(self._folder / f"{name}{n}")

    def _plain_s(self, cases: Sequence[Case], others: float = 0.0) -> float:
        """Predict a live run's seconds; ``others``: other labels' time relative to plain turns'."""
        ones = np.ones(1)
        pass_s = float(self._surface.pass_s(ones, ones, _CONTEXT * ones)[0])
        turns = sum(len(case.turns) for case in cases)
        tokens = turns * int(self._bench.cfg.generation.max_new_tokens) + _WARM_UP_TOKENS
        return max(pass_s, 1e-6) * tokens * (1 + others)

    @property
    def _confirm_s(self) -> float:
        return _START_S + self._plain_s(self._confirming, _FINALISTS * _CHOSEN_COST)

    @property
    def _live_s(self) -> float:
        """Predicted seconds of the live run of methods that cannot be replayed."""
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
                break  # the smaller search before it gave all methods equal effort
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
        """Predict speedups on the prompts for confirming."""
        if not self._best:
            return
        self._replays.until = math.inf
        self._replays([*self._best.values()], [case.case_id for case in self._confirming])
        error, error_text = self._surface.stated_error
        for option in self.advice.options:
            candidate = self._best[option.method]
            if not candidate.refused:
                option.predicted = predicted(candidate, self._confirming, error, self._seed)
        self.advice.notes.append(f"PREDICTED: {error_text}.")

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
        """Run the best two and plain decoding on the prompts for confirming."""
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
    """Estimate the speedup on the cases and its 95 % interval, None below three cases.

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
    half_width = math.hypot(t, float(stats.norm.ppf((1 + LEVEL) / 2)) * error)
    return Speed(value, (value * math.exp(-half_width), value * math.exp(half_width)), len(ids))


def _note_measured(option: Option, summary: Summary) -> None:
    standings = summary["against_best"].items()
    wrong_labels = [label for label, standing in standings if standing == WRONG]
    option.exact = bool(rankable([option.method], wrong_labels))
    rows = [r for r in summary["rows"] if (r["label"], r["task"]) == (option.method, OVERALL)]
    if not rows or rows[0]["speedup"] is None:
        return
    interval = rows[0]["speedup_ci"]
    for pair in summary["pairs"]:  # an interval that holds jointly with the other finalist's
        if pair["family"] == "ar" and pair["first"] == option.method and pair["ratio_ci"]:
            interval = pair["ratio_ci"]
    option.measured = Speed(
        rows[0]["speedup"], interval and (interval[0], interval[1]), rows[0]["n_timed"]
    )


@dataclass(frozen=True)
class Request:
    """The parsed command line of ``advise``.

    Attributes:
        arguments: the command line of ``advise``, as typed.
        overrides: keys of a run, also those that ``prompts`` or ``run`` stand for.
        prompts: a file of prompts.
        run: a finished run whose recording is used.
        output_dir: None: a folder named by these prompts and this model.
    """

    arguments: tuple[str, ...]
    overrides: tuple[str, ...]
    prompts: str | None = None
    minutes: float = MINUTES
    run: Path | None = None
    methods: tuple[str, ...] | None = None
    output_dir: Path | None = None


def main(arguments: Sequence[str]) -> None:
    """Print the requested advice, or help."""
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(f"{_USAGE}\n")
    else:
        give(read(arguments))


def read(arguments: Sequence[str]) -> Request:
    """Parse the request from the command line.

    Raises:
        ConfigurationError: arguments contradict each other, or one is for another command.
    """
    values: dict[str, str] = {}
    overrides: list[str] = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"{text!r} is not KEY=VALUE. {_USAGE}")
        if key in _KEYS:
            values[key] = value
        elif key.lstrip("+~").partition(".")[0] in _DECIDED:
            raise ConfigurationError(f"{text}: advise decides that itself. Leave it out. {_USAGE}")
        elif get_close_matches(key, _KEYS, cutoff=0.8):  # no key of a run is similar to these
            raise unknown_name("key", key, _KEYS)
        else:
            overrides.append(text)
    sources: list[str] = [key for key in ("prompts", "run") if key in values]
    sources += ["dataset"] if any(word.startswith("dataset=") for word in overrides) else []
    if len(sources) > 1:
        raise ConfigurationError(f"{' and '.join(sources)} both name prompts. Leave one out.")
    minutes = _minutes(values.get("minutes", str(MINUTES)))
    if "prompts" in values:
        overrides += ["dataset=jsonl", f"dataset.path={_quote_path(values['prompts'])}"]
    run = Path(values["run"]) if "run" in values else None
    if run is not None:
        overrides = [*_overrides_of(run, {o.partition("=")[0] for o in overrides}), *overrides]
    if not any(word.startswith(f"{_TOKENS_KEY}=") for word in overrides):
        overrides.append(f"{_TOKENS_KEY}={MAX_NEW_TOKENS}")
    return Request(
        arguments=tuple(arguments),
        overrides=tuple(overrides),
        prompts=values.get("prompts"),
        minutes=minutes,
        run=run,
        methods=tuple(re.findall(r"\w+", values["methods"])) if "methods" in values else None,
        output_dir=Path(values["output_dir"]) if values.get("output_dir") else None,
    )


def _minutes(text: str) -> float:
    try:
        return TypeAdapter(Annotated[float, Gt(0), Lt(1e5)]).validate_python(text)
    except ValueError:
        raise ConfigurationError(
            f"minutes must be a number above 0, got {text}. Type minutes=10."
        ) from None


def _quote_path(path: str) -> str:
    """Quote a path for Hydra, which takes other characters as its grammar."""
    return path if re.fullmatch(r"[\w./~+-]+", path) else json.dumps(path, ensure_ascii=False)


def _overrides_of(run: Path, typed_keys: set[str]) -> list[str]:
    """Select a finished run's overrides that concern model, prompts and outputs."""
    if not is_complete(run):
        raise ConfigurationError(
            f"run={run} is not the folder of a finished run. Type run=DIR with one, or "
            "prompts=FILE."
        )
    manifest = RunManifest.read(run)
    overrides = [
        word
        for word in manifest.overrides
        if re.match(r"\+{0,2}(model|dataset|generation|engine|seed|data_dir|pair)\b", word)
        and word.partition("=")[0] not in typed_keys
    ]
    if not any(word.startswith(f"{_TOKENS_KEY}=") for word in overrides):
        overrides.append(f"{_TOKENS_KEY}={manifest.setting('generation', 'max_new_tokens')}")
    return overrides


def give(request: Request) -> Advice:
    """Find the advice, print it, and write its files.

    Raises:
        ConfigurationError: the request cannot be met; says what to type.
    """
    budget = TimeBudget(request.minutes)
    if request.prompts is not None and not typed_path(request.prompts).is_file():
        raise ConfigurationError(
            f"prompts={request.prompts} is not a file. Type prompts=FILE.txt with a prompt a line, "
            'or FILE.jsonl with {"prompt": "..."} a line.'
        )
    cfg = compose.compose([f"method={BASELINE}", *request.overrides])
    cfg.measure.rerun_minutes = min(1.0, request.minutes / 10)
    check_values(cfg)
    if cfg.generation.temperature:
        raise ConfigurationError(
            "advise replays greedy outputs: type generation=greedy, or leave generation out."
        )
    config = compose.to_config(cfg)
    loading.model_files_present(config)
    cases = load_cases(config.dataset, config.data_dir)
    traces = None if request.run is None else _recording(request.run, cases)
    name = f"{file_name(cfg.model.name)}-{subject_key(cfg, cases)}"
    folder = request.output_dir or Path(cfg.paths.results) / "advice" / name
    make_folder(folder)
    questions = str(cfg.dataset.path or f"dataset={cfg.dataset.name}")
    budget.say(f"{len(cases)} prompts of {questions}, model {cfg.model.name}")
    advice = find(cases, questions, Bench(cfg), folder, budget, traces, request.methods)
    advice.command = command_of(advice, request)
    advice.write(folder)
    console = Console()
    show(advice, console if console.is_terminal else Console(width=120))
    sys.stdout.write(f"files: {folder}/ ({FILE}, {PAGE})\n")
    return advice


def _recording(run: Path, cases: Sequence[Case]) -> Traces:
    if RunManifest.read(run).prompt_set_hash != prompt_set_hash(cases):
        raise ConfigurationError(
            f"the questions of run={run} are not those that its command names here: they have "
            "changed, or dataset.path and data_dir lie elsewhere. Type dataset.path=FILE or "
            "data_dir=DIR, or record again: prompts=FILE instead of run."
        )
    return load_traces(run)


def command_of(advice: Advice, request: Request) -> str:
    """Write the command that uses the advice on these prompts, or one that decides more."""
    if advice.decision in (USE, PLAIN):
        item = advice.item
        arguments = [f"method={item.pop('method')}", *format_overrides(item), *request.overrides]
    else:
        replaced = ("minutes=", "methods=") if advice.option else ("minutes=",)
        arguments = [_WORD, *(word for word in request.arguments if not word.startswith(replaced))]
        arguments += [f"methods=[{','.join(advice.undecided)}]"] if advice.option else []
        arguments += [f"minutes={advice.minutes_to_decide}"]
    return shlex.join(["python", "run.py", *arguments])


class InMemory(Bench):
    """Makes the runs in this process, on the caller's model in memory."""

    def __init__(self, caller: CallerInput) -> None:
        super().__init__(caller.cfg)
        self._caller = caller

    def surface(self) -> Path:
        node, path = surface_job(self.cfg)
        identity, config = run_identity(node), compose.to_config(node)
        with restored_on_exit(self._caller.model):
            loaded = loading.in_memory(config.model, self._caller.model, self._caller.tokenizer)
            # Two models in memory may have one name.
            path = path.with_name(f"{path.name}-{(loaded.weights_hash or '')[:8]}")
            if not is_complete(path):
                make_folder(path)
                identity = {**identity, "shard": None}
                job = Job(config, (), identity, key_of(identity), path, (entry_of(node),), ())
                Cost(lambda _: loaded).run(job)
        return path / SURFACE

    def record(self, cases: Sequence[Case], path: Path) -> None:
        self._caller.measure([], path, cases, record=RECORD_STATES, strict=False)

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> None:
        self._caller.measure(items, path, cases, strict=False)


def advise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    *,
    name: str | None = None,
    minutes: float = MINUTES,
    max_new_tokens: int = MAX_NEW_TOKENS,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Advice:
    """Find the drafting method for these prompts on this machine, as ``run.py advise`` does.

    Args:
        model, tokenizer, prompts, name, overrides: as for `runners.compare`.
        minutes: for everything; a started step is finished.
        max_new_tokens, seed: as on the command line.
        methods: by name; None takes all that have a search space.
        output_dir: files are kept there and reused. None keeps only the cost surface.

    Raises:
        ComparisonRefused: a ValueError; something cannot be used, the message says what to type.
    """
    budget = TimeBudget(minutes)
    arguments = ["generation=greedy", "verifier=auto", f"seed={seed}"]
    arguments += [f"{_TOKENS_KEY}={max_new_tokens}"]
    with call(output_dir) as path:
        caller = read_input(model, tokenizer, prompts, name, arguments, overrides)
        make_folder(path)
        questions = f"{len(caller.cases)} prompts"
        advice = find(caller.cases, questions, InMemory(caller), path, budget, methods=methods)
        if advice.decision == USE:
            advice.command = f"compare(model, tokenizer, prompts, [{advice.item!r}])"
        elif advice.decision != PLAIN:
            chosen = f", methods={advice.undecided!r}" if advice.option else ""
            more = f"minutes={advice.minutes_to_decide}{chosen}"
            advice.command = f"advise(model, tokenizer, prompts, {more})"
        if output_dir is None:
            advice.folder = ""
        else:
            advice.write(path)
    return advice
