"""A table of several data sets, each of which counts the same, whatever its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.runs.comparisons import ComparedRuns, conditions
from analysis.runs.load import Run
from analysis.tabular.table import ResultTable
from specbench.arrays import FloatArray
from specbench.errors import ResultsError
from specbench.results.cells import INTERVAL, Cell, NumberCell
from specbench.results.statistics import summary
from specbench.results.statistics.bootstrap import (
    LogRatios,
    degrees_of_freedom,
    resampled_totals,
    strata_of,
)

_SPEEDUPS = ("macro speedup", "pooled speedup", "geomean speedup")
_OTHERS = ("macro tokens/s", "macro MAT", "macro MAT per turn")
_TEXT = (
    "macro: the mean of tokens/s over the data sets, and its ratio to plain decoding's. pooled: of "
    "all tokens and seconds together, so that a large set counts more. geomean: of the sets' "
    "speedups. MAT: means over the sets, of a set's tokens per pass and of its turns' means. "
    "Intervals: questions drawn within each set. A method without a number in a set has none here."
)


def macro_table(comparisons: Sequence[ComparedRuns]) -> ResultTable:
    """Average over data sets: a run of each, at one budget and under one set of conditions.

    Raises:
        ResultsError: a data set is there twice, or alone, or runs differ in more than questions.
    """
    runs = [run for comparison in comparisons for run in comparison.runs]
    sets, baseline = [run.dataset for run in runs], runs[0].baseline
    if len(sets) < 2 or len({*sets}) < len(sets):
        raise ResultsError(f"--macro takes one run of each of several data sets, got {sets}.")
    if not baseline or len({(run.model, run.baseline, *conditions(run)) for run in runs}) > 1:
        raise ResultsError("--macro takes runs of one model and its plain decoding, made alike.")
    entries = [entry for comparison in comparisons for entry in comparison.entries]
    named = dict.fromkeys(entry.label for entry in entries)
    for label in named:
        first, *others = (run.knobs(label) for run in runs if label in run.labels)
        if any(knobs != first for knobs in others):
            raise ResultsError(f"--macro takes one set of knobs of a method, got more of {label}.")
    wrong = {e.label for e in entries if not e.ranked and e.label != baseline}
    labels = [x for x in named if x not in wrong and all(x in run.labels for run in runs)]
    cells = _cells(runs, labels, labels.index(baseline))
    rows: list[Mapping[str, Cell]] = [{"method": x, **cells.get(x, {})} for x in named]
    return ResultTable.from_rows(f"Macro average of {', '.join(sets)}", _TEXT, rows)


def _cells(runs: Sequence[Run], labels: Sequence[str], plain: int) -> dict[str, dict[str, Cell]]:
    speed, strata, sums, drawn = [summary.TIMED_COMMITTED, summary.DECODE], [], [], []
    for i, run in enumerate(runs):
        pooled = summary.pool(run.records, labels)
        timed = (pooled.totals[0][..., speed] > 0).all(axis=(1, 2))  # as speeds of one run
        totals = np.where(timed[:, None, None] | ~np.isin(range(12), speed), pooled.totals, 0.0)
        strata.append(strata_of([unit.category for unit in pooled.units]))
        sums.append(totals.sum(axis=1))
        if degrees_of_freedom(strata[-1]):
            columns = totals[0].reshape(len(timed), -1)
            draws = resampled_totals(columns, strata[-1], run.seed + i)
            drawn.append(draws.reshape(-1, *totals.shape[2:]))
    repeats, few = min(map(len, sums)) - 1, len(drawn) < len(runs)
    values = _numbers(np.stack([totals[0] for totals in sums]), plain).ravel()
    errors = None
    if not few:
        by_repeat = np.stack([totals[1 : 1 + repeats] for totals in sums])
        prompts, runs_of = (np.log(_numbers(t, plain)) for t in (np.stack(drawn), by_repeat))
        between = runs_of.var(axis=1) / max(1, repeats - 1)
        errors = LogRatios(
            values=np.log(values),
            prompts=np.diag(prompts.var(axis=1).ravel()),
            repeats=np.diag(between.ravel()),
            n=sum(map(len, strata)),
            prompts_freedom=sum(map(degrees_of_freedom, strata)),
            repeats_freedom=repeats - 1,
        )
    cells: dict[str, dict[str, Cell]] = {label: {} for label in labels}
    for k, value in enumerate(values.tolist()):
        number, label = divmod(k, len(labels))
        itself = label == plain and number < len(_SPEEDUPS)
        interval = errors.interval(k, value) if errors and not itself else None
        heading = (*_SPEEDUPS, *_OTHERS)[number] + INTERVAL
        cells[labels[label]][heading] = NumberCell(value, interval, few=few and not itself)
    return cells


def _numbers(totals: FloatArray, plain: int) -> FloatArray:
    """Compute ``[numbers, .., L]`` of totals ``[sets, .., L, 12]``."""

    def ratio(above: int, below: int, of: FloatArray = totals) -> FloatArray:
        return np.divide(of[..., above], of[..., below])

    speed = (summary.TIMED_COMMITTED, summary.DECODE)
    speeds, pooled = ratio(*speed), ratio(*speed, totals.sum(axis=0))
    averages = [speeds.mean(axis=0), pooled, np.exp(np.log(speeds).mean(axis=0))]
    mats = ratio(summary.COMMITTED, summary.STEPS), ratio(summary.REQUEST_MATS, summary.REQUESTS)
    overs = [average / average[..., plain, None] for average in averages]
    return np.stack([*overs, averages[0], *(mat.mean(axis=0) for mat in mats)])
