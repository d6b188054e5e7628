"""Labels that servers answered: time to first token, throughput, equality.

Definitions:
    time to first token: from the request to the first token's arrival here; the median over turns.
    batch: the questions of a label that were asked at once; the next ones wait until all are done.
    system tokens/s: new tokens of all batches over their time, from the first request to the last
        token. Batches are left out whole and for all labels: those with a failed or repeated
        request, and with a case that counts in no time (it failed for some label, or was
        disturbed). Nobody can say what a batch would have taken without one of its questions.
    goodput: useful tokens/s are the system's, since rejected drafts and failed requests are no
        tokens; good requests/s are the turns within the limits over the same batches' time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TypeAlias

import numpy as np

from specbench.arrays import first_difference
from specbench.results.estimate import ABSENT, Cell, Estimate, number
from specbench.results.manifest import BASELINE
from specbench.results.records import DIFFERS, CaseRecord, Served
from specbench.results.statistics.bootstrap import log_ratios
from specbench.results.statistics.counted import rankable, wrong_outputs
from specbench.results.statistics.latency import NO_LIMITS, Limits, latencies
from specbench.results.statistics.pairs import Ranking
from specbench.results.statistics.summary import timed_turns
from specbench.results.summary_schema import ServedLabel

_PAYS = {"faster": "yes", "slower": "no"}  # by the verdict on all users' speed; else unknown


def served_labels(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    limits: Limits = NO_LIMITS,
    baseline: str | None = BASELINE,
    seed: int = 0,
) -> list[ServedLabel]:
    """Describe the labels of a run that servers answered; none of a run of our own engine."""
    timed = timed_turns(records, labels)
    whole = _whole(records, labels, timed)
    methods, ranking = _system_ranking(records, labels, baseline, seed)
    system = dict(zip(methods, ranking.over_plain, strict=True))
    standing = dict(zip(methods, ranking.plain_verdicts, strict=True))
    rows = []
    for label in labels:
        answered = [r for r in records if r.label == label and r.status != "failed" and r.served]
        if not answered:
            continue
        batches = _of_label(records, label, whole)
        in_time = [r for r in timed if r.label == label]
        decode_s = sum(r.decode_s for r in in_time)
        verdicts = [r.lossless.verdict for r in answered]
        different = [r for r in answered if r.lossless.verdict == DIFFERS]
        over = system.get(label)
        rows.append(
            ServedLabel(
                label=label,
                engine=answered[0].engine,
                numerics=answered[0].numerics,
                concurrency=_of(answered[0]).concurrency,
                ttft_s=median(r.prefill_s for r in in_time) if in_time else None,
                user_tokens_per_s=_per(sum(r.n_decoded for r in in_time), decode_s),
                system_tokens_per_s=_per(*_totals(batches)),
                system_speedup=math.exp(over.log_ratio) if over else None,
                system_speedup_ci=over.interval if over else None,
                pays="" if label == baseline else _PAYS.get(standing.get(label, ""), "unknown"),
                equal=verdicts.count("equal"),
                compared=verdicts.count("equal") + len(different),
                first_difference=_words(different, records),
                uncounted=sum(not _of(r).counted for r in answered),
                together=sum(r.n_new > 1 and not r.n_decoded for r in answered),
                latency=latencies(in_time),
                good_requests_per_s=_good(in_time, whole, batches, limits),
                limits=limits.words(),
            )
        )
    return rows


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _of(record: CaseRecord) -> Served:
    assert record.served is not None
    return record.served


# By the cases that were asked together: new tokens, and the seconds of their batches.
_Batches: TypeAlias = dict[tuple[str, ...], tuple[int, float]]
# By repeat and batch, the cases that were asked together.
_Whole: TypeAlias = dict[tuple[int, int], tuple[str, ...]]


def _whole(
    records: Sequence[CaseRecord], labels: Sequence[str], timed: Sequence[CaseRecord]
) -> _Whole:
    """The batches that count, for all labels."""
    kept = {(turn.repeat, turn.case_id) for turn in timed}
    broken: set[tuple[int, int]] = set()
    together: dict[tuple[int, int], set[str]] = {}
    for record in records:
        if record.served is not None and record.label in labels:
            together.setdefault(_place(record), set()).add(record.case_id)
            if not record.served.batch_s or (record.repeat, record.case_id) not in kept:
                broken.add(_place(record))
    return {place: tuple(sorted(c)) for place, c in together.items() if place not in broken}


def _place(record: CaseRecord) -> tuple[int, int]:
    return record.repeat, _of(record).batch


def _of_label(records: Sequence[CaseRecord], label: str, whole: _Whole) -> _Batches:
    """A label's batches that count, turns and repeats added up."""
    turns: dict[tuple[int, int, int], list[CaseRecord]] = {}
    for r in records:
        if r.label == label and r.served is not None and _place(r) in whole:
            turns.setdefault((*_place(r), r.turn), []).append(r)
    found: _Batches = {}
    for (*place, _), together in turns.items():
        cases = whole[place[0], place[1]]
        tokens, seconds = found.get(cases, (0, 0.0))
        tokens += sum(r.n_new for r in together)
        found[cases] = (tokens, seconds + (_of(together[0]).batch_s or 0.0))
    return found


