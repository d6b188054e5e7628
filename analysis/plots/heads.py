"""Trained heads: acceptance by position in the draft."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing
from analysis.plots.sweeps import caption_of, figure_name
from analysis.runs.acceptance import by_depth, where_the_one_before
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import by_speedup

_DEEPEST = 8  # position that is drawn


def of_heads(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The labels that draft with trained heads, by themselves or as a part."""

    def has_head(knobs: Mapping[str, object]) -> bool:
        part = knobs.get("auxiliary")
        return "head" in knobs or (isinstance(part, Mapping) and has_head(part))

    return [entry for entry in by_speedup(comparison) if has_head(entry.knobs)]


def acceptance_picture(comparison: ComparedRuns) -> Drawing | None:
    """Share of steps that accept each position of the draft; None without such steps.

    Of a method's settings the fastest.
    """
    fastest: dict[str, ComparedLabel] = {}
    for entry in of_heads(comparison):
        fastest.setdefault(entry.method, entry)
    panels = []
    for title, shares in (
        ("of all steps with a draft", by_depth),
        ("where the one before was accepted", where_the_one_before),
    ):
        series = [
            Series(
                figure_name(comparison, entry),
                method,
                [
                    Point.at(position, share)
                    for position, share in shares(
                        entry.records, entry.run.seed, _DEEPEST, entry.run.depths
                    )
                ],
            )
            for method, entry in fastest.items()
        ]
        unit = "share of steps that accept it"
        panels.append(Panel(title, "position in the draft", unit, series, top=1.0))
    first = {s.name: s.points[0].y for s in panels[0].series if s.points and s.points[0].y}
    if not first:
        return None
    name = max(first, key=lambda of: first[of])
    title = f"{name} has its first token accepted most often: in {first[name]:.0%} of steps"
    return curves([panels], title, caption_of(comparison))
