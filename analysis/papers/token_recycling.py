"""Token Recycling: the lines of Figure 3, and Figure 4, the time of a step by its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from analysis.papers.claimed import metric_panel
from analysis.papers.reproduction import along, lines, pictures, points, rows
from analysis.plots.charts import Panel, Series
from analysis.plots.layout import Drawing
from analysis.plots.stacked_bars import stacked_bars
from analysis.plots.sweeps import figure_name
from analysis.runs.acceptance import phase_share
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from specbench.results.decision import case_cell
from specbench.results.estimate import Cell, Estimate
from specbench.results.manifest import BASELINE

PAPER = "token_recycling"
# The paper's words for the phases of a step, in its order.
_PHASES = {
    "draft": "retrieve draft",
    "verify": "forward pass",
    "accept": "verify",
    "cache": "update KV cache",
    "observe": "update matrix",
    "other": "other",
}


def _figure3(comparison: ComparedRuns) -> list[list[Panel]]:
    grown = [entry for entry in comparison.drafting if entry.knobs.get("breadth")]
    rules = [entry for entry in comparison.drafting if not entry.knobs.get("breadth")]
    nodes = along([e for e in grown if int(e.knobs["depth"]) == 6], "breadth")
    levels = along([e for e in grown if int(e.knobs["breadth"]) == 80], "depth")
    names = [str(entry.knobs["update"]) for entry in rules]
    lines = (
        ("(a) breadth, 6 levels", "nodes", "grown tree", nodes, None),
        ("(b) depth, 80 nodes", "levels", "grown tree", levels, None),
        ("(c) update rule", "update rule", "template", [*enumerate(rules)], names),
    )
    return [
        [
            metric_panel(
                key,
                comparison.timing,
                [Series(name, PAPER, points(placed, key))],
                xlabel,
                title,
                ticks,
            )
            for title, xlabel, name, placed, ticks in lines
        ]
        for key in ("mat", "tokens_per_s")
    ]


def _phase_shares(entry: ComparedLabel) -> dict[str, Estimate]:
    return {words: phase_share(entry, phase) for phase, words in _PHASES.items()}


def _figure4(comparison: ComparedRuns) -> Iterable[tuple[dict[str, Cell], str]]:
    for entry in comparison.entries:
        for part, share in _phase_shares(entry).items():
            row: dict[str, Cell] = {
                "run": comparison.title,
                "method": comparison.name_of(entry),
                "part": part,
                # Most parts are below a hundredth.
                "share of the steps' time [95 %]": replace(share, digits=4),
                "cases": case_cell(entry.overall),
            }
            yield row, ""


def _figure4_bars(comparisons: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
    (comparison,) = comparisons
    shares = {figure_name(comparison, e): _drawn_shares(e) for e in comparison.entries}
    return stacked_bars(shares, "share of the time of all steps", title, text)


def _drawn_shares(entry: ComparedLabel) -> dict[str, Estimate]:
    """Plain decoding drafts nothing: what its clock reads there is the clock itself."""
    skipped = {_PHASES[p] for p in ("draft", "observe")} if entry.method == BASELINE else set()
    return {part: share for part, share in _phase_shares(entry).items() if part not in skipped}


figure3_lines = lines(_figure3)
figure4 = rows("Token Recycling, Figure 4: time of a step", _figure4)
figure4_bars = pictures(_figure4_bars, speedup=False)
