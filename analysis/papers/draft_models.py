"""The methods with a draft model: what each gains and takes, and what each paper claims."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.papers.cells import CONTEXT, cells
from analysis.papers.reproduction import Reproduction, captions
from analysis.runs.acceptance import drafter_count, phase_share
from analysis.runs.claim_verdicts import VERDICT_RULE, VERDICT_WORDS
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions, make_comparisons
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import claimed_cell
from analysis.tabular.table import ResultTable
from specbench.results.decision import OUTPUTS
from specbench.results.estimate import ABSENT, Cell, Estimate, Fact

_CLAIMS_TEXT = (
    "Of each source its largest speedup at the run's temperature. CARD's paper gives CARD one GPU "
    "more than plain decoding and ran the others' code itself; PEARL's draft needs a GPU of its "
    "own. Load: Params × L_new. No source states memory or draft passes per token."
)


def tables(of: Reproduction, runs: Sequence[Run]) -> list[ResultTable]:
    """What was measured, and below what each paper claims."""
    # The clock inside the steps costs time: speeds come from the other runs, if any.
    timed = [run for run in runs if not run.phases] or list(runs)
    comparisons = make_comparisons(timed, claims=())
    entries = [(c, entry) for c in comparisons for entry in c.drafting]
    phased = make_comparisons([run for run in runs if run.phases], claims=())
    inside = {_place(entry): entry for comparison in phased for entry in comparison.drafting}
    text = captions(comparisons, of.text)
    rows = [_row(c, entry, inside.get(_place(entry))) for c, entry in entries]
    claims = [(c, entry, claim) for c, entry in entries for claim in _claims(entry)]
    return [
        ResultTable.of("Draft models: gains and resources", text, rows, short=_SHORT),
        ResultTable.of(
            "Draft models: claimed and measured",
            captions(comparisons, _CLAIMS_TEXT),
            [_claim_row(*each) for each in claims],
            [VERDICT_RULE, VERDICT_WORDS],
        ),
    ]


_SHORT = (
    "method", "MAT", "speedup [95 %]", "draft share", "hit rate", "draft passes", "draft tokens",
    "devices", "memory, GB", "outputs",
)  # fmt: skip


def _place(entry: ComparedLabel) -> tuple[object, ...]:
    run = entry.run
    return (run.model, run.dataset, conditions(run), run.manifest.prompt_set_hash, entry.label)


def _row(
    comparison: ComparedRuns, entry: ComparedLabel, inside: ComparedLabel | None
) -> dict[str, Cell]:
    tells = inside is not None and inside.run.tells_draft_time(entry.label)
    others: dict[str, Cell] = {
        "draft share [95 %]": phase_share(inside) if inside and tells else Estimate(None),
        "devices": _devices(entry),
        "memory, GB": _memory(entry),
    }
    return cells(comparison, entry, _COLUMNS, others)


_COLUMNS = (
    "model", "method", "MAT [95 %]", "speedup [95 %]", CONTEXT, "draft share [95 %]",
    "hit rate [95 %]", "draft passes [95 %]", "draft tokens [95 %]", "target Params × L_new",
    "draft Params × L_new", "devices", "memory, GB", "cases", OUTPUTS,
)  # fmt: skip


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
    by_paper: dict[str, dict[float, Claim]] = {}
    for claim in load_claims():
        speedup, same = claim.value("speedup"), claim.temperature == entry.run.temperature
        if claim.method == entry.method and same and speedup and not (claim.over or claim.quoted):
            by_paper.setdefault(claim.paper, {}).setdefault(speedup, claim)
    return [by_speedup[max(by_speedup)] for by_speedup in by_paper.values()]


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


def _claim_row(comparison: ComparedRuns, entry: ComparedLabel, claim: Claim) -> dict[str, Cell]:
    run = entry.run
    models = claim.model if claim.draft is None else f"{claim.model} with {claim.draft}"
    same_data = claim.dataset == run.dataset
    verdict = entry.verdict(claim=claim) if same_data else "other data"
    return {
        **cells(comparison, entry, ("method", "MAT [95 %]", "speedup [95 %]", CONTEXT, "cases")),
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
