"""The tables and figures of the papers, made of the runs of ``conf/experiment/<name>.yaml``.

``reproductions.yaml`` has each by its experiment; a few need runs of more than one. What the
kinds of :mod:`analysis.papers.reproduction` cannot make is in :mod:`analysis.papers.odd_panels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from analysis.papers import odd_panels
from analysis.papers import reproduction as kinds
from analysis.papers.reproduction import FigureKind, Reproduction, TableKind
from analysis.runs.comparisons import by_timing
from analysis.runs.load import Run

_FILE = Path(__file__).with_name("reproductions.yaml")
# Kinds by their keys in the file.
_TABLE_KINDS: Mapping[str, Callable[..., Any]] = {
    "by_task": kinds.task_tables,
    "settings": kinds.settings_tables,
    "columns": kinds.column_tables,
}
_FIGURE_KINDS: Mapping[str, Callable[..., Any]] = {
    "data_set_bars": kinds.data_set_bars,
    "model_bars": kinds.model_bars,
    "task_bars": kinds.task_bars,
    "heatmaps": kinds.knob_heatmaps,
    "lines": kinds.knob_lines,
}
# What no kind makes, by experiment: its table and its picture.
_ODD: Mapping[str, tuple[TableKind, FigureKind | None]] = {
    "draft_models": (odd_panels.draft_model_tables, None),
    "ngrammys_figure1": (odd_panels.slowdown_table, odd_panels.slowdown_pictures),
    "ngrammys_figure4": (odd_panels.row_table, odd_panels.row_bars),
    "ngrammys_table1": (odd_panels.best_settings_table, None),
    "specbench_board": (odd_panels.board_tables, odd_panels.board_heatmaps),
    "ssd_stream": (odd_panels.stream_table, odd_panels.stream_lines),
    "token_recycling_figure4": (odd_panels.phase_table, odd_panels.phase_bars),
}


def _reproduction(name: str, about: dict[str, Any]) -> Reproduction:
    """One entry of the file: a kind has its arguments, everything else is the reproduction's."""
    tables: list[TableKind] = [
        partial(of, **about.pop(key)) for key, of in _TABLE_KINDS.items() if key in about
    ]
    figures: list[FigureKind] = [
        partial(of, **about.pop(key)) for key, of in _FIGURE_KINDS.items() if key in about
    ]
    table, figure = _ODD.get(name, (None, None))
    tables += [table] if table else []
    figures += [figure] if figure else []
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
