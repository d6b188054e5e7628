"""Rows of ``summary.json``: what a run's records say, per label and task and over the whole run.

How records become numbers (words as in :mod:`specbench.results.records`):

- The turns and repeats of a case are added up first; the case is the unit of everything after.
- A case that failed for one label, or lacks a turn of it, is left out for all labels and counted
  in ``n_dropped``. A disturbed turn takes its block (case and repeat) out of all that is timed,
  for all labels, but never more than a quarter of the run's blocks: of more, the least disturbed
  count (``disturbed_counted``). ``n_disturbed`` counts the cases concerned. MAT and verdicts keep
  them. The numbers without this rule: :mod:`specbench.results.statistics.disturbed`.
- ``joules_per_token`` is energy over new tokens, prefill included, of turns whose energy is known;
  ``phase_share`` each phase's part of the wall time (``measure=energy``, ``measure=phases``).
- ``speedup`` (estimator ``paired``) is the ratio of totals: tokens/s of the label over tokens/s
  of the baseline. ``geomean_speedup`` is the geometric mean of the same ratio taken per case.
- ``speedup_eager`` and ``speedup_graph`` are the same over plain decoding by that engine, where the
  run has it. ``bandwidth_share`` is the part of the machine's copy bandwidth that plain decoding
  takes: its own in a row of plain decoding, the baseline's in any other.
- Estimator ``specbench`` is the formula of Spec-Bench's ``speed.py``: a question's speed is its new
  tokens over its wall time (prefill included), a method's speed the plain mean over questions, and
  ``speedup`` the ratio of the two means. It differs from the original on purpose in what went wrong
  there: the baseline's tokens are counted by ids like everybody's and not by tokenising its text
  again, nothing after the first EOS counts, a failed question is left out, and MAT is ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specbench.arrays import FloatArray
from specbench.config.schema import ESTIMATORS as ESTIMATORS  # for analysis too
from specbench.results.estimate import Interval
from specbench.results.manifest import BASELINE
from specbench.results.records import VERDICTS, CaseRecord
from specbench.results.statistics.aggregate import (
    COMMITTED,
    DECODE,
    ENERGY,
    ENERGY_NEW,
    STEPS,
    TIMED_COMMITTED,
    TIMED_NEW,
    WALL,
    Pooled,
    pool,
)
from specbench.results.statistics.bootstrap import (
    N_RESAMPLES,
    Resamples,
    geometric_mean,
    log_interval,
    minimum_detectable_ratio,
    ratio_of_totals,
    strata_of,
)
from specbench.results.statistics.paired import equivalence, holm, sign_flip_p
from specbench.results.statistics.roofline import BaselineContext
from specbench.results.summary_schema import Pair, SummaryRow
from specbench.results.tasks import TASKS

OVERALL = "overall"
DEFAULT_MARGIN = 0.02
NO_CONTEXT = BaselineContext()
_ALPHA = 0.05


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
        records: of one run; those of other labels are not looked at.
        labels: in the order of the table.
        baseline: the label that speedups refer to; without it, or where it is not among the
            labels, there are none.
        seed: of the bootstrap.
        estimator: ``paired`` or ``specbench``, see above.
        n_resamples: of the bootstrap.
        context: the run's plain decodings by engine, and the memory's speed.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is none of {', '.join(ESTIMATORS)}")
    pooled = pool(records, labels)
    tasks = sorted({*pooled.tasks, *pooled.dropped}, key=task_order)
    groups = {task: pooled.of_task(task) for task in tasks}
    groups[OVERALL] = pooled
    rows = []
    for task, group in groups.items():
        sample = _Sample(group, estimator, seed, n_resamples)
        rows += [sample.row(task, label, baseline, context) for label in labels]
    return rows


def compare_pairs(
    records: Iterable[CaseRecord],
    labels: Sequence[str],
    seed: int = 0,
    margin: float = DEFAULT_MARGIN,
    n_resamples: int = N_RESAMPLES,
) -> list[Pair]:
    """Every label against every later one, by the geometric mean of per-case speed ratios.

    Ratios from 1/(1 + margin) to 1 + margin count as a tie. Besides what :func:`equivalence` asks,
    the verdicts ``faster`` and ``slower`` need a corrected p below 5 %.
    """
    sample = _Sample(pool(records, labels), "paired", seed, n_resamples)
    rows: list[Pair] = []
    for first, second in itertools.combinations(labels, 2):
        ratio, interval = sample.geomean(first, second)
        logs, strata = sample.log_ratios(first, second)
        rows.append(
            {
                "first": first,
                "second": second,
                "n_cases": len(logs),
                "ratio": ratio,
                "ratio_ci": interval,
                "p": sign_flip_p(logs.tolist(), seed),
                "verdict": equivalence(interval, margin),
                "margin": margin,
                "detectable": minimum_detectable_ratio(logs.tolist(), strata),
                "p_holm": math.nan,  # known once all pairs are
            }
        )
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p
        if row["verdict"] in ("faster", "slower") and p >= _ALPHA:
            row["verdict"] = "undecided"
    return rows


class _Sample:
    """The cases of one task, or of the whole run, with one bootstrap for all their numbers."""

    def __init__(self, pooled: Pooled, estimator: str, seed: int, n_resamples: int) -> None:
        self._pooled = pooled
        self._estimator = estimator
        self._strata = strata_of(pooled.categories)
        self._resamples = Resamples(self._strata, seed, n_resamples)

    def row(
        self, task: str, label: str, baseline: str | None, context: BaselineContext
    ) -> SummaryRow:
        pooled = self._pooled
        totals = pooled.totals[label]
        mat, mat_ci = self._quotient([totals[:, COMMITTED]], [totals[:, STEPS]])
        geomean: float | None = None
        geomean_ci: Interval | None = None
        if baseline == label:
            geomean = 1.0 if totals[:, DECODE].any() else None
        elif baseline in pooled.totals:
            geomean, geomean_ci = self.geomean(label, baseline)
        plain = context.plain
        over = {of: self._over(label, of) for of in {baseline, *plain.values(), None}}
        speedup, speedup_ci = over[baseline]
        own = label if label in plain.values() else baseline
        verdicts = [verdict for _, verdict in pooled.verdicts[label]]
        return {
            "label": label,
            "method": pooled.methods.get(label, label),
            "task": task,
            "n_cases": len(pooled.tasks),
            "n_dropped": len(pooled.dropped),
            "n_disturbed": len(pooled.noisy),
            "disturbed_counted": pooled.noisy_counted and bool(pooled.noisy),
            "mat": mat,
            "mat_ci": mat_ci,
            "tokens_per_s": self.tokens_per_s(label),
            "end_to_end_tokens_per_s": _finite(
                ratio_of_totals(totals[:, TIMED_NEW], totals[:, WALL])
            ),
            "joules_per_token": self._joules_per_token(totals),
            "phase_share": self._phase_share(label),
            "estimator": self._estimator,
            "speedup": speedup,
            "speedup_ci": speedup_ci,
            "geomean_speedup": geomean,
            "geomean_speedup_ci": geomean_ci,
            "speedup_eager": over[plain.get("eager")][0],
            "speedup_graph": over[plain.get("graph")][0],
            "speedup_eager_ci": over[plain.get("eager")][1],
            "speedup_graph_ci": over[plain.get("graph")][1],
            "bandwidth_share": context.share(self._decode_speed(own)),
            "lossless": {
                kind: verdicts.count(kind)
                for kind in (*VERDICTS, "lossy")
                if kind != "lossy" or kind in verdicts
            },
            "state_scope": pooled.state_scopes.get(label),
            "timing": pooled.timings.get(label, "measured"),
        }

    @staticmethod
    def _joules_per_token(totals: FloatArray) -> float | None:
        if not totals[:, ENERGY_NEW].any():
            return None
        return _finite(ratio_of_totals(totals[:, ENERGY], totals[:, ENERGY_NEW]))

    def _phase_share(self, label: str) -> dict[str, float] | None:
        sums: dict[str, float] = {}
        for phases in self._pooled.phases[label].values():
            for name, seconds in phases.items():
                sums[name] = sums.get(name, 0.0) + seconds
        total = math.fsum(sums.values())
        return {name: seconds / total for name, seconds in sums.items()} if total else None

    def tokens_per_s(self, label: str) -> float | None:
        totals = self._pooled.totals[label]
        if self._estimator == "specbench":
            return _finite(ratio_of_totals(self._question_speeds(label), totals[:, WALL] > 0))
        return self._decode_speed(label)

    def _decode_speed(self, label: str | None) -> float | None:
        """Tokens per second after the prompt's pass; None of a label that was not run."""
        totals = self._pooled.totals.get(label) if label is not None else None
        if totals is None:
            return None
        return _finite(ratio_of_totals(totals[:, TIMED_COMMITTED], totals[:, DECODE]))

    def _over(self, label: str, reference: str | None) -> tuple[float | None, Interval | None]:
        """Speedup over a reference that may not have been run."""
        if reference is None or reference not in self._pooled.totals:
            return None, None
        if reference != label:
            return self.speedup(label, reference)
        # By definition, so there is nothing to estimate.
        timed = WALL if self._estimator == "specbench" else DECODE
        return (1.0 if self._pooled.totals[label][:, timed].any() else None), None

    def speedup(self, label: str, baseline: str) -> tuple[float | None, Interval | None]:
        if self._estimator == "specbench":
            return self._quotient([self._question_speeds(label)], [self._question_speeds(baseline)])
        ours, theirs = self._pooled.totals[label], self._pooled.totals[baseline]
        return self._quotient(
            [ours[:, TIMED_COMMITTED], theirs[:, DECODE]],
            [ours[:, DECODE], theirs[:, TIMED_COMMITTED]],
        )

    def geomean(self, first: str, second: str) -> tuple[float | None, Interval | None]:
        logs, counted = self._logs(first, second)
        if not counted.any():
            return None, None
        value = geometric_mean(np.exp(logs[counted]).tolist())
        if not self._resamples.degrees_of_freedom:
            return value, None
        sums = self._resamples.totals(np.column_stack([logs, counted]))
        with np.errstate(invalid="ignore", divide="ignore"):
            resampled = np.exp(sums[:, 0] / sums[:, 1])
        return value, log_interval(value, resampled, self._resamples.degrees_of_freedom)

    def log_ratios(self, first: str, second: str) -> tuple[FloatArray, Any]:
        """Logarithms of per-case speed ratios, and the strata of these cases."""
        logs, counted = self._logs(first, second)
        names = [c for c, used in zip(self._pooled.categories, counted, strict=True) if used]
        return logs[counted], strata_of(names)

    def _logs(self, first: str, second: str) -> tuple[FloatArray, Any]:
        """``[n]`` log ratios (0 where a case has no speed) and ``[n]`` whether it has one."""
        a, b = self._pooled.totals[first], self._pooled.totals[second]
        factors = [a[:, TIMED_COMMITTED], b[:, DECODE], a[:, DECODE], b[:, TIMED_COMMITTED]]
        counted = np.logical_and.reduce([factor > 0 for factor in factors])
        above, more, below, less = (np.log(np.where(counted, f, 1.0)) for f in factors)
        return above + more - below - less, counted

    def _question_speeds(self, label: str) -> FloatArray:
        """``[n]`` new tokens per second of wall time; 0 for a case that was not timed."""
        totals = self._pooled.totals[label]
        wall = totals[:, WALL]
        return np.divide(totals[:, TIMED_NEW], wall, out=np.zeros(len(wall)), where=wall > 0)

    def _quotient(
        self, above: Sequence[FloatArray], below: Sequence[FloatArray]
    ) -> tuple[float | None, Interval | None]:
        value = 1.0
        for up, down in zip(above, below, strict=True):
            value *= ratio_of_totals(up, down)
        if _finite(value) is None or not self._resamples.degrees_of_freedom:
            return _finite(value), None
        sums = self._resamples.totals(np.column_stack([*above, *below]))
        with np.errstate(invalid="ignore", divide="ignore"):
            resampled = sums[:, : len(above)].prod(axis=1) / sums[:, len(above) :].prod(axis=1)
        return value, log_interval(value, resampled, self._resamples.degrees_of_freedom)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
