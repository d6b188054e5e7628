"""The methods with a draft model: what each gains and takes, and what each paper claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from analysis.papers.card import counter, draft_share, hit_rate
from analysis.papers.reproduction import Reproduction, captions, drafting
from analysis.runs.claims import VERDICT_RULE, compare, load_ledger
from analysis.runs.comparisons import conditions, make_comparisons
from analysis.runs.estimates import pooled_ratio
from analysis.tabular.comparison_tables import context_cells
from analysis.tabular.table import ResultTable
from specbench.results.estimate import ABSENT, Estimate
from specbench.results.wording import verdict_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.runs.claims import Claim
    from analysis.runs.comparisons import ComparedLabel
    from analysis.runs.load import Run
    from analysis.tabular.table import Cell

# They draft while the target verifies; only the serial emulation can tell the two times apart.
_OVERLAPPED = ("card", "pearl")
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
    groups = make_comparisons(timed, ledger=())
    entries = [entry for group in groups for entry in drafting(group)]
    phased = make_comparisons([run for run in runs if run.phases], ledger=())
    inside = {_place(entry): entry for group in phased for entry in drafting(group)}
    text = captions(groups, _TEXT)
    rows = [_row(entry, inside.get(_place(entry))) for entry in entries]
    claims = [(entry, claim) for entry in entries for claim in _claims(entry)]
    return [
        ResultTable.of("Draft models: gains and resources", text, rows),
        ResultTable.of(
            "Draft models: claimed and measured",
            captions(groups, _CLAIMS_TEXT),
            [_claim_row(entry, claim) for entry, claim in claims],
            [VERDICT_RULE],
        ),
    ]


def _place(entry: ComparedLabel) -> tuple[Any, ...]:
    run = entry.run
    return (run.model, run.dataset, conditions(run), run.manifest.prompt_set_hash, entry.label)


def _row(entry: ComparedLabel, inside: ComparedLabel | None) -> dict[str, Cell]:
    run, label, row = entry.run, entry.label, entry.overall
    own = [record for record in run.records if record.label == label]
    share = Estimate(None)
    if inside is not None and (not _overlapped(entry) or inside.run.overlap == "serial"):
        share = draft_share(inside)
    passes, tokens = counter("draft_forwards"), counter("draft_tokens")
    per_token = [
        pooled_ratio(own, count, lambda r: max(0, r.n_new - 1), run.seed)
        for count in (passes, tokens)
    ]
    rows_of_target = pooled_ratio(
        own, lambda r: r.n_drafted + r.n_aux + r.n_target_passes, lambda r: r.n_target_passes
    )
    rows_of_draft = pooled_ratio(own, tokens, passes)
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
        "target Params × L_new": _load(rows_of_target.value, run.parameters()),
        "draft Params × L_new": _load(rows_of_draft.value, run.parameters(label)),
        "devices": _devices(entry),
        "memory, GB": _memory(entry),
        "cases": str(row["n_cases"]),
        "lossless": verdict_words(row["lossless"]),
    }


def _load(rows: float | None, parameters: float | None) -> str:
    return ABSENT if rows is None or parameters is None else f"{rows * parameters / 1e9:.3g}"


def _overlapped(entry: ComparedLabel) -> bool:
    """Whether the entry, or a part of a union, drafts while the target verifies."""
    own = [record for record in entry.run.records if record.label == entry.label]
    parts = {part for r in own for key in r.drafter for part in key.split(".")[:-1]}
    return not parts.isdisjoint(_OVERLAPPED) or entry.overall["method"] in _OVERLAPPED


def _devices(entry: ComparedLabel) -> str:
    """``1 of 2`` where two were asked for and one did it."""
    used, asked_for = counter("devices"), counter("devices_asked")
    found = set()
    for record in entry.run.records:
        devices = used(record) if record.label == entry.label else None
        if devices is not None:
            found.add((int(devices), int(asked_for(record) or devices)))
    words = [str(n) if n == asked else f"{n} of {asked}" for n, asked in sorted(found)]
    return ", ".join(words) or ABSENT


def _memory(entry: ComparedLabel) -> str:
    """Both models' gigabytes."""
    found = entry.run.memory(entry.label)
    return " + ".join(f"{found[part] / 1e9:.2f}" for part in ("target", "draft") if part in found)


def _claims(entry: ComparedLabel) -> list[Claim]:
    """Of each paper that has numbers for the method, the claim of the largest speedup."""
    best: dict[str, Claim] = {}
    for claim in load_ledger():
        speedup = claim.value("speedup")
        if claim.method != entry.overall["method"] or claim.over or claim.quoted:
            continue
        if claim.temperature != entry.run.temperature or speedup is None:
            continue
        known = best.get(claim.paper)
        if known is None or speedup > (known.value("speedup") or 0.0):
            best[claim.paper] = claim
    return list(best.values())


def _claimed_loads(claim: Claim) -> str:
    """Params × L_new of target and draft, where the same paper states them for the method."""
    for other in load_ledger():
        loads = [other.value("target_load"), other.value("draft_load")]
        if (other.paper, other.method) == (claim.paper, claim.method) and None not in loads:
            return " / ".join(f"{load:g}" for load in loads)
    return ABSENT


def _claim_row(entry: ComparedLabel, claim: Claim) -> dict[str, Cell]:
    run, row = entry.run, entry.overall
    mat = claim.value("mat")
    qualifier = f"{claim.qualifier} " if claim.qualifier else ""
    models = claim.model if claim.draft is None else f"{claim.model} with {claim.draft}"
    same_data = claim.dataset == run.dataset
    verdict = compare(claim, row, run.model, run.gpus, "overall") if same_data else "other data"
    return {
        "method": entry.label,
        "MAT [95 %]": entry.measured("mat"),
        "speedup [95 %]": entry.measured("speedup"),
        **context_cells(row),
        "cases": str(row["n_cases"]),
        "measured on": f"{run.model}, {run.dataset}, {run.hardware}",
        "claimed MAT": ABSENT if mat is None else f"{mat:.2f}",
        "claimed speedup": f"{qualifier}{claim.value('speedup'):.2f}",
        "claimed for": f"{models}, {claim.dataset}",
        "claimed on": claim.hardware,
        "GPUs": ABSENT if claim.gpu is None else str(claim.gpu_count),
        "claimed target / draft load": _claimed_loads(claim),
        "source": f"{claim.paper}, {claim.source}",
        "verdict": verdict,
    }


ARTIFACTS = (Reproduction("draft_models", "Draft models side by side", _tables),)
