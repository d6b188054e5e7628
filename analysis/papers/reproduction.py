"""What a reproduction is, and the kinds of table and figure that ``reproductions.yaml`` names.

A kind is a function of this module, called with the reproduction, its runs and its arguments there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from analysis.papers.claimed import (
    claimed_for,
    claimed_words,
    claims_beside,
    speedups,
    task_panel,
)
from analysis.papers.columns import SPEEDUP, cell_of_claim, cells, knob_of, setting_cell
from analysis.plots.charts import Panel, Point, Series, bars, curves
from analysis.plots.pictures import prediction_text, sweep_heatmaps
from analysis.plots.style import Drawing
from analysis.runs.acceptance import hit_rate, phase_share
from analysis.runs.captions import captions
from analysis.runs.claims import NOT_RUN, Claim, load_claims
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions, make_comparisons
from analysis.runs.leaders import wrong_words_of
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
from specbench.results.decision import case_words
from specbench.results.estimate import Cell, Estimate
from specbench.results.names import display_name

# Pictures with what is added to their files' names.
Pictures: TypeAlias = Iterable[tuple[str, Drawing]]
TableKind: TypeAlias = "Callable[[Reproduction, Sequence[Run]], Iterable[ResultTable]]"
FigureKind: TypeAlias = "Callable[[Reproduction, Sequence[Run]], Pictures]"
# Of comparisons that share a picture, with its title and caption; None without numbers.
Draw: TypeAlias = Callable[[Sequence[ComparedRuns], str, str], Drawing | None]
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
    table_kinds: Sequence[TableKind]
    figure_kinds: Sequence[FigureKind] = ()
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


def after(place: str, where: str) -> str:
    """Return the title of a figure that is made after a paper's, but of runs of one's own."""
    return f"After {place} ({where})"


# --- tables ---------------------------------------------------------------------------------------


def settings(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Mapping[str, str],
    beside: Sequence[str] = (),
) -> Iterable[ResultTable]:
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


def by_task(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
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
) -> Iterable[ResultTable]:
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


def picture_text(comparisons: Sequence[ComparedRuns], words: str) -> str:
    """Return a picture's caption, which begins with what was left out for its wrong outputs."""
    wrong = " ".join(line for comparison in comparisons for line in wrong_words_of(comparison))
    about = captions(comparisons, wrong and f"Not drawn: {wrong}", words)
    return "\n".join(filter(None, [about, prediction_text(comparisons)]))


