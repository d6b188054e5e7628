"""Tokens/s and waiting times of servers by the number of questions that they are asked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.runs.comparisons import ComparedRuns, conditions
from analysis.runs.load import Run
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.statistics.latency import LATENCIES, limits_of
from specbench.results.statistics.served import SERVED_TEXT, served_labels
from specbench.results.summary_schema import ServedLabel, number
from specbench.results.wording import build_words, engine_words

# What is drawn: a row of rates, and one of what 95 of 100 requests stay within.
_RATES = {
    "system_tokens_per_s": "system, tokens/s",
    "user_tokens_per_s": "one user, tokens/s",
    "good_requests_per_s": "requests/s within limits",
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
        for one in served_labels(run.records, run.labels, limits_of(run.manifest)):
            found.setdefault(one["label"], []).append(one)
    limited = any(one["limits"] for rows in found.values() for one in rows)
    rates = [
        _panel(found, words, partial(number, key=key))
        for key, words in _RATES.items()
        if limited or key != "good_requests_per_s"
    ]
    waits = [
        _panel(found, f"{words} (P95)", partial(_p95_ms, name=name))
        for name, words in LATENCIES.items()
    ]
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
        _where_it_pays(found),
        f"Equal to plain decoding at the same load: {equal}." if equal else "",
        f"{noisy} of {total} turns were disturbed by other programs." if noisy else "",
    ]
    return curves([rates, waits], title, " ".join(filter(None, text)))


def _panel(
    found: Mapping[str, Sequence[ServedLabel]],
    words: str,
    value: Callable[[ServedLabel], float | None],
) -> Panel:
    series = [
        Series(shown(label), label, [Point(row["concurrency"], value(row)) for row in rows])
        for label, rows in found.items()
    ]
    return Panel("", "questions asked at once", words, series, log=2.0, bottom=0.0)


def _p95_ms(row: ServedLabel, name: str) -> float | None:
    seconds = row["latency"].get(name, {}).get("p95")
    return None if seconds is None else 1e3 * seconds


def _where_it_pays(found: Mapping[str, Sequence[ServedLabel]]) -> str:
    """By label the system's tokens/s over plain decoding's at each load, in a sentence."""
    plain = {row["concurrency"]: row["system_tokens_per_s"] for row in found.get(BASELINE, ())}
    said = []
    for label, rows in found.items():
        over = {
            row["concurrency"]: row["system_tokens_per_s"] / base
            for row in rows
            if (base := plain.get(row["concurrency"])) and row["system_tokens_per_s"]
        }
        if label == BASELINE or not over:
            continue
        pays = [str(users) for users, ratio in over.items() if ratio > 1]
        each = ", ".join(f"{ratio:.2f} at {users}" for users, ratio in over.items())
        where = f"faster at {', '.join(pays)}" if pays else "faster at no load"
        said.append(f"{label} over plain decoding, all users together: {each} ({where}).")
    return " ".join(said)
