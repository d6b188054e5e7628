"""What one job is: plain data that crosses from the parent to the measuring process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.config.schema import verifier_name
from specbench.results.manifest import BASELINE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specbench.data.cases import Case

EAGER_BASELINE = "ar_eager"


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender of a run.

    Attributes:
        label: unique in the run, part of every record's key.
        method: the composed ``method`` node, ``label`` removed, ready to be instantiated.
        pair: the ``pair`` node (which draft model) that belongs to this method, or None.
    """

    label: str
    method: Mapping[str, Any]
    pair: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.method["name"])

    @property
    def draft(self) -> Mapping[str, Any]:
        """The ``pair.draft`` node; names no model where it is empty."""
        return (self.pair or {}).get("draft") or {}


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one output folder.

    Attributes:
        config: the composed configuration, interpolations resolved.
        overrides: what was typed.
        identity: the part of ``config`` that may move a number, and ``shard``.
        run_key: the hash of that part; shards of one run share it.
        folder: where the files go; exists.
        entries: contenders in the order of the interleaving, the baseline first.
        cases: what is asked, in order, all shards.
        shard: ``(i, n)``: this job measures the blocks whose index modulo n is i (from 0).
    """

    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    identity: Mapping[str, Any]
    run_key: str
    folder: Path
    entries: tuple[Entry, ...]
    cases: tuple[Case, ...]
    shard: tuple[int, int] = (0, 1)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order of the interleaving."""
        return tuple(entry.label for entry in self.entries)

    @property
    def repeats(self) -> int:
        """How often every case is measured."""
        return int(self.config["repeats"])

    @property
    def greedy(self) -> bool:
        """Whether the target's most likely token is always taken."""
        return float(self.config["generation"]["temperature"]) == 0.0

    @property
    def verifier(self) -> str:
        """The name of who decides acceptance."""
        return verifier_name(
            str(self.config["verifier"]["name"]), float(self.config["generation"]["temperature"])
        )

    @property
    def baseline(self) -> str | None:
        """The baseline's label, or None under ``baseline=false``."""
        return BASELINE if BASELINE in self.labels else None

    def with_eager_baseline(self) -> Job:
        """This job with the baseline once more, launched pass by pass whatever the engine."""
        own = next(entry for entry in self.entries if entry.label == BASELINE)
        twin = replace(own, label=EAGER_BASELINE, method={**own.method, "eager": True})
        return replace(self, entries=(*self.entries, twin))

    def blocks(self) -> list[CaseBlock]:
        """All blocks of this shard in the order they are measured."""
        i, n = self.shard
        return [
            CaseBlock(repeat, index, case, stream_index=repeat * len(self.cases) + index)
            for repeat in range(self.repeats)
            for index, case in enumerate(self.cases)
            if index % n == i
        ]


@dataclass(frozen=True, slots=True)
class CaseBlock:
    """One case in one repeat: the unit of interleaving and of resume.

    Attributes:
        index: the case's place in the data set.
        stream_index: the block's place in the whole run.
    """

    repeat: int
    index: int
    case: Case
    stream_index: int

    def order(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Who runs first: forward and backward by turns (ABBA), so that drift hits all alike.

        Successive repeats of a case see both orders, whatever the number of cases.
        """
        return labels if (self.index + self.repeat) % 2 == 0 else labels[::-1]

    def keys(self, labels: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        """The keys of the records that make the block complete."""
        turns = range(len(self.case.turns))
        return {(self.repeat, self.case.case_id, t, label) for t in turns for label in labels}


def derive_seed(seed: int, case_id: str, turn: int, repeat: int) -> int:
    """A turn's seed: stable over machines and Python versions, the same for all labels."""
    text = f"{seed}/{case_id}/{turn}/{repeat}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
