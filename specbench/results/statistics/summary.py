"""Rows of ``summary.json``: a run's numbers per label and task, and over the whole run.

:data:`specbench.results.metrics.METRICS` says what each number is. How cases count:

- The turns and repeats of a case are added up first; the case is the unit of everything after.
- A case that failed for one label, or lacks a turn of it, is left out for all labels
  (``n_dropped``). MAT and verdicts are about the rest, ``n_cases``; speeds are about those of them
  that every label has a speed for, ``n_timed``.
- A disturbed turn takes its block (case and repeat) out of all times, for all labels, unless more
  than a twentieth of the run's blocks are disturbed: then all count (``disturbed_counted``).
- Cases decoded at once (``batch.size`` above 1) are added up by group, and the group is the unit:
  its tokens are those of all its sequences, its time ends with the last token of any. Groups hold
  cases of several tasks, so a run of several has rows of the whole run alone.

Estimators of ``tokens_per_s`` and ``speedup``:

- ``paired``: tokens after the first over decode time; the speedup is the ratio of these totals.
- ``end_to_end``: new tokens over wall time, the prompt's pass and its token included.
- ``specbench``: a question's speed is its new tokens over its wall time, a method's the mean over
  questions, as in Spec-Bench's ``speed.py``; but the baseline's tokens are counted by ids, nothing
  after the first EOS counts, and a failed question is left out.
- ``specbench_exact``: the same with plain decoding's tokens as ``speed.py`` counts them
  (``n_retokenized`` of the records; without it there is no speed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from specbench.arrays import FloatArray
from specbench.config.schema import ESTIMATORS as ESTIMATORS  # for analysis too
from specbench.results.cells import FEWEST, Interval
from specbench.results.manifest import BASELINE
from specbench.results.metrics import METRICS, Measured
from specbench.results.records import AUDIT_STATUSES, DIFFERS, BlockKey, CaseRecord, group_by
from specbench.results.statistics.bootstrap import (
    N_RESAMPLES,
    LogRatios,
    geometric_mean,
    log_ratios,
    ratio_of_totals,
    strata_of,
)
from specbench.results.statistics.roofline import BaselineContext
from specbench.results.summary_schema import SummaryRow
from specbench.results.tasks import OVERALL, TASKS

NO_CONTEXT = BaselineContext()

# Of the blocks, how many may be left out of times; in a small run one.
LEFT_OUT_SHARE = 0.05

# Columns of a label's totals per case.
(
    COMMITTED, STEPS, TIMED_COMMITTED, DECODE, TIMED_NEW, WALL, ENERGY, ENERGY_NEW, SPEC_BENCH_NEW,
    REQUESTS, REQUEST_MATS, TOKEN_MATS,
) = range(12)  # fmt: skip

# What each case adds above and below the line of a ratio, of totals ``[..., n, L, 12]``.
Parts: TypeAlias = Callable[[FloatArray], tuple[FloatArray, FloatArray]]


# -- which turns count -----------------------------------------------------------------------------


def noisy_blocks(records: Iterable[CaseRecord]) -> set[BlockKey]:
    """Return every block that holds a disturbed turn."""
    return {record.block for record in records if record.status == "disturbed"}


def untimed_blocks(records: Iterable[CaseRecord]) -> set[BlockKey]:
    """Return the blocks that count in no time: the disturbed ones, where these are few.

    Where more than :func:`most_left_out` are disturbed, all count: what takes long is hit more
    often, so a run without many of them, or without the worst, is one of shorter answers.
    """
    records = list(records)
    noisy = noisy_blocks(records)
    n_blocks = len({record.block for record in records})
    return noisy if len(noisy) <= most_left_out(n_blocks) else set()


def most_left_out(n_blocks: int) -> int:
    """Compute how many disturbed blocks of a run its times may leave out."""
    return max(1, math.floor(LEFT_OUT_SHARE * n_blocks)) if n_blocks > FEWEST else 0


def timed_turns(records: Iterable[CaseRecord], labels: Sequence[str]) -> list[CaseRecord]:
    """Return the turns that count in times: :func:`counted_turns` less :func:`untimed_blocks`.

    Args:
        records: of a whole run.
        labels: those compared; turns of others are left out.
    """
    counted = counted_turns(records, labels)
    untimed = untimed_blocks(counted)
    return [turn for turn in counted if turn.block not in untimed]


def counted_turns(records: Iterable[CaseRecord], labels: Sequence[str]) -> list[CaseRecord]:
    """Return the turns of cases that did not drop out: all numbers but times come from them."""
    by_unit = group_by((r for r in records if r.label in labels), lambda turn: turn.unit)
    return [turn for turns in by_unit.values() if is_complete(turns, labels) for turn in turns]


def is_complete(turns: Sequence[CaseRecord], labels: Sequence[str]) -> bool:
    """Tell whether no turn failed and every label has every turn of the case in every repeat."""
    if any(turn.status == "failed" for turn in turns):
        return False
    keys = {turn.key[:3] for turn in turns}
    return all(keys == {t.key[:3] for t in turns if t.label == label} for label in labels)


def task_order(task: str) -> tuple[int, str]:
    """Give a key that sorts tasks: Spec-Bench's order, others by name, the whole run last."""
    order = [*TASKS, None, OVERALL]
    return (order.index(task if task in order else None), task)


