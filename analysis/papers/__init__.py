"""The tables and figures of the papers, made of the runs of ``conf/experiment/<name>.yaml``.

One module per paper or leaderboard, one for the methods with a draft model side by side. A
reproduction has the name of its experiment; a few need runs of more than one.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.papers import (
    cacheback,
    card,
    draft_models,
    eagle,
    ngrammys,
    spec_bench,
    ssd,
    token_recycling,
)
from analysis.papers.reproduction import Reproduction
from analysis.runs.comparisons import by_timing
from analysis.runs.load import Run

REPRODUCTIONS: tuple[Reproduction, ...] = (
    *cacheback.REPRODUCTIONS,
    *token_recycling.REPRODUCTIONS,
    *ngrammys.REPRODUCTIONS,
    *ssd.REPRODUCTIONS,
    *card.REPRODUCTIONS,
    *draft_models.REPRODUCTIONS,
    *spec_bench.REPRODUCTIONS,
    *eagle.REPRODUCTIONS,
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
