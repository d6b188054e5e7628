"""A job: the data that crosses from the parent to the child process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.config.schema import (
    PLAIN,
    DraftConfig,
    PairConfig,
    RunConfig,
    VerifierConfig,
    verifier_name,
)
from specbench.data.cases import Case
from specbench.errors import ConfigurationError
from specbench.results.jsonl_schema import Batched
from specbench.results.manifest import BASELINE

EAGER_BASELINE = "ar_eager"


@dataclass(frozen=True, slots=True)
class Entry:
    """One method of a run.

    Attributes:
        label: unique in the run, part of every record's key.
        method: the composed ``method`` node without its ``label``, ready to be instantiated.
        budget: where its knobs come from (`specbench.config.entries.budget_of`); None for plain
            decoding and for methods without a yaml.
        verifier: None: the run's verifier.
    """

    label: str
    method: Mapping[str, Any]
    pair: PairConfig | None = None
    budget: str | None = None
    verifier: VerifierConfig | None = None

    @property
    def name(self) -> str:
        return str(self.method["name"])

    @property
    def plain(self) -> bool:
        """True for plain decoding, ours or a server's."""
        server = self.method.get("server") or {}
        return self.name == BASELINE or server.get("speculation") == PLAIN

    @property
    def draft(self) -> DraftConfig:
        """The ``pair.draft`` node, which may name no model."""
        return (self.pair or PairConfig()).draft

    @property
    def heads(self) -> Mapping[str, str]:
        """The ``pair.heads`` node: where trained heads are, by name."""
        return (self.pair or PairConfig()).heads