# -- cases added up --------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A case, or the group that it was decoded in: of cases of several tasks the whole run's."""

    name: str
    task: str
    category: str
    n_cases: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """The cases of a run, added up."""

    labels: Sequence[str]  # ``[L]``
    units: list[Unit]  # ``[n]`` that did not drop out
    totals: FloatArray  # ``[1 + R, n, L, 12]``: over all repeats, then in each of the R
    dropped: list[str]  # tasks of the cases that dropped out
    noisy: list[str]  # tasks of those that hold a disturbed turn
    timed: set[BlockKey]  # the blocks that count in times
    noisy_counted: bool  # some of them are disturbed
    turns: Mapping[str, Sequence[CaseRecord]]  # by label, those that did not fail
    last: Mapping[str, CaseRecord]  # by label, for its method, scope of state and kind of times
    prediction_errors: Mapping[str, float]  # of predicted speedups, relative; plain has none

    def only(self, chosen: Sequence[int]) -> Pooled:
        """Keep some of the cases; what is counted by turn stays."""
        return replace(self, units=[self.units[i] for i in chosen], totals=self.totals[:, chosen])

    @property
    def n_cases(self) -> int:
        return sum(unit.n_cases for unit in self.units)


def pool(records: Iterable[CaseRecord], labels: Sequence[str]) -> Pooled:
    """Add up turns and repeats; find what drops out."""
    turns = [record for record in records if record.label in labels]
    in_time = timed_turns(turns, labels)
    timed = {turn.block for turn in in_time}
    batched = any(turn.batch for turn in turns)
    mixed = batched and len({turn.task for turn in turns}) > 1
    repeats = sorted({turn.repeat for turn in turns})
    units, totals = [], []
    dropped, noisy = list[str](), list[str]()
    # Sorted, so that a run that was interrupted and resumed gives the same intervals.
    for name, of_unit in sorted(group_by(turns, lambda turn: turn.unit).items()):
        size = len({turn.case_id for turn in of_unit})
        task = OVERALL if mixed else of_unit[0].task
        if not is_complete(of_unit, labels):
            dropped += [task] * size
            continue
        if noisy_blocks(of_unit):
            noisy += [task] * size
        # Groups are of all lengths, whatever their categories.
        units.append(Unit(name, task, OVERALL if batched else of_unit[0].category, size))
        totals.append(
            [
                _totals([t for t in of_unit if t.label == x and t.repeat in r], timed)
                for r in (repeats, *([repeat] for repeat in repeats))
                for x in labels
            ]
        )
    shape = (len(units), 1 + len(repeats), len(labels), TOKEN_MATS + 1)
    return Pooled(
        labels=list(labels),
        units=units,
        totals=np.array(totals, dtype=np.float64).reshape(shape).swapaxes(0, 1),
        dropped=dropped,
        noisy=noisy,
        timed=timed,
        noisy_counted=bool(noisy_blocks(in_time)),
        turns={x: [t for t in turns if t.label == x and t.status != "failed"] for x in labels},
        last={turn.label: turn for turn in turns},
        prediction_errors={
            turn.label: turn.prediction_error
            for turn in turns
            if turn.prediction_error and turn.method != BASELINE
        },
    )


