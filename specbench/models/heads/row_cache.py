"""A head's own small KV cache, and the rows of its passes: their positions and what they see.

A pass reads either new committed rows after the present ones, or nodes of the draft tree that is
being grown. Committed rows have the target's true states, nodes the head's own guesses, so a
node's keys are never kept: the next committed rows drop them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench.kernels.attention import AttentionPlan
from specbench.kernels.compiled_call import Segment
from specbench.kernels.static_rows import StaticRows
from specbench.models.cache_layout import LayerLayout
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.kv_cache import KVCache, SequenceCaches

_ALIGNED = 16  # keys that attention kernels read at once: a mask of other sizes is copied


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass: their positions and what they see."""

    cache: KVCache | SequenceCaches
    cos: torch.Tensor  # [rows, head_dim]
    sin: torch.Tensor
    plan: AttentionPlan
    # Of nodes: what they see [rows, held + rows], and all depths, the root's -1 first; None of
    # committed rows
    nodes: tuple[torch.Tensor, torch.Tensor] | None
    segments: tuple[Segment, ...] = ()  # for a call that runs all layers; then ``plan`` is empty

    def __len__(self) -> int:
        return len(self.cos)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[Any, Any]:
        """As ``KVCache.update``."""
        if self.plan.static is None:
            return self.cache.update(keys, values, layer)
        assert isinstance(self.cache, KVCache)
        with self.cache.static(self.plan.static.first):
            return self.cache.update(keys, values, layer)

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``KVCache.whole``."""
        assert isinstance(self.cache, KVCache)
        return self.cache.whole(layer, 1)


def joint_rows(parts: Sequence[Rows]) -> Rows:
    """Join the rows of several sequences; each sequence's cache keeps its rows."""
    if len(parts) == 1:
        return parts[0]
    caches = [rows.cache for rows in parts if isinstance(rows.cache, KVCache)]
    plan = AttentionPlan(sequences=tuple((len(rows), rows.plan) for rows in parts))
    cos, sin = (torch.cat(tables) for tables in zip(*((r.cos, r.sin) for r in parts), strict=True))
    segments = tuple(segment for rows in parts for segment in rows.segments)
    counts = [len(rows) for rows in parts]
    return Rows(SequenceCaches(caches, counts), cos, sin, plan, None, segments)


