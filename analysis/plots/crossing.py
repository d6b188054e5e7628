"""Speedup by the number of texts that are decoded in lock-step: where does drafting stop paying?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.runs.comparisons import ComparedRuns
from analysis.runs.crossings import Crossing
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name

_TEXT = (
    "Speedup of all texts together over ar at the same batch. Texts are decoded in lock-step; one "
    "that ended is not replaced. Bars: 95 %, over prompts at batch 1 and over groups of prompts "
    "above."
)


def crossing_pictures(
    swept: Sequence[tuple[list[ComparedRuns], dict[str, Crossing]]],
) -> Iterator[tuple[str, Drawing]]:
    """A figure for runs that differ in their batch alone (`over_batches`), with its file's name.

    Those whose times are predicted stand in a panel of their own beside the measured ones.
    """
    alike: dict[tuple[object, ...], list[tuple[ComparedRuns, Mapping[str, Crossing]]]] = {}
    for found, labels in swept:
        run = found[0].runs[0]
        key = (run.model, run.dataset, run.hardware, run.dtype, run.temperature, run.max_new_tokens)
        alike.setdefault(key, []).append((found[0], labels))
    for parts in alike.values():
        parts.sort(key=lambda part: part[0].timing)  # measured before predicted
        yield "batch_crossing", _picture(parts)


def _picture(parts: Sequence[tuple[ComparedRuns, Mapping[str, Crossing]]]) -> Drawing:
    first = parts[0][0]
    panels, text = [], [f"{first.runs[0].hardware}.", _TEXT]
    for comparison, labels in parts:
        series = [
            Series(
                shown(label),
                crossing.entries[0].method,
                [Point.at(e.run.batch, e.measured("speedup")) for e in crossing.entries],
            )
            for label, crossing in labels.items()
        ]
        panels.append(
            Panel(
                comparison.timing if len(parts) > 1 else "",
                "texts decoded at once",
                "speedup over ar",
                series,
                reference=(1.0, shown(BASELINE)),
                log=2.0,
                bottom=0.0,
            )
        )
        which = "Breaks" if comparison.timing == "measured" else "Predicted to break"
        words = "; ".join(f"{label} {crossing}" for label, crossing in labels.items())
        text.append(f"{which} even at batch: {words}.")
    title = f"Batches: {display_name(first.model)} on {display_name(first.dataset)}"
    return curves([panels], title, " ".join(text))
