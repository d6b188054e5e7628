"""The kinds of table and figure that ``reproductions.yaml`` names.

A kind is a function of this module, called with the reproduction, its runs and its arguments there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from analysis.papers.claimed import (
    bar_series,
    claimed_for,
    claimed_words,
    claims_beside,
    place_name,
    task_panel,
)
from analysis.papers.columns import SPEEDUP, cell_of_claim, cells, knob_of, setting_cell
from analysis.plots.charts import Panel, Point, Series, bars, curves
from analysis.plots.pictures import caption_of, sweep_heatmaps
from analysis.plots.style import Drawing
from analysis.runs.acceptance import hit_rate, phase_share
from analysis.runs.captions import captions
from analysis.runs.claims import NOT_RUN, Claim, load_claims
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions, make_comparisons
from analysis.runs.load import Run
from analysis.runs.sweeps import sweeps
from analysis.tabular.comparison_tables import (
    comparison_table,
    natural,
    settings_table,
    task_table,
    with_rule,
)
from analysis.tabular.table import ResultTable
from specbench.results.estimate import Cell, Estimate
from specbench.results.names import display_name
from specbench.results.tasks import OVERALL

# Pictures with what is added to their files' names.
Pictures: TypeAlias = Iterable[tuple[str, Drawing]]
Tables: TypeAlias = Iterable[ResultTable]
Row: TypeAlias = Mapping[str, Cell]

# Of a line's points, what no row of a summary has.
_BESIDE_ROWS: Mapping[str, Callable[[ComparedLabel], Estimate]] = {
    "draft_share": phase_share,
    "hit_rate": hit_rate,
}


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of a paper; ``reproductions.yaml`` says what its keys mean."""

    name: str
    place: str
    claims: Sequence[str]
    table_kinds: Sequence[Callable[[Reproduction, Sequence[Run]], Tables]]
    figure_kinds: Sequence[Callable[[Reproduction, Sequence[Run]], Pictures]]
    text: str = ""
    also: Sequence[str] = ()
    instead: Sequence[str] = ()

    @property
    def experiments(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def own_claims(self) -> list[Claim]:
        """The claims of its source's exhibits."""
        paper, exhibits = self.claims[:1], self.claims[1:]
        return [c for c in load_claims() if c.paper in paper and c.exhibit in exhibits]

    def comparisons(self, runs: Sequence[Run]) -> list[ComparedRuns]:
        """Compare the runs, with the claims of this table or figure alone; by model size."""
        compared = make_comparisons(runs, claims=self.own_claims)
        return sorted(compared, key=lambda comparison: natural(comparison.model))

    def tables(self, runs: Sequence[Run]) -> list[ResultTable]:
        return [table for kind in self.table_kinds for table in kind(self, runs)]

    def figures(self, runs: Sequence[Run]) -> Pictures:
        for kind in self.figure_kinds:
            yield from kind(self, runs)


# --- tables ---------------------------------------------------------------------------------------


def settings(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Mapping[str, str],
    beside: Sequence[str] = (),
) -> Tables:
    """Tabulate a row per setting; ``columns`` has by heading a name of :func:`setting_cell`.

    ``beside`` has labels of speeds claimed without a data set, which follow below; the caption
    then says nothing before the conditions.
    """
    of_entry = {heading: partial(setting_cell, name=name) for heading, name in columns.items()}
    stated = [claim for claim in of.own_claims if claim.value("tokens_per_s")]
    below = [claim for claim in stated if (claim.setting or "") in beside]
    comparisons = of.comparisons(runs)
    claimed = claimed_for([*claims_beside(comparisons), *below])
    text = captions((), claimed, "" if beside else of.text)
    yield settings_table(title, comparisons, of_entry, text, below)


def by_task(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate of each comparison the methods, and where it has several tasks these, too."""
    for comparison in of.comparisons(runs):
        table = comparison_table(comparison, not_run=True)
        text = captions((), claimed_for(claims_beside([comparison])), table.caption)
        yield replace(table, caption=text)
        if len(comparison.tasks) > 1:
            yield task_table(comparison, f"{of.place} by task ({comparison.title})")


def columns(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Sequence[str],
    knob: Sequence[str] = (),
    short: Sequence[str] = (),
    not_run: bool = False,
) -> Tables:
    """Tabulate a row for each method or each value of a knob (its name, its column's heading).

    ``not_run``: whether claims about methods that were not run follow.
    """
    comparisons = of.comparisons(runs)
    rows: list[Row] = []
    notes: list[str] = []
    for comparison in comparisons:
        values = along(comparison.drafting, knob[0]) if knob else enumerate(comparison.drafting)
        for value, entry in values:
            others = {knob[1]: str(value)} if knob else {}
            rows.append(cells(comparison, entry, columns, others))
            notes.append(entry.note(f"{knob[1]} = {value}" if knob else entry.label))
        methods = {entry.method for entry in comparison.entries}
        for claim in of.own_claims if not_run else ():
            if claim.method not in methods:
                row: dict[str, Cell] = {"model": claim.model, "method": claim.method, "cases": "0"}
                row |= {h: cell_of_claim(claim, h) for h in columns if h.startswith("claimed")}
                rows.append(row | {"verdict": NOT_RUN})
                notes.append(claim.note(claim.method))
    claimed = ""
    if SPEEDUP in columns:
        claimed = claimed_for(claims_beside(comparisons) + (of.own_claims if not_run else []))
    notes = with_rule(notes if SPEEDUP in columns else [])
    yield ResultTable.of(title, captions(comparisons, claimed, of.text), rows, notes, short)


# --- figures --------------------------------------------------------------------------------------


def drawn_together(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    place: str = "",
    per_model: bool = False,
    by_data: bool = False,
    claimed: Sequence[str] = (),
) -> Iterator[tuple[str, list[ComparedRuns], str, str]]:
    """Return each comparison, or ``per_model`` those that differ in data alone, for a picture.

    None where no label may be ranked. ``by_data``, file names have the data set after the model;
    of ``claimed`` metrics the caption lists the claims in place of the reproduction's text.

    Returns:
        What is added to the file's name, the comparisons, title and caption.
    """
    groups: dict[object, list[ComparedRuns]] = {}
    for comparison in of.comparisons(runs):
        alike = (comparison.model, conditions(comparison.runs[0]), comparison.estimator)
        groups.setdefault(alike if per_model else id(comparison), []).append(comparison)
    for members in groups.values():
        if not any(comparison.ranked for comparison in members):
            continue
        first = members[0]
        where = first.printed_title if len(members) == 1 else display_name(first.model)
        words = claimed_words(members, *claimed) if claimed else of.text
        stem = f"{first.model}_{first.dataset}" if by_data else first.model
        title = f"After {place or of.place} ({where})"  # the figure is of runs of one's own
        yield stem, members, title, caption_of(*members, words=words)


def task_bars(of: Reproduction, runs: Sequence[Run], *, by_data: bool = False) -> Pictures:
    """Draw MAT and speedup by task, with the claims."""
    keys = ("mat", "speedup")
    for stem, (shown,), *words in drawn_together(of, runs, by_data=by_data, claimed=keys):
        yield stem, bars([task_panel(shown, key) for key in keys], *words)


def data_set_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw speedups by data set, one figure per model."""
    for stem, members, *words in drawn_together(of, runs, per_model=True, claimed=("speedup",)):
        ticks = [place_name(shown.dataset, [shown.entries[0].overall]) for shown in members]
        series = bar_series([(shown, OVERALL) for shown in members], "speedup")
        yield stem, bars([Panel.of("speedup", members[0].timing, series, ticks=ticks)], *words)


def model_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw speedups by model and, of each, by task: one figure of all models."""
    comparisons = of.comparisons(runs)
    models = [display_name(comparison.model) for comparison in comparisons]
    panels = [task_panel(each, "speedup", f"by task, {each.printed_title}") for each in comparisons]
    if len(models) > 1:
        series = bar_series([(each, OVERALL) for each in comparisons], "speedup")
        timing = comparisons[0].timing
        panels.insert(0, Panel.of("speedup", timing, series, title="by model", ticks=models))
    text = caption_of(*comparisons, words=claimed_words(comparisons, "speedup"))
    if any(comparison.ranked for comparison in comparisons):
        yield "", bars(panels, f"After {of.place} (by model and by task)", text)


def heatmaps(
    of: Reproduction, runs: Sequence[Run], *, axes: Mapping[str, str], keys: Sequence[str]
) -> Pictures:
    """Draw a figure per model and key; of each data set a heatmap per method and other setting.

    ``axes`` names by knob the vertical one, then the horizontal one; several ``keys`` (``speedup``,
    ``mat``) are in the file names.
    """
    for key in keys:
        for stem, members, *words in drawn_together(of, runs, per_model=True):
            ranked = [replace(each, entries=each.ranked) for each in members]
            swept = [sweep for each in ranked for sweep in sweeps(each, *axes)]
            figure = sweep_heatmaps(swept, axes, key, *words)
            if figure is not None:
                yield f"{stem}_{key}" if len(keys) > 1 else stem, figure


def lines(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    y: Sequence[str],
    panels: Sequence[Mapping[str, Any]],
    **how: Any,
) -> Pictures:
    """Draw lines over knobs: a row of ``panels`` (:func:`_knob_panel`) for each metric.

    Where rows have a single panel each, they stand beside each other. ``per_model``, a picture
    has them for each data set, whose name is the first one's title.
    """
    for stem, members, *words in drawn_together(of, runs, **how):
        table: list[list[Panel]] = []
        for shown in members:
            rows = [[_knob_panel(shown, key, of.own_claims, **p) for p in panels] for key in y]
            known = [
                row for row in rows if any(line.drawn for panel in row for line in panel.series)
            ]
            rows = _beside(known or rows)
            if how.get("per_model"):
                rows[0][0] = replace(rows[0][0], title=display_name(shown.dataset))
            table += rows
        yield stem, curves(_beside(table), *words)


def _beside(rows: list[list[Panel]]) -> list[list[Panel]]:
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
    """Lines of a metric over a knob, of the entries that have the knobs ``where``.

    Args:
        name: of the one line of all entries; by default a line a method, or ``by`` label.
        published: whether the claims on the same data are drawn, too.
    """
    conditions_met = (where or {}).items()
    entries = [
        entry
        for entry in comparison.ranked
        if all(entry.knobs.get(key) == value for key, value in conditions_met)
    ]
    values = [knob_of(entry, knob) for entry in entries]
    ticks = [value for value in values if isinstance(value, str)]
    words = ticks and len(ticks) == len(values)
    placed = [*enumerate(entries)] if words else along(entries, knob)
    series: dict[tuple[str, str], list[Point]] = {}
    for x, entry in placed:
        line = (name or display_name(entry.method), entry.method)
        if by == "label":
            source = entry.label.partition("_")[0]
            line = (entry.label.replace("_", ", w = "), f"{entry.method}/{source}")
        cell = _BESIDE_ROWS[y](entry) if y in _BESIDE_ROWS else entry.measured(y)
        series.setdefault(line, []).append(Point.at(x, cell))
    logs = [
        Point(float(str(claim.knobs[knob])), claim.value(y))
        for claim in claims
        if published and claim.dataset == comparison.dataset and claim.value(y) is not None
    ]
    shown = [Series(*line, points) for line, points in series.items()]
    if shown:
        shown[0] = replace(shown[0], claimed=logs)
    return Panel.of(y, comparison.timing, shown, xlabel, title=title, ticks=ticks or None, log=log)


def along(entries: Iterable[ComparedLabel], knob: str) -> list[tuple[int, ComparedLabel]]:
    """Sort the entries that have a knob by its value, and by folder where several share it."""
    values = [(knob_of(entry, knob), entry) for entry in entries]
    with_knob = [(int(str(value)), entry) for value, entry in values if value is not None]
    return sorted(with_knob, key=lambda item: (item[0], str(item[1].run.path)))