def _totals(turns: Sequence[CaseRecord], timed_blocks: set[BlockKey]) -> list[float]:
    timed = [turn for turn in turns if turn.block in timed_blocks]
    # A turn whose server did not report its steps counts in no MAT.
    lengths = [(t.n_new - 1, t.n_target_passes) for t in turns if t.n_target_passes]
    # Sequences decoded at once share their group's time.
    slots = group_by(timed, lambda turn: (turn.turn, turn.block)).values()
    return [
        sum(committed for committed, _ in lengths),
        sum(steps for _, steps in lengths),
        sum(turn.n_decoded for turn in timed),
        math.fsum(max(turn.decode_s for turn in together) for together in slots),
        sum(turn.n_new for turn in timed),
        math.fsum(max(turn.wall_s for turn in together) for together in slots),
        math.fsum(turn.energy_j or 0.0 for turn in timed),
        sum(turn.n_new for turn in timed if turn.energy_j is not None),
        sum(_spec_bench_new(turn) for turn in timed),
        len(lengths),
        math.fsum(committed / steps for committed, steps in lengths),
        math.fsum(committed**2 / steps for committed, steps in lengths),
    ]


def _spec_bench_new(turn: CaseRecord) -> float:
    """Count new tokens like Spec-Bench, which retokenizes AR decoding's text; NaN if unknown."""
    if turn.method != BASELINE:
        return turn.n_new
    return math.nan if turn.n_retokenized is None else turn.n_retokenized


# -- ratios over cases -----------------------------------------------------------------------------


def _columns(totals: FloatArray, above: int, below: int) -> tuple[FloatArray, FloatArray]:
    return totals[..., above], totals[..., below]


def _question_speeds(totals: FloatArray, new: int) -> tuple[FloatArray, FloatArray]:
    """Tokens of a column over wall time by case, and 1 for each; both 0 where a case has none."""
    timed = totals[..., WALL] > 0
    seconds = np.where(timed, totals[..., WALL], 1.0)
    return np.where(timed, totals[..., new] / seconds, 0.0), timed.astype(np.float64)


_MAT = partial(_columns, above=COMMITTED, below=STEPS)
_DECODED = partial(_columns, above=TIMED_COMMITTED, below=DECODE)
_WHOLE = partial(_columns, above=TIMED_NEW, below=WALL)
_SPEEDS: Mapping[str, Parts] = {  # by estimator
    "paired": _DECODED,
    "end_to_end": _WHOLE,
    "specbench": partial(_question_speeds, new=TIMED_NEW),
    "specbench_exact": partial(_question_speeds, new=SPEC_BENCH_NEW),
}


class Ratios:
    """A ratio of every label, over the cases that have it of all labels.

    Args:
        pooled: the cases.
        parts: what each adds above and below the line.
        seed, n_resamples: of the bootstrap.
        zero_counts: cases with nothing above the line count.
        by_case: compare labels by the geometric mean over cases of the ratios, and not by the ratio
            of totals.
    """

    def __init__(
        self,
        pooled: Pooled,
        parts: Parts,
        seed: int,
        n_resamples: int,
        *,
        zero_counts: bool = False,
        by_case: bool = False,
    ) -> None:
        above, below = parts(pooled.totals)
        counted = (np.isfinite(above[0]) if zero_counts else above[0] > 0) & (below[0] > 0)
        cases = np.flatnonzero(counted.all(axis=1))
        self.pooled = pooled.only(cases.tolist())
        self._above, self._below = above[:, cases], below[:, cases]
        self._bootstrap = seed, n_resamples
        self._by_case = by_case

    @cached_property
    def logs(self) -> LogRatios | None:
        """The ratios' logarithms, label by label, with what predictions miss in their errors."""
        above, below = self._above, self._below
        if self._by_case:
            timed = (above > 0) & (below > 0)
            above, below = (np.log(np.where(timed, part, 1.0)) for part in (above, below))
            above, below = above - below, timed.astype(np.float64)
        strata = strata_of([unit.category for unit in self.pooled.units])
        ratios = log_ratios(above, below, strata, *self._bootstrap, means=self._by_case)
        errors = [self.pooled.prediction_errors.get(label, 0.0) for label in self.pooled.labels]
        if ratios is None or not any(errors):
            return ratios
        return replace(ratios, predictions=np.diag(np.square(errors)))

    def value(self, label: str) -> float | None:
        """Return a label's ratio of totals."""
        i = self.pooled.labels.index(label)
        return _finite(ratio_of_totals(self._above[0, :, i], self._below[0, :, i]))

    def estimate(self, label: str) -> Measured:
        """Return a label's ratio of totals with its interval."""
        value = self.value(label)
        return value, self._interval(value, label)

    def over(self, label: str, reference: str | None) -> Measured:
        """Return a label's ratio over that of a reference, which may not have been run."""
        labels = self.pooled.labels
        if reference is None or reference not in labels or not self.pooled.units:
            return None, None
        if reference == label:  # by definition, so there is nothing to estimate
            return 1.0, None
        above, plain_above = self._above[0, :, [labels.index(label), labels.index(reference)]]
        below, plain_below = self._below[0, :, [labels.index(label), labels.index(reference)]]
        if self._by_case:
            value = geometric_mean((above / below * (plain_below / plain_above)).tolist())
        else:
            value = ratio_of_totals(above, below) * ratio_of_totals(plain_below, plain_above)
        return value, self._interval(value, label, reference)

    def _interval(
        self, value: float | None, label: str, reference: str | None = None
    ) -> Interval | None:
        if value is None or self.logs is None:
            return None
        contrast = [float(x == label) - float(x == reference) for x in self.pooled.labels]
        return self.logs.contrast(np.array([contrast])).interval(0, value)


