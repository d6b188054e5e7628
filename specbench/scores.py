"""What one target pass says about each of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specbench.structs import IntArray


class Scores:
    """What one pass says about each of its rows: row 0 is the root, row i + 1 is node i.

    Attributes:
        raw: logits as the pass returned them, ``[rows, vocab]``.
        select: row numbers of root and nodes within ``raw``, or None where they are in order.
        hidden: hidden states ``[rows, hidden]`` by layer, as asked for.
    """

    __slots__ = ("hidden", "raw", "select")

    def __init__(
        self,
        raw: torch.Tensor,
        select: torch.Tensor | None = None,
        hidden: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.raw, self.select, self.hidden = raw, select, hidden

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        return self.raw.shape[-1]

    @property
    def verified(self) -> tuple[IntArray, IntArray] | None:
        """Accepted path and greedy choices on the host, where the pass itself verified."""
        return None

    @property
    def logits(self) -> torch.Tensor:
        """``[n + 1, vocab]`` on the device."""
        return self.raw if self.select is None else self.raw.index_select(0, self.select)

    def greedy(self) -> torch.Tensor:
        """``[n + 1]`` on the device: the largest logit's id, the smallest id on ties.

        -1 stands for a row whose largest logit is not finite.
        """
        ids = self.raw.argmax(-1)
        top = self.raw.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        ids = torch.where(torch.isfinite(top), ids, -1)
        return ids if self.select is None else ids.index_select(0, self.select)
