"""``summary.json`` of a run, from its records and its manifest: rows, pairs, conditions, warnings.

Runs write it when they end, and merging writes it for the shards of a run together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from specbench.results.conditions import conditions, warnings
from specbench.results.manifest import RunManifest
from specbench.results.records import SCHEMA_VERSION, CaseRecord
from specbench.results.statistics.batched import batched_labels
from specbench.results.statistics.counted import WRONG, left_out, wrong_output_texts, wrong_outputs
from specbench.results.statistics.disturbed import disturbance, disturbance_text
from specbench.results.statistics.pairs import rank_sample
from specbench.results.statistics.roofline import BaselineContext, baseline_context
from specbench.results.statistics.served import limits_of, served_labels, system_sentence
from specbench.results.statistics.summary import NO_CONTEXT, samples_of
from specbench.results.summary_schema import Compared, Summary
from specbench.results.tasks import OVERALL


def compare_labels(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    baseline: str | None,
    seed: int,
    estimator: str,
    context: BaselineContext = NO_CONTEXT,
) -> Compared:
    """Compute rows, pairs and standings; labels with wrong outputs have no standing.

    Args:
        records: of these labels alone, of one run or of several that count as its repeats.
        labels: in the order of the run.
        baseline: what speedups refer to.
        seed: of the bootstrap.
        estimator, context: as for :func:`specbench.results.statistics.summary.samples_of`.
    """
    wrong = wrong_outputs(records, labels)
    samples = samples_of(records, labels, baseline, seed, estimator, context=context)
    rows = [sample.row(task, label) for task, sample in samples.items() for label in labels]
    ranked = rank_sample(samples[OVERALL], wrong, baseline)
    unit = "groups" if any(record.batch for record in records) else "cases"
    sentence = ranked.ranking.sentence(ranked.methods, rows[0]["timing"] if rows else "none", unit)
    if any(record.served and record.served.concurrency > 1 for record in records):
        sentence = system_sentence(records, labels, baseline, seed)
    return {
        "rows": rows,
        "pairs": ranked.pairs,
        "leaders": ranked.leaders,
        "against_best": {**ranked.standings, **dict.fromkeys(wrong, WRONG)},
        "verdict": "\n".join([*wrong_output_texts(wrong, baseline), sentence]).strip(),
    }


def run_summary(
    records: Sequence[CaseRecord],
    errors: Sequence[Mapping[str, object]],
    manifest: RunManifest,
    superseded: Sequence[CaseRecord] = (),
) -> Summary:
    """Compute what ``summary.json`` holds.

    Args:
        records: of ``cases.jsonl``; ``superseded``: of ``disturbed.jsonl``.
        errors: the lines of ``errors.jsonl``.
        manifest: of the run.
    """
    missing = left_out(records, manifest, errors)
    labels = [label for label in manifest.labels if label not in missing]
    # Blocks are measured in changing orders; words go by the run's own.
    records = [record for label in labels for record in records if record.label == label]
    superseded = [record for record in superseded if record.label not in missing]
    baseline = manifest.baseline if manifest.baseline in labels else None
    seed, estimator = manifest.seed, manifest.config["estimator"]
    context = baseline_context(manifest)
    compared = compare_labels(records, labels, baseline, seed, estimator, context)
    rows = compared["rows"]
    if len({pair["first"] for pair in compared["pairs"]}) < 2:
        compared["pairs"] = []
    served = served_labels(records, labels, limits_of(manifest), baseline, seed)
    disturbed = disturbance(records, superseded, rows, baseline, seed)
    warned = warnings(records, manifest, rows, errors, missing, served)
    if refused := [warning.text for warning in warned if warning.code == "NO_HEADLINE"]:
        wrong = wrong_output_texts(wrong_outputs(records, labels), baseline)
        compared["verdict"] = "\n".join([*wrong, *refused])
    fields = {
        "schema_version": SCHEMA_VERSION,
        "run_key": manifest.run_key,
        **compared,
        "disturbed": disturbed,
        "conditions": conditions(records, manifest, rows),
        "warnings": [warning.to_json() for warning in warned],
    }
    summary = cast("Summary", fields)
    if batched := batched_labels(records, labels, baseline):
        summary["batched"] = batched
    if served:
        summary["served"] = served
    if text := disturbance_text([disturbed]):
        summary["conditions"]["disturbed turns"] = text
    return summary


def exit_code(records: Sequence[CaseRecord], errors: Sequence[Mapping[str, object]]) -> int:
    """Return 0, or 1 where a case failed or an output is not what plain decoding gives."""
    return int(bool(errors) or any(record.lossless.verdict == "bug" for record in records))
