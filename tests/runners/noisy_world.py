"""A made-up machine and made-up methods, judged and summarized by the project's own code.

A draw is a run: prompts are sampled, each label's turn takes its time, the rule judges, what it
names is measured again, and the statistics make a speedup with and without it.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runners.session import interference_rule
from specbench.config.schema import MeasureConfig
from specbench.data.cases import interleaved
from specbench.results.lines import StepTrace
from specbench.results.statistics.aggregate import pool
from specbench.results.statistics.disturbed import first_measurements, without_rule
from specbench.results.statistics.summary import NO_CONTEXT, Sample
from tests.runners.test_blocks import ToyCase
from tests.runners.toy import make_job
from tests.small_run import case_record

_COMMITTED = 6  # tokens of a turn after the first; as many steps of ar
_FEWEST, _MOST = 2, 5  # steps of a label that drafts: any number in between, by the prompt
_STEP_S = {"ar": 0.10, "a": 0.12, **dict.fromkeys("bcdef", 0.11)}
_NOISE = 0.03  # standard deviation of a turn's time, as a part of it
_RESAMPLES = 200
_MEASURE = MeasureConfig()


@dataclass(frozen=True)
class Own:
    """A label's own slowness: in a share of its turns everything takes so much longer."""

    share: float
    factor: float = 2.0
    by_prompt: bool = False  # slow for a prompt, hence also when it is measured again
    waits: bool = False  # threads of its own wait for a CPU then


@dataclass(frozen=True)
class Bursts:
    """Something else takes the machine, at any time (Poisson), whoever runs then."""

    share: float  # of the time
    counted: bool  # whether counters show it
    factor: float = 4.0
    seconds: float = 6.0  # that a burst lasts, on average
    hits: str | None = None  # the only label that it slows; None: all


@dataclass(frozen=True)
class World:
    own: dict[str, Own] = field(default_factory=dict)
    bursts: Bursts | None = None
    labels: tuple[str, ...] = ("ar", "a")
    n: int = 120
    scale: float = 1.0  # of all times: 1 has turns of .2 to .6 s
    drift: float = 0.0  # by how much everything is slower at the end of the run
    order: str | None = None  # of two tasks, of which one drafts better; None: a single task

    def truth(self, label: str) -> float:
        """The speedup over all prompts on a quiet machine."""

        def seconds(name):
            own = self.own.get(name, Own(0.0))
            steps = _COMMITTED if name == "ar" else (_FEWEST + _MOST) / 2
            return _STEP_S[name] * steps * (1 + own.share * (own.factor - 1))

        return seconds("ar") / seconds(label)


