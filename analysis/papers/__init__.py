"""The tables and figures of the papers, made of the runs of ``conf/experiment/<name>.yaml``.

One module per paper, and one for the methods with a draft model side by side. An artifact is named
like its experiment; a few need runs of more than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.papers import cacheback, card, draft_models, ngrammys, ssd, token_recycling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.papers.reproduction import Reproduction
    from analysis.runs.load import Run

REPRODUCTIONS: tuple[Reproduction, ...] = (
    *cacheback.ARTIFACTS,
    *token_recycling.ARTIFACTS,
    *ngrammys.ARTIFACTS,
    *ssd.ARTIFACTS,
    *card.ARTIFACTS,
    *draft_models.ARTIFACTS,
)


def made_of(runs: Sequence[Run]) -> tuple[list[tuple[Reproduction, list[Run]]], list[Run]]:
    """The artifacts that the runs are for, each with its runs, and the runs that are for none."""
    made = []
    used: set[str | None] = set()
    for artifact in REPRODUCTIONS:
        members = [run for run in runs if run.experiment in artifact.experiments]
        if artifact.instead:
            models = {run.model for run in members}
            others = [run for run in runs if run.experiment in artifact.instead]
            members += [run for run in others if run.model not in models]
        if members:
            made.append((artifact, members))
            used |= set(artifact.experiments)
    return made, [run for run in runs if run.experiment not in used and run.records]
