"""A made-up machine and made-up methods, judged and summarized by the project's own code.

A draw is a run: prompts are sampled, each label's turn takes its time, the rule judges, what it
names is measured again, and the statistics make a speedup with and without it.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from runners.session import interference_rule
from specbench.config.schema import MeasureConfig
from specbench.results.lines import StepTrace
from specbench.results.statistics.aggregate import pool
from specbench.results.statistics.disturbed import first_measurements, without_rule
from specbench.results.statistics.summary import NO_CONTEXT, Sample
from tests.runners.test_blocks import ToyCase
from tests.runners.toy import make_job
from tests.small_run import case_record

_COMMITTED = 6  # tokens of a turn after the first; as many steps of ar
_FEWEST, _MOST = 2, 5  # steps of a label that drafts: any number in between, by the prompt
_STEP_S = {"ar": 0.10, "a": 0.12, "b": 0.11}
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
    """Something else takes the machine, for many turns in a row."""

    share: float  # of the time
    counted: bool  # whether counters show it
    factor: float = 4.0
    turns: float = 12.0  # that a burst lasts, on average


@dataclass(frozen=True)
class World:
    own: dict[str, Own] = field(default_factory=dict)
    bursts: Bursts | None = None
    labels: tuple[str, ...] = ("ar", "a")
    n: int = 120

    def truth(self, label: str) -> float:
        """The speedup over all prompts on a quiet machine."""

        def seconds(name):
            own = self.own.get(name, Own(0.0))
            steps = _COMMITTED if name == "ar" else (_FEWEST + _MOST) / 2
            return _STEP_S[name] * steps * (1 + own.share * (own.factor - 1))

        return seconds("ar") / seconds(label)


@cache
def _job(labels, n):
    cases = [ToyCase(f"{i:03}", ("why",)) for i in range(n)]
    return make_job(Path("unused"), labels, cases, measure=_MEASURE)


@dataclass
class _Machine:
    """Remembers, from turn to turn, whether something else has it."""

    world: World
    rng: np.random.Generator
    busy: bool = False

    def next(self) -> bool:
        bursts = self.world.bursts
        if bursts is None:
            return False
        if self.rng.random() < 1 / bursts.turns:  # this one ends, or this quiet does
            self.busy = bool(self.rng.random() < bursts.share)
        return self.busy


def one_run(world: World, seed: int, label: str = "a"):
    """A draw: the overall row of ``label`` with the rule and without it, and the records."""
    rng = np.random.default_rng(seed)
    job = _job(world.labels, world.n)
    machine = _Machine(world, rng, busy=bool(world.bursts and rng.random() < world.bursts.share))
    steps = {
        name: rng.integers(_FEWEST, _MOST + 1, world.n) if name != "ar" else [_COMMITTED] * world.n
        for name in world.labels
    }
    slow = {name: rng.random(world.n) < own.share for name, own in world.own.items()}

    def block(one, attempt):
        for name in one.order(world.labels):
            own, n_steps = world.own.get(name, Own(0.0)), int(steps[name][one.index])
            drawn = slow[name][one.index] if own.by_prompt else rng.random() < own.share
            is_slow, busy = own.share > 0 and drawn, machine.next()
            factor = np.exp(_NOISE * rng.standard_normal())
            factor *= (own.factor if is_slow else 1) * (world.bursts.factor if busy else 1)
            step_s = float(_STEP_S[name] * factor)
            record = case_record(
                one.case.case_id, name, _COMMITTED + 1, attempt=attempt,
                stream_index=one.stream_index,
                committed_per_step=_spread(n_steps), decode_s=step_s * n_steps,
                wall_s=step_s * n_steps, cpu_waiting=0.6 if is_slow and own.waits else 0.0,
                cpu_steal=0.5 if busy and world.bursts.counted else 0.0,
            )  # fmt: skip
            trace = StepTrace(
                **record.turn_id,
                drafted=[0] * n_steps,
                depth=[0] * n_steps,
                committed=record.committed_per_step,
                step_s=[step_s] * n_steps,
            )
            yield record, trace

    made = {b.place: list(block(b, 0)) for b in job.blocks()}
    superseded = []
    while True:
        records = [record for pairs in made.values() for record, _ in pairs]
        traces = [trace for pairs in made.values() for _, trace in pairs]
        changed = interference_rule.judge(records, traces, _MEASURE.disturbed, "ar")
        records = [changed.get(record.key, record) for record in records]
        n_again = len({(r.repeat, r.case_id) for r in superseded})
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
    return row, row if same else _row(without_rule(first), world.labels, label), records, first


def _spread(n_steps):
    return [_COMMITTED // n_steps + (i < _COMMITTED % n_steps) for i in range(n_steps)]


def _row(records, labels, label):
    sample = Sample(pool(records, labels), "paired", seed=0, n_resamples=_RESAMPLES)
    return sample.row("overall", label, "ar", NO_CONTEXT)  # of all rows the one that is looked at


@dataclass(frozen=True)
class Study:
    """Many draws. Pairs: with the rule, without it."""

    bias: tuple[float, float]  # of the mean speedup, as a part of the truth
    sd: tuple[float, float]  # of the logarithm of the speedup
    speed_sd: tuple[float, float]  # of the logarithm of tokens/s
    coverage: tuple[float, float]  # of the 95 % interval
    moved: float  # by how much the rule moves the mean speedup
    flagged: float  # share of the turns
    left_out: float  # cases in no time


def study(world: World, draws: int, label: str = "a", seed: int = 0) -> Study:
    truth = world.truth(label)
    speedups, speeds, covered, flagged, left_out = [], [], [], 0.0, 0.0
    for draw in range(draws):
        *rows, records, first = one_run(world, seed + draw, label)
        speedups.append([row["speedup"] for row in rows])
        speeds.append([row["tokens_per_s"] for row in rows])
        covered.append([row["speedup_ci"][0] <= truth <= row["speedup_ci"][1] for row in rows])
        flagged += sum(bool(r.disturbed_by) for r in first) / len(first) / draws
        left_out += sum(r.status == "disturbed" for r in records) / len(records) / draws
    found = np.array(speedups)
    mean = found.mean(axis=0)
    return Study(
        bias=tuple((mean / truth - 1).tolist()),
        sd=tuple(np.log(found).std(axis=0, ddof=1).tolist()),
        speed_sd=tuple(np.log(speeds).std(axis=0, ddof=1).tolist()),
        coverage=tuple(np.array(covered).mean(axis=0).tolist()),
        moved=float(mean[0] / mean[1] - 1),
        flagged=flagged,
        left_out=left_out,
    )
