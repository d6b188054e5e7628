"""The papers' pictures, by the kinds that ``reproductions.yaml`` names (:data:`KINDS`).

A kind is called with the reproduction, its runs and its arguments in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from analysis.papers.tables import (
    PARTS,
    PHASES,
    SOURCES,
    along,
    claimed_for,
    distribution,
    knob_of,
    over_stream,
    slowdown_caption,
)
from analysis.plots import heatmaps as plots
from analysis.plots.charts import Panel, Point, Series, bars, curves, stacked_bars
from analysis.plots.heatmaps import HeatmapGrid
from analysis.plots.pictures import caption_of, is_hollow, sweep_heatmaps
from analysis.plots.style import Drawing, unit_of
from analysis.runs.acceptance import hit_rate, phase_share
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions
from analysis.runs.leaders import by_speedup
from analysis.runs.load import Run
from analysis.runs.sweeps import sweeps
from specbench.results.cells import NumberCell
from specbench.results.headline_table import case_count_text
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.statistics.roofline import baseline_context
from specbench.results.summary_schema import SummaryRow, number
from specbench.results.tasks import HEADINGS, OVERALL

if TYPE_CHECKING:
    from analysis.papers import Reproduction

Pictures: TypeAlias = Iterator[tuple[str, Drawing]]  # with their file names' suffixes

# Metrics of a line's points that a summary's rows lack.
_NOT_IN_ROWS: Mapping[str, Callable[[ComparedLabel], NumberCell]] = {
    "draft_share": phase_share,
    "hit_rate": hit_rate,
}


# --- comparisons of one picture, with their claims ------------------------------------------------


def _together(
    reproduction: Reproduction,
    runs: Sequence[Run],
    *,
    title: str = "",
    per_model: bool = False,
    by_data: bool = False,
    claimed: Sequence[str] = (),
) -> Iterator[tuple[str, list[ComparedRuns], str, str]]:
    """Yield what one picture shows: a comparison, or ``per_model`` those that differ in data alone.

    Comparisons without a ranked label are skipped. ``by_data`` adds the data set to file names;
    for ``claimed`` metrics the caption lists the claims instead of the reproduction's text.

    Returns:
        The file name's suffix, the comparisons, title and caption.
    """
    groups: dict[object, list[ComparedRuns]] = {}
    for comparison in reproduction.comparisons(runs):
        alike = (comparison.model, conditions(comparison.runs[0]), comparison.estimator)
        groups.setdefault(alike if per_model else id(comparison), []).append(comparison)
    for members in groups.values():
        if not any(comparison.ranked for comparison in members):
            continue
        first = members[0]
        where = first.printed_title if len(members) == 1 else display_name(first.model)
        text = claims_text(members, *claimed) if claimed else reproduction.text
        stem = f"{first.model}_{first.dataset}" if by_data else first.model
        after = f"After {title or reproduction.title} ({where})"  # drawn from the user's own runs
        yield stem, members, after, caption_of(*members, text=text)


def bar_series(places: Sequence[tuple[ComparedRuns, str]], key: str) -> list[Series]:
    """Draw ``speedup`` or ``mat`` of each label, the fastest first, with its claims.

    Speedups are hollow unless the whole run differs significantly from plain decoding.

    Args:
        places: comparison and task by position on the axis.
        key: ``speedup`` or ``mat``.
    """
    lines: dict[str, tuple[str, list[Point], list[Point]]] = {}
    for x, (comparison, task) in enumerate(places):
        for entry in by_speedup(comparison) or comparison.ranked:
            if number(entry.overall, key) is None:
                continue
            name = comparison.name_of(entry)
            _, points, claimed = lines.setdefault(name, (entry.method, [], []))
            hollow = key == "speedup" and is_hollow(comparison, entry)
            points.append(Point.at(x, entry.measured(key, task), hollow))
            claim = _drawn_claim(entry, key)
            value = claim.value(key, task) if claim else None
            claimed += [] if value is None else [Point(x, value)]
    return [Series(name, *line) for name, line in lines.items()]


def task_panel(comparison: ComparedRuns, key: str, title: str = "") -> Panel:
    """Draw bars of ``speedup`` or ``mat`` by task, the whole run last."""
    tasks = [*(comparison.tasks if len(comparison.tasks) > 1 else []), OVERALL]
    rows = [[e.rows[task] for e in comparison.entries if task in e.rows] for task in tasks]
    ticks = [_tick(task, of_task) for task, of_task in zip(tasks, rows, strict=True)]
    series = bar_series([(comparison, task) for task in tasks], key)
    return Panel.for_metric(key, comparison.timing, series, ticks=ticks, title=title)


def _tick(name: str, rows: Iterable[SummaryRow]) -> str:
    """Format a task's or data set's name below its bars, with the number of its cases."""
    counts = {case_count_text(row) for row in rows}
    text = display_name(name).replace("_", " ")
    return f"{text}\nn = {min(counts)}" if len(counts) == 1 else text


def _drawn_claim(entry: ComparedLabel, key: str) -> Claim | None:
    """Return the entry's claim if it is an exact number that the entry's bar may be compared with.

    Model and hardware, for a speed also formula and baseline, must agree, and the bar is measured.
    """
    claim, run = entry.claim, entry.run
    if claim is None or claim.qualifier:  # "up to" is on no bar
        return None
    if claim.model != run.model or run.timing != "measured":
        return None
    if key == "speedup":
        plain = baseline_context(run.manifest).plain.get(claim.counting.baseline)
        if (plain, claim.counting.speed) != (run.baseline, entry.overall["estimator"]):
            return None
    return claim if claim.same_hardware(run.gpus) else None


def claims_text(comparisons: Iterable[ComparedRuns], *metrics: str) -> str:
    """List the models and hardware that the drawn claims are for; "" without any."""
    entries = [entry for comparison in comparisons for entry in comparison.ranked]
    drawn = [(_drawn_claim(entry, key), key) for entry in entries for key in metrics]
    return claimed_for(claim for claim, key in drawn if claim and claim.values.get(key))


# --- kinds that several figures share -------------------------------------------------------------


def task_bars(reproduction: Reproduction, runs: Sequence[Run], by_data: bool = False) -> Pictures:
    """Draw MAT and speedup by task, with the claims."""
    keys = ("mat", "speedup")
    for stem, members, *captions in _together(reproduction, runs, by_data=by_data, claimed=keys):
        yield stem, bars([task_panel(members[0], key) for key in keys], *captions)


def data_set_bars(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw speedups by data set, one figure per model."""
    keys = ("speedup",)
    for stem, members, *captions in _together(reproduction, runs, per_model=True, claimed=keys):
        ticks = [_tick(c.dataset, [c.entries[0].overall]) for c in members]
        series = bar_series([(comparison, OVERALL) for comparison in members], "speedup")
        panel = Panel.for_metric("speedup", members[0].timing, series, ticks=ticks)
        yield stem, bars([panel], *captions)