class Sample:
    """The cases of one task, or of the whole run, with one bootstrap for all their numbers.

    Attributes:
        speed: of every label by the estimator, over the timed cases.
        baseline, context: what speedups and bandwidth shares refer to.
    """

    def __init__(
        self, pooled: Pooled, estimator: str, seed: int, n_resamples: int = N_RESAMPLES
    ) -> None:
        self.pooled = pooled
        self._estimator = estimator
        self._bootstrap = seed, n_resamples
        self.baseline: str | None = None
        self.context = NO_CONTEXT
        # Of an answer without text Spec-Bench's count is 0 or less, and it averages that in.
        zero_counts = estimator == "specbench_exact"
        self.speed = Ratios(pooled, _SPEEDS[estimator], seed, n_resamples, zero_counts=zero_counts)
        self._decoded = Ratios(pooled, _DECODED, seed, n_resamples, by_case=True)
        self._whole = Ratios(pooled, _WHOLE, seed, n_resamples)

    @property
    def n_timed(self) -> int:
        """Cases that every label has a speed for: those that speeds are made of."""
        return self.speed.pooled.n_cases

    @property
    def unit_size(self) -> float:
        """Timed cases in a unit of the bootstrap: more than one where they are decoded at once."""
        return self.n_timed / max(1, len(self.speed.pooled.units))

    @property
    def mats(self) -> LogRatios | None:
        """The logarithm of every label's MAT, over the cases with a step of every label."""
        return Ratios(replace(self.pooled, prediction_errors={}), _MAT, *self._bootstrap).logs

    def row(self, task: str, label: str) -> SummaryRow:
        """Return the row of ``summary.json``."""
        pooled = self.pooled
        turns = [turn for turn in pooled.turns[label] if task in (OVERALL, turn.task)]
        verdicts = ["lossy" if turn.lossy else turn.lossless.verdict for turn in turns]
        n_noisy = sum(task in (OVERALL, name) for name in pooled.noisy)
        last = pooled.last.get(label)
        row: SummaryRow = {
            "label": label,
            "method": last.method if last else label,
            "task": task,
            "n_cases": pooled.n_cases,
            "n_timed": self.n_timed,
            "n_dropped": sum(task in (OVERALL, name) for name in pooled.dropped),
            "n_disturbed": n_noisy,
            "disturbed_counted": pooled.noisy_counted and n_noisy > 0,
            "estimator": self._estimator,
        }
        numbers = self._numbers(label)
        for metric in METRICS:
            row[metric.name], interval = numbers[metric.name]
            if metric.has_interval:
                row[metric.interval_name] = interval
        return row | {
            "phase_share": _phase_share(turn for turn in turns if turn.block in pooled.timed),
            "lossless": {
                status: verdicts.count(status)
                for status in (*AUDIT_STATUSES, DIFFERS, "lossy")
                if status in AUDIT_STATUSES or status in verdicts
            },
            "state_scope": last.state_scope if last else None,
            "timing": last.timing if last else "measured",
        }

    def _numbers(self, label: str) -> dict[str, Measured]:
        """Compute each of `specbench.results.metrics.METRICS`, by its name."""
        baseline, plain = self.baseline, self.context.plain
        totals = self.pooled.totals[0, :, self.pooled.labels.index(label)].T

        def ratio(above: int, below: int) -> Measured:
            return _finite(ratio_of_totals(totals[above], totals[below])), None

        # The share of the label itself where it is plain decoding, else of the baseline.
        reader = label if label in plain.values() else baseline
        return {
            "mat": self._mat(label),
            "mat_per_request": ratio(REQUEST_MATS, REQUESTS),
            "mat_token_weighted": ratio(TOKEN_MATS, COMMITTED),
            "tokens_per_s": self.speed.estimate(label),
            "end_to_end_tokens_per_s": ratio(TIMED_NEW, WALL),
            "speedup": self.speed.over(label, baseline),
            "geomean_speedup": self._decoded.over(label, baseline),
            "end_to_end_speedup": self._whole.over(label, baseline),
            "speedup_eager": self.speed.over(label, plain.get("eager")),
            "speedup_graph": self.speed.over(label, plain.get("graph")),
            "bandwidth_share": (self.context.share(self.decode_speed(reader)), None),
            "joules_per_token": ratio(ENERGY, ENERGY_NEW),
        }

    def _mat(self, label: str) -> Measured:
        # Over the cases with a step of this label, whatever the others have.
        i = self.pooled.labels.index(label)
        pooled = replace(
            self.pooled, labels=[label], totals=self.pooled.totals[:, :, [i]], prediction_errors={}
        )
        value, interval = Ratios(pooled, _MAT, *self._bootstrap, zero_counts=True).estimate(label)
        # A pass yields a token at least.
        return value, interval and (max(1.0, interval[0]), interval[1])

    def decode_speed(self, label: str | None) -> float | None:
        """Return tokens per second after the prompt's pass; None of a label that was not run."""
        return self._decoded.value(label) if label and label in self.pooled.labels else None


