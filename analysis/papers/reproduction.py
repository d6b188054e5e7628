"""What a reproduction is, and what the papers' modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.plots.charts import Panel, Point, Series, bars
from analysis.plots.layout import Drawing
from analysis.plots.sweeps import comparison_title, figure_name, sweep_heatmaps
from analysis.plots.units import MAT, PLAIN, speedup_words
from analysis.runs.captions import captions_once
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, Comparison, conditions, make_comparisons
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.runs.sweeps import sweeps
from analysis.tabular.comparison_tables import Columns, natural, settings_table
from analysis.tabular.table import ResultTable
from specbench.results.estimate import ABSENT
from specbench.results.names import display_name
from specbench.results.statistics.roofline import baseline_context
from specbench.results.summary_schema import number
from specbench.results.tasks import OVERALL
from specbench.results.wording import case_words

# Pictures with what is added to their files' names.
Pictures = Iterable[tuple[str, Drawing]]


def no_figures(runs: Sequence[Run]) -> Pictures:
    """Of a reproduction that is a table."""
    del runs
    return ()


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of a paper.

    Attributes:
        name: of the experiment that it is made of, and of its files.
        place: where it stands, e.g. ``Cacheback, Table 1``.
        tables: its numbers, from its runs.
        figures: its pictures, each with what is added to the file name, which need not differ;
            none for a plain table.
        also: further experiments whose runs belong to it.
        instead: experiments whose runs show the same numbers, and serve for a model that its own
            experiments were not run with.
    """

    name: str
    place: str
    tables: Callable[[Sequence[Run]], Sequence[ResultTable]]
    figures: Callable[[Sequence[Run]], Pictures] = field(default=no_figures)
    also: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()

    @property
    def experiments(self) -> tuple[str, ...]:
        return (self.name, *self.also)