@cache
def _job(labels, n, order):
    tasks = ["easy"] * (n // 2) + ["hard"] * (n - n // 2) if order else ["qa"] * n
    cases = [ToyCase(f"{i:03}", ("why",), task, task) for i, task in enumerate(tasks)]
    if order == "interleaved":
        cases = interleaved(cases)
    return make_job(Path("unused"), labels, cases, measure=_MEASURE)


class _Machine:
    """Works, and is taken away from time to time."""

    def __init__(self, bursts: Bursts | None, rng: np.random.Generator) -> None:
        self._bursts, self._rng = bursts, rng
        self._busy = bursts is not None and bool(rng.random() < bursts.share)
        self._left = self._lasts()  # seconds until that changes

    def _lasts(self) -> float:
        bursts = self._bursts
        if bursts is None or bursts.share in (0, 1):
            return math.inf
        quiet = bursts.seconds * (1 - bursts.share) / bursts.share
        return float(self._rng.exponential(bursts.seconds if self._busy else quiet))

    def work(self, seconds: float) -> tuple[float, float]:
        """How long so much work takes, and what of it others take."""
        elapsed = stolen = 0.0
        while True:
            factor = self._bursts.factor if self._busy and self._bursts else 1.0
            spent = min(seconds * factor, self._left)
            elapsed += spent
            stolen += spent * (1 - 1 / factor)
            self._left -= spent
            if self._left > 0:
                return elapsed, stolen
            seconds -= spent / factor
            self._busy = not self._busy
            self._left = self._lasts()


class Draw(NamedTuple):
    """A run: the overall row of a label with the rule and without it, and what they are made of.

    ``quiet``: the speedup that the same answers have on a machine of one's own.
    """

    ruled: dict
    plain: dict
    records: list
    first: list
    quiet: float


def one_run(world: World, seed: int, label: str = "a") -> Draw:
    rng = np.random.default_rng(seed)
    job = _job(world.labels, world.n, world.order)
    bursts = world.bursts
    machine, quiet = _Machine(bursts, rng), _Machine(None, rng)
    steps = {
        name: _steps(job, rng) if name != "ar" else [_COMMITTED] * world.n for name in world.labels
    }
    slow = {name: rng.random(world.n) < own.share for name, own in world.own.items()}

    alone = dict.fromkeys(world.labels, 0.0)

    def block(one, attempt):
        late = 1 + world.drift * (1 if attempt else one.index / world.n)
        for name in one.order(world.labels, seed):
            own, n_steps = world.own.get(name, Own(0.0)), int(steps[name][one.index])
            drawn = slow[name][one.index] if own.by_prompt else rng.random() < own.share
            is_slow = own.share > 0 and drawn
            factor = np.exp(_NOISE * rng.standard_normal()) * (own.factor if is_slow else 1)
            step_s = float(_STEP_S[name] * factor * world.scale)
            alone[name] += 0.0 if attempt else step_s * n_steps
            here = machine if bursts and bursts.hits in (None, name) else quiet
            times = [here.work(step_s * late) for _ in range(n_steps)]
            wall_s, stolen = (math.fsum(column) for column in zip(*times, strict=True))
            record = case_record(
                one.case.case_id, name, _COMMITTED + 1, attempt=attempt,
                stream_index=one.stream_index, category=one.case.category, task=one.case.task,
                committed_per_step=_spread(n_steps), decode_s=wall_s, wall_s=wall_s,
                cpu_waiting=0.6 if is_slow and own.waits else 0.0,
                cpu_steal=stolen / wall_s if bursts and bursts.counted else 0.0,
            )  # fmt: skip
            trace = StepTrace(
                **record.turn_id,
                drafted=[0] * n_steps,
                depth=[0] * n_steps,
                committed=record.committed_per_step,
                step_s=[elapsed for elapsed, _ in times],
            )
            yield record, trace

    made = {b.place: list(block(b, 0)) for b in job.blocks()}
    superseded = []
    while True:
        records = [record for pairs in made.values() for record, _ in pairs]
        traces = [trace for pairs in made.values() for _, trace in pairs]
        changed = interference_rule.judge(records, traces, _MEASURE.disturbed, "ar")
        records = [changed.get(record.key, record) for record in records]
        n_again = len(superseded) // len(world.labels)
        again = interference_rule.to_measure_again(job, records, n_again)
        if not again:
            break
        for one in again:
            old = [r for r in records if (r.repeat, r.case_id) == one.place]
            superseded += old
            made[one.place] = list(block(one, 1 + old[0].attempt))
    first = first_measurements(records, superseded)
    row = _row(records, world.labels, label)
    same = not any(record.disturbed_by for record in first)
    plain = row if same else _row(without_rule(first), world.labels, label)
    return Draw(row, plain, records, first, alone["ar"] / alone[label])


def _steps(job, rng):
    """Of a label that drafts, by case."""
    middle = (_FEWEST + _MOST) // 2
    spans = {"easy": (_FEWEST, middle), "hard": (middle + 1, _MOST), "qa": (_FEWEST, _MOST)}
    lows, highs = zip(*(spans[case.task] for case in job.cases), strict=True)
    return rng.integers(lows, np.array(highs) + 1)


def _spread(n_steps):
    return [_COMMITTED // n_steps + (i < _COMMITTED % n_steps) for i in range(n_steps)]


def _row(records, labels, label):
    sample = Sample(pool(records, labels), "paired", seed=0, n_resamples=_RESAMPLES)
    return sample.row("overall", label, "ar", NO_CONTEXT)  # of all rows the one that is looked at


@dataclass(frozen=True)
class Study:
    """Many draws. Pairs: with the rule, without it."""

    bias: tuple[float, float]  # mean of the speedup over the same run's on a quiet machine, less 1
    error: tuple[float, float]  # standard error of the bias
    sd: tuple[float, float]  # of the logarithm of the speedup
    coverage: tuple[float, float]  # of the 95 % interval
    flagged: float  # share of the turns
    again: float  # share of the cases
    stayed: float  # share of the cases

    def __str__(self) -> str:
        pairs = [
            "/".join(f"{100 * part:{form}}" for part in pair)
            for pair, form in (
                (self.bias, "+.2f"), (self.error, ".2f"), (self.sd, ".1f"), (self.coverage, ".1f"),
            )
        ]  # fmt: skip
        shares = (f"{self.flagged:.0%}", f"{self.again:.0%}", f"{self.stayed:.1%}")
        return " | ".join([*pairs, *shares])


def study(world: World, draws: int, label: str = "a", seed: int = 0) -> Study:
    truth = world.truth(label)
    found, covered, shares = [], [], []
    for draw in range(draws):
        one = one_run(world, seed + draw, label)
        rows = (one.ruled, one.plain)
        found.append([(row["speedup"], row["speedup"] / one.quiet) for row in rows])
        covered.append([row["speedup_ci"][0] <= truth <= row["speedup_ci"][1] for row in rows])
        own = [record for record in one.records if record.label == label]
        shares.append(
            (
                np.mean([bool(record.disturbed_by) for record in one.first]),
                np.mean([record.attempt > 0 for record in own]),
                np.mean([record.status == "disturbed" for record in own]),
            )
        )
    speedups, ratios = np.moveaxis(np.array(found), 2, 0)
    flagged, again, stayed = np.mean(shares, axis=0)
    return Study(
        bias=_pair(ratios.mean(axis=0) - 1),
        error=_pair(ratios.std(axis=0, ddof=1) / math.sqrt(draws)),
        sd=_pair(np.log(speedups).std(axis=0, ddof=1)),
        coverage=_pair(np.mean(covered, axis=0)),
        flagged=float(flagged),
        again=float(again),
        stayed=float(stayed),
    )


def _pair(values) -> tuple[float, float]:
    return float(values[0]), float(values[1])
