"""What advice stands on: passes timed, plain decoding recorded, methods run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from runners.search import jobs
from specbench.config.run_key import key_of
from specbench.data.cases import Case


class Bench(Protocol):
    """Makes runs of one model on chosen cases; what a folder holds already is not made again.

    Attributes:
        cfg: a run's configuration; its method is plain decoding.
    """

    cfg: DictConfig

    def surface(self) -> Path:
        """The file of the machine's cost surface."""

    def record(self, cases: Sequence[Case], path: Path) -> Path:
        """The folder of plain decoding, with what replays read."""

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> Path:
        """The folder of plain decoding and the entries of a ``compare``, interleaved."""


class Processes:
    """A `Bench` whose runs have processes of their own, as those of ``run.py``."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def surface(self) -> Path:
        return jobs.measure_surface(self.cfg)

    def record(self, cases: Sequence[Case], path: Path) -> Path:
        return jobs.record(self._asked(cases, path), path)

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> Path:
        return jobs.try_live(self._asked(cases, path), items, path)

    def _asked(self, cases: Sequence[Case], path: Path) -> DictConfig:
        return jobs.asked_from(self.cfg, cases, path.parent / f"{path.name}.jsonl")


def folder_of(parent: Path, name: str, items: object, cases: Sequence[Case]) -> Path:
    """A folder for a run of these entries on these cases, always the same."""
    return parent / f"{name}-{key_of([items, [case.case_id for case in cases]])}"
