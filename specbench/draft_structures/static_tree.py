"""Shapes of static draft trees: the rank of each node among its parent's candidates.

A node is named by its path of ranks from the root: ``(0, 2)`` is the third candidate of the root's
first candidate. The shape is fixed before decoding; only the tokens change from step to step.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
from annotated_types import Ge, Lt, MinLen
from pydantic import TypeAdapter

from specbench.arrays import IntArray
from specbench.decoding.structs import Artifact
from specbench.errors import ArtifactError, ConfigurationError, field_error, unknown_name
from specbench.paths import ASSETS, typed_file

RankPath: TypeAlias = tuple[int, ...]

# Names for ``method.tree``, in every method that has this knob.
TREES = {
    "template": ASSETS / "token_recycling_tree.json",
    "sam_60": ASSETS / "sam_token_recycling_tree.json",
    "medusa_63": ASSETS / "medusa_tree.json",
    "vicuna_7b_stage2": ASSETS / "medusa_vicuna_7b_tree.json",
    "vicuna_13b_stage2": ASSETS / "medusa_vicuna_13b_tree.json",
    "vicuna_33b_stage2": ASSETS / "medusa_vicuna_33b_tree.json",
    "zephyr_stage2": ASSETS / "medusa_zephyr_tree.json",
    "eagle_25": ASSETS / "eagle_tree.json",
}
# Ranks in a file are below 2^31, more than a vocabulary has ids.
_PATHS = TypeAdapter(Annotated[list[list[Annotated[int, Ge(0), Lt(2**31)]]], MinLen(1)])


@dataclass(frozen=True, slots=True)
class Layer:
    """The nodes of one depth, for a drafter that reads only nodes with children.

    Attributes:
        above: ``[n]`` each node's parent: its number among the nodes above that have children.
        ranks: ``[n]`` each node's rank among its parent's candidates.
        inner: ``[m]`` the nodes that have children.
    """

    above: IntArray
    ranks: IntArray
    inner: IntArray

    @property
    def n_ranks(self) -> int:
        return 1 + int(self.ranks.max())


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree of ranks, breadth first, equal depths in lexicographic order.

    Attributes:
        paths: ranks from the root to each node.
        parents: ``[n]`` int64, -1 for the root.
        levels: for each depth two ``[nodes of that depth]`` int64 arrays: the parent's index
            within its depth, and the rank among the parent's candidates.
    """

    paths: tuple[RankPath, ...]
    parents: IntArray
    levels: tuple[tuple[IntArray, IntArray], ...]

    @staticmethod
    def from_paths(paths: Iterable[Sequence[int]]) -> StaticTree:
        """Build the tree with these nodes, given in any order.

        Raises:
            ValueError: a path is empty or repeated, or its parent is missing.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        node_of: dict[RankPath, int] = {(): -1}
        index: dict[RankPath, int] = {(): 0}  # within its depth
        counts: Counter[int] = Counter()
        levels: list[tuple[list[int], list[int]]] = []
        for path in ordered:
            if path in node_of:
                raise ValueError(f"the path {list(path)} is empty or occurs twice")
            if path[:-1] not in node_of:
                raise ValueError(f"the path {list(path)} has no parent in the tree")
            depth = len(path)
            if depth > len(levels):
                levels.append(([], []))
            levels[-1][0].append(index[path[:-1]])
            levels[-1][1].append(path[-1])
            node_of[path] = len(node_of) - 1
            index[path] = counts[depth]
            counts[depth] += 1
        return StaticTree(
            tuple(ordered),
            np.array([node_of[path[:-1]] for path in ordered], dtype=np.int64),
            tuple(
                (np.array(above, dtype=np.int64), np.array(ranks, dtype=np.int64))
                for above, ranks in levels
            ),
        )

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def ranks(self) -> IntArray:
        """``[n]`` the rank of each node among its parent's candidates."""
        return np.array([path[-1] for path in self.paths], dtype=np.int64)

    @property
    def n_ranks(self) -> int:
        return 1 + max((path[-1] for path in self.paths), default=-1)

    @property
    def level_sizes(self) -> list[int]:
        return [len(ranks) for _, ranks in self.levels]

    def layers(self) -> list[Layer]:
        layers: list[Layer] = []
        read = np.zeros(1, dtype=np.int64)  # indices, in their depth, of nodes with children
        for depth, (above, ranks) in enumerate(self.levels, start=1):
            last = depth == len(self.levels)
            inner = above[:0] if last else np.unique(self.levels[depth][0])
            layers.append(Layer(np.searchsorted(read, above), ranks, inner))
            read = inner
        return layers


def load_tree(path: Path) -> StaticTree:
    """Read a tree from a JSON file: a list of paths, alone or as ``paths`` in an object.

    Raises:
        ArtifactError: the file is missing, or is not such a tree.
    """
    try:
        paths = json.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(paths, dict):
            paths = paths.get("paths")
        return StaticTree.from_paths(_PATHS.validate_python(paths, strict=True))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is not a draft tree: {field_error(error)}. Give each node's ranks from the "
            "root, as in [[0], [1], [0, 0]]."
        ) from error


