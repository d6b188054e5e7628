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
from specbench.results.summary_schema import SummaryRow, number
from specbench.results.tasks import OVERALL


def bar_series(places: Sequence[tuple[ComparedRuns, str]], key: str) -> list[Series]:
    """Draw ``speedup`` or ``mat`` of each label, the fastest first, with what is claimed for it.

    Hollow speedups where no difference from plain decoding is shown over the whole run.

    Args:
        places: comparison and task by place on the axis.
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
    ticks = [place_name(task, of_task) for task, of_task in zip(tasks, rows, strict=True)]
    series = bar_series([(comparison, task) for task in tasks], key)
    return Panel.of(key, comparison.timing, series, ticks=ticks, title=title)


def place_name(name: str, rows: Iterable[SummaryRow]) -> str:
    """Return a task's or data set's name below its bars, with the number of its cases."""
    counts = {case_words(row) for row in rows}
    words = display_name(name).replace("_", " ")
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
    drawn = [(_drawn_claim(entry, key), key) for entry in entries for key in metrics]
    return claimed_for(claim for claim, key in drawn if claim and claim.values.get(key))


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
