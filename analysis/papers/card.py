"""CARD: Table 3 and the lines of Figures 1 and 6."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from analysis.papers.cells import CONTEXT, cells
from analysis.papers.claimed import metric_panel
from analysis.papers.reproduction import along, claims_of, lines, pictures, points, rows
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.runs.acceptance import (
    draft_passes,
    draft_tokens,
    hit_rate,
    phase_share,
    rows_of_draft_pass,
    rows_of_target_pass,
)
from analysis.runs.claim_verdicts import NOT_RUN
from analysis.runs.comparisons import ComparedRuns
from analysis.runs.estimates import decoded_tokens, pooled_ratio, steps
from analysis.tabular.comparison_tables import claimed_cell
from specbench.results.estimate import Cell
from specbench.results.names import display_name

PAPER = "card"
_LOADS = ("target_load", "draft_load", "speedup")


def _table3(comparison: ComparedRuns) -> Iterable[tuple[dict[str, Cell], str]]:
    methods = {entry.method for entry in comparison.entries}
    for entry in comparison.drafting:
        claim, seed = entry.claim, entry.run.seed
        target, draft = rows_of_target_pass(entry), rows_of_draft_pass(entry)
        others: dict[str, Cell] = {
            "L_new of a target pass [95 %]": replace(target, digits=1),
            "L_new of a draft pass [95 %]": replace(draft, digits=1),
            "draft passes per target pass [95 %]": pooled_ratio(
                entry.records, draft_passes, steps, seed
            ),
            "draft token-passes per token [95 %]": pooled_ratio(
                entry.records, draft_tokens, decoded_tokens, seed
            ),
            "claimed target load": claimed_cell(claim, "target_load"),
            "claimed draft load": claimed_cell(claim, "draft_load"),
        }
        # The verdict is on the speedup: none is about loads.
        yield cells(comparison, entry, _TABLE3, others), entry.note(entry.label)
    for claim in claims_of(PAPER, "table3"):
        if claim.method not in methods:
            row: dict[str, Cell] = {"model": claim.model, "method": claim.method, "cases": "0"}
            row |= {f"claimed {key.replace('_', ' ')}": claimed_cell(claim, key) for key in _LOADS}
            row |= {"claimed on": claim.place, "verdict": NOT_RUN}
            yield row, claim.note(claim.method)


_TABLE3 = (
    "model",
    "method",
    "L_new of a target pass [95 %]",
    "target Params × L_new",
    "L_new of a draft pass [95 %]",
    "draft Params × L_new",
    "draft passes per target pass [95 %]",
    "draft token-passes per token [95 %]",
    "speedup [95 %]",
    CONTEXT,
    "cases",
    "claimed target load",
    "claimed draft load",
    "claimed speedup",
    "claimed on",
    "verdict",
)
_TABLE3_SHORT = (
    "method", "target Params × L_new", "draft Params × L_new", "draft passes per target pass",
    "draft token-passes per token", "speedup [95 %]", "claimed target load", "claimed draft load",
    "claimed speedup", "verdict",
)  # fmt: skip


def _figure1_lines(comparison: ComparedRuns) -> list[list[Panel]]:
    drafted = along(comparison.drafting, "gamma")
    shares = [Point.at(r, phase_share(entry)) for r, entry in drafted]
    series = [Series(shown("sps"), "sps", shares)]
    return [[Panel("", "r (tokens drafted per step)", "draft's share of time", series, top=1.0)]]


def _figure6_row(comparison: ComparedRuns) -> list[Panel]:
    sizes, dataset = along(comparison.drafting, "k"), comparison.dataset
    hits = [Point.at(size, hit_rate(entry)) for size, entry in sizes]
    mats, speeds = points(sizes, "mat"), points(sizes, "tokens_per_s")
    timing, unit = comparison.timing, "K (nodes per layer)"
    logged = _beside_logs(hits, dataset, "hit_rate")
    return [
        Panel(display_name(dataset), unit, "hit rate", logged, top=1.02),
        metric_panel("mat", timing, _beside_logs(mats, dataset, "mat"), unit),
        metric_panel("tokens_per_s", timing, [_run_here(speeds)], unit),
    ]


def _run_here(measured: list[Point]) -> Series:
    return Series("CARD, run here", PAPER, measured)


def _beside_logs(measured: list[Point], dataset: str, metric: str) -> list[Series]:
    logs = [
        Point(float(str(claim.knobs["k"])), claim.value(metric))
        for claim in claims_of(PAPER, "figure6_logs")
        if claim.dataset == dataset
    ]
    published = Series("CARD, published logs", PAPER, logs, dashed=True)
    return [_run_here(measured), *([published] if logs else [])]


def _figure6_lines(comparisons: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
    return curves([_figure6_row(comparison) for comparison in comparisons], title, text)


table3 = rows("CARD, Table 3: computation of a pass", _table3, _TABLE3_SHORT, speedup=True)
figure1_lines = lines(_figure1_lines)
figure6_lines = pictures(_figure6_lines, per_model=True, speedup=False)
