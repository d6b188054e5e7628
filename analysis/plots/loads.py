"""Speedup by how many texts are decoded, or questions asked of a server, at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions
from analysis.runs.leaders import verdict_of
from analysis.runs.load import Run
from specbench.results.estimate import FEWEST, Estimate
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.statistics.served import system_speedups

_TEXT = (
    "Speedup of all texts together over ar at the same load, of whole batches. Bars: 95 %, over "
    f"batches; none of fewer than {FEWEST}."
)
_SERVED_TEXT = (
    "Speedup of all users together over ar at the same load: new tokens of whole batches over "
    f"their time, the prompts' included. Bars: 95 %, over batches; none of fewer than {FEWEST}."
)
_ALONE_TEXT = "The sentence at 1 is about tokens/s after the first token."


def by_load(comparisons: Sequence[ComparedRuns]) -> Iterator[list[ComparedRuns]]:
    """Those that differ in their load alone, the smallest load first."""
    groups: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        run = comparison.runs[0]
        _batch, *alike, _concurrency = conditions(run)
        key = (run.model, run.dataset, comparison.estimator, *alike)
        groups.setdefault(key, []).append(comparison)
    for found in groups.values():
        if len({comparison.load for comparison in found}) > 1:
            yield sorted(found, key=lambda comparison: comparison.load)


def load_picture(found: Sequence[ComparedRuns]) -> Drawing:
    """A line for each label of comparisons as `by_load` gives them."""
    points: dict[tuple[str, str], list[Point]] = {}
    for comparison in found:
        for entry in comparison.ranked:
            point = Point.at(comparison.load, _speedup(entry))
            points.setdefault((entry.label, entry.method), []).append(point)
    series = [Series(shown(label), method, own) for (label, method), own in points.items()]
    first = found[0].runs[0]
    served = any(_served(comparison.runs[0]) for comparison in found)
    text = _SERVED_TEXT if served else _TEXT
    if served and found[0].load == 1:
        text = f"{text} {_ALONE_TEXT}"
    across = "questions asked at once" if served else "texts decoded at once"
    reference = (1.0, shown(BASELINE))
    panel = Panel("", across, "speedup over ar", series, reference=reference, log=2.0, bottom=0.0)
    said = [f"At {comparison.load}: {verdict_of(comparison)}" for comparison in found]
    title = f"At once: {display_name(first.model)} on {display_name(first.dataset)}"
    return curves([[panel]], title, " ".join([f"{first.engine}, {first.hardware}.", text, *said]))


def _served(run: Run) -> bool:
    return any(record.served for record in run.records)


def _speedup(entry: ComparedLabel) -> Estimate:
    """Of all texts together; of fewer batches than an interval needs there is none."""
    run = entry.run
    if _served(run):  # what one user gains, others may lose; at 1 the same, for one line
        found = system_speedups(run.records, run.labels, run.baseline, run.seed)
        return found.get(entry.label, Estimate(None))
    speedup = entry.measured("speedup")
    return speedup if speedup.interval else Estimate(None)
