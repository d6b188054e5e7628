"""Rows of ``summary.json``: what a run's records say, per label and task and over the whole run.

How records become numbers (words as in :mod:`specbench.results.records`):

- The turns and repeats of a case are added up first; the case is the unit of everything after.
- A case that failed for one label, or lacks a turn of it, is left out for all labels and counted
  in ``n_dropped``. ``n_cases`` counts the rest: MAT and verdicts are about them. Speeds are about
  those that every label has a timed speed for, ``n_timed``. A disturbed turn takes its block (case
  and repeat) out of all that is timed, for all labels, unless more than a twentieth of the run's
  blocks (or than one) are disturbed: then all count (``disturbed_counted``). ``n_disturbed`` counts
  the cases concerned.
  The numbers without this rule: :mod:`specbench.results.statistics.disturbed`.
- ``mat`` is pooled: tokens over steps, summed first. ``mat_per_request`` is the plain mean of the
  turns' own, ``mat_token_weighted`` the mean over tokens of the turn's that each stands in.
- No interval is made of fewer than three cases.
- Cases decoded at once (``batch.size`` above 1) are added up group by group, and the group is the
  unit: its tokens are those of all its texts, its time is from the end of all prompts to the last
  token of any. ``tokens_per_s`` is then the system's, ``speedup`` over plain decoding of the same
  groups, intervals draw groups, and a failed case leaves its group out. Groups hold cases of
  several tasks, so a run of several has rows of the whole run alone.
- ``joules_per_token`` is energy over new tokens, prefill included, of turns whose energy is known;
  ``phase_share`` each phase's part of the wall time (``measure=energy``, ``measure=phases``).
- ``speedup`` (estimator ``paired``) is the ratio of totals: tokens/s of the label over tokens/s
  of the baseline. ``geomean_speedup`` is the geometric mean of the same ratio taken per case.
- ``speedup_eager`` and ``speedup_graph`` are the same over plain decoding by that engine, where the
  run has it. ``bandwidth_share`` is the part of the memory's speed (the run's fastest read) that
  plain decoding takes: its own in a row of plain decoding, the baseline's in any other.
- Estimator ``end_to_end`` is the same ratio of totals with the prompt's pass and its token in it:
  new tokens over wall time.
- Estimator ``specbench`` is the formula of Spec-Bench's ``speed.py``: a question's speed is its new
  tokens over its wall time (prefill included), a method's speed the plain mean over questions, and
  ``speedup`` the ratio of the two means. It differs from the original on purpose in what went wrong
  there: the baseline's tokens are counted by ids like everybody's and not by tokenising its text
  again, nothing after the first EOS counts, a failed question is left out, and MAT is ours.
- Estimator ``specbench_exact`` counts plain decoding's tokens as they do (``n_retokenized`` of the
  records), so it is what ``speed.py`` prints for an export; repeats of a question are added up.
  Records that were not counted have no speed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias, cast

import numpy as np

from specbench.arrays import FloatArray
from specbench.config.schema import ESTIMATORS as ESTIMATORS  # for analysis too
from specbench.results.estimate import Interval
from specbench.results.manifest import BASELINE
from specbench.results.metrics import METRICS, Measured
from specbench.results.records import DIFFERS, VERDICTS, CaseRecord
from specbench.results.statistics.aggregate import (
    COMMITTED,
    DECODE,
    ENERGY,
    ENERGY_NEW,
    REQUEST_MATS,
    REQUESTS,
    SPEC_BENCH_NEW,
    STEPS,
    TIMED_COMMITTED,
    TIMED_NEW,
    TOKEN_MATS,
    WALL,
    Pooled,
    pool,
)
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

# What each case adds above and below the line of a ratio, of totals ``[..., n, 12]``.
Part: TypeAlias = tuple[FloatArray, FloatArray]
Parts: TypeAlias = Callable[[FloatArray], Part]


def task_order(task: str) -> tuple[int, str]:
    """Sorting key of tasks: Spec-Bench's order, others by name, the whole run last."""
    if task == OVERALL:
        return (len(TASKS) + 1, task)
    return (TASKS.index(task) if task in TASKS else len(TASKS), task)