def refuse_duplicate_labels(entries: Sequence[Entry], second: str) -> None:
    """Refuse two entries with one label, and plain decoding's labels for anything else.

    Args:
        second: how to type the second entry; LABEL and METHOD are replaced by its own.

    Raises:
        ConfigurationError: a label occurs twice, or is plain decoding's and its method is not.
    """
    labels = [entry.label for entry in entries]
    for entry in entries:
        if entry.label == EAGER_BASELINE or (entry.label == BASELINE and not entry.plain):
            raise ConfigurationError(
                f"`label` of {entry.name} must not be {entry.label!r}, which is plain decoding's. "
                f"Type another one, e.g. {entry.name}_2."
            )
    for label in labels:
        if labels.count(label) > 1:
            _, repeated, *_ = (entry for entry in entries if entry.label == label)
            raise ConfigurationError(
                f"the label {label!r} occurs {labels.count(label)} times among the run's entries "
                f"({', '.join(labels)}). Name the second one, e.g. "
                f"{second.replace('LABEL', label).replace('METHOD', repeated.name)}."
            )


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one output folder.

    Attributes:
        overrides: the overrides as typed.
        identity: the part of ``config`` that may move a number, and ``shard``.
        run_key: the hash of that part; shards of one run share it.
        entries: methods in the order of the interleaving, the baseline first.
        cases: the prompts of all shards, in order.
        shard: ``(i, n)``: this job measures the blocks whose index modulo n is i (from 0).
        optional: labels that may be left out where they cannot run.
    """

    config: RunConfig
    overrides: tuple[str, ...]
    identity: Mapping[str, Any]
    run_key: str
    folder: Path
    entries: tuple[Entry, ...]
    cases: tuple[Case, ...]
    shard: tuple[int, int] = (0, 1)
    optional: frozenset[str] = frozenset()
    swept: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(entry.label for entry in self.entries)

    @property
    def repeats(self) -> int:
        return self.config.repeats

    @property
    def greedy(self) -> bool:
        return self.config.generation.temperature == 0.0

    def verifier(self, label: str) -> str:
        """Return the name of a label's verifier."""
        (entry,) = (entry for entry in self.entries if entry.label == label)
        verifier = entry.verifier or self.config.verifier
        return verifier_name(verifier.name, self.config.generation.temperature)

    @property
    def baseline(self) -> str | None:
        """The baseline's label, or None under ``baseline=false``."""
        return BASELINE if BASELINE in self.labels else None

    def without(self, labels: Collection[str]) -> Job:
        """Return this job without these labels."""
        return replace(self, entries=tuple(e for e in self.entries if e.label not in labels))

    def blocks(self) -> list[CaseBlock]:
        """Return all blocks of this shard in the order they are measured."""
        i, n = self.shard
        return [
            CaseBlock(repeat, index, case, stream_index=repeat * len(self.cases) + index)
            for repeat in range(self.repeats)
            for index, case in enumerate(self.cases)
            if index % n == i
        ]

    def groups(self, size: int) -> list[list[CaseBlock]]:
        """Group this shard's blocks, which are decoded ``size`` at a time.

        Groups are alike: each takes, by chance, one block of every stratum of prompt lengths. Every
        repeat groups the same cases. Blocks that fill no group are spread over all lengths and
        make a smaller group at the end.
        """
        groups: list[list[CaseBlock]] = []
        for repeat in range(self.repeats):
            blocks = [block for block in self.blocks() if block.repeat == repeat]
            blocks.sort(key=lambda block: (len(block.case.turns[0]), block.index))
            n, remainder = divmod(len(blocks), size)
            leftover = {(2 * i + 1) * len(blocks) // (2 * remainder) for i in range(remainder)}
            rest = [blocks.pop(index) for index in sorted(leftover, reverse=True)]
            strata = [blocks[slot * n : (slot + 1) * n] for slot in range(size if n else 0)]
            for slot, stratum in enumerate(strata):
                random.Random(f"{self.config.seed}/{slot}").shuffle(stratum)
            groups += [*map(list, zip(*strata, strict=True)), *([rest] if rest else [])]
        return groups

    def groups_of_a_repeat(self, size: int) -> int:
        """Count the `groups` of a repeat."""
        i, n = self.shard
        return -(-len(range(i, len(self.cases), n)) // size)

    def slot(self, group: int, position: int, at_once: int) -> Batched:
        """Say where a turn is decoded: ``group`` in `groups`, ``position`` in the group.

        The group's number is the one that it has in all repeats, among all shards' groups.
        """
        (i, n), size = self.shard, self.config.batch.size
        number = group % self.groups_of_a_repeat(size) * n + i
        return Batched(size=size, at_once=at_once, group=number, place=position, full_s=0.0)


@dataclass(frozen=True, slots=True)
class CaseBlock:
    """One case in one repeat: the unit of interleaving and of resume.

    Attributes:
        index: the case's position in the data set.
        stream_index: the block's position in the whole run.
    """

    repeat: int
    index: int
    case: Case
    stream_index: int

    @property
    def key(self) -> tuple[int, str]:
        return (self.repeat, self.case.case_id)

    def order(self, labels: Sequence[str], seed: int) -> tuple[str, ...]:
        """Return the labels in the order in which this block measures them (`label_order`)."""
        return label_order(labels, seed, self.index, self.repeat)

    def record_keys(self, labels: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        """Return the keys of the records that make the block complete."""
        turns = range(len(self.case.turns))
        return {(self.repeat, self.case.case_id, t, label) for t in turns for label in labels}


def label_order(labels: Sequence[str], seed: int, index: int, repeat: int = 0) -> tuple[str, ...]:
    """Return the labels in a balanced, unpredictable order: a row of a Williams design.

    The rows of a design (as many as labels, twice as many if their number is odd) have every
    label as often at each position and as often right after each other label. Successive indices
    take the rows of a design one by one, in a new random order for each design; successive
    repeats of an index take the next rows. So a drift hits all labels alike, and no label always
    runs after the same one.

    Args:
        index: of the block in the data set, or of a batch in the run; with ``seed`` and
            ``repeat`` it decides, so shards and resumed runs agree.
    """
    n = len(labels)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    rows = [[(number + shift) % n for number in zigzag] for shift in range(n)]
    if n % 2 and n > 1:
        rows += [row[::-1] for row in rows]
    design, row = divmod(index, len(rows))
    random.Random(f"{seed}/{design}").shuffle(rows)
    return tuple(labels[i] for i in rows[(row + repeat) % len(rows)])


def derive_seed(seed: int, case_id: str, turn: int, repeat: int) -> int:
    """Derive a turn's seed: the same for all labels, machines and Python versions."""
    text = f"{seed}/{case_id}/{turn}/{repeat}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
