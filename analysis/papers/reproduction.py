"""What a reproduction is, and the kinds of table and figure that ``reproductions.yaml`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from analysis.papers.claimed import (
    claimed_for,
    claimed_words,
    claims_beside,
    metric_panel,
    speedups,
    task_panel,
)
from analysis.papers.columns import cells, cells_not_run, knob_of, setting_cell
from analysis.plots.charts import Panel, Point, Series, bars, curves
from analysis.plots.layout import Drawing
from analysis.plots.sweeps import sweep_heatmaps
from analysis.runs.acceptance import hit_rate, phase_share
from analysis.runs.captions import captions as captions
from analysis.runs.claims import Claim, load_claims
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
from specbench.results.decision import case_words
from specbench.results.estimate import Cell, Estimate
from specbench.results.names import display_name

# Pictures with what is added to their files' names.
Pictures: TypeAlias = Iterable[tuple[str, Drawing]]
TableKind: TypeAlias = "Callable[[Reproduction, Sequence[Run]], Iterable[ResultTable]]"
FigureKind: TypeAlias = "Callable[[Reproduction, Sequence[Run]], Pictures]"
# Of comparisons that share a picture, with its title and caption.
Draw: TypeAlias = Callable[[Sequence[ComparedRuns], str, str], Drawing]
Row: TypeAlias = Mapping[str, Cell]


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of a paper.

    Attributes:
        name: of the experiment that it is made of, and of its files.
        place: where it stands, e.g. ``Cacheback, Table 1``.
        claims: the source's key in ``claims.yaml``, then the exhibits that may stand beside.
        table_kinds: its numbers.
        figure_kinds: its pictures; none for a plain table.
        text: what captions say before the conditions.
        also: further experiments whose runs belong to it.
        instead: experiments whose runs show the same numbers, and serve for a model that its own
            experiments were not run with.
    """

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
        return claims_of(*self.claims) if self.claims else []

    def comparisons(self, runs: Sequence[Run]) -> list[ComparedRuns]:
        """Compare the runs, with the claims of this table or figure alone; by model size."""
        compared = make_comparisons(runs, claims=self.own_claims)
        return sorted(compared, key=lambda comparison: natural(comparison.model))

    def tables(self, runs: Sequence[Run]) -> list[ResultTable]:
        """Make its numbers from its runs."""
        return [table for kind in self.table_kinds for table in kind(self, runs)]

    def figures(self, runs: Sequence[Run]) -> Pictures:
        """Draw its pictures one after the other."""
        for kind in self.figure_kinds:
            yield from kind(self, runs)


def claims_of(paper: str, *exhibits: str) -> list[Claim]:
    """Return what ``claims.yaml`` has from these tables, figures or passages of a source."""
    return [c for c in load_claims() if c.paper == paper and c.exhibit in exhibits]


def after(place: str, where: str) -> str:
    """Return the title of a figure that is made after a paper's, but of runs of one's own."""
    return f"After {place} ({where})"


# --- tables ---------------------------------------------------------------------------------------


def settings_tables(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Mapping[str, str],
    beside: Sequence[str] = (),
) -> Iterable[ResultTable]:
    """One table, a row per setting.

    Args:
        of, runs: what it is about.
        title: above it.
        columns: by heading a knob, or another name of :func:`setting_cell`.
        beside: labels of speeds claimed without a data set, which follow below; the caption
            then says nothing before the conditions.
    """
    of_entry = {heading: partial(setting_cell, name=name) for heading, name in columns.items()}
    below = of.own_claims if beside else []
    claims = [c for c in below if c.value("tokens_per_s") and (c.setting or "") in beside]
    comparisons = of.comparisons(runs)
    words = [claimed_for([*claims_beside(comparisons), *claims]), "" if beside else of.text]
    text = "\n".join(filter(None, words))
    yield settings_table(title, comparisons, of_entry, text, claims)