class RowCache:
    """Keys and values of a head's layers.

    Entry j has position j. A node of level l (1 below the root) has position ``length + l - 1``
    and sees the committed rows, its ancestors and itself.

    Args:
        layers: decoder layers of the head.
        max_len: committed rows at most.
        max_nodes: nodes held at once at most.
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        layers: int = 1,
        max_len: int,
        max_nodes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        length = -(-(max_len + max_nodes) // _ALIGNED) * _ALIGNED
        with torch.inference_mode(False):  # it may be written to outside of that mode, too
            self._cache = KVCache(
                [LayerLayout(device, shape.cached_rows)] * layers,
                batch=1,
                max_len=length,
                dtype=dtype,
            )
        self._max_len, self._max_nodes = max_len, max_nodes
        self.few = 0  # rows of a pass that one call runs at most
        self._window, self._dtype = shape.window, dtype
        frequencies, factor = shape.inverse_frequencies()
        positions = torch.arange(length, dtype=torch.float64)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self._cos = (angles.cos() * factor).to(device, dtype)
        self._sin = (angles.sin() * factor).to(device, dtype)
        self._positions = torch.arange(length, device=device)
        # The root, which sees no node, and the held nodes: which of these each sees, and depths.
        self._no_nodes = torch.zeros(1, 0, dtype=torch.bool, device=device)
        self._no_depths = torch.full((1,), -1, device=device)
        self._seen, self._depths = self._no_nodes, self._no_depths
        self._fixed: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Committed rows."""
        return self._cache.length

    @property
    def rows(self) -> int:
        """Rows that it has memory for."""
        return self._cache.max_len

    def fixed(self, length: torch.Tensor) -> RowCache:
        """Copy the cache for work that is recorded: ``length [1]`` of its rows are committed.

        Some of them may be padding, after the others. `read` counts them afterwards.
        """
        other = copy.copy(self)
        other._fixed, other._seen, other._depths = length, self._no_nodes, self._no_depths
        return other

    def drop_nodes(self) -> None:
        self._cache.retained = 0
        self._seen, self._depths = self._no_nodes, self._no_depths

    def truncate(self, length: int) -> None:
        """Forget the nodes, and the committed rows from ``length`` on."""
        self.drop_nodes()
        self._cache.truncate(length)

    def committed_rows(self, n: int, *, attended: bool = True) -> Rows:
        """Plan a pass over the next ``n`` committed rows; held nodes are dropped.

        Rows that are not ``attended`` look at nothing and only leave keys and values.

        Raises:
            ValueError: there is no room for them.
        """
        if self._fixed is not None:
            rows = self._positions[:n]
            return self._static_rows(rows, rows <= rows[:, None], rows)
        self.drop_nodes()
        start = self.length
        if start + n > self._max_len:
            raise ValueError(f"{start + n} rows exceed the {self._max_len} reserved")
        if n <= self.few or not attended or (n == 1 and self._window is None):  # it sees all
            cos, sin = (table[start : start + n] for table in (self._cos, self._sin))
            segments = tuple(self._cache.segments(1, n, None)) if n <= self.few else ()
            return Rows(self._cache, cos, sin, AttentionPlan(), None, segments)
        positions = self._positions[start : start + n]
        return self._rows(positions, self._positions[: start + n] <= positions[:, None])

    def node_rows(self, parents: torch.Tensor) -> Rows:
        """Plan a pass over nodes below ``parents [n]``, numbers of held nodes; -1 is the root.

        Nodes are numbered as they come.

        Raises:
            ValueError: more nodes than reserved, or a parent that is not held (seen on a CPU).
        """
        held, n = self._seen.shape[1], len(parents)
        if held + n > self._max_nodes:
            raise ValueError(f"{held + n} nodes exceed the {self._max_nodes} reserved")
        if not parents.is_cuda and ((parents >= held) | (parents < -1)).any():
            raise ValueError("a node's parent was not read before it")
        # A node sees what its parent sees, and itself.
        above = parents + 1
        itself = torch.eye(n, dtype=torch.bool, device=above.device)
        seen = torch.cat([self._seen.index_select(0, above), itself], 1)
        new = self._depths.index_select(0, above) + 1
        depths = torch.cat([self._depths, new])
        if self._fixed is not None:
            return self._static_rows(new, seen, depths[1:], (seen, depths))
        positions = self.length + depths[1:]
        if n <= self.few:
            segments = tuple(self._cache.segments(1, n, seen))
            cos, sin = self._cos[positions[held:]], self._sin[positions[held:]]
            return Rows(self._cache, cos, sin, AttentionPlan(), (seen, depths), segments)
        visible = torch.cat([seen.new_ones(n, self.length), seen], dim=1)
        keys = torch.cat([self._positions[: self.length], positions])
        return self._rows(positions[held:], visible, (seen, depths), keys)

    def _static_rows(
        self,
        depths: torch.Tensor,
        visible: torch.Tensor,
        key_depths: torch.Tensor,
        nodes: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Rows:
        """Plan rows after ``fixed`` rows, at ``depths [n]`` behind them, and after held nodes."""
        assert self._fixed is not None
        first = self._fixed + (visible.shape[1] - len(depths))
        static = StaticRows(self._fixed, first, visible[None], depths[None], key_depths[None])
        positions = self._fixed + depths
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return Rows(self._cache, cos, sin, AttentionPlan(static=static), nodes)

    def block_rows(self, n: int, windows: Collection[int] = ()) -> Rows:
        """Plan a pass over the ``n`` rows after the committed ones, which all see each other.

        They are held as nodes, which are dropped before. ``windows`` are tokens that layers look
        back.
        """
        depths = self._positions[:n]
        seen = torch.ones(n, n, dtype=torch.bool, device=depths.device)
        nodes = seen, torch.cat([self._no_depths, depths])
        if self._fixed is not None:
            return self._static_rows(depths, seen, depths, nodes)
        self.drop_nodes()
        positions = self._positions[self.length : self.length + n]
        cos, sin = self._cos[positions], self._sin[positions]
        if n <= self.few:
            segments = tuple(self._cache.segments(1, n, seen))
            return Rows(self._cache, cos, sin, AttentionPlan(), nodes, segments)
        behind = positions[:, None] - self._positions[: self.length + n]
        masks = torch.zeros_like(behind, dtype=self._dtype)[None, None]
        windowed = {w: masks.masked_fill(behind >= w, -torch.inf) for w in windows}
        return Rows(self._cache, cos, sin, AttentionPlan(windowed=windowed), nodes)

    def _rows(
        self,
        positions: torch.Tensor,
        visible: torch.Tensor,
        nodes: tuple[torch.Tensor, torch.Tensor] | None = None,
        keys: torch.Tensor | None = None,
    ) -> Rows:
        """Mask by ``visible [rows, keys]``; ``keys [keys]`` are positions unless they count up."""
        if self._window is not None:
            keys = self._positions[: visible.shape[1]] if keys is None else keys
            visible = visible & (positions[:, None] - keys < self._window)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        return Rows(
            self._cache,
            self._cos[positions],
            self._sin[positions],
            AttentionPlan(mask=mask[None, None]),
            nodes,
        )

    def keep(self, rows: Rows) -> None:
        """Commit a pass's rows, or hold its nodes for the ones below them."""
        if rows.nodes is not None:
            seen, self._depths = rows.nodes
            before = torch.nn.functional.pad(self._seen, (0, len(seen)))
            self._seen = torch.cat([before, seen])
        if self._fixed is not None:
            return
        if rows.nodes is None:
            self._cache.commit(None, len(rows))
        else:
            self._cache.retain(len(rows))

    def read(self, n: int) -> None:
        """Commit ``n`` more rows, which its `fixed` copy has written."""
        self.drop_nodes()
        self._cache.commit(None, n)
