"""What the decode loop asks of a target, live or recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from specbench.arrays import IntArray
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import PassScores

if TYPE_CHECKING:
    import torch


class StepScores(PassScores, Protocol):
    """Scores of a pass, with the hidden states by number that drafters may ask for."""

    @property
    def hidden(self) -> Mapping[int, torch.Tensor] | None: ...


class PassTarget(Protocol):
    """What the loop asks of a target: ``specbench.models.target.Target``, or a recorded output."""

    @property
    def device(self) -> torch.device: ...

    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> StepScores: ...

    def forward(
        self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()
    ) -> StepScores: ...

    def commit(self, tree: DraftTree, path: IntArray) -> None: ...

    def free_rows(self) -> int: ...