def samples_of(
    records: Iterable[CaseRecord],
    labels: Sequence[str],
    baseline: str | None = BASELINE,
    seed: int = 0,
    estimator: str = "paired",
    n_resamples: int = N_RESAMPLES,
    context: BaselineContext = NO_CONTEXT,
) -> dict[str, Sample]:
    """Add up a run's cases by task, tasks in their order, ``overall`` last.

    Args:
        records: of one run; other labels' are not looked at.
        labels: in the order of the table.
        baseline: the label that speedups refer to; without it, or where it is not among the
            labels, there are none.
        seed, n_resamples: of the bootstrap.
        estimator: one of ``ESTIMATORS``, see above.
        context: the run's plain decodings by engine, and the memory's speed.
    """
    pooled = pool(records, labels)
    tasks = sorted({*(unit.task for unit in pooled.units), *pooled.dropped}, key=task_order)
    groups = {
        task: pooled.only([i for i, unit in enumerate(pooled.units) if unit.task == task])
        for task in tasks
    }
    groups[OVERALL] = pooled
    samples = {task: Sample(group, estimator, seed, n_resamples) for task, group in groups.items()}
    for sample in samples.values():
        for label in {*context.plain.values(), baseline}:
            context = context.with_passes(sample.decode_speed(label))
    for sample in samples.values():
        sample.baseline, sample.context = baseline, context
    return samples


def summarize(
    records: Iterable[CaseRecord], labels: Sequence[str], *how: Any, **more: Any
) -> list[SummaryRow]:
    """Compute the rows of a run, one per task and label; arguments as of :func:`samples_of`."""
    samples = samples_of(records, labels, *how, **more)
    return [sample.row(task, label) for task, sample in samples.items() for label in labels]


def _phase_share(turns: Iterable[CaseRecord]) -> dict[str, float] | None:
    sums: dict[str, float] = {}
    for turn in turns:
        for name, seconds in (turn.phase_s or {}).items():
            sums[name] = sums.get(name, 0.0) + seconds
    total = math.fsum(sums.values())
    return {name: seconds / total for name, seconds in sums.items()} if total else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
