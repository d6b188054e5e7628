"""The tables and figures of the papers, made of the runs of ``conf/experiment/<name>.yaml``.

``reproductions.yaml`` has each by its experiment; a few need runs of more than one. What the
kinds of :mod:`analysis.papers.reproduction` cannot make is in :mod:`analysis.papers.odd_panels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from analysis.papers import odd_panels as odd
from analysis.papers import reproduction as kinds
from analysis.papers.reproduction import Reproduction
from analysis.runs.comparisons import by_timing
from analysis.runs.load import Run

_FILE = Path(__file__).with_name("reproductions.yaml")
# The keys that are kinds, of tables and of figures: functions of the module.
_TABLES = ("by_task", "settings", "columns")
_FIGURES = ("data_set_bars", "model_bars", "task_bars", "heatmaps", "lines")
# What no kind makes, by experiment: its table and its picture.
_ODD: Mapping[str, tuple[Any, ...]] = {
    "draft_models": (odd.draft_model_tables,),
    "ngrammys_figure1": (odd.slowdown_table, odd.slowdown_pictures),
    "ngrammys_figure4": (odd.row_table, odd.row_bars),
    "ngrammys_table1": (odd.best_settings_table,),
    "specbench_board": (odd.board_tables, odd.board_heatmaps),
    "ssd_stream": (odd.stream_table, odd.stream_lines),
    "token_recycling_figure4": (odd.phase_table, odd.phase_bars),
}


def _reproduction(name: str, about: dict[str, Any]) -> Reproduction:
    """One entry of the file: a kind has its arguments, everything else is the reproduction's."""
    tables, figures = (
        [partial(getattr(kinds, key), **about.pop(key)) for key in keys if key in about]
        for keys in (_TABLES, _FIGURES)
    )
    of_its_own = _ODD.get(name, ())
    tables, figures = [*tables, *of_its_own[:1]], [*figures, *of_its_own[1:]]
    return Reproduction(name, table_kinds=tables, figure_kinds=figures, **about)


REPRODUCTIONS = tuple(
    _reproduction(name, about)
    for name, about in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
)


def by_reproduction(runs: Sequence[Run]) -> tuple[list[tuple[Reproduction, list[Run]]], list[Run]]:
    """Return the reproductions that the runs are for, each with its runs; and the other runs.

    A reproduction with measured runs and predicted ones is there once for each.
    """
    reproduced = []
    used: set[str | None] = set()
    for reproduction in REPRODUCTIONS:
        members = [run for run in runs if run.experiment in reproduction.experiments]
        if reproduction.instead:
            models = {run.model for run in members}
            others = [run for run in runs if run.experiment in reproduction.instead]
            members += [run for run in others if run.model not in models]
        if members:
            reproduced += [(reproduction, group) for group in by_timing(members)]
            used |= set(reproduction.experiments)
    return reproduced, [run for run in runs if run.experiment not in used and run.records]
