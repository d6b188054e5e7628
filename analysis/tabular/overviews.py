"""Engines side by side."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.tabular.table import ResultTable
from specbench.results.decision import MAT, SPEEDUP, outputs_cell
from specbench.results.estimate import Cell
from specbench.results.records import OWN_ENGINE
from specbench.results.statistics.latency import limits_of
from specbench.results.statistics.served import load_rows, served_labels

_OWN = "this project"
_ENGINES_TEXT = (
    "Each engine's speedup is over its own plain decoding, and its outputs are compared with its "
    "own. Arithmetic and kernels differ from engine to engine: tokens/s say what a user gets, not "
    "which method is better, and no output of one engine is compared with another's."
)


def engine_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """A row per engine and label; None where all runs are of one engine."""
    shown = [c for c in comparisons if c.timing == "measured"]
    if len({c.runs[0].engine for c in shown}) < 2:
        return None
    # Our own engine's rows first, then by engine and load.
    shown.sort(key=lambda c: (c.runs[0].engine != OWN_ENGINE, c.runs[0].engine, _load(c)))
    rows = [_engine_row(comparison, entry) for comparison in shown for entry in comparison.entries]
    return ResultTable.of(
        "Engines, each over its own plain decoding",
        _ENGINES_TEXT,
        rows,
        short=[name.removesuffix(" [95 %]") if name == MAT else name for name in rows[0]],
    )


_LOAD_TEXT = (
    "tokens/s: of all users together. Change: over the same server without a draft; its interval "
    "holds for all drafts together. P95: seconds until a whole answer."
)


def load_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """A row per load and way of drafting: whether to switch it on; None without a server."""
    rows = [
        row
        for comparison in sorted(comparisons, key=_load)
        for run in comparison.runs
        for row in load_rows(
            served_labels(run.records, run.labels, limits_of(run.manifest), run.baseline, run.seed)
        )
    ]
    if not rows:
        return None
    return ResultTable.of("At which load to draft", _LOAD_TEXT, rows, short=[*rows[0]])


def _load(comparison: ComparedRuns) -> int:
    return comparison.runs[0].concurrency


def _engine_row(comparison: ComparedRuns, entry: ComparedLabel) -> dict[str, Cell]:
    run = entry.run
    return {
        "engine": _OWN if run.engine == OWN_ENGINE else run.engine,
        "numerics": run.dtype,
        "model and data": comparison.title,
        "at once": str(_load(comparison)),
        "method": entry.label if entry.label == run.baseline else comparison.name_of(entry),
        MAT: entry.measured("mat"),
        SPEEDUP: entry.measured("speedup"),
        "tokens/s": entry.speed(),
        "outputs": outputs_cell(entry.overall),
    }
