"""Ratios that a summary's rows do not have: shares of time, of steps, of rows; with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from specbench.results.estimate import FEWEST, Estimate
from specbench.results.records import PHASES, CaseRecord
from specbench.results.statistics.aggregate import untimed_blocks
from specbench.results.statistics.bootstrap import (
    Resamples,
    log_interval,
    ratio_of_totals,
    strata_of,
)

STEP_PHASES = (*PHASES, "other")


def decoded_tokens(record: CaseRecord) -> int:
    """Tokens that the turn's steps committed: all new ones but the first, the prompt pass's."""
    return max(0, record.n_new - 1)


def steps(record: CaseRecord) -> int:
    """Target passes after the prompt's."""
    return record.n_target_passes


def phase_s(record: CaseRecord, phase: str) -> float:
    """Seconds of a turn in a phase; 0 where the clock did not look into the steps."""
    return (record.phase_s or {}).get(phase, 0.0)


def pooled_ratio(
    records: Iterable[CaseRecord],
    above: Callable[[CaseRecord], float | None],
    below: Callable[[CaseRecord], float | None],
    seed: int = 0,
    at_most: float = math.inf,
) -> Estimate:
    """Sum of ``above`` over sum of ``below``, with the interval of a bootstrap over cases.

    No interval is made of fewer than :data:`specbench.results.estimate.FEWEST` cases.

    Args:
        records: of one label; failed turns are left out.
        above, below: of one turn; None where nobody counted, which leaves the turn out.
        seed: of the bootstrap.
        at_most: what the ratio cannot exceed, e.g. 1 for a share; neither does its interval.
    """
    totals: dict[str, list[float]] = {}
    categories: dict[str, str] = {}
    for record in records:
        if record.status == "failed":
            continue
        counts = above(record), below(record)
        if counts[0] is None or counts[1] is None:
            continue
        pair = totals.setdefault(record.case_id, [0.0, 0.0])
        pair[0] += counts[0]
        pair[1] += counts[1]
        categories[record.case_id] = record.category
    # Sorted, so that a run that was interrupted and resumed gives the same intervals.
    ids = sorted(totals)
    columns = np.array([totals[case] for case in ids], dtype=np.float64).reshape(len(ids), 2)
    value = ratio_of_totals(columns[:, 0], columns[:, 1])
    if not math.isfinite(value):
        return Estimate(None)
    if len(ids) < FEWEST:
        return Estimate(value, few=True)
    resamples = Resamples(strata_of([categories[case] for case in ids]), seed)
    if not resamples.degrees_of_freedom:
        return Estimate(value)
    sums = resamples.totals(columns)
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled = sums[:, 0] / sums[:, 1]
    interval = log_interval(value, resampled, resamples.degrees_of_freedom)
    return Estimate(value, interval and (interval[0], min(interval[1], at_most)))


def usable_turns(records: Iterable[CaseRecord]) -> list[CaseRecord]:
    """The turns of a whole run that count in times, as in the run's own table.

    A case that failed for one label counts for none; nor does a case and repeat that was disturbed
    for one, but for those that the rule lets count.
    """
    records = list(records)
    failed = {record.case_id for record in records if record.status == "failed"}
    found = [record for record in records if record.case_id not in failed]
    untimed = untimed_blocks(found)
    return [record for record in found if (record.repeat, record.case_id) not in untimed]


def tokens_per_s(records: Iterable[CaseRecord], seed: int = 0) -> Estimate:
    """Decoding speed of one label's turns that :func:`usable_turns` left."""
    speed = pooled_ratio(records, decoded_tokens, lambda r: r.decode_s, seed)
    return replace(speed, digits=1)


def over_repeats(
    records: Iterable[CaseRecord], label: str, baseline: str
) -> tuple[float, float] | None:
    """Mean and standard deviation of the speedup over repeats; None of fewer than two."""
    totals: dict[int, dict[str, list[float]]] = {}
    for record in usable_turns(records):
        if record.label in (label, baseline):
            by_label = totals.setdefault(record.repeat, {label: [0.0, 0.0], baseline: [0.0, 0.0]})
            by_label[record.label][0] += decoded_tokens(record)
            by_label[record.label][1] += record.decode_s
    ratios = []
    for by_label in totals.values():
        (tokens, seconds), (base_tokens, base_seconds) = by_label[label], by_label[baseline]
        if seconds > 0 and base_tokens > 0:
            ratios.append(tokens / seconds / (base_tokens / base_seconds))
    if len(ratios) < 2:
        return None
    return float(np.mean(ratios)), float(np.std(ratios, ddof=1))


def mat(records: Iterable[CaseRecord], seed: int = 0) -> Estimate:
    """Mean accepted tokens of one label's turns."""
    found = pooled_ratio(records, decoded_tokens, steps, seed)
    if found.interval is None:
        return found
    low, high = found.interval
    return replace(found, interval=(max(1.0, low), high))  # a pass yields a token at least
