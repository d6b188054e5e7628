"""Pictures of comparisons: ranked, by MAT, budget, depth and load, along the knobs of a sweep."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence

from analysis.plots.charts import Panel, Point, Series, curves, mat_against_speedup, ranked
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.style import Drawing, unit_of
from analysis.runs.acceptance import by_depth, conditional_by_depth, rows_of_target_pass
from analysis.runs.captions import captions
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions
from analysis.runs.leaders import by_speedup, over_plain, sentence_of, wrong_texts_of
from analysis.runs.settings import differing_settings, without_names
from analysis.runs.sweeps import Sweep, sweeps, swept_knobs
from specbench.errors import ResultsError
from specbench.results.cells import NumberCell
from specbench.results.headline_table import case_count_text
from specbench.results.names import display_name
from specbench.results.statistics.served import system_speedups

_log = logging.getLogger(__name__)

_SETTINGS = 3  # of one method, from which it is drawn by its budgets
_MOST = 40  # rows of a picture that can be read
_DEEPEST = 8  # position in a draft that is drawn
# A load's verdict is the first of these that one of its labels has; the title has the text.
_VERDICTS = {
    "faster": "faster",
    "undecided": "undecided",
    "tie": "undecided",
    "too few": "too few prompts to tell",
    "slower": "slower",
}
_LOADS = ("faster", "slower", "undecided", "too few prompts to tell")  # in the title's order


def caption_of(*comparisons: ComparedRuns, text: str = "", drawn: bool = False) -> str:
    """Format a caption: labels with wrong outputs, ``text``, then the comparisons' conditions.

    For predicted times it says whether intervals include the predictions' error.

    Args:
        comparisons: which share a picture.
        text: before the conditions.
        drawn: whether the picture includes labels with wrong outputs.
    """
    wrong = " ".join(line for comparison in comparisons for line in wrong_texts_of(comparison))
    head = "" if drawn or not wrong else "Not drawn: "
    runs = [run for c in comparisons if c.timing == "predicted" for run in c.runs]
    errors = {r.prediction_error for run in runs for r in run.records if r.prediction_error}
    error = "Intervals exclude the predictions' error, which is unknown." if runs else ""
    if errors:
        percent = ", ".join(f"{error:.1%}" for error in sorted(errors))
        error = f"Intervals include the predictions' error, {percent}."
    return "\n".join(filter(None, [captions(comparisons, f"{head}{wrong}", text), error]))


def is_hollow(comparison: ComparedRuns, entry: ComparedLabel) -> bool:
    """Return whether a label does not differ significantly from plain decoding."""
    verdict = over_plain(comparison).get((entry.run.path, entry.label))
    return verdict not in ("faster", "slower")


def finding(comparison: ComparedRuns) -> str:
    """Return the comparison's result as a title."""
    return sentence_of(comparison).rstrip(".") or comparison.printed_title


def overview_pictures(comparison: ComparedRuns) -> Iterator[tuple[str, Drawing]]:
    """Draw the labels that have a speedup: ranked, and against MAT; with their files' names."""
    entries = by_speedup(comparison)
    if len(entries) < 2:
        return
    caption = caption_of(comparison)
    if len(entries) > _MOST:
        caption = f"Drawn: the first {_MOST} of {len(entries)}. {caption}"
    rows = []
    for entry in entries[:_MOST]:
        mat, speedup = entry.measured("mat"), entry.measured("speedup")
        hollow = is_hollow(comparison, entry)
        dot = Point(mat.value or 0.0, speedup.value, speedup.interval, hollow, mat.interval)
        name = comparison.name_of(entry) + entry.without_drafts
        rows.append(Series(name, entry.method, [dot]))
    units = unit_of("mat", comparison.timing), unit_of("speedup", comparison.timing)
    together = f"{caption}\nTitle, hollow marks: intervals of all together. Lines: of each alone."
    yield "ranked", ranked(rows, units[1], finding(comparison), together)
    first = entries[0].overall
    if first["mat"] is None:
        return
    ratio, accepted = first["speedup"] or 1.0, first["mat"]
    title = (
        f"{comparison.name_of(entries[0])} has a MAT of {accepted:.2f}; its steps "
        f"cost {accepted / ratio:.2f} passes of plain decoding"
    )
    dots = [row for row in rows if row.points[0].x]
    yield "mat_speedup", mat_against_speedup(dots, units, title, caption)


