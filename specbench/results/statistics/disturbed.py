"""The effect of the rule about disturbed turns on a run's numbers; ``runners`` has the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specbench.results.records import CaseRecord
from specbench.results.statistics.summary import summarize
from specbench.results.summary_schema import Disturbance, SummaryRow
from specbench.results.tasks import OVERALL


def disturbance(
    records: Sequence[CaseRecord],
    superseded: Iterable[CaseRecord],
    rows: Sequence[SummaryRow],
    baseline: str | None,
    seed: int = 0,
) -> Disturbance | None:
    """Count what was flagged and measured again; compute the numbers without the rule.

    Args:
        records: of a run; ``superseded``: of its ``disturbed.jsonl``.
        rows: of the records, from :func:`specbench.results.statistics.summary.summarize`.
        baseline, seed: that the rows were made with.

    Returns:
        None where no time was measured.
    """
    if not any(record.timing == "measured" for record in records):
        return None
    labels = [row["label"] for row in rows if row["task"] == OVERALL]
    replaced = {record.key: record for record in superseded if not record.attempt}
    first = [replaced.get(record.key, record) for record in records]
    timed = [record for record in first if record.status != "failed"]
    turns = Counter(record.label for record in timed)
    flagged = Counter(r.label for r in timed if r.status == "disturbed" or r.disturbed_by)
    again = [record for record in records if record.attempt]
    if flagged or again:
        first = [r.replace(status="ok") if r.status == "disturbed" else r for r in first]
        rows = summarize(first, labels, baseline, seed, rows[0]["estimator"])
    return {
        "turns": {label: turns[label] for label in labels},
        "flagged": {label: flagged[label] for label in labels},
        "cases_again": len({(record.repeat, record.case_id) for record in again}),
        "turns_again": len(again),
        "without_rule": {
            row["label"]: {key: row[key] for key in ("tokens_per_s", "speedup", "speedup_ci")}
            for row in rows
            if row["task"] == OVERALL
        },
    }


def disturbance_text(runs: Iterable[Disturbance | None]) -> str:
    """Say how many turns of the runs were disturbed and measured again; empty where none was."""
    turns, flagged, again = Counter[str](), Counter[str](), 0
    for run in filter(None, runs):
        turns.update(run["turns"])
        flagged.update(run["flagged"])
        again += run["cases_again"]
    if not (flagged.total() or again):
        return ""
    counts = {label: f"{flagged[label]} of {turns[label]}" for label in turns}
    by_label = ", ".join(f"{label} {count}" for label, count in counts.items())
    if len(set(counts.values())) == 1:
        by_label = f"{next(iter(counts.values()))} of each label"
    cases = f"; {again} case{'s were' if again > 1 else ' was'} measured again" if again else ""
    return f"Turns that were disturbed when first measured: {by_label}{cases}."
