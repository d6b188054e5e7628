"""N-Grammys (arXiv 2411.03786): Figures 1 to 9 and Table 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis.papers.ngrammys_rows import FIGURE4
from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    along,
    by_model,
    captions,
    claimed_comparisons,
    heatmap_pictures,
    knob_column,
    label_column,
    settings_tables,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.slowdowns import slowdown_caption, slowdown_heatmaps
from analysis.runs.claims import Claim, claim_of_setting
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.estimates import over_repeats
from analysis.runs.leaders import leaders
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.runs.verdicts import NOT_RUN, OTHER_MODEL
from analysis.tabular.comparison_tables import claimed_cells, context_cells, with_rule
from analysis.tabular.table import ResultTable
from specbench.results.decision import case_cell
from specbench.results.estimate import ABSENT, Cell, Fact
from specbench.results.names import display_name
from specbench.results.wording import leader_words

PAPER = "ngrammys"
_MAT = "tokens per call (MAT)"
_AXES = {"k": "k (rows)", "w": "w (draft tokens in a row)"}
_KW = {"k": knob_column("k"), "w": knob_column("w")}
_FIGURE1_TEXT = (
    "Time of a target pass over k rows of w + 1 tokens (a batch, as the paper runs it), relative "
    "to one of a single token. The paper's cells (Mistral-7B, bfloat16, A100-40GB) have no "
    "numbers in its text."
)
_FIGURE2_TEXT = (
    "What the model alone gives: its unigrams, bigrams, and bigrams extended to w tokens. The "
    "paper's curves have no numbers; it says about 1.5 tokens per call at k = 25, w = 2 ("
    "Mistral-7B, A100-40GB, data set not stated)."
)
_GRID_TEXT = "k rows of w draft tokens each. The paper's cells have no numbers in its text."
_TABLE1_TEXT = (
    "± is the standard deviation over the run's repeats, as in the paper, the bracket a 95 % "
    "interval over prompts. (k*, w*): the fastest of the settings that were run, chosen on the "
    "questions it is shown for, as the paper does; those that may be as fast are listed below. "
    "A claim is shown in the row of its own model; "
    "the paper's others on the same data follow below."
)


def _comparisons(runs: Sequence[Run]) -> list[Comparison]:
    return claimed_comparisons(runs, PAPER, "table1")


# --- Figure 1 -------------------------------------------------------------------------------------


def _figure1(runs: Sequence[Run]) -> list[ResultTable]:
    rows: list[dict[str, Cell]] = [
        {
            "model": run.model,
            "context (tokens)": str(context),
            "k": str(k),
            "w": str(w),
            "slow-down [95 %]": slowdown,
            "passes": str(run.surface.passes["batch"].repeats),
        }
        for run in runs
        if run.surface is not None  # this experiment measures costs alone
        for context in run.surface.passes["batch"].axes["context"]
        for (k, w), slowdown in run.surface.slowdowns(context, run.seed).items()
    ]
    text = "\n".join(slowdown_caption(run, _FIGURE1_TEXT) for run in runs)
    return [ResultTable.of("N-Grammys, Figure 1: slow-down of a target pass", text, rows)]


def _figure1_figure(runs: Sequence[Run]) -> Pictures:
    for run in runs:
        title = after("N-Grammys, Figure 1", display_name(run.model))
        yield run.model, slowdown_heatmaps(run, title, slowdown_caption(run, _FIGURE1_TEXT))


# --- Figure 2 -------------------------------------------------------------------------------------


_figure2 = settings_tables(
    "N-Grammys, Figure 2: tokens per call against k",
    {"source": label_column, **_KW},
    PAPER,
    "figure2",  # whose claims are the mixed strategy's
    text=_FIGURE2_TEXT,
)


def _figure2_figure(runs: Sequence[Run]) -> Pictures:
    for model, comparisons in by_model(claimed_comparisons(runs, PAPER, "figure2")):
        panels = []
        for comparison in comparisons:
            names = list(dict.fromkeys(entry.label for entry in comparison.drafting))
            panels.append(
                Panel(
                    display_name(comparison.dataset), "k (drafts)", _MAT,
                    [_over_k(comparison, name) for name in names], bottom=1.0,
                )
            )  # fmt: skip
        text = captions(comparisons, _FIGURE2_TEXT)
        yield model, curves([panels], after("N-Grammys, Figure 2", display_name(model)), text)


def _over_k(comparison: Comparison, name: str) -> Series:
    own = [(k, entry) for k, entry in along(comparison, "k") if entry.label == name]
    source = f"{PAPER}/{name.partition('_')[0]}"
    points = [Point.at(k, entry.measured("mat")) for k, entry in own]
    return Series(name.replace("_", ", w = "), source, points)


# --- Figures 3, 6, 8 and 5, 7, 9 ------------------------------------------------------------------


def _grid_table(words: str) -> Callable[[Sequence[Run]], list[ResultTable]]:
    title = f"N-Grammys, {words}, over (k, w)"
    return settings_tables(title, {"method": label_column, **_KW}, PAPER, "table1", text=_GRID_TEXT)


def grid_figures(runs: Sequence[Run], key: str, place: str = "N-Grammys") -> Pictures:
    """One figure per model; of each data set a heatmap per strategy, layout and other setting."""
    return heatmap_pictures(_comparisons(runs), ("k", "w"), key, place, _GRID_TEXT, _AXES)


# --- Table 1 --------------------------------------------------------------------------------------


def _table1(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = _comparisons(runs)
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for comparison in comparisons:
        where = [comparison.model, comparison.dataset]
        entries = [e for e in comparison.drafting if e.method == PAPER]
        timed = [e for e in entries if e.overall["speedup"] is not None]
        best = max(timed, key=lambda e: e.overall["speedup"] or 0.0, default=None)
        for entry in comparison.drafting:
            claim = entry.claim if entry.claim and entry.claim.model == where[0] else None
            rows.append(_table1_row(entry, _setting(entry), claim))
            notes += [entry.note(_setting(entry), claim)] if claim else []
        if best is not None:
            claim = claim_of_setting(_claims(), "best", PAPER, *where)
            rows.append(_table1_row(best, f"(k*, w*) = {_pair(best)}", claim))
            notes.append(_leading(comparison, timed, best))
            notes += [best.note("(k*, w*)", claim)] if claim else []
    for claim in _claimed_elsewhere(comparisons):
        rows.append(
            {
                "model": claim.model,
                "data": claim.dataset,
                "setting": _claimed_setting(claim),
                "cases": "0",
                **claimed_cells(claim),
                "verdict": _why_not(claim, comparisons),
            }
        )
        notes.append(claim.note(_claimed_setting(claim), "quoted" if claim.quoted else "claimed"))
    text = captions(comparisons, _TABLE1_TEXT)
    return [ResultTable.of("N-Grammys, Table 1", text, rows, with_rule(notes))]


def _leading(comparison: Comparison, timed: Sequence[ComparedLabel], best: ComparedLabel) -> str:
    """Which settings may be the fastest: the one that was, and those that are not shown slower."""
    others = [entry for entry in leaders(timed, "speedup") if entry is not best]
    words = leader_words([_pair(entry) for entry in (best, *others)])
    unknown = ", which the data cannot part" if others else ""
    return f"(k*, w*) of {comparison.title}: {words}{unknown}."


def _claimed_elsewhere(comparisons: Sequence[Comparison]) -> list[Claim]:
    """What the paper's table has on the same data and no row of ours shows."""
    ran = {
        (comparison.dataset, comparison.model, entry.method)
        for comparison in comparisons
        for entry in comparison.entries
    }
    datasets = {comparison.dataset for comparison in comparisons}
    return [
        claim
        for claim in _claims()
        if claim.dataset in datasets and (claim.dataset, claim.model, claim.method) not in ran
    ]


