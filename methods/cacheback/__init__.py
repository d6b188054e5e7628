"""Cacheback: draft trees from a table of earlier continuations, under LRU eviction.

Paper: "Cacheback: Speculative Decoding With Nothing But Cache", EMNLP 2025, arXiv 2511.21699.
Reference code studied: the authors' Spec-Bench fork (``model/cacheback``), by its description.
Tables: a dynamic one, filled from prompt and answer by a sliding window, and a frozen one built
    beforehand from a corpus. For the bundled model the frozen table is built on first use from the
    English of installed documentation (``specbench.artifacts.documentation``), otherwise by
    ``scripts/build_artifact.py``; its header names the corpus.
Where ours differs, and why:
    - The budget includes the tokens committed by the last step, as the reference's does, although
      the engine keeps their KV (``budget_counts: fixed`` counts only the root).
    - The first draft comes after the prompt's pass, not in it, as for every method here.
    - With several tables each one inserts exactly the windows that end on a new token; the
      reference inserts some old windows of the shorter tables again.
    - The paper resets the table "before running each test case"; the code behind its numbers resets
      at every turn (``state_scope: paper``). ``prompt`` keeps the table for a case, whose second
      turn repeats the first one's text anyway.
    - ``merge: true`` is ours: equal branches are shared and the budget counts distinct nodes.
Example: ``follower_len`` 2; after "a b c a d e a" the dynamic table has "d e" and "b c" after a,
    the newest first, and the frozen one "f g": the tree has these three chains below the root,
    and the followers of e, c and g below those.
State kept: the dynamic tables, bounded by leader_capacity × follower_capacity followers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from methods.cacheback.frozen_table import FrozenTable
from methods.cacheback.kernels import DYNAMIC, FROZEN, SCRATCH, grow_tree
from methods.cacheback.table import LruTable
from specbench.config.schema import Count, Positive
from specbench.config.validate import check_knob, types_of
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import (
    Artifact,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.errors import ConfigurationError, unknown_name

_KINDS = {"dual": ("dynamic", "frozen"), "dynamic": ("dynamic",), "frozen": ("frozen",)}
_SHAPE = ("leader_len", "follower_len", "leader_capacity", "follower_capacity")


@dataclass(frozen=True, slots=True)
class _Table:
    """One entry of the ordered list of tables."""

    kind: str
    leader_len: int
    follower_len: int
    leader_capacity: int
    follower_capacity: int
    frozen_table: str | None


@dataclass(kw_only=True, eq=False)
class Cacheback(Drafter):
    """Cacheback: two n-gram tables, one learnt while decoding and one frozen, draft a tree.

    Attributes:
        leader_len: tokens of a leader (LL).
        follower_len: tokens of a follower (FL).
        leader_capacity: maximum leaders of a table (LC).
        follower_capacity: maximum followers of a leader (FC).
        total_draft_len: maximum draft nodes plus tokens not yet cached (TDL).
        chaining_reserved: part of these reserved for the tree's second level and deeper (CRT).
        table: ``dual``, ``dynamic`` or ``frozen``; ignored where ``tables`` is given.
        merge: share equal branches and count distinct nodes.
        budget_counts: tokens that the budget counts besides draft nodes: ``paper`` those committed
            by the last step, ``fixed`` only the root.
        frozen_table: file of the frozen table; None takes the one in the cache folder.
        tables: several tables, queried in this order, each a mapping with ``kind`` (``dynamic`` or
            ``frozen``) and, where they differ from the above, leader_len, follower_len,
            leader_capacity, follower_capacity, frozen_table.

    Raises:
        ConfigurationError: a value is out of range, or the budget can never draft anything.
    """

    name: str = "cacheback"
    paper_scope: Scope = "turn"
    leader_len: Positive = 1
    follower_len: Positive = 3
    leader_capacity: Positive = 2**20
    follower_capacity: Positive = 128
    total_draft_len: int = 96
    chaining_reserved: Count = 16
    table: Literal["dual", "dynamic", "frozen"] = "dual"
    merge: bool = False
    budget_counts: Literal["paper", "fixed"] = "paper"
    frozen_table: str | None = None
    tables: list[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plan = self._ordered_tables()
        longest = max(entry.follower_len for entry in self._plan)
        least = 1 + self.chaining_reserved + longest
        self._require(
            self.total_draft_len >= least,
            "total_draft_len",
            f"at least {least}: the root, chaining_reserved={self.chaining_reserved} and a "
            f"follower of {longest}",
        )
        self._dynamic: list[LruTable] = []
        self._frozen: list[FrozenTable] = []

    @property
    def needs(self) -> Needs:
        files = tuple(
            _artifact(entry, f"frozen_table_{i}" if self.tables else "frozen_table")
            for i, entry in enumerate(self._plan)
            if entry.kind == "frozen"
        )
        return Needs(artifacts=files, max_nodes=self.total_draft_len - 1)

    def setup(self, context: DraftContext) -> None:
        files = iter(self.needs.artifacts)
        self._dynamic, self._frozen, order = [], [], []
        for entry in self._plan:
            if entry.kind == "frozen":
                path = context.artifacts[next(files).name]
                order.append((FROZEN, len(self._frozen)))
                self._frozen.append(_open_frozen(entry, path, context.tokenizer_hash))
            else:
                order.append((DYNAMIC, len(self._dynamic)))
                self._dynamic.append(LruTable(*(getattr(entry, key) for key in _SHAPE)))
        self._order = np.array(order, dtype=np.int64)
        # Compiled code takes at least one table of each kind; one not in `_order` is never queried.
        self._unused_table = LruTable(1, 1, 1, 1).arrays
        frozen = self._frozen or [FrozenTable.empty()]
        self._frozen_arrays = tuple(table.arrays for table in frozen)
        self._work = np.zeros((self.total_draft_len, SCRATCH), dtype=np.int64)
        self._key = np.zeros(max(entry.leader_len for entry in self._plan), dtype=np.int64)
        self._refresh()
        # Compiles, or loads what was compiled before, outside any clock.
        state = DecodeState(np.zeros(16, dtype=np.int64), 1)
        self.begin(state)
        self.propose(state)
        self.reset()

    def reset(self) -> None:
        for table in self._dynamic:
            table.clear()

    def begin(self, state: DecodeState) -> None:
        self._insert(state, 0)

    def propose(self, state: DecodeState) -> DraftTree:
        spent = max(1, state.last_committed) if self.budget_counts == "paper" else 1
        nodes = grow_tree(
            state.buffer,
            state.length,
            max(0, self.total_draft_len - spent),
            self.chaining_reserved,
            self.merge,
            self._order,
            self._dynamic_arrays,
            self._frozen_arrays,
            self._work,
            self._key,
        )
        return DraftTree(nodes[0], nodes[1], sources=nodes[2])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        self._insert(state, state.length - len(outcome.committed))

    def _insert(self, state: DecodeState, begin: int) -> None:
        """Insert every window that ends at ``begin`` or later into every dynamic table."""
        grown = False
        for table in self._dynamic:
            grown |= table.insert_windows(state.buffer, begin, state.length)
        if grown:
            self._refresh()

    def _refresh(self) -> None:
        tables = tuple(table.arrays for table in self._dynamic)
        self._dynamic_arrays = tables or (self._unused_table,)

    def _ordered_tables(self) -> list[_Table]:
        defaults = {key: getattr(self, key) for key in (*_SHAPE, "frozen_table")}
        if not self.tables:
            return [_Table(kind=kind, **defaults) for kind in _KINDS[self.table]]
        plan = []
        types = types_of(type(self))
        for i, entry in enumerate(self.tables):
            if not isinstance(entry, Mapping) or entry.get("kind") not in ("dynamic", "frozen"):
                raise ConfigurationError(
                    f"`method.tables[{i}]` must be as {{kind: dynamic, leader_len: 2}}, or kind: "
                    f"frozen, got {entry!r}."
                )
            for key, value in entry.items():
                if key not in (*defaults, "kind"):
                    raise unknown_name(f"key of method.tables[{i}]", key, (*defaults, "kind"))
                check_knob(self.name, f"tables[{i}].{key}", value, types.get(key, str))
            plan.append(_Table(**{**defaults, **entry}))
        return plan


def _artifact(entry: _Table, name: str) -> Artifact:
    params = {key: getattr(entry, key) for key in _SHAPE}
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in params.items())
    return Artifact(
        name=name,
        builder="methods.cacheback.frozen_table:build",
        command=f"python scripts/build_artifact.py frozen_table --model MODEL {options}",
        path=entry.frozen_table,
        params=params,
    )


def _open_frozen(entry: _Table, path: Any, tokenizer_hash: str) -> FrozenTable:
    table = FrozenTable.open(path, tokenizer_hash or None)
    for key in ("leader_len", "follower_len"):
        actual, required = getattr(table, key), getattr(entry, key)
        if actual != required:
            raise ConfigurationError(
                f"{path} has {key}={actual}, but the run asks for {key}={required}: set "
                f"method.{key}={actual} or build a table for it."
            )
    return table