def tree_files(tree: str) -> tuple[Artifact, ...]:
    """List the user's file in ``method.tree``, so that its hash is in the manifest."""
    file = _tree_file(tree)
    return () if file is None else (Artifact("tree", builder="", command="", path=str(file)),)


def _tree_file(tree: str) -> Path | None:
    """Return None for a name; the file may be missing."""
    return typed_file(tree) if tree not in TREES and tree.endswith(".json") else None


def tree_of_knobs(
    tree: str, levels: Sequence[int] | None, default: str, also: Sequence[str] = ()
) -> StaticTree:
    """Build the tree of ``method.tree``, or of ``method.levels`` if that is set.

    Args:
        tree: one of `TREES`, or a file for `load_tree`.
        default: the method's default for ``tree``.
        also: other values that the method accepts, for the message.

    Raises:
        ConfigurationError: there is no such tree, or both are set.
    """
    if levels is not None and tree != default:
        raise ConfigurationError(
            f"method.tree={tree} and method.levels={levels} are two trees. Type "
            "method.levels=null, or leave out method.tree."
        )
    if levels is None:
        file = _tree_file(tree)
        if file is None and tree not in TREES:
            raise unknown_name("method.tree", tree, [*TREES, *also, "FILE.json"])
        return load_tree(file or TREES[tree])
    try:
        return tree_of_levels(max(levels, default=1), levels)
    except ValueError as error:
        raise ConfigurationError(f"method.levels={levels} cannot make a tree: {error}.") from error


def require_heads(tree: StaticTree, n_heads: int, where: Path) -> None:
    """Refuse a tree with more levels than the file ``where`` has heads.

    Raises:
        ConfigurationError: the message has the values to type.
    """
    if len(tree.levels) > n_heads:
        raise ConfigurationError(
            f"{where} has {n_heads} heads, but the tree of method.tree and method.levels has "
            f"{len(tree.levels)} levels, and each level needs a head. Type method.levels=[...] "
            f"with at most {n_heads} numbers of nodes."
        )


def most_nodes(k: int, depth: int) -> int:
    """Count the nodes of the full tree with k children everywhere."""
    return sum(k**level for level in range(1, depth + 1))


def grow_tree(k: int, n_nodes: int, depth: int) -> StaticTree:
    """Build the tree of the cheapest ``n_nodes`` nodes: low ranks and early levels are cheap.

    A node of depth d with ranks r costs ``(r_1 + 1) … (r_d + 1) * k ** ((d - 1) / depth)``: a rank
    costs what Zipf's law gives, and the last level about as much as the last rank. The root is not
    counted. Every node costs more than its parent, so the cheapest ones form a tree. The branch of
    first candidates is in it to its full depth. Ties: smaller depth, then lexicographic order.

    Raises:
        ValueError: no such tree has that many or that few nodes.
    """
    if not depth <= n_nodes <= most_nodes(k, depth):
        raise ValueError(
            f"a tree of depth {depth} with {k} candidates per node has between {depth} and "
            f"{most_nodes(k, depth)} nodes, not {n_nodes}"
        )

    def entry(path: RankPath) -> tuple[float, int, RankPath]:
        zipf = math.prod(rank + 1 for rank in path)
        # Rounded, so that equal costs stay equal whatever the power's last bit.
        return round(zipf * k ** ((len(path) - 1) / depth), 9), len(path), path

    spine = {(0,) * level for level in range(1, depth + 1)}
    chosen = set(spine)
    queue = [entry((0,))]
    while len(chosen) < n_nodes:
        path = heapq.heappop(queue)[2]
        chosen.add(path)
        if path[-1] + 1 < k:
            heapq.heappush(queue, entry((*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(queue, entry((*path, 0)))
    return StaticTree.from_paths(chosen)


def tree_of_levels(k: int, sizes: Sequence[int]) -> StaticTree:
    """Build the tree with ``sizes[d]`` nodes at depth d + 1, each level's cheapest ones.

    A node costs ``(r_1 + 1) … (r_d + 1)``; ties go by lexicographic order.

    Raises:
        ValueError: there is no level, or one has no nodes or more than its parents' candidates.
    """
    if not sizes:
        raise ValueError("a tree has at least one level")
    paths: list[RankPath] = []
    above: list[RankPath] = [()]
    for depth, size in enumerate(sizes, start=1):
        if not 1 <= size <= k * len(above):
            raise ValueError(
                f"level {depth} has between 1 and {k * len(above)} nodes, not {size}: there are "
                f"{len(above)} nodes above it with {k} candidates each"
            )
        below = [(*path, rank) for path in above for rank in range(k)]
        below.sort(key=lambda path: (math.prod(rank + 1 for rank in path), path))
        above = sorted(below[:size])
        paths += above
    return StaticTree.from_paths(paths)
