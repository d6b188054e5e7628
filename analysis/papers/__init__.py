"""The papers' tables and figures, made from the runs of ``conf/experiment/<name>.yaml``.

``reproductions.yaml`` lists them by experiment; a few need runs of several. It names kinds,
which are functions of :mod:`analysis.papers.tables` and :mod:`analysis.papers.pictures`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from analysis.papers import pictures, tables
from analysis.plots.style import Drawing
from analysis.runs.claims import Claim, load_claims
from analysis.runs.comparisons import ComparedRuns, by_timing, make_comparisons
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import natural
from analysis.tabular.table import ResultTable

_FILE = Path(__file__).with_name("reproductions.yaml")


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of a paper; ``reproductions.yaml`` says what its keys mean."""

    name: str
    title: str
    claims: Sequence[str]
    kinds: Mapping[str, Mapping[str, Any]]
    text: str = ""
    also: Sequence[str] = ()
    instead: Sequence[str] = ()

    @property
    def experiments(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def own_claims(self) -> list[Claim]:
        """The claims of its source's exhibits."""
        paper, exhibits = self.claims[:1], self.claims[1:]
        return [c for c in load_claims() if c.paper in paper and c.exhibit in exhibits]

    def comparisons(self, runs: Sequence[Run]) -> list[ComparedRuns]:
        """Compare the runs, with the claims of this table or figure alone; by model size."""
        compared = make_comparisons(runs, claims=self.own_claims)
        return sorted(compared, key=lambda comparison: natural(comparison.model))

    def tables(self, runs: Sequence[Run]) -> list[ResultTable]:
        """Tabulate the runs, kind by kind."""
        kinds = [
            (tables.KINDS[kind], self.kinds[kind]) for kind in self.kinds if kind in tables.KINDS
        ]
        return [table for kind, options in kinds for table in kind(self, runs, **options)]

    def figures(self, runs: Sequence[Run]) -> Iterator[tuple[str, Drawing]]:
        """Draw the runs, kind by kind, with their file names' suffixes."""
        for kind, options in self.kinds.items():
            if kind in pictures.KINDS:
                yield from pictures.KINDS[kind](self, runs, **options)


def _reproduction(name: str, about: dict[str, Any]) -> Reproduction:
    """Read one entry of the file; every key that is no field names a kind and has its arguments."""
    fields = {field.name for field in dataclasses.fields(Reproduction)}
    kinds = {key: about[key] for key in about if key not in fields}
    if unknown := kinds.keys() - {*tables.KINDS, *pictures.KINDS}:
        raise ValueError(f"{_FILE.name}: {name} has unknown keys: {', '.join(unknown)}")
    return Reproduction(name, kinds=kinds, **{k: about[k] for k in about if k in fields})


REPRODUCTIONS = tuple(
    _reproduction(name, about)
    for name, about in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
)


def by_reproduction(runs: Sequence[Run]) -> tuple[list[tuple[Reproduction, list[Run]]], list[Run]]:
    """Group the runs by the reproduction that they belong to; also return the other runs.

    A reproduction with measured and predicted runs is returned once for each.
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
