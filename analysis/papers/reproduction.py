"""What a reproduction is, and the kinds of tables and figures that a paper's module lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from analysis.papers.cells import cells
from analysis.papers.claimed import (
    claimed_in_cells,
    claimed_words,
    metric_panel,
    speedups,
    task_panel,
)
from analysis.plots.charts import Panel, Point, bars, curves
from analysis.plots.layout import Drawing
from analysis.plots.sweeps import sweep_heatmaps
from analysis.runs.captions import captions_once
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions, make_comparisons
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.runs.sweeps import sweeps
from analysis.tabular.comparison_tables import (
    Columns,
    comparison_table,
    natural,
    settings_table,
    task_table,
    with_rule,
)
from analysis.tabular.table import ResultTable
from specbench.results.estimate import ABSENT, Cell
from specbench.results.names import display_name
from specbench.results.wording import case_words

# Pictures with what is added to their files' names.
Pictures: TypeAlias = Iterable[tuple[str, Drawing]]
TableKind: TypeAlias = "Callable[[Reproduction, Sequence[Run]], Iterable[ResultTable]]"
FigureKind: TypeAlias = "Callable[[Reproduction, Sequence[Run]], Pictures]"
# Of comparisons that share a picture, with its title and caption.
Draw: TypeAlias = Callable[[Sequence[ComparedRuns], str, str], Drawing]


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of a paper.

    Attributes:
        name: of the experiment that it is made of, and of its files.
        place: where it stands, e.g. ``Cacheback, Table 1``.
        claims: the source's key in the ledger, then the exhibits whose claims may stand beside.
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

    def comparisons(self, runs: Sequence[Run]) -> list[ComparedRuns]:
        """The runs compared, with the claims of this table or figure alone; by model size."""
        compared = make_comparisons(runs, claims=claims_of(*self.claims))
        return sorted(compared, key=lambda comparison: natural(comparison.model))

    def tables(self, runs: Sequence[Run]) -> list[ResultTable]:
        """Its numbers, from its runs."""
        return [table for kind in self.table_kinds for table in kind(self, runs)]

    def figures(self, runs: Sequence[Run]) -> Pictures:
        """Its pictures, drawn one after the other."""
        for kind in self.figure_kinds:
            yield from kind(self, runs)


def claims_of(paper: str, *exhibits: str) -> list[Claim]:
    """What the ledger has from these tables, figures or passages of a source."""
    return [c for c in load_claims() if c.paper == paper and c.exhibit in exhibits]


# --- tables ---------------------------------------------------------------------------------------


def knob_column(name: str) -> Callable[[ComparedLabel], str]:
    """A column of a table: the value of a knob, – for a method that has no such knob."""

    def value_of(entry: ComparedLabel) -> str:
        value = entry.knobs.get(name)
        return ABSENT if value is None else str(value)

    return value_of


STORES = {"ssd": "buffer_tokens", "rest": "store_tokens"}  # by method, the knob of the store's size
# What a column of a table of settings has, where it is no knob.
_NO_KNOBS: Columns = {
    "label": lambda entry: entry.label,
    "temperature": lambda entry: f"{entry.run.temperature:g}",
    "store": lambda entry: knob_column(STORES.get(entry.method, "buffer_tokens"))(entry),
}


def settings(title: str, columns: Mapping[str, str], beside: Sequence[str] = ()) -> TableKind:
    """One table, a row per setting, as :func:`settings_table` has it.

    Args:
        title: above it.
        columns: by heading a knob, or one of the columns above.
        beside: labels of speeds claimed without a data set, which follow below; the caption
            then says nothing before the conditions.
    """
    of_entry = {heading: _NO_KNOBS.get(of) or knob_column(of) for heading, of in columns.items()}

    def tables(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
        below = claims_of(*of.claims) if beside else []
        claims = [c for c in below if c.value("tokens_per_s") and (c.setting or "") in beside]
        text = "" if beside else of.text
        yield settings_table(title, of.comparisons(runs), of_entry, text, claims)

    return tables


def overall_and_by_task() -> TableKind:
    """Of each comparison the methods, and where it has several tasks these, too."""

    def tables(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
        for comparison in of.comparisons(runs):
            yield comparison_table(comparison)
            if len(comparison.tasks) > 1:
                yield task_table(comparison, f"{of.place} by task ({comparison.title})")

    return tables


def rows(
    title: str,
    rows_of: Callable[[ComparedRuns], Iterable[tuple[dict[str, Cell], str]]],
    short: Sequence[str] = (),
    speedup: bool = False,
) -> TableKind:
    """One table of all comparisons' rows, each with its note; ``short``: its first columns."""

    def tables(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
        comparisons = of.comparisons(runs)
        made = [row for comparison in comparisons for row in rows_of(comparison)]
        notes = with_rule([note for _, note in made])
        text = captions(comparisons, of.text, speedup=speedup)
        yield ResultTable.of(title, text, [cells for cells, _ in made], notes, short)

    return tables


def knob_rows(
    title: str, knob: Sequence[str], columns: Sequence[str], speedup: bool = False
) -> TableKind:
    """One table, a row for each value of a knob.

    Args:
        title: above it.
        knob: its name, and the heading of its column.
        columns: all headings, of :mod:`analysis.papers.cells` but for the knob's.
        speedup: whether a column shows any; the notes then say whose claims stand beside.
    """
    name, heading = knob

    def rows_of(comparison: ComparedRuns) -> Iterable[tuple[dict[str, Cell], str]]:
        for value, entry in along(comparison.drafting, name):
            made = cells(comparison, entry, columns, {heading: str(value)})
            yield made, entry.note(f"{heading} = {value}") if speedup else ""

    return rows(title, rows_of, speedup=speedup)


# --- figures --------------------------------------------------------------------------------------


def by_model(comparisons: Sequence[ComparedRuns]) -> list[list[ComparedRuns]]:
    """Groups that one picture may show, in order of appearance.

    They differ in data alone: what ran elsewhere, or was predicted, has a picture of its own.
    """
    pictures: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        key = (comparison.model, conditions(comparison.runs[0]), comparison.estimator)
        pictures.setdefault(key, []).append(comparison)
    return list(pictures.values())


def pictures(
    draw: Draw,
    place: str = "",
    per_model: bool = False,
    by_data: bool = False,
    speedup: bool = True,
    claimed: Sequence[str] = (),
) -> FigureKind:
    """A picture per comparison, or ``per_model`` of all its data sets.

    Args:
        draw: the picture.
        place: in its title; by default the reproduction's.
        per_model: whether a model's comparisons share a picture.
        by_data: whether file names have the data set after the model.
        speedup: whether the picture shows any.
        claimed: metrics whose claims its caption lists in place of the reproduction's text.
    """

    def figures(of: Reproduction, runs: Sequence[Run]) -> Pictures:
        comparisons = of.comparisons(runs)
        for members in by_model(comparisons) if per_model else [[c] for c in comparisons]:
            first = members[0]
            where = display_name(first.model) if per_model else first.printed_title
            words = claimed_words(members, *claimed) if claimed else of.text
            stem = f"{first.model}_{first.dataset}" if by_data else first.model
            title = after(place or of.place, where)
            yield stem, draw(members, title, captions(members, words, speedup=speedup))

    return figures


def lines(
    grid: Callable[[ComparedRuns], Sequence[Sequence[Panel]]],
    place: str = "",
    by_data: bool = False,
    speedup: bool = False,
) -> FigureKind:
    """Lines of one comparison a picture, in rows of panels."""
    return pictures(
        lambda members, title, text: curves(grid(members[0]), title, text),
        place,
        by_data=by_data,
        speedup=speedup,
    )


def task_bars(by_data: bool = False) -> FigureKind:
    """MAT and speedup by task, with the claims."""
    return pictures(
        lambda members, title, text: bars(
            [task_panel(members[0], key) for key in ("mat", "speedup")], title, text
        ),
        by_data=by_data,
        claimed=("mat", "speedup"),
    )


def _data_set_bars(members: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
    ticks = [f"{display_name(c.dataset)}\nn = {case_words(c.entries[0].overall)}" for c in members]
    panel = metric_panel("speedup", members[0].timing, speedups(members), ticks=ticks)
    return bars([panel], title, text)


def data_set_bars() -> FigureKind:
    """Speedups by data set, one figure per model."""
    return pictures(_data_set_bars, per_model=True, claimed=("speedup",))


def model_bars() -> FigureKind:
    """Speedups by model and, of each, by task: one figure of all models."""

    def figures(of: Reproduction, runs: Sequence[Run]) -> Pictures:
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

    return figures


def knob_heatmaps(axes: Mapping[str, str], keys: Sequence[str], named: bool = False) -> FigureKind:
    """One figure per model and key; of each data set a heatmap per method and other setting.

    Args:
        axes: by knob the name of its axis: the vertical one, then the horizontal one.
        keys: ``speedup`` or ``mat``; ``named``: also in the file names.
    """
    down, across = axes

    def figures(of: Reproduction, runs: Sequence[Run]) -> Pictures:
        for key in keys:
            for members in by_model(of.comparisons(runs)):
                model, timed = members[0].model, key == "speedup"
                swept = [(each, sweep) for each in members for sweep in sweeps(each, down, across)]
                entries = [entry for _, sweep in swept for entry in sweep.entries.values()]
                claimed = claimed_in_cells(entries, key, down, across)
                words = captions(members, of.text, claimed, speedup=timed, times=timed)
                only = len(members) == 1
                where = members[0].printed_title if only else display_name(model)
                title = after(of.place, where)
                figure = sweep_heatmaps(swept, (down, across), key, title, words, axes)
                if figure is not None:
                    yield f"{model}_{key}" if named else model, figure

    return figures


def along(entries: Iterable[ComparedLabel], knob: str) -> list[tuple[int, ComparedLabel]]:
    """The entries that have a knob by its value, and by folder where several share a value."""
    with_knob = [(int(e.knobs[knob]), e) for e in entries if e.knobs.get(knob) is not None]
    return sorted(with_knob, key=lambda item: (item[0], str(item[1].run.path)))


def points(placed: Iterable[tuple[float, ComparedLabel]], key: str) -> list[Point]:
    """A number of each entry, at its place."""
    return [Point.at(x, entry.measured(key)) for x, entry in placed]


def after(place: str, where: str) -> str:
    """The title of a figure that is made after a paper's, but of runs of one's own."""
    return f"After {place} ({where})"


def captions(
    comparisons: Iterable[ComparedRuns], *before: str, speedup: bool = True, times: bool = True
) -> str:
    """What stands below a figure: a few words of its own, then each comparison's conditions."""
    return "\n".join([*filter(None, before), *captions_once(comparisons, speedup, times)])