def _totals(batches: _Batches) -> tuple[int, float]:
    """New tokens and seconds of all batches."""
    return sum(n for n, _ in batches.values()), sum(seconds for _, seconds in batches.values())


def _good(
    in_time: Sequence[CaseRecord], whole: _Whole, batches: _Batches, limits: Limits
) -> float | None:
    """Requests/s within the limits, of the batches that count."""
    good = sum(limits.met(r) for r in in_time if _place(r) in whole)
    return _per(good, _totals(batches)[1]) if limits else None


def system_verdict(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None, seed: int
) -> str:
    """Tell a run that asked several questions at once in a sentence about all users together.

    "" where nothing can be compared.
    """
    methods, ranking = _system_ranking(records, labels, baseline, seed)
    if not methods:
        return ""
    users = max(_of(r).concurrency for r in records if r.served)
    return f"All {users} users together: {ranking.sentence(methods, unit='batches')}"


def system_speedups(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None, seed: int
) -> dict[str, tuple[Estimate, str]]:
    """Give by label all users' tokens/s over plain decoding's, and its verdict.

    Intervals are those that decide: a bootstrap over batches, for all methods together. With too
    few batches there is no number.
    """
    methods, ranking = _system_ranking(records, labels, baseline, seed)
    estimates = [
        Estimate(None) if over is None else Estimate(math.exp(over.log_ratio), over.interval)
        for over in ranking.over_plain
    ]
    return dict(zip(methods, zip(estimates, ranking.plain_verdicts, strict=True), strict=True))


def _system_ranking(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None, seed: int
) -> tuple[list[str], Ranking]:
    """Methods, and how their speeds over plain decoding's, of common batches, stand."""
    whole = _whole(records, labels, timed_turns(records, labels))
    batches = {label: _of_label(records, label, whole) for label in labels}
    ranked = rankable(labels, wrong_outputs(records, labels), baseline)
    methods = [label for label in ranked if label != baseline and batches[label]]
    if baseline is None or not batches.get(baseline) or not methods:
        return [], Ranking([], [], {})
    shown = [baseline, *methods]
    units = sorted(set.intersection(*(set(batches[label]) for label in shown)))
    over = None
    if units:
        totals = np.array([[batches[label][u] for label in shown] for u in units], dtype=float)
        above, below = (np.stack([totals[..., i]] * 2) for i in range(2))
        ratios = log_ratios(above, below, np.zeros(len(units), dtype=np.int64), seed)
        contrasts = np.eye(len(shown))[1:] - np.eye(len(shown))[0]
        over = None if ratios is None else ratios.of(contrasts)
    return methods, Ranking.of(over, over, [0.0] * len(methods))


def _words(different: Sequence[CaseRecord], records: Sequence[CaseRecord]) -> str:
    """Where the first answer that is not plain decoding's leaves it, both ways on."""
    if not different:
        return ""
    record = different[0]
    where = f"case {record.case_id}, turn {record.turn}"
    plain = next((r for r in records if r.key == (*record.key[:3], BASELINE)), None)
    ours, theirs = _of(record).text, _of(plain).text if plain and plain.served else ""
    if not (ours and theirs):  # a kept run has no text
        return where
    at = first_difference(ours, theirs)
    at = len(ours) if at is None else at
    return f"{where}, character {at}: {ours[at : at + 20]!r}, plain {theirs[at : at + 20]!r}"


def load_cells(row: ServedLabel, plain: ServedLabel) -> dict[str, Cell]:
    """Compare a way of drafting with the same server's plain decoding, as a line of a table."""
    waits = [each["latency"].get("e2e", {}).get("p95") for each in (plain, row)]
    speeds = [each["system_tokens_per_s"] for each in (plain, row)]
    return {
        "draft": row["label"],
        "users": str(row["concurrency"]),
        "tokens/s off → on": " → ".join(number(speed, ".1f") for speed in speeds),
        "change [95 %]": Estimate(row["system_speedup"], row["system_speedup_ci"]),
        "P95, s": " → ".join(number(wait, ".2f") for wait in waits),
        "equal": f"{row['equal']} of {row['compared']}" if row["compared"] else ABSENT,
        "switch on": row["pays"],
    }


def load_rows(rows: Sequence[ServedLabel], baseline: str = BASELINE) -> list[dict[str, Cell]]:
    """A line for each way of drafting that a server was asked with, at one load."""
    plain = next((row for row in rows if row["label"] == baseline), None)
    others = [row for row in rows if row["label"] != baseline]
    return [load_cells(row, plain) for row in others] if plain else []
