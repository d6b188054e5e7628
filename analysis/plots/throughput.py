"""Tokens/s of servers by the number of questions that they are asked at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.runs.comparisons import ComparedRuns, conditions
from analysis.runs.load import Run
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.statistics.served import SERVED_TEXT, served_labels
from specbench.results.summary_schema import ServedLabel, number
from specbench.results.wording import build_words, engine_words

# What is drawn, by its key.
_NUMBERS = {
    "system_tokens_per_s": "system, tokens/s",
    "user_tokens_per_s": "one user, tokens/s",
    "ttft_s": "first token, s",
}


def throughput_pictures(comparisons: Sequence[ComparedRuns]) -> Iterator[tuple[str, Drawing]]:
    """A figure for each server whose load was varied, with what is added to its file's name."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for comparison in comparisons:
        for run in comparison.runs:
            # All conditions but the load, which is the last.
            key = (run.model, run.dataset, comparison.estimator, *conditions(run)[:-1])
            groups.setdefault(key, []).append(run)
    for runs in groups.values():
        if len({run.concurrency for run in runs}) > 1:
            yield "throughput", _picture(sorted(runs, key=lambda run: run.concurrency))


def _picture(runs: Sequence[Run]) -> Drawing:
    found: dict[str, list[ServedLabel]] = {}
    for run in runs:
        for one in served_labels(run.records, run.labels):
            found.setdefault(one["label"], []).append(one)
    panels = []
    for key, words in _NUMBERS.items():
        series = [
            Series(shown(label), label, [Point(r["concurrency"], number(r, key)) for r in rows])
            for label, rows in found.items()
        ]
        panels.append(Panel("", "questions asked at once", words, series, log=2.0, bottom=0.0))
    equal = ", ".join(
        f"{label} {one['equal']} of {one['compared']} at {one['concurrency']}"
        for label, rows in found.items()
        if label != BASELINE
        for one in rows
        if one["compared"]
    )
    first = runs[0]
    title = f"Load: {display_name(first.model)} on {display_name(first.dataset)}"
    said = engine_words(record for run in runs for record in run.records)
    noisy = sum(r.status == "disturbed" for run in runs for r in run.records)
    total = sum(r.status != "failed" for run in runs for r in run.records)
    text = [
        f"{said} {build_words(first.manifest)} {first.hardware}. {SERVED_TEXT}",
        f"Equal to plain decoding at the same load: {equal}." if equal else "",
        f"{noisy} of {total} turns were disturbed by other programs." if noisy else "",
    ]
    return curves([panels], title, " ".join(filter(None, text)))
