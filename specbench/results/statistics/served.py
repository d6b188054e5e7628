"""Labels that servers answered: how long requests took, throughput, equality.

Definitions:
    ttft: seconds from the request to the first token, as the client sees it.
    tpot: seconds for each token after those that came first.
    itl: seconds between two bursts: a step's accepted tokens arrive together and are one burst, so
        that drafting well makes bursts longer and not the time between them shorter.
    e2e: seconds from the request to the last token.
    P50, P95, P99: of all timed turns (itl: of all their gaps), linear between two of them.
    batch: the questions of a label that were asked at once; the next ones wait until all are done.
    system tokens/s: new tokens of all batches over their time, from the first request to the last
        token. Batches are left out whole and for all labels: those with a failed or repeated
        request, and with a case that counts in no time (it failed for some label, or was
        disturbed). A batch's time without one of its questions is unknown.
    goodput: useful tokens/s are the system's, since rejected drafts and failed requests are no
        tokens; good requests/s are the turns within the limits over the same batches' time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import numpy as np

from specbench.arrays import FloatArray, first_difference
from specbench.results.cells import ABSENT, Cell, NumberCell, number
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import DIFFERS, CaseRecord, Served, group_by
from specbench.results.statistics.bootstrap import log_ratios
from specbench.results.statistics.counted import rankable, wrong_outputs
from specbench.results.statistics.pairs import Ranking
from specbench.results.statistics.summary import timed_turns
from specbench.results.summary_schema import ServedLabel

PERCENTILES = (50, 95, 99)
_PAYS = {"faster": "yes", "slower": "no"}  # by the verdict on all users' speed; else unknown

Limits: TypeAlias = Mapping[str, float]  # seconds of ``ttft``, ``tpot`` that a good request keeps


# By label and by the cases that were asked together: new tokens, seconds, requests within limits.
Batches: TypeAlias = dict[str, dict[tuple[str, ...], FloatArray]]


def limits_of(manifest: RunManifest) -> Limits:
    """Read ``server.limit_ttft_s`` and ``server.limit_tpot_s``, where set."""
    limits = {name: manifest.setting("server", f"limit_{name}_s") for name in ("ttft", "tpot")}
    return {name: seconds for name, seconds in limits.items() if seconds is not None}


def _latencies(turn: CaseRecord) -> dict[str, list[float]]:
    return {
        "ttft": [turn.prefill_s],
        "tpot": [turn.decode_s / turn.n_decoded] if turn.n_decoded else [],
        "itl": [b - a for a, b in pairwise(turn.served.bursts)] if turn.served else [],
        "e2e": [turn.wall_s],
    }


def _percentiles(turns: Sequence[CaseRecord]) -> dict[str, dict[str, float]]:
    """Compute seconds by latency and percentile (``p50``); latencies not measured are left out."""
    seconds: dict[str, list[float]] = {}
    for turn in turns:
        for name, of_turn in _latencies(turn).items():
            seconds.setdefault(name, []).extend(of_turn)
    return {
        name: {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}
        for name, values in seconds.items()
        if values
    }


def served_labels(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    limits: Limits | None = None,
    baseline: str | None = BASELINE,
    seed: int = 0,
) -> list[ServedLabel]:
    """Describe the labels of a run that servers answered; empty for our own engine."""
    if not any(record.served for record in records):
        return []
    timed = timed_turns(records, labels)
    batches = _batches(records, labels, limits or {})
    methods, ranking = _system_ranking(records, labels, baseline, seed)
    rows = []
    for label in labels:
        answered = [r for r in records if r.label == label and r.status != "failed" and r.served]
        if not answered:
            continue
        in_time = [r for r in timed if r.label == label]
        tokens, seconds, good = sum(batches[label].values(), np.zeros(3)).tolist()
        verdicts = [r.lossless.verdict for r in answered]
        i = methods.index(label) if label in methods else None
        over = None if i is None else ranking.over_plain[i]
        verdict = "" if i is None else ranking.plain_outcomes[i]
        rows.append(
            ServedLabel(
                label=label,
                engine=answered[0].engine,
                numerics=answered[0].numerics,
                concurrency=_served(answered[0]).concurrency,
                ttft_s=median(r.prefill_s for r in in_time) if in_time else None,
                user_tokens_per_s=_per(
                    sum(r.n_decoded for r in in_time), sum(r.decode_s for r in in_time)
                ),
                system_tokens_per_s=_per(tokens, seconds),
                system_speedup=math.exp(over.log_ratio) if over else None,
                system_speedup_ci=over.interval if over else None,
                pays="" if label == baseline else _PAYS.get(verdict, "unknown"),
                equal=verdicts.count("equal"),
                compared=verdicts.count("equal") + verdicts.count(DIFFERS),
                first_difference=_first_difference(answered, records),
                uncounted=sum(not _served(r).counted for r in answered),
                together=sum(r.n_new > 1 and not r.n_decoded for r in answered),
                latency=_percentiles(in_time),
                good_requests_per_s=_per(good, seconds) if limits else None,
                limits=", ".join(f"{name} {limit:g} s" for name, limit in (limits or {}).items()),
            )
        )
    return rows


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _served(record: CaseRecord) -> Served:
    assert record.served is not None
    return record.served


def _batches(records: Sequence[CaseRecord], labels: Sequence[str], limits: Limits) -> Batches:
    """Add up turns and repeats of the batches that count for all labels."""
    timed = {(turn.repeat, turn.case_id) for turn in timed_turns(records, labels)}
    answered = (record for record in records if record.served and record.label in labels)
    batches: Batches = {label: {} for label in labels}
    for batch in group_by(answered, lambda turn: (turn.repeat, _served(turn).batch)).values():
        if any(not _served(t).batch_s or (t.repeat, t.case_id) not in timed for t in batch):
            continue
        cases = tuple(sorted({turn.case_id for turn in batch}))
        for (label, _), together in group_by(batch, lambda turn: (turn.label, turn.turn)).items():
            n_new = sum(turn.n_new for turn in together)
            good = sum(_is_good(turn, limits) for turn in together)
            totals = np.array([n_new, _served(together[0]).batch_s, good], dtype=np.float64)
            batches[label][cases] = batches[label].get(cases, np.zeros(3)) + totals
    return batches


def _is_good(turn: CaseRecord, limits: Limits) -> bool:
    latencies = _latencies(turn)
    return all(s <= limit for name, limit in limits.items() for s in latencies[name])


def system_sentence(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None, seed: int
) -> str:
    """Describe all users together in a sentence, for a run with several requests at once.

    "" where nothing can be compared.
    """
    methods, ranking = _system_ranking(records, labels, baseline, seed)
    if not methods:
        return ""
    users = max(_served(r).concurrency for r in records if r.served)
    return f"All {users} users together: {ranking.sentence(methods, unit='batches')}"


def system_speedups(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None, seed: int
) -> dict[str, tuple[NumberCell, str]]:
    """Give by label all users' tokens/s over plain decoding's, and its verdict.

    Intervals are those that decide: a bootstrap over batches, for all methods together. With too
    few batches there is no number.
    """
    methods, ranking = _system_ranking(records, labels, baseline, seed)
    estimates = [
        NumberCell(None) if over is None else NumberCell(math.exp(over.log_ratio), over.interval)
        for over in ranking.over_plain
    ]
    return dict(zip(methods, zip(estimates, ranking.plain_outcomes, strict=True), strict=True))


def _system_ranking(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None, seed: int
) -> tuple[list[str], Ranking]:
    """Rank methods by their speeds over AR decoding's on common batches."""
    batches = _batches(records, labels, {})
    ranked = rankable(labels, wrong_outputs(records, labels), baseline)
    methods = [label for label in ranked if label != baseline and batches[label]]
    if baseline is None or not batches.get(baseline) or not methods:
        return [], Ranking([], [], {})
    compared = [baseline, *methods]
    units = sorted(set.intersection(*(set(batches[label]) for label in compared)))
    over = None
    if units:
        totals = np.array([[batches[label][cases] for label in compared] for cases in units])
        above, below = (np.stack([totals[..., i]] * 2) for i in range(2))
        ratios = log_ratios(above, below, np.zeros(len(units), dtype=np.int64), seed)
        contrasts = np.eye(len(compared))[1:] - np.eye(len(compared))[0]
        over = None if ratios is None else ratios.contrast(contrasts)
    return methods, Ranking.compare(over, over, [0.0] * len(methods))


