"""What the rows of a pass may look at: the part of a target that plans its attention."""

from __future__ import annotations

import torch

from specbench.decoding.device import to_device
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import TreeGeometry, visibility
from specbench.kernels.attention import AttentionPlan, windowed_masks
from specbench.models.kv_cache import KVCache


class PassMasks:
    """Masks of passes behind the text in ``cache``; the mask of a tree lies in a buffer.

    Attributes:
        windows: sizes of the model's sliding windows.
        hidden_value: what a mask holds where attention must not look.
    """

    cache: KVCache
    device: torch.device
    dtype: torch.dtype
    windows: tuple[int, ...]

    def _new_mask(self, rows: int, length: int) -> None:
        """A buffer for trees of ``rows`` rows with the root, over ``length`` keys."""
        self._mask = torch.zeros(rows, length, dtype=self.dtype, device=self.device)
        self._mask_span = (0, 0)
        self.hidden_value = torch.finfo(self.dtype).min
        self._key_positions = torch.arange(length, device=self.device)

    def seen(
        self, tree: DraftTree, geometry: TreeGeometry
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Which rows of a tree see each other ``[rows, rows]``, and their depths ``[rows]``.

        ``geometry`` has read the tree.
        """
        rows = len(tree) + 1
        if rows == 1:  # plain decoding: a row that sees all, at the next position
            return None, self._key_positions[:1]
        if self.device.type == "cpu":
            visible = torch.from_numpy(geometry.visible[:rows, :rows])
            return visible, torch.from_numpy(geometry.depths[:rows])
        return visibility(to_device(tree.parents, self.device))  # n numbers instead of n * n

    def lower_triangle(self, n: int, before: int = 0) -> torch.Tensor | None:
        """What rows of a chain see of ``before`` others and of themselves; None where it is all."""
        if n == 1:
            return None
        ones = torch.ones(n, before + n, dtype=torch.bool, device=self.device)
        return ones.tril(before)

    def positions(self, n: int) -> torch.Tensor:
        """``[n]`` from 0, on the device."""
        return self._key_positions[:n]

    def plan_of(
        self, past: int, visible: torch.Tensor | None, own: torch.Tensor, rows: int | None = None
    ) -> AttentionPlan:
        """Masks over ``past`` committed tokens and the others, which are at ``own [.. rows]``.

        ``visible [rows, own]`` as in `extend`; ``rows`` are all of ``own`` where it is None.
        """
        rows = len(own) if rows is None else rows
        plan = AttentionPlan()
        if visible is not None:
            plan.mask = torch.nn.functional.pad(self._additive(visible), (past, 0))[None, None]
        text = self._key_positions[:past]
        plan.windowed = windowed_masks(self.windows, text, own, rows, visible, self._additive)
        return plan

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, self.hidden_value)

    def _plan(
        self, rows: int, visible: torch.Tensor | None, positions: torch.Tensor
    ) -> AttentionPlan:
        """Masks over the cached text (all visible, windows aside) and the pass's own rows.

        ``visible [rows, rows]`` is None for a single row.
        """
        past = self.cache.length
        plan = AttentionPlan()
        if visible is not None:
            start, end = self._mask_span
            self._mask[:, start:end] = 0.0
            own = self._mask[:rows, past : past + rows]
            own.masked_fill_(~visible, self.hidden_value)
            self._mask_span = (past, past + rows)
            plan.mask = self._mask[None, None, :rows, : past + rows]
        text = self._key_positions[:past]
        plan.windowed = windowed_masks(self.windows, text, positions, rows, visible, self._additive)
        return plan
