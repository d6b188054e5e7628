"""Claims in figures: whose may stand on a bar, and the words about the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from analysis.plots.charts import Panel, Point, Series
from analysis.plots.style import PLAIN, unit_of
from analysis.plots.sweeps import figure_name
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import by_speedup, over_plain
from specbench.results.decision import case_words
from specbench.results.names import display_name
from specbench.results.statistics.roofline import baseline_context
from specbench.results.summary_schema import number
from specbench.results.tasks import OVERALL

_BOUND_OF = {"up to": "upper", "less than": "upper", "more than": "lower"}


def task_panel(comparison: ComparedRuns, key: str) -> Panel:
    """Draw bars of ``speedup`` or ``mat`` by task, the whole run last.

    Of the labels alone that may have a standing, the fastest first; hollow speedups where no
    difference from plain decoding is shown over the whole run.
    """
    over = over_plain(comparison) if key == "speedup" else {}
    tasks = [*(comparison.tasks if len(comparison.tasks) > 1 else []), OVERALL]
    series = [
        Series(
            figure_name(comparison, entry),
            entry.method,
            [
                Point.at(
                    x,
                    entry.measured(key, task),
                    over.get((entry.run.path, entry.label), "faster") not in ("faster", "slower"),
                )
                for x, task in enumerate(tasks)
            ],
            claimed=[p for x, task in enumerate(tasks) for p in claimed_point(x, entry, key, task)],
        )
        for entry in by_speedup(comparison) or comparison.ranked
        if number(entry.overall, key) is not None
    ]
    ticks = [task_label(comparison, task) for task in tasks]
    return metric_panel(key, comparison.timing, series, ticks=ticks)


def metric_panel(
    key: str,
    timing: str,
    series: Sequence[Series],
    xlabel: str = "",
    title: str = "",
    ticks: Sequence[str] | None = None,
    log: float | None = None,
) -> Panel:
    """Make axes of a metric; those of ``speedup`` have the line of plain decoding."""
    # A pass always yields one token: what counts of MAT is the part above.
    bottom, line = 1.0 if key == "mat" else None, (1.0, PLAIN) if key == "speedup" else None
    top = {"draft_share": 1.0, "hit_rate": 1.02}.get(key)
    unit = unit_of(key, timing)
    return Panel(title, xlabel, unit, series, ticks, line, log, bottom=bottom, top=top)


def task_label(comparison: ComparedRuns, task: str) -> str:
    """A task's name in a figure, with the number of its cases."""
    counts = {case_words(entry.rows[task]) for entry in comparison.entries if task in entry.rows}
    words = display_name(task).replace("_", " ")
    return f"{words}\nn = {min(counts)}" if len(counts) == 1 else words


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


def claimed_words(comparisons: Iterable[ComparedRuns], *metrics: str) -> str:
    """Return for which models and hardware the diamonds were claimed; "" without any."""
    return claimed_for(
        entry.claim
        for comparison in comparisons
        for entry in comparison.ranked
        if entry.claim
        and any(entry.claim.values.get(key) and drawn_claim(entry, key) for key in metrics)
    )


def claimed_for(claims: Iterable[Claim]) -> str:
    """Return for which models and hardware claims were stated, and by whom; "" without claims."""
    models: dict[str, list[str]] = {}
    for claim in claims:
        place = f"hardware: {claim.hardware} ({claim.title.partition(':')[0]})"
        models.setdefault(place, []).append(display_name(claim.model))
    words = [f"{', '.join(dict.fromkeys(names))}, {place}" for place, names in models.items()]
    return f"Claimed for {'; '.join(words)}." if words else ""


def claims_beside(comparisons: Iterable[ComparedRuns]) -> list[Claim]:
    """Return the claims that a table of these comparisons shows."""
    claims: list[Claim] = []
    for comparison in comparisons:
        claims += [entry.claim for entry in comparison.entries if entry.claim]
        claims += comparison.not_run
    return claims


def claimed_point(x: float, entry: ComparedLabel, key: str, task: str = OVERALL) -> list[Point]:
    """What is claimed for the entry, at a place; empty where nothing may stand there."""
    claim = drawn_claim(entry, key)
    value = claim.value(key, task) if claim else None
    if claim is None or value is None:
        return []
    return [Point(x, value, bound=_BOUND_OF.get(claim.qualifier or "", ""))]


def speedups(comparisons: Sequence[ComparedRuns]) -> list[Series]:
    """Draw the speedup of each label that may have a standing, a point a comparison.

    A label that several runs of a comparison have is one for each of them.
    """
    series: dict[str, Series] = {}
    for x, comparison in enumerate(comparisons):
        for entry in comparison.ranked:
            name = figure_name(comparison, entry)
            line = series.get(name) or Series(name, entry.method, [])
            series[name] = replace(
                line,
                points=[*line.points, Point.at(x, entry.measured("speedup"))],
                claimed=[*line.claimed, *claimed_point(x, entry, "speedup")],
            )
    return list(series.values())