def _why_not(claim: Claim, comparisons: Sequence[Comparison]) -> str:
    methods = {
        entry.method
        for comparison in comparisons
        for entry in comparison.entries
        if comparison.dataset == claim.dataset
    }
    return OTHER_MODEL if claim.method in methods else NOT_RUN


def _claimed_setting(claim: Claim) -> str:
    """``(10, 10)``, ``(k*, w*) = (25, 14)`` where both are stated, or another's method."""
    if claim.method != PAPER:
        return claim.method
    pair = f"({claim.knobs['k']}, {claim.knobs['w']})" if claim.knobs else ""
    return pair if claim.setting is None else " = ".join(filter(None, ["(k*, w*)", pair]))


def _setting(entry: ComparedLabel) -> str:
    return _pair(entry) if entry.method == PAPER else entry.label


def _pair(entry: ComparedLabel) -> str:
    return f"({entry.knobs['k']}, {entry.knobs['w']})"


def _claims() -> list[Claim]:
    return [c for c in load_claims() if c.paper == PAPER and c.exhibit == "table1"]


def _table1_row(entry: ComparedLabel, setting: str, claim: Claim | None) -> dict[str, Cell]:
    row, run = entry.overall, entry.run
    spread = over_repeats(run.records, entry.label, run.baseline or "")
    return {
        "model": run.model,
        "data": run.dataset,
        "setting": setting,
        "tokens per call [95 %]": entry.measured("mat"),
        "speedup ± sd": _spread(spread) if spread else ABSENT,
        "speedup [95 %]": entry.measured("speedup"),
        **context_cells(row),
        "cases": case_cell(row),
        **claimed_cells(claim),
        "verdict": entry.verdict(claim=claim) if claim else "",
    }


def _spread(found: tuple[float, float]) -> Fact:
    mean, sd = found
    return Fact(f"{mean:.2f} ± {sd:.2f}", {"speedup mean": mean, "speedup sd": sd})


REPRODUCTIONS = (
    Reproduction("ngrammys_figure1", "N-Grammys, Figure 1", _figure1, _figure1_figure),
    Reproduction("ngrammys_figure2", "N-Grammys, Figure 2", _figure2, _figure2_figure),
    Reproduction(
        "ngrammys_figure3",
        "N-Grammys, Figures 3, 6, 8",
        _grid_table("speedup"),
        lambda runs: grid_figures(runs, "speedup", "N-Grammys, Figures 3, 6, 8"),
    ),
    Reproduction(
        "ngrammys_figure5",
        "N-Grammys, Figures 5, 7, 9",
        _grid_table("tokens per call"),
        lambda runs: grid_figures(runs, "mat", "N-Grammys, Figures 5, 7, 9"),
        instead=("ngrammys_figure3",),  # the same grid, with speeds beside
    ),
    Reproduction("ngrammys_table1", "N-Grammys, Table 1", _table1),
    FIGURE4,
)
