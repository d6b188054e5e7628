"""What the decode loops ask of a target, live or recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from specbench.arrays import IntArray
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import PassScores

if TYPE_CHECKING:
    import torch


class StepScores(PassScores, Protocol):
    """Scores of a pass, with the hidden states by number that drafters may ask for."""

    @property
    def hidden(self) -> Mapping[int, torch.Tensor] | None: ...


class TextTarget(Protocol):
    """What belongs to one text: its prompt's pass, and the keys and values that it keeps."""

    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> StepScores: ...

    def commit(self, tree: DraftTree, path: IntArray) -> None: ...

    def free_rows(self) -> int: ...


class PassTarget(TextTarget, Protocol):
    """What the loop asks of a target: ``specbench.models.target.Target``, or a recorded output."""

    @property
    def device(self) -> torch.device: ...

    def forward(
        self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()
    ) -> StepScores: ...


Asked: TypeAlias = tuple[int, int, DraftTree]  # seat, root and draft of a text in a joint pass


class BatchPassTarget(Protocol):
    """Several texts at once: ``specbench.models.batch_target.BatchTarget``."""

    @property
    def device(self) -> torch.device: ...

    @property
    def seats(self) -> Sequence[TextTarget]: ...

    def check(self, seat: int, tree: DraftTree) -> None:
        """Refuse a malformed draft before it is in a pass with others (CaseFailed)."""

    def forward(
        self, asked: Sequence[Asked], *, hidden_layers: tuple[int, ...] = ()
    ) -> Sequence[StepScores]:
        """One pass over the rows of all, each of a seat of its own; every draft is checked."""