def budget_picture(comparison: ComparedRuns) -> Drawing | None:
    """Draw speedup by draft budget of methods that ran with several; None without one.

    A line joins settings that differ in one knob alone.
    """
    by_method: dict[str, list[tuple[float, ComparedLabel]]] = {}
    for entry in by_speedup(comparison):
        if (tokens := rows_of_target_pass(entry).value) is not None:
            by_method.setdefault(entry.method, []).append((tokens, entry))
    series: list[Series] = []
    for method, entries in by_method.items():
        settings = [without_names(entry.knobs) for _, entry in entries]
        if len({json.dumps(knobs, sort_keys=True) for knobs in settings}) < _SETTINGS:
            continue
        points = [
            Point.at(tokens, entry.measured("speedup"), is_hollow(comparison, entry))
            for tokens, entry in sorted(entries, key=lambda item: item[0])
        ]
        varied = {knob for knobs in differing_settings(settings) for knob in knobs}
        series.append(Series(method, method, points, joined=len(varied) == 1))
    heights = [(y, x, line.name) for line in series for x, y, _ in line.drawn]
    if not heights:
        return None
    across = "tokens of a target pass (mean), the root and its draft"
    panel = Panel.for_metric("speedup", comparison.timing, series, across, log=True)
    best, tokens, name = max(heights)
    predicted = "predicted " if comparison.timing == "predicted" else ""
    title = f"Highest {predicted}speedup, {best:.2f}: {name} with {tokens:.1f} tokens per pass"
    return curves([[panel]], title, caption_of(comparison))


def _has_head(knobs: Mapping[str, object]) -> bool:
    """Return whether a method, or a part of it, drafts with trained heads."""
    part = knobs.get("auxiliary")
    return "head" in knobs or (isinstance(part, Mapping) and _has_head(part))


def acceptance_picture(comparison: ComparedRuns) -> Drawing | None:
    """Draw the share of steps that accept each position of a head's draft; None without heads.

    Only the fastest setting of a method is drawn.
    """
    fastest: dict[str, ComparedLabel] = {}
    for entry in by_speedup(comparison):
        if _has_head(entry.knobs):
            fastest.setdefault(entry.method, entry)
    panels = []
    for title, shares in (
        ("of all steps with a draft", by_depth),
        ("if the previous token was accepted", conditional_by_depth),
    ):
        series = []
        for method, entry in fastest.items():
            by_position = shares(entry.records, entry.run.seed, _DEEPEST, entry.run.depths)
            points = [Point.at(position, share) for position, share in by_position]
            series.append(Series(comparison.name_of(entry), method, points))
        unit = "share of steps that accept it"
        panels.append(Panel(title, "position in the draft", unit, series, top=1.0))
    firsts = [(line.drawn[0][1], line.name) for line in panels[0].series if line.drawn]
    if not firsts:
        return None
    share, name = max(firsts)
    title = f"{name} has its first token accepted most often: in {share:.0%} of steps"
    return curves([panels], title, caption_of(comparison))


# --- batch sizes, or concurrent requests of a server ----------------------------------------------


def by_load(comparisons: Sequence[ComparedRuns]) -> Iterator[list[ComparedRuns]]:
    """Group comparisons that differ in their load alone, the smallest load first."""
    groups: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        run = comparison.runs[0]
        _batch, *alike, _concurrency = conditions(run)
        key = (run.model, run.dataset, comparison.estimator, *alike)
        groups.setdefault(key, []).append(comparison)
    for group in groups.values():
        if len({comparison.load for comparison in group}) > 1:
            yield sorted(group, key=lambda comparison: comparison.load)


def load_picture(group: Sequence[ComparedRuns]) -> Drawing:
    """Draw a line for each label of comparisons as :func:`by_load` gives them.

    The title lists the loads at which drafting is significantly faster or slower than plain
    decoding, undecided, or measured with too few prompts.
    """
    points: dict[tuple[str, str], list[Point]] = {}
    loads: dict[str, list[str]] = {}
    for comparison in group:
        verdicts = set()
        for entry, speedup, verdict in _speedups_of_all(comparison):
            verdicts.add(verdict)
            point = Point.at(comparison.load, speedup, verdict not in ("faster", "slower"))
            points.setdefault((entry.label, entry.method), []).append(point)
        if verdicts:
            first = next(verdict for verdict in _VERDICTS if verdict in verdicts)
            loads.setdefault(_VERDICTS[first], []).append(str(comparison.load))
    series = [Series(label, method, line) for (label, method), line in points.items()]
    served = group[0].runs[0].records[0].served
    across = "concurrent requests" if served else "batch size"
    unit = f"speedup of all {'users' if served else 'sequences'} together"
    panel = Panel("", across, unit, series, even=True, log=True)
    parts = [f"{outcome} at {', '.join(loads[outcome])}" for outcome in _LOADS if outcome in loads]
    title = f"{across.capitalize()}: drafting is {'; '.join(parts)}"
    return curves([[panel]], title, caption_of(group[0]))


def _speedups_of_all(comparison: ComparedRuns) -> Iterator[tuple[ComparedLabel, NumberCell, str]]:
    """Yield each label's speedup of all sequences together and verdict against plain decoding."""
    over = over_plain(comparison)
    # On a server, one user's gain may be another's loss.
    served = {
        run.path: system_speedups(run.records, run.labels, run.baseline, run.seed)
        for run in comparison.runs
        if any(record.served for record in run.records)
    }
    for entry in comparison.ranked:
        speedup = entry.measured("speedup")
        verdict = over.get((entry.run.path, entry.label), "too few")
        if entry.run.path in served:
            speedup, verdict = served[entry.run.path].get(
                entry.label, (NumberCell(None), "too few")
            )
        elif speedup.interval is None:
            speedup = NumberCell(None)
        yield entry, speedup, verdict


