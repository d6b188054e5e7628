"""The methods with a draft model: what each gains and takes, and what each paper claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.papers.reproduction import Reproduction, captions
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, conditions, make_comparisons
from analysis.runs.drafting import (
    draft_passes,
    draft_tokens,
    drafter_count,
    hit_rate,
    load_of_pass,
    phase_share,
    rows_of_draft_pass,
    rows_of_target_pass,
)
from analysis.runs.estimates import decoded_tokens, pooled_ratio
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.runs.verdicts import VERDICT_RULE, VERDICT_WORDS
from analysis.tabular.comparison_tables import claimed_cell, context_cells
from analysis.tabular.table import ResultTable
from specbench.results.decision import case_cell, outputs_cell
from specbench.results.estimate import ABSENT, Cell, Estimate, Fact

_TEXT = (
    "Draft passes and draft tokens (rows of those passes): per committed token; the prompt's pass "
    "counts for neither model. Draft share: of the steps' time, where a run with measure=phases "
    "has it; for CARD and PEARL in serial emulation. Hit rate: share of queries whose corrected "
    "token was in CARD's cache. Params × L_new: billions of parameters times tokens of a pass. "
    "Devices: those that both models were on, of those asked for. Memory: weights (packed copies "
    "too) and caches of both models, as the method needs them by itself."
)
_CLAIMS_TEXT = (
    "Of each source its largest speedup at the run's temperature. CARD's paper gives CARD one GPU "
    "more than plain decoding and ran the others' code itself; PEARL's draft needs a GPU of its "
    "own. Load: Params × L_new. No source states memory or draft passes per token."
)


def _tables(runs: Sequence[Run]) -> list[ResultTable]:
    # The clock inside the steps costs time: speeds are those of the other runs, if any.
    timed = [run for run in runs if not run.phases] or list(runs)
    comparisons = make_comparisons(timed, claims=())
    entries = [entry for comparison in comparisons for entry in comparison.drafting]
    phased = make_comparisons([run for run in runs if run.phases], claims=())
    inside = {_place(entry): entry for comparison in phased for entry in comparison.drafting}
    text = captions(comparisons, _TEXT)
    rows = [_row(entry, inside.get(_place(entry))) for entry in entries]
    claims = [(entry, claim) for entry in entries for claim in _claims(entry)]
    return [
        ResultTable.of("Draft models: gains and resources", text, rows, short=_SHORT),
        ResultTable.of(
            "Draft models: claimed and measured",
            captions(comparisons, _CLAIMS_TEXT),
            [_claim_row(entry, claim) for entry, claim in claims],
            [VERDICT_RULE, VERDICT_WORDS],
        ),
    ]


_SHORT = (
    "method", "MAT", "speedup [95 %]", "draft share", "hit rate", "draft passes", "draft tokens",
    "devices", "memory, GB", "outputs",
)  # fmt: skip


def _place(entry: ComparedLabel) -> tuple[Any, ...]:
    run = entry.run
    return (run.model, run.dataset, conditions(run), run.manifest.prompt_set_hash, entry.label)


def _row(entry: ComparedLabel, inside: ComparedLabel | None) -> dict[str, Cell]:
    run, label, row = entry.run, entry.label, entry.overall
    share = Estimate(None)
    if inside is not None and inside.run.tells_draft_time(label):
        share = phase_share(inside)
    per_token = [
        pooled_ratio(entry.records, count, decoded_tokens, run.seed)
        for count in (draft_passes, draft_tokens)
    ]
    return {
        "model": run.model,
        "method": label,
        "MAT [95 %]": entry.measured("mat"),
        "speedup [95 %]": entry.measured("speedup"),
        **context_cells(row),
        "draft share [95 %]": share,
        "hit rate [95 %]": hit_rate(entry),
        "draft passes [95 %]": per_token[0],
        "draft tokens [95 %]": per_token[1],
        "target Params × L_new": load_of_pass(rows_of_target_pass(entry), run.parameters()),
        "draft Params × L_new": load_of_pass(rows_of_draft_pass(entry), run.parameters(label)),
        "devices": _devices(entry),
        "memory, GB": _memory(entry),
        "cases": case_cell(row),
        "outputs": outputs_cell(row),
    }


def _devices(entry: ComparedLabel) -> str:
    """``1 of 2`` where two were asked for and one did it."""
    used, asked_for = drafter_count("devices"), drafter_count("devices_asked")
    found = set()
    for record in entry.records:
        devices = used(record)
        if devices is not None:
            found.add((int(devices), int(asked_for(record) or devices)))
    words = [str(n) if n == asked else f"{n} of {asked}" for n, asked in sorted(found)]
    return ", ".join(words) or ABSENT


def _memory(entry: ComparedLabel) -> Cell:
    found = {part: b / 1e9 for part, b in entry.run.memory(entry.label).items()}
    words = " + ".join(f"{found[part]:.2f}" for part in ("target", "draft") if part in found)
    return Fact(words, {f"{part} memory, GB": size for part, size in found.items()})


def _claims(entry: ComparedLabel) -> list[Claim]:
    """Of each paper that has numbers for the method, the claim of the largest speedup."""
    best: dict[str, Claim] = {}
    for claim in load_claims():
        speedup = claim.value("speedup")
        if claim.method != entry.method or claim.over or claim.quoted:
            continue
        if claim.temperature != entry.run.temperature or speedup is None:
            continue
        known = best.get(claim.paper)
        if known is None or speedup > (known.value("speedup") or 0.0):
            best[claim.paper] = claim
    return list(best.values())


def _claimed_loads(claim: Claim) -> dict[str, Cell]:
    """Params × L_new of target and draft, where the same paper states them for the method."""
    stated = None
    for other in reversed(load_claims()):
        loads = [other.value("target_load"), other.value("draft_load")]
        if (other.paper, other.method) == (claim.paper, claim.method) and None not in loads:
            stated = other
    return {
        f"claimed {part} load": claimed_cell(stated, f"{part}_load") for part in ("target", "draft")
    }


def _claim_row(entry: ComparedLabel, claim: Claim) -> dict[str, Cell]:
    run, row = entry.run, entry.overall
    models = claim.model if claim.draft is None else f"{claim.model} with {claim.draft}"
    same_data = claim.dataset == run.dataset
    verdict = entry.verdict(claim=claim) if same_data else "other data"
    return {
        "method": entry.label,
        "MAT [95 %]": entry.measured("mat"),
        "speedup [95 %]": entry.measured("speedup"),
        **context_cells(row),
        "cases": case_cell(row),
        "measured on": f"{run.model}, {run.dataset}, {run.hardware}",
        "claimed MAT": claimed_cell(claim, "mat"),
        "claimed speedup": claimed_cell(claim, "speedup"),
        "claimed for": f"{models}, {claim.dataset}",
        "claimed on": claim.hardware,
        "GPUs": ABSENT if claim.gpu is None else str(claim.gpu_count),
        **_claimed_loads(claim),
        "claimed in": f"{claim.paper}, {claim.source}",
        "verdict": verdict,
    }


REPRODUCTIONS = (Reproduction("draft_models", "Draft models side by side", _tables),)
