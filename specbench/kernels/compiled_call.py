"""The common part of passes that run in one call: addresses, buffers, threads, segments.

``compiled_pass`` has a model's passes, ``specbench.models.heads.decoder`` a trained head's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specbench.kernels import pass_kernels
from specbench.kernels.packed_linear import Product
from specbench.kernels.panel_kernels import WIDTH, form_of


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of a pass that continue one sequence.

    Attributes:
        storage: ``[2 * layers, batch, kv_heads, max_len, head_dim]``, see ``KVCache``.
        sequence: its index in the batch.
        past: rows of the cache that all rows see.
        held: rows after them that ``visible`` covers.
        rows: that are read now; their keys and values are appended.
        visible: ``[rows, held + rows]`` bool, which of held and new rows each sees; None if each
            sees all before it and itself.
    """

    storage: torch.Tensor
    sequence: int
    past: int
    held: int
    rows: int
    visible: torch.Tensor | None = None

    @property
    def keys(self) -> int:
        """Rows of the cache that the pass reads or writes for its sequence."""
        return self.past + self.held + self.rows


class CompiledCall:
    """Layers that one compiled call runs; one call at a time.

    Args:
        run: see ``pass_kernels.compiled``.
        layers: how many; a class puts `_layer_fields` of each into ``_table``.
        numbers: epsilons of norms and of heads' norms, and the scale of attention.
    """

    def __init__(
        self,
        run: Callable[[Any, int], None],
        layers: int,
        *,
        hidden: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        numbers: Sequence[float],
    ) -> None:
        self._run, self._hidden, self._head_dim = run, hidden, head_dim
        self._threads = 0
        self._referenced: list[Any] = []  # whatever the addresses are of
        self._fields = fields = np.zeros(pass_kernels.CALL_WORDS, dtype=np.intp)
        fields[pass_kernels.LAYERS], fields[pass_kernels.HIDDEN] = layers, hidden
        fields[pass_kernels.HEADS], fields[pass_kernels.KV_HEADS] = heads, kv_heads
        fields[pass_kernels.HEAD_DIM], fields[pass_kernels.INNER] = head_dim, inner
        self._state_addresses = np.zeros(layers + 1, dtype=np.intp)
        self._table = np.zeros((layers, pass_kernels.LAYER_WORDS), dtype=np.intp)
        for field, value in (
            (pass_kernels.WEIGHTS, self._table),
            (pass_kernels.NUMBERS, np.array(numbers, dtype=np.float64)),
            (pass_kernels.WANTED, self._state_addresses),
            (pass_kernels.MEETING, np.zeros(256, dtype=np.uint8)),
        ):
            fields[field] = self._address(value)

    def _address(self, value: Any) -> int:
        """Take the address of a tensor or array and keep it alive; 0 for None."""
        if value is None:
            return 0
        self._referenced.append(value)
        return int(value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr())

    def _product(self, product: Product) -> list[int]:
        """List the fields of a product: its panels, their form and its bias."""
        panels = self._address(product.panels)
        return [panels, form_of(product.panels).number, self._address(product.bias)]

    def _layer_fields(
        self,
        before: Any,
        after: Any,
        products: Sequence[Product],
        of_heads: Sequence[Any],
        beside: Any = None,
    ) -> list[int]:
        """Fill a row of the table of weights.

        Args:
            before, after: weights of the norms before attention and before the gated product.
            products: of attention's input and output, of the gated product's.
            of_heads: weights of the norms of queries and keys.
            beside: weights of the norm of what attention reads beside the state.
        """
        qkv, out, gate_up, down = products
        return [
            self._address(before),
            *self._product(qkv),
            *map(self._address, of_heads),
            *self._product(out),
            self._address(after),
            *self._product(gate_up),
            *self._product(down),
            self._address(beside),
        ]

    def _reserve(self, rows: int, keys: int) -> None:
        """Allocate buffers for calls of so many rows over sequences of so many keys."""
        fields, self._rows, self._keys = self._fields, rows, keys
        queries = int(fields[pass_kernels.HEADS]) * self._head_dim
        both = queries + 2 * int(fields[pass_kernels.KV_HEADS]) * self._head_dim
        inner = int(fields[pass_kernels.INNER])
        self._buffers = {
            field: torch.empty(rows, columns, dtype=torch.float32)
            for field, columns in (
                (pass_kernels.NORMED, self._hidden),
                (pass_kernels.PRODUCT, max(both, 2 * inner, self._hidden) + WIDTH),
                (pass_kernels.QUERIES, queries),
                (pass_kernels.ATTENDED, queries),
                (pass_kernels.GATED, inner),
            )
        }
        for field, buffer in self._buffers.items():
            fields[field] = buffer.data_ptr()
        fields[pass_kernels.SCRATCH_BYTES] = pass_kernels.scratch_bytes(self._head_dim, keys)
        self._threads = 0

    def _use_threads(self) -> None:
        """Allocate scratch memory for each of torch's threads."""
        threads = torch.get_num_threads()
        if threads == self._threads:
            return
        self._threads = threads
        thread_bytes = int(self._fields[pass_kernels.SCRATCH_BYTES])
        self._scratch = torch.empty(threads * thread_bytes, dtype=torch.uint8)
        self._best = torch.empty(threads * self._rows * WIDTH * 8, dtype=torch.uint8)
        self._fields[pass_kernels.SCRATCH] = self._scratch.data_ptr()
        self._fields[pass_kernels.BEST] = self._best.data_ptr()

    def _call(
        self,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        segments: Sequence[Segment],
    ) -> None:
        """Run it over ``states [rows, hidden]``, which it overwrites with the last layer's.

        ``cos`` and ``sin`` are ``[rows, head_dim]``.
        """
        self._use_threads()
        fields = self._fields
        table = np.zeros((len(segments), pass_kernels.SEGMENT_WORDS), dtype=np.intp)
        seen = []  # until the call is over
        first = 0
        for segment, segment_row in zip(segments, table, strict=True):
            storage, visible = segment.storage, segment.visible
            per_kind, per_text, per_head = storage.stride()[:3]
            if visible is not None and visible.stride(1) != 1:
                visible = visible.contiguous()
            seen.append(visible)
            segment_row[:] = (
                first,
                segment.rows,
                storage.data_ptr() + 4 * segment.sequence * per_text,
                per_head,
                per_kind,
                2 * per_kind,
                segment.past,
                segment.held,
                0 if visible is None else visible.data_ptr(),
                0 if visible is None else visible.stride(0),
            )
            first += segment.rows
        fields[pass_kernels.ROWS], fields[pass_kernels.STATES] = len(states), states.data_ptr()
        fields[pass_kernels.COSINES], fields[pass_kernels.SINES] = cos.data_ptr(), sin.data_ptr()
        fields[pass_kernels.SEGMENTS] = len(segments)
        fields[pass_kernels.SEGMENT_TABLE] = table.ctypes.data
        self._run(fields.ctypes.data, self._threads)