def _first_difference(answered: Sequence[CaseRecord], records: Sequence[CaseRecord]) -> str:
    """Show where the first output that is not AR decoding's departs from it."""
    record = next((r for r in answered if r.lossless.verdict == DIFFERS), None)
    if record is None:
        return ""
    where = f"case {record.case_id}, turn {record.turn}"
    plain = next((r for r in records if r.key == (*record.key[:3], BASELINE)), None)
    ours, theirs = _served(record).text, _served(plain).text if plain and plain.served else ""
    if not (ours and theirs):  # a kept run has no text
        return where
    at = first_difference(ours, theirs)
    at = len(ours) if at is None else at
    return f"{where}, character {at}: {ours[at : at + 20]!r}, plain {theirs[at : at + 20]!r}"


def load_rows(rows: Sequence[ServedLabel], baseline: str = BASELINE) -> list[dict[str, Cell]]:
    """Compare each way of drafting with the same server's plain decoding, at one load."""
    plain = next((row for row in rows if row["label"] == baseline), None)
    if plain is None:
        return []

    def off_and_on(values: tuple[float | None, float | None], form: str) -> str:
        return " → ".join(number(value, form) for value in values)

    def p95(row: ServedLabel) -> float | None:
        return row["latency"].get("e2e", {}).get("p95")

    return [
        {
            "draft": row["label"],
            "users": str(row["concurrency"]),
            "tokens/s off → on": off_and_on(
                (plain["system_tokens_per_s"], row["system_tokens_per_s"]), ".1f"
            ),
            "change [95 %]": NumberCell(row["system_speedup"], row["system_speedup_ci"]),
            "P95, s": off_and_on((p95(plain), p95(row)), ".2f"),
            "equal": f"{row['equal']} of {row['compared']}" if row["compared"] else ABSENT,
            "switch on": row["pays"],
        }
        for row in rows
        if row["label"] != baseline
    ]
