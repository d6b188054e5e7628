"""``summary.json`` of a run, from its records and its manifest: rows, pairs, conditions, warnings.

Runs write it when they end, and merging writes it for the shards of a run together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbench.results.conditions import Warned, conditions, warnings
from specbench.results.manifest import RunManifest
from specbench.results.records import SCHEMA_VERSION, CaseRecord
from specbench.results.statistics import roofline
from specbench.results.statistics.batched import batched_labels
from specbench.results.statistics.counted import WRONG, left_out, wrong_outputs, wrong_words
from specbench.results.statistics.disturbed import disturbance, disturbance_text
from specbench.results.statistics.latency import limits_of
from specbench.results.statistics.pairs import rank_sample
from specbench.results.statistics.served import served_labels, system_verdict
from specbench.results.statistics.summary import NO_CONTEXT, samples_of
from specbench.results.summary_schema import Pair, ServedLabel, Standing, Summary, SummaryRow
from specbench.results.tasks import OVERALL


@dataclass(frozen=True, slots=True)
class Compared:
    """The labels of records beside each other, as ``summary.json`` has it."""

    rows: list[SummaryRow]
    pairs: list[Pair]
    leaders: list[str]
    against_best: dict[str, Standing]
    verdict: str


def compare_labels(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    baseline: str | None,
    seed: int,
    estimator: str,
    context: roofline.BaselineContext = NO_CONTEXT,
) -> Compared:
    """Rows, pairs and standings of the labels that count; those with wrong outputs have none.

    Args:
        records: of these labels alone, of one run or of several that count as its repeats.
        labels: in the order of the run.
        baseline: what speedups refer to.
        seed: of the bootstrap.
        estimator, context: as for :func:`specbench.results.statistics.summary.summarize`.
    """
    wrong = wrong_outputs(records, labels)
    samples = samples_of(records, labels, baseline, seed, estimator, context=context)
    rows = [sample.row(task, label) for task, sample in samples.items() for label in labels]
    ranked = rank_sample(samples[OVERALL], wrong, baseline)
    unit = "groups" if any(record.batch for record in records) else "cases"
    said = ranked.ranking.sentence(ranked.methods, rows[0]["timing"] if rows else "none", unit)
    if any(record.served and record.served.concurrency > 1 for record in records):
        said = system_verdict(records, labels, baseline, seed)
    return Compared(
        rows,
        ranked.pairs,
        ranked.leaders,
        {**ranked.standings, **dict.fromkeys(wrong, WRONG)},
        "\n".join([*wrong_words(wrong, baseline), said]).strip(),
    )


def run_summary(
    records: Sequence[CaseRecord],
    errors: Sequence[Mapping[str, object]],
    manifest: RunManifest,
    superseded: Sequence[CaseRecord] = (),
) -> Summary:
    """What ``summary.json`` holds.

    Args:
        records: of ``cases.jsonl``; ``superseded``: of ``disturbed.jsonl``.
        errors: the lines of ``errors.jsonl``.
        manifest: of the run.
    """
    missing = left_out(records, manifest, errors)
    records, superseded = (
        [record for record in of if record.label not in missing] for of in (records, superseded)
    )
    labels = [label for label in manifest.labels if label not in missing]
    baseline = manifest.baseline if manifest.baseline in labels else None
    seed = manifest.seed
    context = roofline.baseline_context(manifest)
    estimator = manifest.config["estimator"]
    compared = compare_labels(records, labels, baseline, seed, estimator, context)
    rows, pairs = compared.rows, compared.pairs
    several = len({pair["first"] for pair in pairs}) > 1
    disturbed = disturbance(records, superseded, rows, baseline, seed)
    # Blocks are measured in changing orders; words go by the run's own.
    rank = {label: place for place, label in enumerate(labels)}
    in_order = sorted(records, key=lambda record: rank.get(record.label, len(rank)))
    found: Summary = {
        "schema_version": SCHEMA_VERSION,
        "run_key": manifest.run_key,
        "rows": rows,
        "pairs": pairs if several else [],
        "leaders": compared.leaders,
        "against_best": compared.against_best,
        "disturbed": disturbed,
        "verdict": compared.verdict,
        "conditions": conditions(in_order, manifest, rows),
        "warnings": [
            warned.to_json()
            for warned in warnings(in_order, manifest, rows, errors, left_out=missing)
        ],
    }
    if batched := batched_labels(records, labels, baseline):
        found["batched"] = batched
    if served := served_labels(records, labels, limits_of(manifest), baseline, seed):
        found["served"] = served
        found["warnings"] += [warned.to_json() for warned in served_warnings(served)]
    if text := disturbance_text([disturbed]):
        found["conditions"]["disturbed turns"] = text
    return found


def served_warnings(rows: Iterable[ServedLabel]) -> Iterator[Warned]:
    """Warn of answers that differ, and of what servers did not say."""
    for row in rows:
        if row["first_difference"]:
            values = {"label": row["label"], "place": row["first_difference"]}
            yield Warned("DIFFERS", values)
        if row["uncounted"]:
            yield Warned("UNCOUNTED", {"label": row["label"], "turns": row["uncounted"]})
        if row["together"]:
            code = "TOGETHER" if row["user_tokens_per_s"] else "NOT_STREAMED"
            yield Warned(code, {"label": row["label"], "turns": row["together"]})


def exit_code(records: Sequence[CaseRecord], errors: Sequence[Mapping[str, object]]) -> int:
    """0, or 1 where a case failed or an output is not what plain decoding gives."""
    return int(bool(errors) or any(record.lossless.verdict == "bug" for record in records))
