"""Pictures of sweeps: heatmaps over two knobs, lines along one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.layout import Drawing, shown
from analysis.plots.style import MAT, PLAIN, speedup_words, unit_of
from analysis.runs.captions import caption
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import wrong_words_of
from analysis.runs.sweeps import Sweep, Value, sweeps, swept_knobs
from specbench.errors import ResultsError
from specbench.results.names import display_name
from specbench.results.wording import case_words

_log = logging.getLogger(__name__)

# A sweep with the comparison that it was found in.
Found: TypeAlias = "tuple[ComparedRuns, Sweep]"


def sweep_heatmaps(
    found: Sequence[Found],
    knobs: tuple[str, str],
    key: str,
    title: str,
    text: str,
    names: Mapping[str, str] | None = None,
) -> Drawing | None:
    """Heatmaps over any two knobs on one color scale; None without numbers.

    The best cell is framed, and those that the data cannot tell from it have a dot; of speedups a
    line is drawn where they cross 1.

    Args:
        found: of comparisons of one timing, what :func:`analysis.runs.sweeps.sweeps` found for
            ``knobs``: a heatmap each.
        knobs: the vertical axis's, then the horizontal one's.
        key: ``speedup`` or ``mat``.
        text: the caption, conditions of the comparisons.
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


def sweep_lines(
    found: Sequence[Found], knob: str, title: str, text: str, name: str = ""
) -> Drawing | None:
    """Speedup and MAT along one knob, a line for each sweep; None without numbers.

    The best point of a line has a black ring, those that may be as good a grey one. Words instead
    of numbers are places side by side.

    Args:
        found: of one comparison, as for :func:`sweep_heatmaps`.
        knob: what varies; ``name`` names the axis, by default as the knob.
        text: the caption, conditions of the comparison.
    """
    timing = found[0][0].timing
    values = list(dict.fromkeys(v for _, sweep in found for (v,) in sweep.entries))
    ticks = [str(v) for v in values] if any(isinstance(v, str) for v in values) else None
    places = {v: float(values.index(v) if ticks else v) for v in values}
    panels = []
    for key in ("speedup", "mat"):
        series = [_line(comparison, sweep, key, places) for comparison, sweep in found]
        if any(point.y is not None for one in series for point in one.points):
            panels.append(
                Panel(
                    "", name or knob, MAT if key == "mat" else speedup_words(timing), series, ticks,
                    reference=(1.0, PLAIN) if key == "speedup" else None,
                    bottom=1.0 if key == "mat" else None,
                )
            )  # fmt: skip
    return curves([panels], title, text) if panels else None


def _line(
    comparison: ComparedRuns, sweep: Sweep, key: str, places: Mapping[Value, float]
) -> Series:
    points = [Point.at(places[v], cell) for (v,), cell in sweep.estimates(key).items()]
    label = shown(sweep.method)
    return Series(
        f"{label}, {sweep.words}" if sweep.words else label,
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
    wrong = wrong_words_of(comparison)  # drawn all the same: which setting it is must be seen
    methods = ", ".join(dict.fromkeys(display_name(sweep.method) for _, sweep in found))
    title = f"{methods}: {{}} by {' and '.join(knobs[:2])} ({comparison.printed_title})"
    if len(knobs) == 1:
        text = "\n".join([*wrong, caption(comparison)])
        drawn = sweep_lines(found, knobs[0], title.format("speedup and MAT"), text)
        if drawn is not None:
            yield knobs[0], drawn
        return
    for key, words in (("speedup", "speedup"), ("mat", "MAT")):
        timed = key == "speedup"
        text = "\n".join([*wrong, caption(comparison, timed, timed)])
        drawn = sweep_heatmaps(found, (knobs[0], knobs[1]), key, title.format(words), text)
        if drawn is not None:
            yield f"{knobs[0]}_{knobs[1]}_{key}", drawn


def figure_name(comparison: ComparedRuns, entry: ComparedLabel) -> str:
    """What a legend calls a label: as the table does, with the settings that set it apart."""
    words, name = comparison.words_of(entry), shown(entry.label)
    return f"{name} ({words})" if words else name