# --- sweeps ---------------------------------------------------------------------------------------


def sweep_heatmaps(
    swept: Sequence[Sweep], axes: Mapping[str, str], key: str, title: str, text: str
) -> Drawing | None:
    """Draw heatmaps over any two knobs on one color scale; None without numbers.

    Args:
        swept: what :func:`analysis.runs.sweeps.sweeps` gives for the knobs, all of one timing: a
            heatmap each.
        axes: names of the vertical axis and of the horizontal one, by knob.
        key: ``speedup`` or ``mat``.
        title, text: the finding and the caption.
    """
    firsts = [next(iter(sweep.entries.values())) for sweep in swept]
    several = len({entry.run.dataset for entry in firsts}) > 1
    grids = []
    for sweep, entry in zip(swept, firsts, strict=True):
        data = f"{display_name(entry.run.dataset)} (n = {case_count_text(entry.overall)})"
        heading = sweep.titled(data if several else "")
        grids.append(HeatmapGrid(heading, sweep.estimates(key), sweep.leaders(key)))
    if not any(grid.numbers for grid in grids):
        return None
    down, across = axes.values()
    unit, even = unit_of(key, firsts[0].run.timing), 1.0 if key == "speedup" else None
    return heatmaps(grids, across, down, unit, title, text, break_even=even)


def _sweep_lines(swept: Sequence[Sweep], timing: str, knob: str, text: str) -> Drawing | None:
    """Draw speedup and MAT along one knob, a line for each sweep; None without numbers."""
    values = list(dict.fromkeys(value for sweep in swept for (value,) in sweep.entries))
    ticks = [str(v) for v in values] if any(isinstance(v, str) for v in values) else None
    panels = []
    for key in ("speedup", "mat"):
        series = []
        for sweep in swept:
            cells = sweep.estimates(key).items()
            positioned = [(values.index(v) if ticks else float(v), cell) for (v,), cell in cells]
            points = [Point.at(x, cell) for x, cell in sorted(positioned, key=lambda item: item[0])]
            name = ", ".join(filter(None, [sweep.method, sweep.fixed_settings]))
            series.append(Series(name, sweep.method, points))
        if any(line.drawn for line in series):
            panels.append(Panel.for_metric(key, timing, series, knob, ticks=ticks))
    title = _highest(swept, [knob], "speedup", timing) or _highest(swept, [knob], "mat", timing)
    return curves([panels], title, text) if panels else None


def own_sweeps(comparison: ComparedRuns) -> tuple[list[str], list[Sweep]]:
    """Return the first two knobs that a user varied, and the sweeps over them.

    Labels of one run do not make a sweep. If a setting was measured twice, a warning names both
    runs, and there is no sweep.
    """
    knobs = swept_knobs(comparison)[:2] if len(comparison.runs) > 1 else []
    try:
        return knobs, sweeps(comparison, *knobs) if knobs else []
    except ResultsError as error:  # other figures of the same folders are worth drawing
        _log.warning("no figure of a sweep: %s", error)
        return knobs, []


def sweep_pictures(
    comparison: ComparedRuns, knobs: Sequence[str], swept: Sequence[Sweep]
) -> Iterator[tuple[str, Drawing]]:
    """Draw the sweeps of :func:`own_sweeps`, with their file names' suffixes.

    Heatmaps of speedup and of MAT over two knobs, one for each setting of the others; lines over
    a single one.
    """
    text = caption_of(comparison, drawn=True)  # which setting has wrong outputs must be seen
    if swept and len(knobs) == 1:
        if (drawn := _sweep_lines(swept, comparison.timing, knobs[0], text)) is not None:
            yield knobs[0], drawn
        return
    for key in ("speedup", "mat") if swept else ():
        title = _highest(swept, knobs, key, comparison.timing)
        axes = {knob: knob for knob in knobs}
        if (drawn := sweep_heatmaps(swept, axes, key, title, text)) is not None:
            yield f"{'_'.join(knobs)}_{key}", drawn


def _highest(swept: Sequence[Sweep], knobs: Sequence[str], key: str, timing: str) -> str:
    """Format a title that says where a number is highest; "" without numbers."""
    cells = [
        (estimate.value, sweep, cell)
        for sweep in swept
        for cell, estimate in sweep.estimates(key).items()
        if estimate.value is not None
    ]
    if not cells:
        return ""
    value, sweep, cell = max(cells, key=lambda item: item[0])
    at = [f"{knob} {v}" for knob, v in zip(knobs, cell, strict=True)]
    where = ", ".join(filter(None, [*at, sweep.fixed_settings]))
    word = "MAT" if key == "mat" else "speedup"
    if key == "speedup" and timing == "predicted":
        word = f"predicted {word}"
    undecided = len(sweep.leaders(key)) - 1
    more = f"; {undecided} more undecided" if undecided > 0 else ""
    return f"{sweep.method} has its highest {word}, {value:.2f}, at {where}{more}"