def model_bars(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw one figure: speedups by model, then by task for each model."""
    comparisons = reproduction.comparisons(runs)
    models = [display_name(comparison.model) for comparison in comparisons]
    panels = [task_panel(c, "speedup", f"by task, {c.printed_title}") for c in comparisons]
    if len(models) > 1:
        series = bar_series([(comparison, OVERALL) for comparison in comparisons], "speedup")
        timing = comparisons[0].timing
        panel = Panel.for_metric("speedup", timing, series, title="by model", ticks=models)
        panels.insert(0, panel)
    text = caption_of(*comparisons, text=claims_text(comparisons, "speedup"))
    if any(comparison.ranked for comparison in comparisons):
        yield "", bars(panels, f"After {reproduction.title} (by model and by task)", text)


def heatmaps(
    reproduction: Reproduction, runs: Sequence[Run], *, axes: Mapping[str, str], keys: Sequence[str]
) -> Pictures:
    """Draw a figure per model and key, with a heatmap per data set, method and other setting.

    ``axes`` names by knob the vertical one, then the horizontal one; several ``keys`` (``speedup``,
    ``mat``) are in the file names.
    """
    for key in keys:
        for stem, members, *captions in _together(reproduction, runs, per_model=True):
            ranked = [replace(comparison, entries=comparison.ranked) for comparison in members]
            swept = [sweep for comparison in ranked for sweep in sweeps(comparison, *axes)]
            figure = sweep_heatmaps(swept, axes, key, *captions)
            if figure is not None:
                yield f"{stem}_{key}" if len(keys) > 1 else stem, figure


def lines(
    reproduction: Reproduction,
    runs: Sequence[Run],
    *,
    y: Sequence[str],
    panels: Sequence[Mapping[str, Any]],
    **options: Any,
) -> Pictures:
    """Draw lines over knobs: a row of ``panels`` (:func:`_knob_panel`) for each metric.

    Rows of a single panel each are put side by side. With ``per_model``, a picture
    has them for each data set, whose name is the first one's title.
    """
    for stem, members, *captions in _together(reproduction, runs, **options):
        table: list[list[Panel]] = []
        for comparison in members:
            claims = reproduction.own_claims
            rows = [[_knob_panel(comparison, key, claims, **p) for p in panels] for key in y]
            drawn = [row for row in rows if any(s.drawn for panel in row for s in panel.series)]
            rows = _side_by_side(drawn or rows)
            if options.get("per_model"):
                rows[0][0] = replace(rows[0][0], title=display_name(comparison.dataset))
            table += rows
        yield stem, curves(_side_by_side(table), *captions)


def _side_by_side(rows: list[list[Panel]]) -> list[list[Panel]]:
    return [[row[0] for row in rows]] if all(len(row) == 1 for row in rows) else rows


def _knob_panel(
    comparison: ComparedRuns,
    y: str,
    claims: Sequence[Claim],
    *,
    knob: str,
    xlabel: str,
    title: str = "",
    log: bool = False,
    where: Mapping[str, object] | None = None,
    name: str = "",
    by: str = "method",
    published: bool = False,
) -> Panel:
    """Draw lines of a metric over a knob, for the entries that have the knobs ``where``.

    Args:
        name: of a single line of all entries; by default one line per method, or ``by`` label.
        published: whether to draw the claims on the same data, too.
    """
    conditions_met = (where or {}).items()
    entries = [
        entry
        for entry in comparison.ranked
        if all(entry.knobs.get(key) == value for key, value in conditions_met)
    ]
    values = [knob_of(entry, knob) for entry in entries]
    ticks = [value for value in values if isinstance(value, str)]
    by_name = ticks and len(ticks) == len(values)
    positioned = [*enumerate(entries)] if by_name else along(entries, knob)
    series: dict[tuple[str, str], list[Point]] = {}
    for x, entry in positioned:
        line = (name or display_name(entry.method), entry.method)
        if by == "label":
            source = entry.label.partition("_")[0]
            line = (entry.label.replace("_", ", w = "), f"{entry.method}/{source}")
        cell = _NOT_IN_ROWS[y](entry) if y in _NOT_IN_ROWS else entry.measured(y)
        series.setdefault(line, []).append(Point.at(x, cell))
    claimed = [
        Point(float(str(claim.knobs[knob])), claim.value(y))
        for claim in claims
        if published and claim.dataset == comparison.dataset and claim.value(y) is not None
    ]
    lines = [Series(*line, points) for line, points in series.items()]
    if lines:
        lines[0] = replace(lines[0], claimed=claimed)
    names = ticks or None
    return Panel.for_metric(y, comparison.timing, lines, xlabel, title=title, ticks=names, log=log)


# --- kinds of one figure --------------------------------------------------------------------------


def slowdown_heatmaps(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw one picture per model: a heatmap for each number of cached tokens."""
    for run in runs:
        assert run.surface is not None
        grids = [
            HeatmapGrid(f"context of {context} tokens", run.surface.slowdowns(context, run.seed))
            for context in run.surface.axes["context"]
        ]
        title = f"After {reproduction.title} ({display_name(run.model)})"
        text = slowdown_caption(run, reproduction.text)
        across, unit = "w (draft tokens in a row)", "time over one token's"
        yield run.model, plots.heatmaps(grids, across, "k (rows)", unit, title, text)


def row_bars(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw a row of panels for each part, a column for each label of each data set."""

    def panel(comparison: ComparedRuns, entry: ComparedLabel, part: str) -> Panel:
        series = []
        for source in SOURCES:
            points = [Point.at(n, share) for n, share in distribution(entry, part, source)]
            series.append(Series(source, f"{entry.method}/{source}", points))
        title = display_name(comparison.dataset) if part == next(iter(PARTS)) else ""
        if title and len(comparison.drafting) > 1:
            title += f", {comparison.name_of(entry)}"
        return Panel(title, part, PARTS[part][0], series, top=1.0, bars=True)

    for stem, members, *captions in _together(reproduction, runs, per_model=True):
        entries = [(comparison, entry) for comparison in members for entry in comparison.ranked]
        yield stem, curves([[panel(c, e, part) for c, e in entries] for part in PARTS], *captions)


def stream_lines(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw MAT and tokens/s over the tokens of finished requests."""
    title, xlabel = "SSD, over the stream of requests", "tokens of finished requests"
    for stem, (comparison,), *captions in _together(reproduction, runs, title=title, by_data=True):
        parts = [(e, [*over_stream(e)]) for e in comparison.entries if e.ranked]
        panels = []
        for key in ("mat", "tokens_per_s"):
            points = [[Point.at(size, part[key][1]) for size, part in line] for _, line in parts]
            series = [
                Series(comparison.name_of(entry), entry.method, line)
                for (entry, _), line in zip(parts, points, strict=True)
            ]
            panels.append(Panel.for_metric(key, comparison.timing, series, xlabel))
        yield stem, curves([panels], *captions)


def phase_bars(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw a stacked bar per label.

    Plain decoding drafts nothing, so its draft phases only measure the clock and are left out.
    """
    for stem, (comparison,), *captions in _together(reproduction, runs):
        shares = {
            comparison.name_of(entry): {
                part: phase_share(entry, phase)
                for phase, part in PHASES.items()
                if entry.method != BASELINE or phase not in ("draft", "observe")
            }
            for entry in comparison.entries
            if entry.ranked
        }
        yield stem, stacked_bars(shares, "share of the time of all steps", *captions)


def board_heatmaps(reproduction: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw heatmaps of each comparison's speedup and MAT: methods as rows, tasks as columns."""
    for key, even in (("speedup", 1.0), ("mat", None)):
        for stem, (comparison,), title, text in _together(reproduction, runs, claimed=(key,)):
            numbers = {
                (comparison.name_of(entry), HEADINGS.get(task, task)): entry.measured(key, task)
                for entry in reversed(by_speedup(comparison) or comparison.ranked)  # from below
                for task in (*comparison.tasks, OVERALL)
            }
            grid, unit = HeatmapGrid("", numbers), unit_of(key, comparison.timing)
            drawn = plots.heatmaps([grid], "task", "method", unit, title, text, even)
            yield f"{stem}_{key}", drawn


KINDS: Mapping[str, Callable[..., Pictures]] = {
    kind.__name__: kind
    for kind in (
        task_bars, data_set_bars, model_bars, heatmaps, lines, slowdown_heatmaps, row_bars,
        stream_lines, phase_bars, board_heatmaps,
    )
}  # fmt: skip
