"""What a drafter may know of the target, and the draft model as a drafter uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from specbench.arrays import Array, IntArray


class TargetInfo(Protocol):
    """What a drafter may know of the target; ``specbench.models.target.Target`` in a run.

    Attributes:
        device: where passes run and logits lie.
        dtype: of its weights.
        vocab_size: logits of a row.
    """

    device: torch.device
    dtype: torch.dtype
    vocab_size: int

    @property
    def n_parameters(self) -> int:
        """Weights, tied ones once."""

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree that it reads in one pass."""

    def fingerprint(self) -> Array:
        """A sample of its weights in float32: the same in any dtype, up to rounding."""

    def pass_s(self, rows: int) -> float:
        """Measure a pass of so many rows over a short text, in seconds; empties the cache."""


class DraftLM(Protocol):
    """A second model that drafts; ``specbench.models.draft_model.DraftModel`` in a run.

    Ids are the target's, unless ``own`` asks for the draft's.

    Attributes:
        device: where passes run and logits lie.
        forwards: passes since ``begin``.
        tokens: rows of those passes.
    """

    device: torch.device
    forwards: int
    tokens: int

    @property
    def n_parameters(self) -> int:
        """Weights, tied ones once."""

    def begin(self, tokens: IntArray, seed: int = 0) -> None:
        """Start a turn: read the text ``tokens [n]``, reset the counters, seed ``draw``."""

    def free_rows(self, length: int) -> int:
        """Tokens that still fit behind ``length``; negative where the text itself does not."""

    def catch_up(self, tokens: IntArray, *, own: bool = False) -> torch.Tensor:
        """Read what is new in the text ``tokens [n]``; logits ``[vocab]`` behind it."""

    def extend(
        self,
        tokens: IntArray | torch.Tensor,
        parents: IntArray | torch.Tensor,
        *,
        own: bool = False,
    ) -> torch.Tensor:
        """Read nodes ``[n]`` behind the text; logits ``[n, vocab]``."""

    def commit_path(self, path: IntArray, survivors: IntArray | None = None) -> None:
        """Commit the rows of accepted nodes ``[a]``; of the others ``survivors [s]`` stay."""

    def drop_nodes(self) -> None:
        """Forget all nodes that are not committed."""

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """``[n]`` ids drawn from rows of probabilities ``[n, vocab]``."""

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of the draft's own."""

    def to_target_vocab(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """``[..., target's vocab]`` of ``[..., own vocab]``; ``fill`` for what the draft lacks."""

    def pass_s(self, rows: int) -> float:
        """Measure a pass over so many nodes behind a short text, in seconds; empties the cache."""

    def report(self) -> Mapping[str, int]:
        """Its counters, for the method's own ``report``."""
