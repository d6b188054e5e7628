"""Ratios that a summary's rows do not have: shares of time, of steps, of rows; with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from specbench.results.cells import FEWEST, NumberCell
from specbench.results.records import PHASES, CaseRecord
from specbench.results.statistics.bootstrap import log_ratios, ratio_of_totals, strata_of
from specbench.results.statistics.summary import DECODE, TIMED_COMMITTED, pool

STEP_PHASES = (*PHASES, "other")


def decoded_tokens(record: CaseRecord) -> int:
    """Count the tokens that the turn's steps committed: all but the prompt pass's first one."""
    return max(0, record.n_new - 1)


def steps(record: CaseRecord) -> int:
    """Count the target passes after the prompt's."""
    return record.n_target_passes


def phase_s(record: CaseRecord, phase: str) -> float:
    """Return a turn's seconds in a phase; 0 if phases were not measured."""
    return (record.phase_s or {}).get(phase, 0.0)


def pooled_ratio(
    records: Iterable[CaseRecord],
    above: Callable[[CaseRecord], float | None],
    below: Callable[[CaseRecord], float | None],
    seed: int = 0,
    at_most: float = math.inf,
) -> NumberCell:
    """Divide the sum of ``above`` by that of ``below``, with a bootstrap interval over cases.

    Cases of one batch are drawn together. There is no interval for fewer than
    :data:`specbench.results.cells.FEWEST`.

    Args:
        records: of one label; failed turns are left out.
        above, below: of one turn; None if not counted, which leaves the turn out.
        seed: of the bootstrap.
        at_most: what the ratio cannot exceed, e.g. 1 for a share; neither does its interval.
    """
    counts = [(r, above(r), below(r)) for r in records if r.status != "failed"]
    counts = [(r, a, b) for r, a, b in counts if a is not None and b is not None]
    # By unit and repeat; sorted, so that a run that was resumed gives the same intervals.
    units = {unit: i for i, unit in enumerate(sorted({r.unit for r, _, _ in counts}))}
    repeats = sorted({r.repeat for r, _, _ in counts})
    per_repeat = np.zeros((len(repeats), len(units), 2))
    for r, a, b in counts:
        per_repeat[repeats.index(r.repeat), units[r.unit]] += a, b
    whole = per_repeat.sum(axis=0)
    value = ratio_of_totals(whole[:, 0], whole[:, 1])
    if not math.isfinite(value):
        return NumberCell(None)
    counted = whole[:, 1] > 0
    columns = np.concatenate([whole[None], per_repeat])[:, counted]
    # A group's cases are of several categories.
    categories = {r.unit: r.category if r.batch is None else "" for r, _, _ in counts}
    strata = strata_of([categories[u] for u, used in zip(units, counted, strict=True) if used])
    ratios = log_ratios(columns[..., :1], columns[..., 1:], strata, seed)
    if ratios is None:
        return NumberCell(value, few=int(counted.sum()) < FEWEST)
    low, high = ratios.interval(0, value)
    return NumberCell(value, (low, min(high, at_most)))


def tokens_per_s(records: Iterable[CaseRecord], seed: int = 0) -> NumberCell:
    """Compute one label's decoding speed over timed turns; for one user if there are several."""
    speed = pooled_ratio(records, lambda r: r.n_decoded, lambda r: r.decode_s, seed)
    return replace(speed, digits=1)


def mat(records: Iterable[CaseRecord], seed: int = 0) -> NumberCell:
    """Compute the mean accepted tokens of one label's turns."""
    estimate = pooled_ratio(records, decoded_tokens, steps, seed)
    if estimate.interval is None:
        return estimate
    low, high = estimate.interval
    return replace(estimate, interval=(max(1.0, low), high))  # a pass yields a token at least


def over_repeats(
    records: Iterable[CaseRecord], label: str, baseline: str
) -> tuple[float, float] | None:
    """Return mean and standard deviation of the speedup over repeats; None if fewer than two."""
    records = list(records)
    labels = sorted({record.label for record in records})
    if not {label, baseline} <= set(labels):
        return None
    totals = pool(records, labels).totals[1:].sum(axis=1)  # [repeats, labels, 12]
    with np.errstate(invalid="ignore", divide="ignore"):
        speeds = totals[..., TIMED_COMMITTED] / totals[..., DECODE]
        ratios = speeds[:, labels.index(label)] / speeds[:, labels.index(baseline)]
    ratios = ratios[np.isfinite(ratios)]
    return None if len(ratios) < 2 else (float(ratios.mean()), float(ratios.std(ddof=1)))