def summarize(
    records: Iterable[CaseRecord],
    labels: Sequence[str],
    baseline: str | None = BASELINE,
    seed: int = 0,
    estimator: str = "paired",
    n_resamples: int = N_RESAMPLES,
    context: BaselineContext = NO_CONTEXT,
) -> list[SummaryRow]:
    """The rows of a run, one per task and label, tasks in their usual order, ``overall`` last.

    Args:
        records: of one run; other labels' are not looked at.
        labels: in the order of the table.
        baseline: the label that speedups refer to; without it, or where it is not among the
            labels, there are none.
        seed: of the bootstrap.
        estimator: one of ``ESTIMATORS``, see above.
        n_resamples: of the bootstrap.
        context: the run's plain decodings by engine, and the memory's speed.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} must be one of {', '.join(ESTIMATORS)}")
    pooled = pool(records, labels)
    tasks = sorted({*pooled.tasks, *pooled.dropped}, key=task_order)
    groups = {task: pooled.of_task(task) for task in tasks}
    groups[OVERALL] = pooled
    samples = {task: Sample(group, estimator, seed, n_resamples) for task, group in groups.items()}
    plain = {*context.plain.values(), baseline}
    for sample in samples.values():
        for label in plain:
            context = context.with_passes(sample.decode_speed(label))
    for sample in samples.values():
        sample.baseline, sample.context = baseline, context
    return [sample.row(task, label) for task, sample in samples.items() for label in labels]


def _over_totals(above: Part, below: Part) -> float:
    return ratio_of_totals(*above) * ratio_of_totals(*reversed(below))


def _mean_of_cases(above: Part, below: Part) -> float:
    return geometric_mean((above[0] / above[1] * (below[1] / below[0])).tolist())


class Sample:
    """The cases of one task, or of the whole run, with one bootstrap for all their numbers."""

    def __init__(
        self, pooled: Pooled, estimator: str, seed: int, n_resamples: int = N_RESAMPLES
    ) -> None:
        self._all = pooled
        self._estimator = estimator
        self._seed = seed
        self._n_resamples = n_resamples
        self.baseline: str | None = None
        self.context = NO_CONTEXT
        # Of an answer without text Spec-Bench's count is 0 or less, and it averages that in.
        self._timed = self._with(self._speed_parts, above_zero=estimator != "specbench_exact")
        self._decoded = self._with(_decode_parts)

    def _with(self, parts: Parts, *, above_zero: bool = True) -> Pooled:
        """The cases of which every label has something above and below the line."""
        found = [parts(totals[0]) for totals in self._all.totals.values()]
        counted = np.ones(len(self._all.cases), dtype=bool)
        for above, below in found:
            counted &= (above > 0 if above_zero else np.isfinite(above)) & (below > 0)
        return self._all.only(np.flatnonzero(counted).tolist())

    @property
    def n_timed(self) -> int:
        """Cases that every label has a speed for: those that speeds are made of."""
        return sum(self._timed.sizes)

    @property
    def unit_size(self) -> float:
        """Timed cases in a unit of the bootstrap: more than one where they are decoded at once."""
        return self.n_timed / max(1, len(self._timed.cases))

    def row(self, task: str, label: str) -> SummaryRow:
        pooled = self._all
        verdicts = [verdict for _, verdict in pooled.verdicts[label]]
        row: dict[str, object] = {
            "label": label,
            "method": pooled.methods.get(label, label),
            "task": task,
            "n_cases": sum(pooled.sizes),
            "n_timed": self.n_timed,
            "n_dropped": len(pooled.dropped),
            "n_disturbed": len(pooled.noisy),
            "disturbed_counted": pooled.noisy_counted and bool(pooled.noisy),
            "estimator": self._estimator,
        }
        for metric in METRICS:
            row[metric.name], interval = metric.function(self, label)
            if metric.has_interval:
                row[metric.interval_name] = interval
        row |= {
            "phase_share": self._phase_share(label),
            "lossless": {
                kind: verdicts.count(kind)
                for kind in (*VERDICTS, DIFFERS, "lossy")
                if kind in VERDICTS or kind in verdicts
            },
            "state_scope": pooled.state_scopes.get(label),
            "timing": pooled.timings.get(label, "measured"),
        }
        return cast("SummaryRow", row)

    def _ratio_of_columns(self, label: str, above: int, below: int) -> Measured:
        totals = self._all.totals[label][0]
        return _finite(ratio_of_totals(totals[:, above], totals[:, below])), None

    def mat_per_request(self, label: str) -> Measured:
        return self._ratio_of_columns(label, REQUEST_MATS, REQUESTS)

    def mat_token_weighted(self, label: str) -> Measured:
        return self._ratio_of_columns(label, TOKEN_MATS, COMMITTED)

    def end_to_end_tokens_per_s(self, label: str) -> Measured:
        return self._ratio_of_columns(label, TIMED_NEW, WALL)

    def joules_per_token(self, label: str) -> Measured:
        return self._ratio_of_columns(label, ENERGY, ENERGY_NEW)

    def geomean_speedup(self, label: str) -> Measured:
        return self._over(
            label,
            self.baseline,
            self._decoded,
            _decode_parts,
            lambda: self._case_means,
            _mean_of_cases,
        )

    def end_to_end_speedup(self, label: str) -> Measured:
        """With the prompt's pass in the time and its token among the new ones."""
        return self._over(
            label, self.baseline, self._whole, _whole_parts, lambda: self._whole_speeds
        )

    def speedup_over_engine(self, label: str, engine: str) -> Measured:
        """Over plain decoding by that engine, where the run has it."""
        return self.speedup(label, self.context.plain.get(engine))

    def bandwidth_share(self, label: str) -> Measured:
        """Of plain decoding: of the label itself where it is that, else of the baseline."""
        plain = label if label in self.context.plain.values() else self.baseline
        return self.context.share(self.decode_speed(plain)), None

    def _phase_share(self, label: str) -> dict[str, float] | None:
        sums: dict[str, float] = {}
        for phases in self._all.phases[label].values():
            for name, seconds in phases.items():
                sums[name] = sums.get(name, 0.0) + seconds
        total = math.fsum(sums.values())
        return {name: seconds / total for name, seconds in sums.items()} if total else None

    def _speed_parts(self, totals: FloatArray) -> Part:
        if self._estimator == "paired":
            return _decode_parts(totals)
        if self._estimator == "end_to_end":
            return _whole_parts(totals)
        exact = self._estimator == "specbench_exact"
        return _question_speeds(totals, SPEC_BENCH_NEW if exact else TIMED_NEW)

    def tokens_per_s(self, label: str) -> Measured:
        value = _finite(ratio_of_totals(*self._speed_parts(self._timed.totals[label][0])))
        return value, self._interval(self.speeds, value, label)

    def decode_speed(self, label: str | None) -> float | None:
        """Tokens per second after the prompt's pass; None of a label that was not run."""
        if label not in self._decoded.totals:
            return None
        return _finite(ratio_of_totals(*_decode_parts(self._decoded.totals[label][0])))

    def mat(self, label: str) -> Measured:
        totals = self._all.totals[label]
        value = ratio_of_totals(totals[0][:, COMMITTED], totals[0][:, STEPS])
        stepped = self._all.only(np.flatnonzero(totals[0][:, STEPS] > 0).tolist())
        found = self._log_ratios(stepped, [label], _mat_parts)
        if found is None:
            return _finite(value), None
        low, high = found.interval(0, value)
        return value, (max(1.0, low), high)  # a pass yields a token at least

    def speedup(self, label: str, reference: str | None) -> Measured:
        """Speedup over a reference that may not have been run."""
        return self._over(label, reference, self._timed, self._speed_parts, lambda: self.speeds)

    def _over(
        self,
        label: str,
        reference: str | None,
        of: Pooled,
        parts: Parts,
        logarithms: Callable[[], LogRatios | None],
        ratio: Callable[[Part, Part], float] = _over_totals,
    ) -> Measured:
        """A ratio of the parts over a reference that may not have been run, with its interval."""
        if reference not in of.totals or not of.cases:
            return None, None
        if reference == label:  # by definition, so there is nothing to estimate
            return 1.0, None
        value = ratio(*(parts(of.totals[x][0]) for x in (label, reference)))
        return value, self._interval(logarithms(), value, label, reference)

    def _interval(
        self, found: LogRatios | None, value: float | None, label: str, reference: str | None = None
    ) -> Interval | None:
        if found is None or value is None:
            return None
        contrast = [float(x == label) - float(x == reference) for x in self._all.totals]
        return found.of(np.array([contrast])).interval(0, value)

    @cached_property
    def speeds(self) -> LogRatios | None:
        """Of every label the logarithm of its speed, over the timed cases."""
        return self._predicted(
            self._log_ratios(self._timed, list(self._all.totals), self._speed_parts)
        )

    def _predicted(self, found: LogRatios | None) -> LogRatios | None:
        """Speeds of all labels with what their predictions miss among the errors."""
        known = self._all.prediction_errors
        if found is None or not known:
            return found
        missed = np.diag([known.get(label, 0.0) ** 2 for label in self._all.totals])
        return replace(found, predictions=missed)

    @cached_property
    def _whole(self) -> Pooled:
        return self._with(_whole_parts)

    @cached_property
    def _whole_speeds(self) -> LogRatios | None:
        """Of every label the logarithm of its speed end to end."""
        if self._estimator == "end_to_end":
            return self.speeds
        return self._predicted(self._log_ratios(self._whole, list(self._all.totals), _whole_parts))

    @cached_property
    def mats(self) -> LogRatios | None:
        """Of every label the logarithm of its MAT, over the cases with a step of every label."""
        return self._log_ratios(self._with(_mat_parts), list(self._all.totals), _mat_parts)

    @cached_property
    def _case_means(self) -> LogRatios | None:
        """Of every label the mean over cases of its speed's logarithm."""
        return self._predicted(
            self._log_ratios(self._decoded, list(self._all.totals), _log_parts, means=True)
        )

    def _log_ratios(
        self, of: Pooled, labels: Sequence[str], parts: Parts, *, means: bool = False
    ) -> LogRatios | None:
        above, below = zip(*(parts(of.totals[label]) for label in labels), strict=True)
        return log_ratios(
            np.stack(above, axis=-1),
            np.stack(below, axis=-1),
            strata_of(of.categories),
            self._seed,
            self._n_resamples,
            means=means,
        )


def _decode_parts(totals: FloatArray) -> Part:
    return totals[..., TIMED_COMMITTED], totals[..., DECODE]


def _whole_parts(totals: FloatArray) -> Part:
    return totals[..., TIMED_NEW], totals[..., WALL]


def _mat_parts(totals: FloatArray) -> Part:
    return totals[..., COMMITTED], totals[..., STEPS]


def _log_parts(totals: FloatArray) -> Part:
    """Logarithms of decode speeds by case, and 1 for each; both 0 where a case has none."""
    known = (totals[..., TIMED_COMMITTED] > 0) & (totals[..., DECODE] > 0)
    tokens, seconds = (np.where(known, part, 1.0) for part in _decode_parts(totals))
    return np.log(tokens) - np.log(seconds), known.astype(np.float64)


def _question_speeds(totals: FloatArray, new: int) -> Part:
    """Tokens of a column over wall time by case, and 1 for each; both 0 where a case has none."""
    known = totals[..., WALL] > 0
    seconds = np.where(known, totals[..., WALL], 1.0)
    return np.where(known, totals[..., new] / seconds, 0.0), known.astype(np.float64)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
