"""Claims in figures: whose may stand on a bar, and the words about the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.plots.charts import Panel, Point, Series
from analysis.plots.pictures import is_hollow
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import by_speedup
from specbench.results.decision import case_words
from specbench.results.names import display_name
from specbench.results.statistics.roofline import baseline_context
from specbench.results.summary_schema import number
from specbench.results.tasks import OVERALL


def task_panel(comparison: ComparedRuns, key: str) -> Panel:
    """Draw bars of ``speedup`` or ``mat`` by task, the fastest label first, the whole run last.

    Hollow speedups where no difference from plain decoding is shown over the whole run.
    """
    tasks = [*(comparison.tasks if len(comparison.tasks) > 1 else []), OVERALL]
    series = []
    for entry in by_speedup(comparison) or comparison.ranked:
        if number(entry.overall, key) is None:
            continue
        hollow = key == "speedup" and is_hollow(comparison, entry)
        points = [Point.at(x, entry.measured(key, t), hollow) for x, t in enumerate(tasks)]
        claimed = [p for x, task in enumerate(tasks) for p in claimed_point(x, entry, key, task)]
        series.append(Series(comparison.name_of(entry), entry.method, points, claimed=claimed))
    ticks = [task_label(comparison, task) for task in tasks]
    return Panel.of(key, comparison.timing, series, ticks=ticks)


def task_label(comparison: ComparedRuns, task: str) -> str:
    """A task's name in a figure, with the number of its cases."""
    counts = {case_words(entry.rows[task]) for entry in comparison.entries if task in entry.rows}
    words = display_name(task).replace("_", " ")
    return f"{words}\nn = {min(counts)}" if len(counts) == 1 else words


def _drawn_claim(entry: ComparedLabel, key: str) -> Claim | None:
    """The entry's claim where its ``mat`` or ``speedup`` may stand on the entry's bar.

    It is a number and no bound, about this model and hardware, the bar was measured, and a speed is
    the ratio that the bar shows: by the same formula over the same engine's plain decoding.
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


def claimed_words(comparisons: Iterable[ComparedRuns], *metrics: str) -> str:
    """Return for which models and hardware the diamonds were claimed; "" without any."""
    entries = [entry for comparison in comparisons for entry in comparison.ranked]
    drawn = [
        entry.claim
        for entry in entries
        if entry.claim
        and any(_drawn_claim(entry, key) and entry.claim.values.get(key) for key in metrics)
    ]
    return claimed_for(drawn)


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
    shown = [[*(entry.claim for entry in c.entries), *c.not_run] for c in comparisons]
    return [claim for claims in shown for claim in claims if claim]


def claimed_point(x: float, entry: ComparedLabel, key: str, task: str = OVERALL) -> list[Point]:
    """Return what is claimed for the entry, at a place; empty where nothing may stand there."""
    claim = _drawn_claim(entry, key)
    value = claim.value(key, task) if claim else None
    return [] if value is None else [Point(x, value)]


def speedups(comparisons: Sequence[ComparedRuns]) -> list[Series]:
    """Draw the speedup of each label that may have a standing, a point a comparison."""
    lines: dict[str, tuple[str, list[Point], list[Point]]] = {}
    for x, comparison in enumerate(comparisons):
        for entry in comparison.ranked:
            name = comparison.name_of(entry)
            _, points, claimed = lines.setdefault(name, (entry.method, [], []))
            points.append(Point.at(x, entry.measured("speedup")))
            claimed += claimed_point(x, entry, "speedup")
    return [
        Series(name, method, points, claimed=claimed)
        for name, (method, points, claimed) in lines.items()
    ]
