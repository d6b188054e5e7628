"""Labels that servers answered: time to first token, throughput, equality.

Definitions:
    time to first token: from the request to the first token's arrival here; the median over turns.
    batch: the questions of a label that were asked at once; the next ones wait until all are done.
    system tokens/s: new tokens of all batches over their time, from the first request to the last
        token. A batch with a failed or repeated request counts in neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from specbench.arrays import first_difference
from specbench.results.estimate import ABSENT
from specbench.results.manifest import BASELINE
from specbench.results.records import DIFFERS, CaseRecord, Served
from specbench.results.statistics.aggregate import timed_turns
from specbench.results.summary_schema import ServedLabel


def served_labels(records: Sequence[CaseRecord], labels: Sequence[str]) -> list[ServedLabel]:
    """The labels of a run that servers answered; none of a run of our own engine."""
    timed = timed_turns(records, labels)
    found = []
    for label in labels:
        own = [r for r in records if r.label == label and r.status != "failed" and r.served]
        if not own:
            continue
        in_time = [r for r in timed if r.label == label]
        decode_s = sum(r.decode_s for r in in_time)
        compared = [r for r in own if r.lossless.verdict in ("equal", DIFFERS)]
        different = [r for r in compared if r.lossless.verdict == DIFFERS]
        found.append(
            ServedLabel(
                label=label,
                engine=own[0].engine,
                numerics=own[0].numerics,
                concurrency=_of(own[0]).concurrency,
                ttft_s=median(r.prefill_s for r in in_time) if in_time else None,
                user_tokens_per_s=sum(r.n_new - 1 for r in in_time) / decode_s
                if decode_s
                else None,
                system_tokens_per_s=_system(in_time),
                equal=len(compared) - len(different),
                compared=len(compared),
                first_difference=_words(different, records),
                uncounted=sum(not _of(r).counted for r in own),
            )
        )
    return found


def _of(record: CaseRecord) -> Served:
    assert record.served is not None
    return record.served


def _system(records: Iterable[CaseRecord]) -> float | None:
    batches: dict[tuple[int, int], list[CaseRecord]] = {}
    for record in records:
        if _of(record).batch_s:
            batches.setdefault((_of(record).batch, record.turn), []).append(record)
    seconds = sum(_of(batch[0]).batch_s or 0.0 for batch in batches.values())
    tokens = sum(record.n_new for batch in batches.values() for record in batch)
    return tokens / seconds if seconds else None


def _words(different: Sequence[CaseRecord], records: Sequence[CaseRecord]) -> str:
    """Where the first answer that is not plain decoding's leaves it, both ways on."""
    if not different:
        return ""
    record = different[0]
    plain = next(r for r in records if r.key == (*record.key[:3], BASELINE))
    ours, theirs = _of(record).text, _of(plain).text
    at = first_difference(ours, theirs)
    at = len(ours) if at is None else at
    return (
        f"case {record.case_id}, turn {record.turn}, character {at}: "
        f"{ours[at : at + 20]!r}, plain {theirs[at : at + 20]!r}"
    )


SERVED_TEXT = (
    "first token: from the request to its arrival, median. one user: tokens/s after the first "
    "token. system: new tokens of all users over all time. equal: answers that are the same "
    "server's plain ones."
)


def served_cells(row: ServedLabel) -> dict[str, str]:
    """A label as a line of a table."""

    def shown(value: float | None, form: str) -> str:
        return ABSENT if value is None else format(value, form)

    ttft = row["ttft_s"]
    return {
        "server": str(row["label"]),
        "at once": str(row["concurrency"]),
        "first token, ms": shown(None if ttft is None else 1e3 * ttft, ".0f"),
        "tokens/s, one user": shown(row["user_tokens_per_s"], ".1f"),
        "tokens/s, system": shown(row["system_tokens_per_s"], ".1f"),
        "equal": f"{row['equal']} of {row['compared']}" if row["compared"] else ABSENT,
    }


def served_notes(rows: Iterable[ServedLabel]) -> list[str]:
    """What differs, and what servers did not say."""
    notes = []
    for row in rows:
        if row["first_difference"]:
            notes.append(f"{row['label']} differs first at {row['first_difference']}.")
        if row["uncounted"]:
            notes.append(
                f"{row['label']}: the server did not say its steps in {row['uncounted']} turns, "
                "which do not count in MAT."
            )
    return notes
