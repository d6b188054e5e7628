"""The key/value cache: preallocated for all layers, and kept exact by moving rows.

Rows of draft nodes are written after the committed ones. Keeping the accepted path is one gather
over all layers; rolling back only moves ``length``. A tree that is fed in several passes holds the
rows of the earlier ones between committed rows and new ones. The class offers the part of
transformers' cache interface that decoder layers call during a forward pass.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from specbench.arrays import IntArray
from specbench.decoding.device import to_device
from specbench.kernels.compiled_call import Segment
from specbench.kernels.recurrent import States
from specbench.kernels.static_rows import write_rows
from specbench.models.cache_layout import LayerLayout

_LENGTH_STEP = 256  # cache lengths are rounded up to this, so that few sizes are ever allocated


def in_place(path: IntArray) -> bool:
    """Return True if ``path`` is the first nodes of its tree, so that no row has to move."""
    return not len(path) or int(path[-1]) == len(path) - 1


class KVCache:
    """Keys and values of all layers in ``[2 * layers, batch, kv_heads, max_len, head_dim]``.

    ``storage[2 * i]`` holds the keys of layer i and ``storage[2 * i + 1]`` its values. With
    ``batch=1`` this is the ``[2 * layers, kv_heads, max_len, head_dim]`` tensor of the design; a
    larger batch is the N-Grammys layout, whose rows all hold the same committed text.

    Keys and values that differ in device (``device_map``), heads or size get one such tensor for
    each of these, and there is no ``storage`` of all. ``max_len`` counts committed tokens and the
    rows of one pass.
    """

    @staticmethod
    def length_for(max_len: int, rows: int) -> int:
        """Compute a cache's length for ``max_len`` tokens and passes of ``rows`` after them."""
        return -(-(max_len + rows) // _LENGTH_STEP) * _LENGTH_STEP

    def __init__(
        self,
        layers: Sequence[LayerLayout],
        *,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
    ) -> None:
        self.max_len = max_len
        self.batch = batch
        self.length = 0
        self.retained = 0  # rows after ``length`` that later passes see too, though not committed
        self._static: torch.Tensor | None = None  # first slots of a fixed shape
        self._shared = 0  # batch layout: rows up to here are the same in all batch rows
        kinds = [[(layer.device, *shape) for shape in layer.rows] for layer in layers]
        groups = {
            (device, heads, size): torch.zeros(
                slots, batch, heads, max_len, size, dtype=dtype, device=device
            )
            for (device, heads, size), slots in Counter(chain(*kinds)).items()
        }
        self._storage = list(groups.values())
        unused = {kind: iter(group) for kind, group in groups.items()}
        # Keys and values by layer, nothing of one that has none.
        self._layers = [tuple(next(unused[kind]) for kind in both) for both in kinds]

    @property
    def storage(self) -> torch.Tensor:
        """The one tensor of all layers; raises ValueError where there are several."""
        (storage,) = self._storage
        return storage

    @property
    def nbytes(self) -> int:
        return sum(s.numel() * s.element_size() for s in self._storage)

    def reset(self) -> None:
        """Forget everything; memory stays as it is, since nothing past ``length`` is read."""
        self.length = self.retained = self._shared = 0

    # -- what transformers' decoder layers call during a pass --------------------------------

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new rows ``[batch, kv_heads, rows, head_dim]``.

        Returns:
            Views ``[batch, kv_heads, length + retained + rows, head_dim]`` of keys and values.
        """
        cached_keys, cached_values = self._layers[layer]
        return self._written(cached_keys, keys), self._written(cached_values, values)

    def _written(self, cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Append ``new [batch, kv_heads, rows, size]`` and return all rows."""
        cached = cached[: len(new)]
        if self._static is not None:
            return write_rows(cached, self._static, new)
        start = self.length + self.retained
        end = start + new.shape[2]
        cached[:, :, start:end] = new
        return cached[:, :, :end]

    def sequence(self, number: int) -> KVCache:
        """View the part of one sequence, whose length is its own."""
        other, part = copy.copy(self), slice(number, number + 1)
        other.batch, other._storage = 1, [storage[:, part] for storage in self._storage]
        other._layers = [tuple(rows[part] for rows in both) for both in self._layers]
        return other

    def whole(self, layer: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View keys and values of a layer ``[batch, kv_heads, max_len, head_dim]``."""
        keys, values = self._layers[layer]
        return keys[:batch], values[:batch]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the committed rows; part of transformers' interface."""
        return self.length

    @contextmanager
    def static(self, first: torch.Tensor) -> Iterator[None]:
        """Let passes within write from the slots ``first [batch]`` on, and see all of the cache.

        Attention hides keys that hold nothing.
        """
        self._static = first
        try:
            yield
        finally:
            self._static = None

    def move(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows [n]`` to the places ``to [n]``; for a cache on one device.

        Of batch row 0 alone, the only one that a tree pass writes (see ``broadcast``).
        """
        for storage in self._storage:
            written = storage[:, :1]
            written.index_copy_(3, to, written.index_select(3, rows))

    def copy_text(self, other: KVCache) -> None:
        """Take over the committed rows of ``other``, a cache of the same model and sizes."""
        self.reset()
        for storage, source in zip(self._storage, other._storage, strict=True):
            storage.copy_(source)
        self.commit(None, other.length)

    def clear(self) -> None:
        """Zero all rows: a fixed shape also reads rows that hold nothing, and 0 * NaN is NaN."""
        for storage in self._storage:
            storage.zero_()

    def segments(self, sequences: int, rows: int, visible: torch.Tensor | None) -> list[Segment]:
        """Describe ``rows`` rows after each of the first ``sequences``, for a pass in one call.

        ``visible`` as in ``Segment``.
        """
        return [
            Segment(self.storage, sequence, self.length, self.retained, rows, visible)
            for sequence in range(sequences)
        ]

    # -- what the engine calls between passes ------------------------------------------------

    def retain(self, count: int) -> None:
        """Keep ``count`` rows of the last pass for the next one, without committing them."""
        self.retained += count

    def commit(self, rows: torch.Tensor | None, count: int, retained: int = 0) -> None:
        """Commit the next ``count`` rows, retain ``retained`` more and drop the others.

        ``rows [count + retained]`` are numbers from the first uncommitted row (0 is the root of a
        single pass) on any device, in the order they shall have; None where they are
        ``0 .. count + retained - 1`` already (a chain).
        """
        if rows is not None:
            start = self.length
            for storage in self._storage:
                index = to_device(rows + start, storage.device)
                storage[..., start : start + count + retained, :] = storage.index_select(3, index)
        self.length += count
        self.retained = retained

    def commit_row(self, row: int, count: int) -> None:
        """Commit the first ``count`` rows of batch row ``row`` for all batch rows."""
        end = self.length + count
        for storage in self._storage:
            new = storage[:, :, :, self.length : end]
            new.copy_(new[:, row : row + 1].clone().expand_as(new))
        self.length = self._shared = end
        self.retained = 0

    def broadcast(self) -> None:
        """Bring all rows of a batch layout up to row 0.

        A prompt and a tree pass write row 0 alone, so a batch pass calls this first.
        """
        if self.batch > 1 and self._shared < self.length:
            for storage in self._storage:
                text = storage[:, :, :, self._shared : self.length]
                text[:, 1:].copy_(text[:, :1].expand_as(text[:, 1:]))
        self._shared = self.length

    def truncate(self, length: int) -> None:
        self.length = length
        self.retained = 0
        self._shared = min(self._shared, length)


class StateCache(States, KVCache):
    """Keys and values of layers that attend, and the states of those that keep one, of one text."""

    def __init__(self, layers: Sequence[LayerLayout], **sizes: Any) -> None:
        States.__init__(self)
        KVCache.__init__(self, layers, **sizes)

    def reset(self) -> None:
        KVCache.reset(self)
        self.layers = {}

    def commit(self, rows: torch.Tensor | None, count: int, retained: int = 0) -> None:
        KVCache.commit(self, rows, count, retained)
        States.commit(self, rows, count)

    def truncate(self, length: int) -> None:
        """Take the last commit back, whose text had ``length`` tokens; 0: forget everything."""
        KVCache.truncate(self, length)
        self.layers = dict(self.before) if length else {}


class SequenceCaches:
    """Caches of several sequences in one pass over all their rows.

    ``rows`` says how many of the pass's rows belong to each of ``caches``. Layers get lists, a
    tensor for each sequence, which `specbench.kernels.attention.attend` takes.
    """

    def __init__(self, caches: Sequence[KVCache], rows: Sequence[int]) -> None:
        self._caches, self._rows = caches, list(rows)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As ``KVCache.update``, of rows ``[1, kv_heads, all rows, head_dim]``."""
        parts = zip(
            self._caches, keys.split(self._rows, 2), values.split(self._rows, 2), strict=True
        )
        written = [cache.update(key, value, layer) for cache, key, value in parts]
        return [key for key, _ in written], [value for _, value in written]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the longest sequence's committed rows; only transformers reads it."""
        return max(cache.length for cache in self._caches)
