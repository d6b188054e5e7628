"""``summary.json`` of a run: rows, pairs, caption and notes, from its records and its manifest.

Runs write it when they end, and merging writes it for the shards of a run together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench.results.manifest import ModelInfo, RunManifest
from specbench.results.records import (
    CASES,
    ERRORS,
    LAUNCHED_DRAFTS,
    SCHEMA_VERSION,
    CaseRecord,
)
from specbench.results.statistics import roofline
from specbench.results.statistics.aggregate import LEFT_OUT_SHARE, noisy_blocks, timed_turns
from specbench.results.statistics.batched import batched_labels
from specbench.results.statistics.counted import WRONG, left_out, wrong_outputs, wrong_words
from specbench.results.statistics.disturbed import disturbance, disturbance_text
from specbench.results.statistics.latency import limits_of
from specbench.results.statistics.pairs import rank_labels
from specbench.results.statistics.served import served_labels, system_verdict
from specbench.results.statistics.summary import NO_CONTEXT, summarize
from specbench.results.summary_schema import Disturbance, Pair, Standing, Summary, SummaryRow
from specbench.results.tasks import OVERALL
from specbench.results.wording import run_caption

_NEAR_TIES_SHOWN_FROM = 0.02  # of the audited turns, in float32
_STEAL_SHOWN_FROM = 0.05  # of the CPU time while turns ran


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
    how = (labels, baseline, seed, estimator)
    wrong = wrong_outputs(records, labels)
    rows = summarize(records, *how, context=context)
    ranked = rank_labels(records, *how)
    said = ranked.ranking.sentence(ranked.methods, rows[0]["timing"] if rows else "none")
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
    seed, model = manifest.seed, manifest.model
    context = roofline.baseline_context(manifest)
    estimator = manifest.config["estimator"]
    compared = compare_labels(records, labels, baseline, seed, estimator, context)
    rows, pairs = compared.rows, compared.pairs
    several = len({pair["first"] for pair in pairs}) > 1
    disturbed = disturbance(records, superseded, rows, baseline, seed)
    on_gpu = model is not None and (model.device or "").startswith("cuda")
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
        "caption": run_caption(in_order, manifest, rows),
        "notes": [
            *(f"LEFT OUT: {label}. {why}" for label, why in missing.items()),
            *(manifest.notes or []),
            *accepted_by_part(in_order),
            *_failures(records, errors, labels),
            *_verdicts(records, baseline, (model and model.dtype) or ""),
            *_near_ties(model),
            *_disturbance(
                records, disturbed, rows, manifest.setting("measure", "disturbed") or {}, on_gpu
            ),
            *_draft_weights(manifest),
            *_launched_drafts(in_order),
            *_baseline(rows, baseline, manifest),
            *_phases(rows),
        ],
    }
    if batched := batched_labels(records, labels, baseline):
        found["batched"] = batched
    if served := served_labels(records, labels, limits_of(manifest)):
        found["served"] = served
    return found


def exit_code(records: Sequence[CaseRecord], errors: Sequence[Mapping[str, object]]) -> int:
    """0, or 1 where a case failed or an output is not what plain decoding gives."""
    return int(bool(errors) or any(record.lossless.verdict == "bug" for record in records))


def _failures(
    records: Sequence[CaseRecord], errors: Sequence[Mapping[str, object]], labels: Sequence[str]
) -> list[str]:
    notes = []
    failed = {(r.case_id, r.label) for r in records if r.status == "failed"}
    if failed:
        dropped = len({case for case, _ in failed})
        by_label = {label: sum(1 for _, x in failed if x == label) for label in labels}
        counts = ", ".join(f"{label} {n}" for label, n in by_label.items() if n)
        notes.append(
            f"{dropped} of {len({r.case_id for r in records})} cases are dropped for all labels "
            f"because one failed ({counts}); reasons in {ERRORS}."
        )
    unaudited = sum(error["during"] == "audit" for error in errors)
    if unaudited:
        notes.append(f"the audit itself failed for {unaudited} turns; reasons in {ERRORS}.")
    return notes


def _verdicts(records: Sequence[CaseRecord], baseline: str | None, dtype: str) -> list[str]:
    notes = []
    audited = [r for r in records if r.lossless.verdict != "not_audited" and r.label != baseline]
    ties = sum(record.lossless.verdict == "near_tie" for record in audited)
    if "float32" in dtype and ties > _NEAR_TIES_SHOWN_FROM * len(audited):
        notes.append(
            f"{ties} of {len(audited)} audited turns are near ties, more than "
            f"{_NEAR_TIES_SHOWN_FROM:.0%} in float32: look at their gaps in {CASES}."
        )
    if any(record.forced_resume for record in records):
        notes.append("resumed with resume=force: not all records come from the same conditions.")
    return notes


def _near_ties(model: ModelInfo | None) -> list[str]:
    """What a near tie is, where that was measured."""
    audit = (model and model.audit) or {}
    if audit.get("spread") is None:
        return []
    rows = " and ".join(map(str, audit["rows"]))
    return [
        f"a near tie is within {audit['value']:.3g} of the largest logit: over "
        f"{audit['positions']} positions of this run's prompts, logits of passes with 1 row and "
        f"with {rows} differ by up to {audit['spread']:.3g}. At {audit['blind']:.0%} of them the "
        "second token is as near, and the audit could not tell it from the first."
    ]


def _disturbance(
    records: Sequence[CaseRecord],
    found: Disturbance | None,
    rows: Sequence[SummaryRow],
    limits: Mapping[str, float | None],
    on_gpu: bool,
) -> list[str]:
    notes = []
    if text := disturbance_text([found]):
        notes += [text, _rule(limits, on_gpu)]
    units = noisy_blocks(records)
    blocks = {(r.repeat, r.case_id): (r.repeat, r.unit) for r in records}
    noisy = [block for block, unit in blocks.items() if unit in units]
    if noisy:
        labels = [row["label"] for row in rows if row["task"] == OVERALL]
        counted = bool(noisy_blocks(timed_turns(records, labels)))
        notes.append(
            f"{len(noisy)} of {len(blocks)} cases stayed disturbed (disturbed_by in the records "
            "says why); "
            + (
                f"their times count. THE MACHINE WAS TOO BUSY: no case is left out where over "
                f"{LEFT_OUT_SHARE:.0%} stayed disturbed. Labels were interleaved, so ratios suffer "
                "less than tokens/s."
                if counted
                else "the times count for no label."
            )
        )
    steal = [record.cpu_steal for record in records if record.cpu_steal is not None]
    if steal and sum(steal) > _STEAL_SHOWN_FROM * len(steal):
        notes.append(
            f"the hypervisor gave {sum(steal) / len(steal):.0%} of this machine's CPU time to "
            "others while turns were measured: times are disturbed (cpu_steal in the records)."
        )
    return notes


def _rule(limits: Mapping[str, float | None], on_gpu: bool) -> str:
    """The rule by which turns are disturbed, in a sentence."""
    words = {
        "steal": "more than {:.0%} of a case's CPU time, all labels together, stolen by the "
        "hypervisor",
        "others": "more than {:.0%} of it taken by other processes",
    }
    parts = [text.format(limits[key]) for key, text in words.items() if limits.get(key) is not None]
    gpu = ["a GPU shared or throttled"] if on_gpu else []
    return f"disturbed by: {'; '.join([*parts, *gpu])}."


def _draft_weights(manifest: RunManifest) -> list[str]:
    """That what drafts is read in fewer bytes than the target, where a CPU does that."""
    model, form = manifest.model, manifest.setting("engine", "draft_weights")
    if (
        model is None
        or model.device != "cpu"
        or model.dtype != "float32"
        or form in (None, "float32")
    ):
        return []
    heads = [
        label
        for label, files in (model.artefacts or {}).items()
        if any(name.startswith("head ") for name in files)
    ]
    labels = sorted({*model.drafts, *heads})
    if not labels:
        return []
    return [
        f"Draft models and heads ({', '.join(labels)}) are rounded to {form} and read so "
        "(engine.draft_weights); the model is not."
    ]


def _launched_drafts(records: Sequence[CaseRecord]) -> list[str]:
    """Labels whose heads ran kernel by kernel, for some drafts, beside a target on CUDA graphs."""
    launched, steps = Counter[str](), Counter[str]()
    for record in records:
        counts = [n for key, n in record.drafter.items() if key.split(".")[-1] == LAUNCHED_DRAFTS]
        launched[record.label] += sum(counts)
        steps[record.label] += record.n_target_passes
    return [
        f"{label}: {count / max(steps[label], count):.1%} of its head's drafts were launched "
        "kernel by kernel, beside passes of the target that are replayed as CUDA graphs, and took "
        "longer than they have to (a path longer than the head's own, or no capture: see the log)."
        for label, count in launched.items()
        if count
    ]


def _baseline(rows: Sequence[SummaryRow], baseline: str | None, manifest: RunManifest) -> list[str]:
    shares = {r["task"]: r["bandwidth_share"] for r in rows if r["label"] == baseline}
    highest = max((share for share in shares.values() if share), default=0.0)
    return roofline.notes(manifest, shares[OVERALL], highest) if shares else []


def accepted_by_part(done: Sequence[CaseRecord]) -> list[str]:
    """For each label made of several drafters, whose draft tokens were accepted."""
    notes = []
    for label in dict.fromkeys(record.label for record in done):
        credited, found = Counter[str](), Counter[str]()
        for record in done:
            if record.label == label and record.status != "failed":
                for key, count in record.drafter.items():
                    for prefix, totals in (("accepted_from_", credited), ("found_by_", found)):
                        if key.startswith(prefix):
                            totals[key.removeprefix(prefix)] += count
        if total := credited.total():
            shares = ", ".join(
                f"{name} {credited[name] / total:.0%} (had {found[name] / total:.0%})"
                for name in credited
            )
            notes.append(f"{total:,} accepted draft tokens of {label} came from: {shares}.")
    return notes


def _phases(rows: Sequence[SummaryRow]) -> list[str]:
    notes = []
    for row in rows:
        if row["task"] == OVERALL and row["phase_share"]:
            shares = sorted(row["phase_share"].items(), key=lambda item: -item[1])
            parts = ", ".join(f"{name} {share:.1%}" for name, share in shares)
            notes.append(f"shares of {row['label']}'s wall time: {parts}.")
    return notes
