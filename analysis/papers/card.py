"""CARD: Tables 1 to 3, Figures 1, 5 and 6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    along,
    by_model,
    captions,
    claimed_comparisons,
    data_set_figures,
    label_column,
    settings_tables,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.sweeps import comparison_title
from analysis.plots.units import MAT, speed_words
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.drafting import (
    draft_passes,
    draft_tokens,
    hit_rate,
    load_of_pass,
    phase_share,
    rows_of_draft_pass,
    rows_of_target_pass,
)
from analysis.runs.estimates import decoded_tokens, pooled_ratio, steps
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.runs.verdicts import NOT_RUN
from analysis.tabular.comparison_tables import claimed_cell, context_cells, with_rule
from analysis.tabular.table import ResultTable
from specbench.results.decision import case_cell
from specbench.results.estimate import ABSENT, Cell
from specbench.results.names import display_name

PAPER = "card"
_GPUS_TEXT = (
    "The paper gives CARD one GPU more than plain decoding; here all methods share one machine."
)
_FIGURE1_TEXT = (
    "Time of the draft model over that of all steps, by the number r of tokens it drafts in a step "
    "(measure=phases). The paper's curve has no numbers in its text."
)
_FIGURE6_TEXT = (
    "Hit rate: share of queries whose corrected token was in the cache. The dotted lines are "
    "summed from logs in the authors' repository: GSM8K's lines 11 to 15, eight worked examples "
    "before them, and MT-Bench's ten questions about writing, two turns each; Llama-3 70B and 1B, "
    "3 A800-80GB, r = 7."
)
_TABLE3_TEXT = (
    "Params × L_new: billions of parameters times tokens of one pass. What it hides: the passes of "
    "the draft model per target pass, and that they cost tokens too; hence the draft's "
    "token-passes per committed token beside it."
)


_table1 = settings_tables(
    "CARD, Table 1",
    {"method": label_column, "temperature": lambda entry: f"{entry.run.temperature:g}"},
    PAPER,
    "table1",
    text=_GPUS_TEXT,
)
_table2 = settings_tables(
    "CARD, Table 2: query, and query and correct",
    {"setting": label_column},
    PAPER,
    "table2",
    text=_GPUS_TEXT,
)
_figure5 = settings_tables(
    "CARD, Figure 5: code", {"method": label_column}, PAPER, "figure5", text=_GPUS_TEXT
)


# --- Table 3 --------------------------------------------------------------------------------------


def _table3(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "table3")
    claims = [c for c in load_claims() if c.paper == PAPER and c.exhibit == "table3"]
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for comparison in comparisons:
        for entry in comparison.drafting:
            rows.append(_load_row(entry))
            notes.append(entry.note(entry.label))
        run_methods = {entry.method for entry in comparison.entries}
        for claim in claims:
            if claim.method not in run_methods:
                who = {"model": claim.model, "method": claim.method, "cases": "0"}
                rows.append({**who, **_claimed_load(claim), "verdict": NOT_RUN})
                notes.append(claim.note(claim.method))
    text = captions(comparisons, _TABLE3_TEXT)
    title = "CARD, Table 3: computation of a pass"
    return [ResultTable.of(title, text, rows, with_rule(notes), _TABLE3_SHORT)]


_TABLE3_SHORT = (
    "method", "target Params × L_new", "draft Params × L_new", "draft passes per target pass",
    "draft token-passes per token", "speedup [95 %]", "claimed target load", "claimed draft load",
    "claimed speedup", "verdict",
)  # fmt: skip


def _claimed_load(claim: Claim | None) -> dict[str, Cell]:
    return {
        "claimed target load": claimed_cell(claim, "target_load"),
        "claimed draft load": claimed_cell(claim, "draft_load"),
        "claimed speedup": claimed_cell(claim, "speedup"),
        "claimed on": claim.place if claim else ABSENT,
    }


def _load_row(entry: ComparedLabel) -> dict[str, Cell]:
    target, draft = rows_of_target_pass(entry), rows_of_draft_pass(entry)
    own, seed = entry.records, entry.run.seed
    return {
        "model": entry.run.model,
        "method": entry.label,
        "L_new of a target pass [95 %]": replace(target, digits=1),
        "target Params × L_new": load_of_pass(target, entry.run.parameters()),
        "L_new of a draft pass [95 %]": replace(draft, digits=1),
        "draft Params × L_new": load_of_pass(draft, entry.run.parameters(entry.label)),
        "draft passes per target pass [95 %]": pooled_ratio(own, draft_passes, steps, seed),
        "draft token-passes per token [95 %]": pooled_ratio(
            own, draft_tokens, decoded_tokens, seed
        ),
        "speedup [95 %]": entry.measured("speedup"),
        **context_cells(entry.overall),
        "cases": case_cell(entry.overall),
        **_claimed_load(entry.claim),
        "verdict": entry.verdict(),  # on the speedup: none is about loads
    }


# --- Figure 1 -------------------------------------------------------------------------------------


def _figure1(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "figure1")
    rows: list[dict[str, Cell]] = [
        {
            "run": comparison.title,
            "setting": entry.label,
            "r": str(r),
            "draft share of time [95 %]": phase_share(entry),
            "MAT [95 %]": entry.measured("mat"),
            "cases": case_cell(entry.overall),
        }
        for comparison in comparisons
        for r, entry in along(comparison, "gamma")
    ]
    text = captions(comparisons, _FIGURE1_TEXT, speedup=False)
    return [ResultTable.of("CARD, Figure 1: time of the draft model", text, rows)]


def _figure1_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "figure1"):
        points = [Point.at(r, phase_share(entry)) for r, entry in along(comparison, "gamma")]
        panel = Panel(
            "", "r (tokens drafted per step)", "draft's share of time",
            [Series(display_name("sps"), "sps", points)], top=1.0,
        )  # fmt: skip
        figure = curves(
            [[panel]],
            after("CARD, Figure 1", comparison_title(comparison)),
            captions([comparison], _FIGURE1_TEXT, speedup=False),
        )
        yield comparison.model, figure


# --- Figure 6 -------------------------------------------------------------------------------------


def _figure6(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "figure6_logs")
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for comparison in comparisons:
        for size, entry in along(comparison, "k"):
            claim = entry.claim
            rows.append(
                {
                    "data": comparison.dataset,
                    "K": str(size),
                    "hit rate [95 %]": hit_rate(entry),
                    "MAT [95 %]": entry.measured("mat"),
                    "tokens/s [95 %]": entry.speed(),
                    "speedup [95 %]": entry.measured("speedup"),
                    **context_cells(entry.overall),
                    "cases": case_cell(entry.overall),
                    "claimed hit rate": claimed_cell(claim, "hit_rate"),
                    "claimed MAT": claimed_cell(claim, "mat"),
                    "claimed on": claim.place if claim else ABSENT,
                    "verdict": entry.verdict(),
                }
            )
            notes.append(entry.note(f"K = {size}"))
    text = captions(comparisons, _FIGURE6_TEXT)
    return [ResultTable.of("CARD, Figure 6: size of the cache", text, rows, with_rule(notes))]


def _figure6_figure(runs: Sequence[Run]) -> Pictures:
    for model, comparisons in by_model(claimed_comparisons(runs, PAPER, "figure6_logs")):
        figure = curves(
            [_figure6_row(comparison) for comparison in comparisons],
            after("CARD, Figure 6", display_name(model)),
            captions(comparisons, _FIGURE6_TEXT, speedup=False),
        )
        yield model, figure


def _figure6_row(comparison: Comparison) -> list[Panel]:
    sizes, dataset = along(comparison, "k"), comparison.dataset
    hits = [Point.at(size, hit_rate(entry)) for size, entry in sizes]
    mats = [Point.at(size, entry.measured("mat")) for size, entry in sizes]
    speeds = [Point.at(size, entry.speed()) for size, entry in sizes]
    unit = "K (nodes per layer)"
    return [
        Panel(
            display_name(dataset), unit, "hit rate", _beside(hits, dataset, "hit_rate"), top=1.02
        ),
        Panel("", unit, MAT, _beside(mats, dataset, "mat"), bottom=1.0),
        Panel("", unit, speed_words(comparison.timing), _beside(speeds, dataset, None)),
    ]


def _beside(points: list[Point], dataset: str, metric: str | None) -> list[Series]:
    drawn = [Series("CARD, run here", PAPER, points)]
    logs = [
        Point(float(claim.knobs["k"]), claim.value(metric or ""))
        for claim in load_claims()
        if (claim.paper, claim.exhibit, claim.dataset) == (PAPER, "figure6_logs", dataset)
    ]
    if metric and logs:
        drawn.append(Series("CARD, published logs", PAPER, logs, dashed=True))
    return drawn


REPRODUCTIONS = (
    Reproduction("card_table1", "CARD, Table 1", _table1),
    Reproduction("card_table2", "CARD, Table 2", _table2),
    Reproduction("card_table3", "CARD, Table 3", _table3),
    Reproduction("card_figure1", "CARD, Figure 1", _figure1, _figure1_figure),
    Reproduction(
        "card_figure5",
        "CARD, Figure 5",
        _figure5,
        data_set_figures("CARD, Figure 5", PAPER, "figure5"),
    ),
    Reproduction("card_figure6", "CARD, Figure 6", _figure6, _figure6_figure),
)
