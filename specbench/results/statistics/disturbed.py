"""What the rule about disturbed turns did to the numbers of a run: never to be taken on trust.

The rule itself is in ``runners``; here are the numbers without it, and a test of its fairness.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy import special

from specbench.arrays import FloatArray
from specbench.results.estimate import FEWEST, Estimate
from specbench.results.records import CaseRecord
from specbench.results.statistics.aggregate import BlockKey, by_block
from specbench.results.statistics.summary import summarize
from specbench.results.summary_schema import Disturbance, SummaryRow, Unequal, WithoutRule
from specbench.results.tasks import OVERALL

_ALPHA = 0.05
_SMALLEST = 0.01  # of a label's time
_NAMED = 8  # speedups in a caption; each run's summary has all


def first_measurements(
    records: Iterable[CaseRecord], superseded: Iterable[CaseRecord]
) -> list[CaseRecord]:
    """Every turn of a run as it was first measured.

    Args:
        records: of a run.
        superseded: its measurements that were made again (``disturbed.jsonl``).
    """
    first = {record.key: record for record in superseded if not record.attempt}
    return [first.get(record.key, record) for record in records]


def without_rule(first: Iterable[CaseRecord]) -> list[CaseRecord]:
    """The same turns, each to be counted."""
    return [replace(r, status="ok") if r.status == "disturbed" else r for r in first]


def _flagged(record: CaseRecord) -> bool:
    return record.status == "disturbed" or bool(record.disturbed_by)


def disturbance(
    records: Sequence[CaseRecord],
    superseded: Sequence[CaseRecord],
    rows: Sequence[SummaryRow],
    baseline: str | None,
    seed: int = 0,
) -> Disturbance | None:
    """What was flagged and measured again, and the numbers of every turn as first measured.

    Args:
        records, superseded: as :func:`first_measurements` takes them.
        rows: of the records, from :func:`specbench.results.statistics.summary.summarize`.
        baseline, seed: that the rows were made with.

    Returns:
        None where no time was measured.
    """
    if not any(record.timing == "measured" for record in records):
        return None
    overall = [row for row in rows if row["task"] == OVERALL]
    labels = [row["label"] for row in overall]
    first = first_measurements(records, superseded)
    timed = [record for record in first if record.status != "failed"]
    flagged = [record for record in timed if _flagged(record)]
    again = [record for record in records if record.attempt]
    turns = Counter(record.label for record in timed)
    by_label = Counter(record.label for record in flagged)
    if flagged or again:
        estimator = overall[0]["estimator"]
        overall = summarize(without_rule(first), labels, baseline, seed=seed, estimator=estimator)[
            -len(labels) :
        ]
    return {
        "turns": {label: turns[label] for label in labels},
        "flagged": {label: by_label[label] for label in labels},
        "cases_again": len({(record.repeat, record.case_id) for record in again}),
        "turns_again": len(again),
        "unequal": unequal_shares(timed, labels),
        "without_rule": {
            row["label"]: {
                "tokens_per_s": row["tokens_per_s"],
                "speedup": row["speedup"],
                "speedup_ci": row["speedup_ci"],
            }
            for row in overall
        },
    }


def disturbance_words(
    found: Iterable[Disturbance | None], speedups: Iterable[tuple[str, float | None, WithoutRule]]
) -> list[str]:
    """What a reader must know of the rule, in sentences; none where it found nothing.

    Args:
        found: of each run that is shown.
        speedups: name, speedup with the rule and numbers without it of what is shown.
    """
    runs = [one for one in found if one is not None]
    turns, flagged = Counter[str](), Counter[str]()
    for one in runs:
        turns.update(one["turns"])
        flagged.update(one["flagged"])
    again, turns_again = (sum(one[key] for one in runs) for key in ("cases_again", "turns_again"))
    if not (flagged.total() or again):
        return []
    by_label = ", ".join(f"{label} {flagged[label]} of {turns[label]}" for label in turns)
    if len(alike := {(flagged[label], turns[label]) for label in turns}) == 1:
        by_label = "{} of {} of each label".format(*alike.pop())
    sentences = [f"Turns that were disturbed when first measured: {by_label}."]
    if again:
        cases = f"{again} case{'s were' if again > 1 else ' was'}"
        sentences.append(f"{cases} measured again ({turns_again} turns of all labels).")
    both = [
        (abs(math.log(kept / without["speedup"])), name, without)
        for name, kept, without in speedups
        if kept and without["speedup"] and kept != 1.0
    ]
    if both:
        both.sort(key=lambda one: -one[0])
        listed = ", ".join(
            f"{name} {Estimate(without['speedup'], without['speedup_ci'])}"
            for _, name, without in both[:_NAMED]
        )
        more = f", and {len(both) - _NAMED} that differ less" if len(both) > _NAMED else ""
        sentences.append(
            f"Speedup without the rule, each turn counted as first measured: {listed}{more}."
        )
    for unequal in filter(None, (one["unequal"] for one in runs)):
        sentences.append(
            f"LABELS DISTURBED UNEQUALLY: others took {unequal['shares'][0]:.0%} of "
            f"{unequal['more']}'s time and {unequal['shares'][1]:.0%} of {unequal['less']}'s (t "
            f"test, p {unequal['p']:.2g}): something else runs when {unequal['more']} does."
        )
    return sentences


def unequal_shares(records: Sequence[CaseRecord], labels: Sequence[str]) -> Unequal | None:
    """The two labels whose time others took most unequally, where chance does not do that.

    What disturbs from outside takes as much of a second of one label as of another's, in whatever
    case: what a label lost times the other's time has the mean of the reverse. A t test over blocks
    per pair of labels, corrected for the number of pairs (Bonferroni). Differences below a
    hundredth of the time are left alone: the system counts no finer.
    """
    times: dict[str, dict[BlockKey, tuple[float, float]]] = {label: {} for label in labels}
    for block, turns in by_block(records).items():
        for label in labels:
            own = [turn for turn in turns if turn.label == label]
            taken = ((t.wall_s, (t.cpu_steal or 0.0) + (t.cpu_others or 0.0)) for t in own)
            times[label][block] = (
                math.fsum(seconds * share for seconds, share in taken),
                math.fsum(turn.wall_s for turn in own),
            )
    pairs = list(itertools.combinations(labels, 2))
    found: Unequal | None = None
    for first, second in pairs:
        one, two = (np.array([*times[label].values()]).reshape(-1, 2) for label in (first, second))
        shares = [float(own[:, 0].sum() / (own[:, 1].sum() or 1.0)) for own in (one, two)]
        apart = one[:, 0] * two[:, 1] - two[:, 0] * one[:, 1]
        if len(apart) < FEWEST or abs(shares[0] - shares[1]) < _SMALLEST or not apart.any():
            continue
        p = _p(apart) * len(pairs)
        if p < (found["p"] if found else _ALPHA):
            (low, less), (high, more) = sorted(zip(shares, (first, second), strict=True))
            found = {"more": more, "less": less, "shares": (high, low), "p": p}
    return found


def _p(values: FloatArray) -> float:
    """Of Student's test that the mean is 0, two-sided."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    t = abs(float(values.mean())) / error if error else math.inf
    return 2 * float(special.stdtr(len(values) - 1, -t))
