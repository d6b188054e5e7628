"""SSD, "Spacelike" (a blog post): speed over the stream, against store size, and beside REST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    along,
    captions,
    claimed_comparisons,
    knob_column,
    label_column,
    settings_tables,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.sweeps import comparison_title, figure_name
from analysis.plots.units import MAT, PLAIN, speed_words, speedup_words
from analysis.runs.acceptance import stream_parts
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel
from analysis.runs.estimates import mat, tokens_per_s
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import settings_table
from analysis.tabular.table import ResultTable
from specbench.results.estimate import Cell, Estimate
from specbench.results.names import display_name
from specbench.results.statistics.aggregate import timed_turns

PAPER = "ssd"
_WARM = "cache of megabytes"  # the post's words for a store that has filled
_PARTS = 5  # parts of the stream; its interval needs several requests in each
_STREAM_TEXT = (
    "The requests of the stream in {n} equal parts; a point stands at the part's middle, in tokens "
    "of finished requests (the store of SSD; REST's does not change). The post: about 60 tokens/s "
    "without, 100 to 120 with a store of megabytes, up to 200 for single requests (Llama-7B, a "
    "consumer GPU, workload not stated; its figure has no numbers)."
)
_SIZE_TEXT = (
    "Room of SSD's store in tokens, of which older ones are overwritten; tokens of REST's. The "
    "post speaks of megabytes and has no numbers by size; its picture of REST is REST's own."
)
_STORES = {
    "ssd": "buffer_tokens",
    "rest": "store_tokens",
}  # by method, the knob of the store's size


def _over_stream(run: Run, of_label: str, kind: str) -> list[tuple[float, int, Estimate]]:
    """MAT or tokens/s over the stream: tokens in the store, requests that count, the number."""
    parts = stream_parts([r for r in run.records if r.label == of_label], _PARTS)
    if kind == "mat":
        return [(size, len(turns), mat(turns, run.seed)) for size, turns in parts]
    quiet = {(record.repeat, record.case_id) for record in timed_turns(run.records, run.labels)}
    kept = [
        (size, [turn for turn in turns if (turn.repeat, turn.case_id) in quiet])
        for size, turns in parts
    ]
    return [(size, len(turns), tokens_per_s(turns, run.seed)) for size, turns in kept]


def _post() -> list[Claim]:
    found = [c for c in load_claims() if (c.paper, c.exhibit) == (PAPER, "results")]
    return [c for c in found if c.value("tokens_per_s") and c.setting in (None, _WARM)]


def _stream(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "results")
    rows: list[dict[str, Cell]] = []
    for comparison in comparisons:
        for entry in comparison.entries:
            mats = _over_stream(entry.run, entry.label, "mat")
            speeds = _over_stream(entry.run, entry.label, "tokens_per_s")
            for (size, n, accepted), (_, n_timed, speed) in zip(mats, speeds, strict=True):
                rows.append(
                    {
                        "run": comparison.title,
                        "method": comparison.name_of(entry),
                        "tokens of finished requests": f"{size:.0f}",
                        "requests": str(n),
                        "MAT [95 %]": accepted,
                        "timed": str(n_timed),
                        "tokens/s [95 %]": speed,
                    }
                )
    text = captions(comparisons, _STREAM_TEXT.format(n=_PARTS), speedup=False)
    return [
        settings_table(
            "SSD against REST, over the whole stream",
            comparisons,
            {"method": label_column},
            beside=_post(),
        ),
        ResultTable.of("SSD over the stream of requests", text, rows),
    ]


def _stream_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "results"):
        panels = [
            Panel(
                "", "tokens of finished requests", words,
                [
                    Series(
                        figure_name(comparison, entry),
                        entry.method,
                        [
                            Point.at(size, value)
                            for size, _, value in _over_stream(entry.run, entry.label, kind)
                        ],
                    )
                    for entry in comparison.entries
                ],
                bottom=1.0 if kind == "mat" else None,
            )
            for kind, words in (("mat", MAT), ("tokens_per_s", speed_words(comparison.timing)))
        ]  # fmt: skip
        figure = curves(
            [panels],
            after("SSD, over the stream of requests", comparison_title(comparison)),
            captions([comparison], _STREAM_TEXT.format(n=_PARTS), speedup=False),
        )
        yield f"{comparison.model}_{comparison.dataset}", figure


def _store(entry: ComparedLabel) -> str:
    return knob_column(_STORES.get(entry.method, "buffer_tokens"))(entry)


_store_size = settings_tables(
    "SSD against the size of its store",
    {"method": label_column, "store (tokens)": _store},
    PAPER,
    "results",
    text=_SIZE_TEXT,
)


def _store_size_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "results"):
        sizes = {method: along(comparison, knob) for method, knob in _STORES.items()}
        mats = {
            method: [Point.at(size, entry.measured("mat")) for size, entry in found]
            for method, found in sizes.items()
        }
        ratios = {
            method: [Point.at(size, entry.measured("speedup")) for size, entry in found]
            for method, found in sizes.items()
        }
        panels = [_size_panel(mats, MAT)]
        if any(p.y is not None for points in ratios.values() for p in points):
            panels.append(_size_panel(ratios, speedup_words(comparison.timing)))
        figure = curves(
            [panels],
            after("SSD, the size of its store", comparison_title(comparison)),
            captions([comparison], _SIZE_TEXT),
        )
        yield f"{comparison.model}_{comparison.dataset}", figure


def _size_panel(points: Mapping[str, Sequence[Point]], ylabel: str) -> Panel:
    # A pass always yields one token.
    bottom, line = (1.0, None) if ylabel == MAT else (None, (1.0, PLAIN))
    drawn = [Series(display_name(m), m, found) for m, found in points.items() if found]
    return Panel("", "store (tokens)", ylabel, drawn, log=2, bottom=bottom, reference=line)


REPRODUCTIONS = (
    Reproduction("ssd_stream", "SSD, section Results; SSD against REST", _stream, _stream_figure),
    Reproduction("ssd_store_size", "SSD against store size", _store_size, _store_size_figure),
)