def by_model(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """Groups that one picture may show, with their model, in order of appearance.

    They differ in data alone: what ran elsewhere, or was predicted, has a picture of its own.
    """
    pictures: dict[tuple[Any, ...], list[Comparison]] = {}
    for comparison in comparisons:
        key = (comparison.model, conditions(comparison.runs[0]), comparison.estimator)
        pictures.setdefault(key, []).append(comparison)
    return [(members[0].model, members) for members in pictures.values()]


def claimed_comparisons(runs: Sequence[Run], paper: str, *exhibits: str) -> list[Comparison]:
    """The comparisons of the runs, with the claims of these tables and figures alone."""
    claims = [c for c in load_claims() if c.paper == paper and c.exhibit in exhibits]
    return sorted(make_comparisons(runs, claims=claims), key=lambda found: natural(found.model))


def label_column(entry: ComparedLabel) -> str:
    """A column of a table."""
    return entry.label


def knob_column(name: str) -> Callable[[ComparedLabel], str]:
    """A column of a table: the value of a knob, – for a method that has no such knob."""

    def value_of(entry: ComparedLabel) -> str:
        value = entry.knobs.get(name)
        return ABSENT if value is None else str(value)

    return value_of


def settings_tables(
    title: str,
    columns: Columns,
    paper: str,
    *exhibits: str,
    text: str = "",
) -> Callable[[Sequence[Run]], list[ResultTable]]:
    """The tables of a reproduction that is a row per setting, as :func:`settings_table` has it."""
    return lambda runs: [
        settings_table(title, claimed_comparisons(runs, paper, *exhibits), columns, text)
    ]


def data_set_figures(place: str, paper: str, *exhibits: str) -> Callable[[Sequence[Run]], Pictures]:
    """Figures of speedups by data set, one per model."""

    def figures(runs: Sequence[Run]) -> Pictures:
        for model, members in by_model(claimed_comparisons(runs, paper, *exhibits)):
            ticks = [
                f"{display_name(g.dataset)}\nn = {case_words(g.entries[0].overall)}"
                for g in members
            ]
            unit = speedup_words(members[0].timing)
            panel = Panel("", "", unit, speedups(members), ticks, reference=(1.0, PLAIN))
            text = captions(members, claimed_words(members, "speedup"))
            yield model, bars([panel], after(place, display_name(model)), text)

    return figures


def along(comparison: Comparison, knob: str) -> list[tuple[int, ComparedLabel]]:
    """The entries that have a knob by its value, those of one value by their folder."""
    found = [
        (int(entry.knobs[knob]), entry)
        for entry in comparison.drafting
        if entry.knobs.get(knob) is not None
    ]
    return sorted(found, key=lambda item: (item[0], str(item[1].run.path)))


def task_panel(comparison: Comparison, key: str) -> Panel:
    """Bars of every label by task, the whole run last; of ``speedup`` or ``mat``."""
    tasks = [*(comparison.tasks if len(comparison.tasks) > 1 else []), OVERALL]
    series = [
        Series(
            figure_name(comparison, entry),
            entry.method,
            [Point.at(x, entry.measured(key, task)) for x, task in enumerate(tasks)],
            claimed=[p for x, task in enumerate(tasks) for p in claimed_point(x, entry, key, task)],
        )
        for entry in comparison.drafting
        if number(entry.overall, key) is not None
    ]
    ticks = [task_label(comparison, task) for task in tasks]
    if key == "mat":  # a pass always yields one token: what counts is the part above
        return Panel("", "", MAT, series, ticks, bottom=1.0)
    unit = speedup_words(comparison.timing)
    return Panel("", "", unit, series, ticks, reference=(1.0, PLAIN))


def after(place: str, where: str) -> str:
    """The title of a figure that is made after a paper's, but of runs of one's own."""
    return f"After {place} ({where})"


def task_figure(comparison: Comparison, place: str) -> Drawing:
    """MAT and speedup by task, with the claims."""
    panels = [task_panel(comparison, "mat"), task_panel(comparison, "speedup")]
    text = captions([comparison], claimed_words([comparison], "mat", "speedup"))
    return bars(panels, after(place, comparison_title(comparison)), text)


def task_label(comparison: Comparison, task: str) -> str:
    """A task's name in a figure, with the number of its cases."""
    counts = {case_words(entry.rows[task]) for entry in comparison.entries if task in entry.rows}
    words = display_name(task).replace("_", " ")
    return f"{words}\nn = {min(counts)}" if len(counts) == 1 else words


def heatmap_pictures(
    comparisons: Sequence[Comparison],
    knobs: tuple[str, str],
    key: str,
    place: str,
    text: str,
    names: Mapping[str, str],
) -> Pictures:
    """One figure per model; of each data set a heatmap per method and other setting."""
    for model, members in by_model(comparisons):
        found = [(each, sweep) for each in members for sweep in sweeps(each, *knobs)]
        entries = [entry for _, sweep in found for entry in sweep.entries.values()]
        claimed = claimed_in_cells(entries, key, *knobs)
        timed = key == "speedup"
        words = captions(members, text, claimed, speedup=timed, times=timed)
        where = comparison_title(members[0]) if len(members) == 1 else display_name(model)
        figure = sweep_heatmaps(found, knobs, key, after(place, where), words, names)
        if figure is not None:
            yield model, figure


def captions(
    comparisons: Iterable[Comparison], *before: str, speedup: bool = True, times: bool = True
) -> str:
    """What stands below a figure: a few words of its own, then each comparison's conditions."""
    return "\n".join([*filter(None, before), *captions_once(comparisons, speedup, times)])


def drawn_claim(entry: ComparedLabel, key: str) -> Claim | None:
    """The entry's claim where its ``mat`` or ``speedup`` may stand on the entry's bar.

    It is about this model and hardware, the bar was measured, and a speed is the ratio that the
    bar shows: by the same formula over the same engine's plain decoding.
    """
    claim, run = entry.claim, entry.run
    if claim is None or claim.model != run.model or run.timing != "measured":
        return None
    if key == "speedup":
        plain = baseline_context(run.manifest).plain.get(claim.counting.baseline)
        if (plain, claim.counting.speed) != (run.baseline, entry.overall["estimator"]):
            return None
    return claim if claim.same_hardware(run.gpus) else None


def claimed_words(comparisons: Iterable[Comparison], *metrics: str) -> str:
    """Whose claims the hollow markers are, and the list of those that are drawn on no bar."""
    drawn: dict[str, list[str]] = {}
    listed: dict[str, list[str]] = {}
    for entry in (entry for comparison in comparisons for entry in comparison.drafting):
        claim = entry.claim
        if claim is None:
            continue
        models = f"{claim.model} with {claim.draft}" if claim.draft else claim.model
        source = f"{models}, {claim.hardware} ({claim.title.partition(':')[0]}, {claim.source})"
        if any(claim.values.get(key) and drawn_claim(entry, key) for key in metrics):
            counted = f"{source}, {claim.counting.words(claim.method)}"
            drawn.setdefault(counted, []).append(entry.label)
        numbers = [
            " ".join(filter(None, [_WORDS[key], claim.qualifier, f"{claim.value(key):.2f}"]))
            for key in metrics
            if claim.value(key) is not None and not drawn_claim(entry, key)
        ]
        if numbers:
            listed.setdefault(source, []).append(f"{entry.label} {' and '.join(numbers)}")
    heads = {
        "Hollow markers: claimed for": drawn,
        "Claimed for other models, hardware or ways of counting, so not drawn:": listed,
    }
    return "\n".join(
        f"{head} {'; '.join(f'{of}: {_once(words)}' for of, words in found.items())}."
        for head, found in heads.items()
        if found
    )


_WORDS = {"mat": "MAT", "speedup": "speedup"}


def _once(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def claimed_in_cells(entries: Iterable[ComparedLabel], metric: str, *knobs: str) -> str:
    """What is claimed for cells of a heatmap, in words; "" where nothing is."""
    words = []
    for entry in entries:
        value = entry.claim.value(metric) if entry.claim else None
        if entry.claim is None or value is None:
            continue
        cell = ", ".join(str(entry.knobs[knob]) for knob in knobs)
        where = f"{entry.claim.model}, {entry.claim.dataset}, {entry.claim.hardware}"
        words.append(f"{value:g} at ({cell}) for {where}")
    return f"Claimed: {'; '.join(dict.fromkeys(words))}." if words else ""


_BOUND_OF = {"up to": "upper", "less than": "upper", "more than": "lower"}


def claimed_point(x: float, entry: ComparedLabel, key: str, task: str = OVERALL) -> list[Point]:
    """What is claimed for the entry, at a place; empty where nothing may stand there."""
    claim = drawn_claim(entry, key)
    value = claim.value(key, task) if claim else None
    if claim is None or value is None:
        return []
    return [Point(x, value, bound=_BOUND_OF.get(claim.qualifier or "", ""))]


def speedups(comparisons: Sequence[Comparison]) -> list[Series]:
    """Speedup of each label that drafts, a point for each comparison that has it.

    A label that several runs of a comparison have is one for each of them.
    """
    found = [{figure_name(c, entry): entry for entry in c.drafting} for c in comparisons]
    methods = {label: e.method for own in found for label, e in own.items()}
    places = list(enumerate(found))
    return [
        Series(
            label,
            method,
            [Point.at(x, own[label].measured("speedup")) for x, own in places if label in own],
            claimed=[
                p
                for x, own in places
                if label in own
                for p in claimed_point(x, own[label], "speedup")
            ],
        )
        for label, method in methods.items()
    ]
