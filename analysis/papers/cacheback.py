"""Cacheback: the bars of Figure 3, by model and by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.papers.claimed import claimed_words, speedups, task_panel
from analysis.papers.reproduction import Pictures, Reproduction, after, captions
from analysis.plots.charts import Panel, bars
from analysis.plots.style import PLAIN, speedup_words
from analysis.plots.sweeps import comparison_title
from analysis.runs.load import Run
from specbench.results.names import display_name


def figure3_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """One picture of all models."""
    comparisons = of.comparisons(runs)
    models = [display_name(comparison.model) for comparison in comparisons]
    unit = speedup_words(comparisons[0].timing)
    panels = [Panel("by model", "", unit, speedups(comparisons), models, reference=(1.0, PLAIN))]
    for comparison in comparisons:
        title = f"by task, {comparison_title(comparison)}"
        panels.append(replace(task_panel(comparison, "speedup"), title=title))
    text = captions(comparisons, claimed_words(comparisons, "speedup"))
    title = after(of.place, "by model and by task")
    yield "", bars(panels if len(models) > 1 else panels[1:], title, text)