def task_tables(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
    """Of each comparison the methods, and where it has several tasks these, too."""
    for comparison in of.comparisons(runs):
        table = comparison_table(comparison, not_run=True)
        words = filter(None, [claimed_for(claims_beside([comparison])), table.caption])
        yield replace(table, caption="\n".join(words))
        if len(comparison.tasks) > 1:
            yield task_table(comparison, f"{of.place} by task ({comparison.title})")


def column_tables(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Sequence[str],
    knob: Sequence[str] = (),
    short: Sequence[str] = (),
    speedup: bool = False,
    not_run: bool = False,
) -> Iterable[ResultTable]:
    """One table, a row for each method or each value of a knob.

    Args:
        of, runs: what it is about.
        title: above it.
        columns: all headings, of :mod:`analysis.papers.columns` but for the knob's.
        knob: its name, and the heading of its column.
        short: the headings that are shown at first.
        speedup: whether a column shows any; the notes then say whose claims stand beside.
        not_run: whether claims about methods that were not run follow.
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
                rows.append(cells_not_run(claim, columns))
                notes.append(claim.note(claim.method))
    beside = claims_beside(comparisons) + (of.own_claims if not_run else [])
    claimed = claimed_for(beside) if speedup else ""
    text = captions(comparisons, claimed, of.text)
    yield ResultTable.of(title, text, rows, with_rule(notes if speedup else []), short)


# --- figures --------------------------------------------------------------------------------------


def by_model(comparisons: Sequence[ComparedRuns]) -> list[list[ComparedRuns]]:
    """Groups that one picture may show, in order of appearance.

    They differ in data alone: what ran elsewhere, or was predicted, has a picture of its own.
    """
    groups: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        key = (comparison.model, conditions(comparison.runs[0]), comparison.estimator)
        groups.setdefault(key, []).append(comparison)
    return list(groups.values())


def pictures(
    of: Reproduction,
    runs: Sequence[Run],
    draw: Draw,
    *,
    place: str = "",
    per_model: bool = False,
    by_data: bool = False,
    speedup: bool = True,
    claimed: Sequence[str] = (),
) -> Pictures:
    """A picture per comparison, or ``per_model`` of all its data sets.

    Args:
        of, runs: what they are about.
        draw: the picture.
        place: in its title; by default the reproduction's.
        per_model: whether a model's comparisons share a picture.
        by_data: whether file names have the data set after the model.
        speedup: whether the picture shows any.
        claimed: metrics whose claims its caption lists in place of the reproduction's text.
    """
    comparisons = of.comparisons(runs)
    for members in by_model(comparisons) if per_model else [[c] for c in comparisons]:
        first = members[0]
        where = display_name(first.model) if per_model else first.printed_title
        words = claimed_words(members, *claimed) if claimed else of.text
        stem = f"{first.model}_{first.dataset}" if by_data else first.model
        title = after(place or of.place, where)
        yield stem, draw(members, title, captions(members, words))


def task_bars(of: Reproduction, runs: Sequence[Run], *, by_data: bool = False) -> Pictures:
    """MAT and speedup by task, with the claims."""

    def draw(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
        return bars([task_panel(members[0], key) for key in ("mat", "speedup")], title, text)

    return pictures(of, runs, draw, by_data=by_data, claimed=("mat", "speedup"))


def data_set_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Speedups by data set, one figure per model."""

    def draw(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
        ticks = [
            f"{display_name(c.dataset)}\nn = {case_words(c.entries[0].overall)}" for c in members
        ]
        panel = metric_panel("speedup", members[0].timing, speedups(members), ticks=ticks)
        return bars([panel], title, text)

    return pictures(of, runs, draw, per_model=True, claimed=("speedup",))


def model_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Speedups by model and, of each, by task: one figure of all models."""
    comparisons = of.comparisons(runs)
    models = [display_name(comparison.model) for comparison in comparisons]
    panels = [
        replace(task_panel(each, "speedup"), title=f"by task, {each.printed_title}")
        for each in comparisons
    ]
    if len(models) > 1:
        timing, series = comparisons[0].timing, speedups(comparisons)
        panels.insert(0, metric_panel("speedup", timing, series, "", "by model", models))
    text = captions(comparisons, claimed_words(comparisons, "speedup"))
    yield "", bars(panels, after(of.place, "by model and by task"), text)


def knob_heatmaps(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    axes: Mapping[str, str],
    keys: Sequence[str],
    named: bool = False,
) -> Pictures:
    """One figure per model and key; of each data set a heatmap per method and other setting.

    Args:
        of, runs: what they are about.
        axes: by knob the name of its axis: the vertical one, then the horizontal one.
        keys: ``speedup`` or ``mat``; ``named``: also in the file names.
    """
    down, across = axes
    for key in keys:
        for members in by_model(of.comparisons(runs)):
            model = members[0].model
            swept = [(each, sweep) for each in members for sweep in sweeps(each, down, across)]
            words = captions(members, of.text)
            where = members[0].printed_title if len(members) == 1 else display_name(model)
            title = after(of.place, where)
            figure = sweep_heatmaps(swept, (down, across), key, title, words, axes)
            if figure is not None:
                yield f"{model}_{key}" if named else model, figure


@dataclass(frozen=True)
class Lines:
    """A panel of lines over a knob.

    Attributes:
        knob: along the horizontal axis; ``store`` as in :func:`knob_of`.
        xlabel, title: of the panel.
        log: logarithmic horizontal axis with this base.
        where: knobs of the entries that it shows.
        name: of the one line of all entries; by default a line a method, or ``by`` label.
        published: name of a dashed line of the claims on the same data.
    """

    knob: str
    xlabel: str
    title: str = ""
    log: float | None = None
    where: Mapping[str, object] | None = None
    name: str = ""
    by: str = "method"
    published: str = ""

    def panel(self, comparison: ComparedRuns, y: str, claims: Sequence[Claim]) -> Panel:
        """Draw a metric of the comparison's entries."""
        wanted = (self.where or {}).items()
        entries = [
            entry
            for entry in comparison.ranked
            if all(entry.knobs.get(knob) == value for knob, value in wanted)
        ]
        lines: dict[tuple[str, str], list[tuple[int, ComparedLabel]]] = {}
        ticks = None
        if entries and all(isinstance(knob_of(e, self.knob), str) for e in entries):
            ticks = [str(knob_of(entry, self.knob)) for entry in entries]
            lines = {(self.name, e.method): [*enumerate(entries)] for e in entries}
        else:
            for x, entry in along(entries, self.knob):
                lines.setdefault(self._line(entry), []).append((x, entry))
        series = [Series(*line, points(placed, y)) for line, placed in lines.items()]
        logs = [
            Point(float(str(claim.knobs[self.knob])), value)
            for claim in claims
            if claim.dataset == comparison.dataset and (value := claim.value(y)) is not None
        ]
        if self.published and logs:
            series.append(Series(self.published, series[0].method, logs, dashed=True))
        return metric_panel(y, comparison.timing, series, self.xlabel, self.title, ticks, self.log)

    def _line(self, entry: ComparedLabel) -> tuple[str, str]:
        """Name and look."""
        if self.by == "label":
            source = entry.label.partition("_")[0]
            return entry.label.replace("_", ", w = "), f"{entry.method}/{source}"
        return self.name or display_name(entry.method), entry.method


def knob_lines(
    of: Reproduction,
    runs: Sequence[Run],
    *,
    y: Sequence[str],
    panels: Sequence[Mapping[str, Any]],
    **how: Any,
) -> Pictures:
    """Lines over knobs: a row of panels for each metric.

    Where rows have a single panel each, they stand beside each other. ``per_model``, a picture
    has them for each data set, whose name is the first one's title.
    """
    specs = [Lines(**panel) for panel in panels]

    def grid(comparison: ComparedRuns) -> list[list[Panel]]:
        rows = [[spec.panel(comparison, key, of.own_claims) for spec in specs] for key in y]
        rows = [row for row in rows if any(_has_numbers(panel) for panel in row)] or rows
        rows = _beside(rows)
        if how.get("per_model"):
            rows[0][0] = replace(rows[0][0], title=display_name(comparison.dataset))
        return rows

    def draw(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
        return curves(_beside([row for each in members for row in grid(each)]), title, text)

    return pictures(of, runs, draw, **{"speedup": "speedup" in y, **how})


def _beside(rows: list[list[Panel]]) -> list[list[Panel]]:
    return [[row[0] for row in rows]] if all(len(row) == 1 for row in rows) else rows


def _has_numbers(panel: Panel) -> bool:
    return any(point.y is not None for series in panel.series for point in series.points)


def along(entries: Iterable[ComparedLabel], knob: str) -> list[tuple[int, ComparedLabel]]:
    """The entries that have a knob by its value, and by folder where several share a value."""
    values = [(knob_of(entry, knob), entry) for entry in entries]
    with_knob = [(int(str(value)), entry) for value, entry in values if value is not None]
    return sorted(with_knob, key=lambda item: (item[0], str(item[1].run.path)))


def points(placed: Iterable[tuple[float, ComparedLabel]], y: str) -> list[Point]:
    """A number of each entry, at its place."""
    others: Mapping[str, Callable[[ComparedLabel], Estimate]] = {
        "draft_share": phase_share,
        "hit_rate": hit_rate,
    }
    return [
        Point.at(x, others[y](entry) if y in others else entry.measured(y)) for x, entry in placed
    ]
