"""Speedup by how many texts are decoded, or questions asked of a server, at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing
from analysis.plots.style import PLAIN
from analysis.plots.sweeps import caption_of
from analysis.runs.comparisons import ComparedRuns, conditions
from analysis.runs.leaders import over_plain
from specbench.results.estimate import Estimate
from specbench.results.statistics.served import system_speedups


def by_load(comparisons: Sequence[ComparedRuns]) -> Iterator[list[ComparedRuns]]:
    """Those that differ in their load alone, the smallest load first."""
    groups: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        run = comparison.runs[0]
        _batch, *alike, _concurrency = conditions(run)
        key = (run.model, run.dataset, comparison.estimator, *alike)
        groups.setdefault(key, []).append(comparison)
    for group in groups.values():
        if len({comparison.load for comparison in group}) > 1:
            yield sorted(group, key=lambda comparison: comparison.load)


def load_picture(group: Sequence[ComparedRuns]) -> Drawing:
    """A line for each label of comparisons as `by_load` gives them.

    The title says at which loads a label is shown faster than plain decoding.
    """
    points: dict[tuple[str, str], list[Point]] = {}
    pays: dict[int, bool] = {}
    for comparison in group:
        for label, method, speedup, verdict in _speedups(comparison):
            point = Point.at(comparison.load, speedup, verdict not in ("faster", "slower"))
            points.setdefault((label, method), []).append(point)
            pays[comparison.load] = pays.get(comparison.load, False) or verdict == "faster"
    series = [Series(label, method, own) for (label, method), own in points.items()]
    served = group[0].runs[0].records[0].served
    across = "questions asked at once" if served else "texts decoded at once"
    unit = f"speedup of all {'users' if served else 'texts'} together"
    panel = Panel("", across, unit, series, reference=(1.0, PLAIN), log=2.0)
    return curves([[panel]], _title(pays, across), caption_of(group[0]))


def _title(pays: dict[int, bool], across: str) -> str:
    faster = ", ".join(str(load) for load, found in pays.items() if found)
    others = ", ".join(str(load) for load, found in pays.items() if not found)
    shown = f"drafting is shown to pay at {faster}" if faster else "drafting is not shown to pay"
    left = f"{', not' if faster else ''} at {others}" if others else ""
    return f"{across.capitalize()}: {shown}{left}"


def _speedups(comparison: ComparedRuns) -> Iterator[tuple[str, str, Estimate, str]]:
    """Label, method, speedup of all texts together, verdict against plain decoding.

    Of fewer batches than an interval needs there is no number.
    """
    over = over_plain(comparison)
    # Of a server what one user gains, others may lose.
    served = {
        run.path: system_speedups(run.records, run.labels, run.baseline, run.seed)
        for run in comparison.runs
        if any(record.served for record in run.records)
    }
    for entry in comparison.ranked:
        run = entry.run
        speedup, verdict = entry.measured("speedup"), over.get((run.path, entry.label), "too few")
        if run.path in served:
            speedup, verdict = served[run.path].get(entry.label, (Estimate(None), "too few"))
        elif speedup.interval is None:
            speedup = Estimate(None)
        yield entry.label, entry.method, speedup, verdict
