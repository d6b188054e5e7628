"""Pictures of everything that a comparison has: ranked, by MAT, by draft budget."""

from __future__ import annotations

import json
from collections.abc import Iterator

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing
from analysis.plots.ranking import Row, mat_against_speedup, ranked
from analysis.plots.style import PLAIN, unit_of
from analysis.plots.sweeps import caption_of, figure_name
from analysis.runs.acceptance import rows_of_target_pass
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import by_speedup, over_plain, sentence_of
from analysis.runs.settings import apart, without_names

_SETTINGS = 3  # of one method, from which it is drawn by its budgets
_MOST = 40  # rows of a picture that can be read


def finding(comparison: ComparedRuns) -> str:
    """What the comparison shows, as a title."""
    return sentence_of(comparison).rstrip(".") or comparison.printed_title


def overview_pictures(comparison: ComparedRuns) -> Iterator[tuple[str, Drawing]]:
    """The pictures with what is added to their files' names, for labels that have a speedup."""
    entries = by_speedup(comparison)
    if len(entries) < 2:
        return
    caption = caption_of(comparison)
    if len(entries) > _MOST:
        caption = f"The {_MOST} first of {len(entries)} are drawn. {caption}"
    speedup, mat = (unit_of(key, comparison.timing) for key in ("speedup", "mat"))
    over = over_plain(comparison)

    def rows(*keys: str) -> list[Row]:
        return [
            Row(
                figure_name(comparison, entry),
                entry.method,
                [entry.measured(key) for key in keys],
                over.get((entry.run.path, entry.label)) not in ("faster", "slower"),
            )
            for entry in entries[:_MOST]
        ]

    yield "ranked", ranked(rows("speedup"), [speedup], finding(comparison), caption)
    first = entries[0].overall
    if first["mat"] is None:
        return
    ratio, accepted = first["speedup"] or 1.0, first["mat"]
    title = (
        f"{figure_name(comparison, entries[0])} has a MAT of {accepted:.2f}; its steps "
        f"cost {accepted / ratio:.2f} passes of plain decoding"
    )
    yield "mat_speedup", mat_against_speedup(rows("mat", "speedup"), (mat, speedup), title, caption)


def budget_picture(comparison: ComparedRuns) -> Drawing | None:
    """Speedup by draft budget of methods that ran with several; None without one.

    A line joins settings that differ in one knob alone.
    """
    by_method: dict[str, list[ComparedLabel]] = {}
    for entry in by_speedup(comparison):
        if rows_of_target_pass(entry).value is not None:
            by_method.setdefault(entry.method, []).append(entry)
    series: list[Series] = []
    for method, entries in by_method.items():
        settings = [without_names(entry.knobs) for entry in entries]
        if len({json.dumps(own, sort_keys=True) for own in settings}) < _SETTINGS:
            continue
        points = [
            Point.at(rows_of_target_pass(entry).value or 0.0, entry.measured("speedup"))
            for entry in entries
        ]
        varied = {knob for own in apart(settings) for knob in own}
        ordered = sorted(points, key=lambda point: point.x)
        series.append(Series(method, method, ordered, joined=len(varied) == 1))
    if not series:
        return None
    unit = unit_of("speedup", comparison.timing)
    across = "tokens of a target pass (mean), the root and its draft"
    panel = Panel("", across, unit, series, reference=(1.0, PLAIN), log=2)
    drawn = [(point, own.name) for own in series for point in own.points]
    best, name = max(drawn, key=lambda pair: pair[0].y or 0.0)
    predicted = "predicted " if comparison.timing == "predicted" else ""
    title = f"Highest {predicted}speedup, {best.y:.2f}: {name} with {best.x:.1f} tokens per pass"
    return curves([[panel]], title, caption_of(comparison))
