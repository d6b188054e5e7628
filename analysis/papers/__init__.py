"""The tables and figures of the papers, made of the runs of ``conf/experiment/<name>.yaml``.

``reproductions.yaml`` has each by its experiment; a few need runs of more than one. What the
kinds of :mod:`analysis.papers.reproduction` cannot make is code, in a module per paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from analysis.papers import card, draft_models, ngrammys, spec_bench, ssd, token_recycling
from analysis.papers.reproduction import (
    FigureKind,
    Reproduction,
    TableKind,
    data_set_bars,
    knob_heatmaps,
    knob_rows,
    model_bars,
    overall_and_by_task,
    settings,
    task_bars,
)
from analysis.runs.comparisons import by_timing
from analysis.runs.load import Run

_FILE = Path(__file__).with_name("reproductions.yaml")
# What is code, by experiment.
_TABLES: Mapping[str, TableKind] = {
    "card_table3": card.table3,
    "draft_models": draft_models.tables,
    "ngrammys_figure1": ngrammys.figure1,
    "ngrammys_figure4": ngrammys.figure4,
    "ngrammys_table1": ngrammys.table1,
    "specbench_board": spec_bench.board,
    "ssd_stream": ssd.stream,
    "token_recycling_figure4": token_recycling.figure4,
}
_FIGURES: Mapping[str, FigureKind] = {
    "card_figure1": card.figure1_lines,
    "card_figure6": card.figure6_lines,
    "ngrammys_figure1": ngrammys.figure1_heatmaps,
    "ngrammys_figure2": ngrammys.figure2_lines,
    "ngrammys_figure4": ngrammys.figure4_bars,
    "specbench_board": spec_bench.board_heatmaps,
    "ssd_store_size": ssd.size_lines,
    "ssd_stream": ssd.stream_lines,
    "token_recycling_figure3": token_recycling.figure3_lines,
    "token_recycling_figure4": token_recycling.figure4_bars,
}
_TABLE_KINDS: Mapping[str, Callable[..., TableKind]] = {
    "by_task": overall_and_by_task,
    "settings": settings,
    "knob_rows": knob_rows,
}
_FIGURE_KINDS: Mapping[str, Callable[..., FigureKind]] = {
    "data_set_bars": data_set_bars,
    "model_bars": model_bars,
    "task_bars": task_bars,
    "heatmaps": knob_heatmaps,
}


def _reproduction(name: str, about: dict[str, Any]) -> Reproduction:
    """One entry of the file: a kind has its arguments, everything else is the reproduction's."""
    tables = [kind(**about.pop(key)) for key, kind in _TABLE_KINDS.items() if key in about]
    figures = [kind(**about.pop(key)) for key, kind in _FIGURE_KINDS.items() if key in about]
    tables += [_TABLES[name]] if name in _TABLES else []
    figures += [_FIGURES[name]] if name in _FIGURES else []
    return Reproduction(name, table_kinds=tables, figure_kinds=figures, **about)


REPRODUCTIONS = tuple(
    _reproduction(name, about)
    for name, about in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
)


def by_reproduction(runs: Sequence[Run]) -> tuple[list[tuple[Reproduction, list[Run]]], list[Run]]:
    """The reproductions that the runs are for, each with its runs; and the other runs.

    A reproduction with measured runs and predicted ones is there once for each.
    """
    made = []
    used: set[str | None] = set()
    for reproduction in REPRODUCTIONS:
        members = [run for run in runs if run.experiment in reproduction.experiments]
        if reproduction.instead:
            models = {run.model for run in members}
            others = [run for run in runs if run.experiment in reproduction.instead]
            members += [run for run in others if run.model not in models]
        if members:
            made += [(reproduction, group) for group in by_timing(members)]
            used |= set(reproduction.experiments)
    return made, [run for run in runs if run.experiment not in used and run.records]