def pictures(
    of: Reproduction,
    runs: Sequence[Run],
    draw: Draw,
    *,
    place: str = "",
    per_model: bool = False,
    by_data: bool = False,
    claimed: Sequence[str] = (),
) -> Pictures:
    """Draw a picture per comparison, or ``per_model`` of those that differ in data alone.

    None where no label may be ranked. ``by_data``, file names have the data set after the model;
    of ``claimed`` metrics the caption lists the claims in place of the reproduction's text.
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
        figure = draw(members, after(place or of.place, where), picture_text(members, words))
        if figure is not None:
            yield f"{first.model}_{first.dataset}" if by_data else first.model, figure


def task_bars(of: Reproduction, runs: Sequence[Run], *, by_data: bool = False) -> Pictures:
    """Draw MAT and speedup by task, with the claims."""

    def draw(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
        return bars([task_panel(members[0], key) for key in ("mat", "speedup")], title, text)

    return pictures(of, runs, draw, by_data=by_data, claimed=("mat", "speedup"))


def data_set_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw speedups by data set, one figure per model."""

    def draw(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
        ticks = [
            f"{display_name(c.dataset)}\nn = {case_words(c.entries[0].overall)}" for c in members
        ]
        panel = Panel.of("speedup", members[0].timing, speedups(members), ticks=ticks)
        return bars([panel], title, text)

    return pictures(of, runs, draw, per_model=True, claimed=("speedup",))


def model_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw speedups by model and, of each, by task: one figure of all models."""
    comparisons = of.comparisons(runs)
    models = [display_name(comparison.model) for comparison in comparisons]
    panels = [
        replace(task_panel(each, "speedup"), title=f"by task, {each.printed_title}")
        for each in comparisons
    ]
    if len(models) > 1:
        timing, series = comparisons[0].timing, speedups(comparisons)
        panels.insert(0, Panel.of("speedup", timing, series, title="by model", ticks=models))
    text = picture_text(comparisons, claimed_words(comparisons, "speedup"))
    if any(comparison.ranked for comparison in comparisons):
        yield "", bars(panels, after(of.place, "by model and by task"), text)


def heatmaps(
    of: Reproduction, runs: Sequence[Run], *, axes: Mapping[str, str], keys: Sequence[str]
) -> Pictures:
    """Draw a figure per model and key; of each data set a heatmap per method and other setting.

    ``axes`` names by knob the vertical one, then the horizontal one; several ``keys`` (``speedup``,
    ``mat``) are in the file names.
    """
    for key in keys:

        def draw(
            members: Sequence[ComparedRuns], title: str, text: str, key: str = key
        ) -> Drawing | None:
            ranked = [replace(each, entries=each.ranked) for each in members]
            swept = [sweep for each in ranked for sweep in sweeps(each, *axes)]
            return sweep_heatmaps(swept, [*axes], key, title, text, axes)

        for stem, figure in pictures(of, runs, draw, per_model=True):
            yield f"{stem}_{key}" if len(keys) > 1 else stem, figure


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
    placed: list[tuple[int, ComparedLabel]]
    values = [knob_of(entry, knob) for entry in entries]
    words = [value for value in values if isinstance(value, str)]
    if words and len(words) == len(values):
        placed, ticks = [*enumerate(entries)], words
    else:
        placed, ticks = along(entries, knob), None
    lines: dict[tuple[str, str], list[Point]] = {}
    for x, entry in placed:
        line = (name or display_name(entry.method), entry.method)
        if by == "label":
            source = entry.label.partition("_")[0]
            line = (entry.label.replace("_", ", w = "), f"{entry.method}/{source}")
        cell = _BESIDE_ROWS[y](entry) if y in _BESIDE_ROWS else entry.measured(y)
        lines.setdefault(line, []).append(Point.at(x, cell))
    series = [Series(*line, points) for line, points in lines.items()]
    if published and series:
        logs = [
            Point(float(str(claim.knobs[knob])), claim.value(y))
            for claim in claims
            if claim.dataset == comparison.dataset and claim.value(y) is not None
        ]
        series[0] = replace(series[0], claimed=logs)
    return Panel.of(y, comparison.timing, series, xlabel, title=title, ticks=ticks, log=log)


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

    def grid(comparison: ComparedRuns) -> list[list[Panel]]:
        rows = [[_knob_panel(comparison, key, of.own_claims, **p) for p in panels] for key in y]
        shown = [row for row in rows if any(line.drawn for panel in row for line in panel.series)]
        rows = _beside(shown or rows)
        if how.get("per_model"):
            rows[0][0] = replace(rows[0][0], title=display_name(comparison.dataset))
        return rows

    def draw(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
        return curves(_beside([row for each in members for row in grid(each)]), title, text)

    return pictures(of, runs, draw, **how)


def _beside(rows: list[list[Panel]]) -> list[list[Panel]]:
    return [[row[0] for row in rows]] if all(len(row) == 1 for row in rows) else rows


def along(entries: Iterable[ComparedLabel], knob: str) -> list[tuple[int, ComparedLabel]]:
    """Sort the entries that have a knob by its value, and by folder where several share it."""
    values = [(knob_of(entry, knob), entry) for entry in entries]
    with_knob = [(int(str(value)), entry) for value, entry in values if value is not None]
    return sorted(with_knob, key=lambda item: (item[0], str(item[1].run.path)))
