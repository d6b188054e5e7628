"""SSD, "Spacelike": speed over the stream of requests, and lines over the size of the store."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.papers.claimed import metric_panel
from analysis.papers.reproduction import STORES, along, lines, points, rows
from analysis.plots.charts import Panel, Point, Series
from analysis.plots.layout import shown
from analysis.plots.sweeps import figure_name
from analysis.runs.acceptance import stream_parts
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.estimates import mat, tokens_per_s
from specbench.results.estimate import Cell, Estimate
from specbench.results.statistics.aggregate import timed_turns

_PARTS = 5  # parts of the stream; its interval needs several requests in each


def _over_stream(entry: ComparedLabel, key: str) -> list[tuple[float, int, Estimate]]:
    """MAT or tokens/s over the stream: tokens in the store, requests that count, the number."""
    run = entry.run
    parts = stream_parts([r for r in run.records if r.label == entry.label], _PARTS)
    if key == "mat":
        return [(size, len(turns), mat(turns, run.seed)) for size, turns in parts]
    timed = {(record.repeat, record.case_id) for record in timed_turns(run.records, run.labels)}
    parts = [
        (size, [turn for turn in turns if (turn.repeat, turn.case_id) in timed])
        for size, turns in parts
    ]
    return [(size, len(turns), tokens_per_s(turns, run.seed)) for size, turns in parts]


def _stream(comparison: ComparedRuns) -> Iterable[tuple[dict[str, Cell], str]]:
    for entry in comparison.entries:
        both = zip(_over_stream(entry, "mat"), _over_stream(entry, "tokens_per_s"), strict=True)
        for (size, n, accepted), (_, n_timed, speed) in both:
            row: dict[str, Cell] = {
                "run": comparison.title,
                "method": comparison.name_of(entry),
                "tokens of finished requests": f"{size:.0f}",
                "requests": str(n),
                "MAT [95 %]": accepted,
                "timed": str(n_timed),
                "tokens/s [95 %]": speed,
            }
            yield row, ""


def _stream_lines(comparison: ComparedRuns) -> list[list[Panel]]:
    def panel(key: str) -> Panel:
        series = [
            Series(
                figure_name(comparison, entry),
                entry.method,
                [Point.at(size, value) for size, _, value in _over_stream(entry, key)],
            )
            for entry in comparison.entries
        ]
        return metric_panel(key, comparison.timing, series, "tokens of finished requests")

    return [[panel("mat"), panel("tokens_per_s")]]


def _size_lines(comparison: ComparedRuns) -> list[list[Panel]]:
    sizes = {method: along(comparison.drafting, knob) for method, knob in STORES.items()}
    panels = []
    for key in ("mat", "speedup"):
        series = [
            Series(shown(method), method, points(placed, key))
            for method, placed in sizes.items()
            if placed
        ]
        if key == "mat" or any(p.y is not None for line in series for p in line.points):
            panels.append(metric_panel(key, comparison.timing, series, "store (tokens)", log=2))
    return [panels]


stream = rows("SSD over the stream of requests", _stream)
stream_lines = lines(_stream_lines, "SSD, over the stream of requests", by_data=True)
size_lines = lines(_size_lines, "SSD, the size of its store", by_data=True, speedup=True)
