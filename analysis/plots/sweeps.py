"""Pictures of sweeps: heatmaps over two knobs, lines along one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.layout import Drawing
from analysis.plots.style import PLAIN, unit_of
from analysis.runs.captions import caption
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import wrong_words_of
from analysis.runs.sweeps import Sweep, Value, sweeps, swept_knobs
from specbench.errors import ResultsError
from specbench.results.decision import case_words
from specbench.results.names import display_name

_log = logging.getLogger(__name__)

# A sweep with the comparison that it was found in.
Found: TypeAlias = "tuple[ComparedRuns, Sweep]"


def figure_name(comparison: ComparedRuns, entry: ComparedLabel) -> str:
    """What a legend calls a label: as the table does, with the settings that set it apart."""
    return comparison.name_of(entry)


def caption_of(comparison: ComparedRuns, drawn: bool = False) -> str:
    """The conditions of a comparison, behind whose outputs are wrong.

    ``drawn``: whether these are in the picture all the same.
    """
    wrong = " ".join(wrong_words_of(comparison))
    head = "" if drawn or not wrong else "Not drawn: "
    return "\n".join(filter(None, [f"{head}{wrong}", caption(comparison)]))


def sweep_heatmaps(
    found: Sequence[Found],
    knobs: tuple[str, str],
    key: str,
    title: str,
    text: str,
    names: Mapping[str, str] | None = None,
) -> Drawing | None:
    """Heatmaps over any two knobs on one color scale; None without numbers.

    Args:
        found: of comparisons of one timing, what :func:`analysis.runs.sweeps.sweeps` found for
            ``knobs``: a heatmap each.
        knobs: the vertical axis's, then the horizontal one's.
        key: ``speedup`` or ``mat``.
        title, text: the finding and the caption.
        names: of the axes, by knob; by default the knob's own.
    """
    several = len({id(comparison) for comparison, _ in found}) > 1
    grids = [
        HeatmapGrid.of(
            sweep.titled(_short_title(comparison) if several else ""),
            sweep.estimates(key),
            sweep.leaders(key),
        )
        for comparison, sweep in found
    ]
    if not any(grid.numbers for grid in grids):
        return None
    down, across = (names.get(knob, knob) if names else knob for knob in knobs)
    unit = unit_of(key, found[0][0].timing)
    even = 1.0 if key == "speedup" else None
    return heatmaps(grids, across, down, unit, title, text, break_even=even)


def _short_title(comparison: ComparedRuns) -> str:
    n_cases = case_words(comparison.entries[0].overall)
    return f"{display_name(comparison.dataset)} (n = {n_cases})"


def sweep_lines(found: Sequence[Found], knob: str, title: str, text: str) -> Drawing | None:
    """Speedup and MAT along one knob, a line for each sweep; None without numbers.

    Words instead of numbers are places side by side.
    """
    timing = found[0][0].timing
    values = list(dict.fromkeys(v for _, sweep in found for (v,) in sweep.entries))
    ticks = [str(v) for v in values] if any(isinstance(v, str) for v in values) else None
    places = {v: float(values.index(v) if ticks else v) for v in values}
    panels = []
    for key in ("speedup", "mat"):
        series = [_line(sweep, key, places) for _, sweep in found]
        if any(point.y is not None for line in series for point in line.points):
            line, bottom = ((1.0, PLAIN), None) if key == "speedup" else (None, 1.0)
            unit = unit_of(key, timing)
            panels.append(Panel("", knob, unit, series, ticks, line, bottom=bottom))
    return curves([panels], title, text) if panels else None


def _line(sweep: Sweep, key: str, places: Mapping[Value, float]) -> Series:
    points = [Point.at(places[v], cell) for (v,), cell in sweep.estimates(key).items()]
    return Series(
        ", ".join(filter(None, [sweep.method, sweep.words])),
        sweep.method,
        sorted(points, key=lambda point: point.x),
        leaders=[places[v] for (v,) in sweep.leaders(key)],
    )


def own_sweeps(comparison: ComparedRuns) -> tuple[list[str], list[Found]]:
    """The knobs that a user varied, and the sweeps over the first two of them.

    Labels of one run do not make a sweep. Where a setting was measured twice, a warning names both
    runs, and there is none.
    """
    knobs = swept_knobs(comparison) if len(comparison.runs) > 1 else []
    try:
        return knobs, [(comparison, s) for s in sweeps(comparison, *knobs[:2])] if knobs else []
    except ResultsError as error:  # other figures of the same folders are worth drawing
        _log.warning("no figure of a sweep: %s", error)
        return knobs, []


def sweep_pictures(
    comparison: ComparedRuns, knobs: Sequence[str], found: Sequence[Found]
) -> Iterator[tuple[str, Drawing]]:
    """What the sweeps of :func:`own_sweeps` end in, with what is added to their files' names.

    Heatmaps of speedup and of MAT where two knobs were varied, lines where one was; of more knobs
    the first two, with heatmaps for each setting of the others.
    """
    if not found:
        return
    text = caption_of(comparison, drawn=True)  # which setting has wrong outputs must be seen
    if len(knobs) == 1:
        drawn = sweep_lines(found, knobs[0], _highest(found, knobs, "speedup"), text)
        if drawn is not None:
            yield knobs[0], drawn
        return
    for key in ("speedup", "mat"):
        title = _highest(found, knobs[:2], key)
        drawn = sweep_heatmaps(found, (knobs[0], knobs[1]), key, title, text)
        if drawn is not None:
            yield f"{knobs[0]}_{knobs[1]}_{key}", drawn


def _highest(found: Sequence[Found], knobs: Sequence[str], key: str) -> str:
    """Where a number is highest, as a title."""
    cells = [
        (estimate.value, sweep, cell)
        for _, sweep in found
        for cell, estimate in sweep.estimates(key).items()
        if estimate.value is not None
    ]
    if not cells:
        return found[0][0].printed_title
    value, sweep, cell = max(cells, key=lambda each: each[0])
    at = ", ".join(f"{knob} {v}" for knob, v in zip(knobs, cell, strict=True))
    where = ", ".join(filter(None, [at, sweep.words]))
    word = "MAT" if key == "mat" else "speedup"
    if key == "speedup" and found[0][0].timing == "predicted":
        word = f"predicted {word}"
    title = f"{sweep.method} has its highest {word}, {value:.2f}, at {where}"
    if (undecided := len(sweep.leaders(key)) - 1) > 0:
        others = "1 other setting is" if undecided == 1 else f"{undecided} other settings are"
        title = f"{title}; {others} undecided"
    return title
