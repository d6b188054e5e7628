"""What a drafter may know of the target, and how it asks a model of its own.

A drafter whose drafts take passes of a model hands them out one by one, as a generator. Alone each
is answered at once; beside other texts those of all are answered by one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from specbench.arrays import Array, IntArray

if TYPE_CHECKING:
    import torch

_Made = TypeVar("_Made")
Ids: TypeAlias = "IntArray | torch.Tensor"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a drafter asks of its model.

    Attributes:
        shared: calls of which this is equal may be answered together: the weights that they read,
            and what else must agree.
        asked: what is asked.
        answer: from what is asked in one or several such calls to what each gets, in their order.
        choice: it is no pass: what it asks is decided over the drafts of all, once all are there.
    """

    shared: Hashable
    asked: Any
    answer: Callable[[Sequence[Any]], Sequence[Any]]
    choice: bool = False


ModelWork: TypeAlias = Generator[ModelCall, Any, _Made]  # gives calls, gets answers, makes a result


def alone(work: ModelWork[_Made]) -> _Made:
    """What comes of it where each call is answered by itself."""
    found = None
    while True:
        try:
            call = work.send(found)
        except StopIteration as done:
            made: _Made = done.value
            return made
        (found,) = call.answer([call.asked])


class TargetEmbeddings(Protocol):
    """The target's embedding and LM head, to read and never to write.

    They are on the target's device and in its dtype. Without what some models do to a row of the
    embedding (Gemma's scale) or to the LM head's product (a cap, a scale).
    """

    @property
    def embedding(self) -> torch.Tensor:
        """``[vocab, hidden]``; may hold more rows than there are ids."""

    @property
    def lm_head(self) -> torch.Tensor:
        """``[vocab, hidden]``; the embedding itself where the model ties them."""

    @property
    def lm_head_bias(self) -> torch.Tensor | None:
        """``[vocab]``."""

    @property
    def packed(self) -> str | None:
        """How a trained head's products are packed (``engine.draft_weights``), as the LM head is.

        None where the LM head is not.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., vocab]`` of states ``[..., hidden]`` after the final norm.

        By the target's packed weights where it has them.
        """


class TargetInfo(Protocol):
    """What a drafter may know of the target; ``specbench.models.target.Target`` in a run."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int

    @property
    def n_parameters(self) -> int:
        """Weights, tied ones once."""

    @property
    def n_layers(self) -> int:
        """Decoder layers; hidden states are numbered from 0 to this, see ``Needs``."""

    @property
    def embeddings(self) -> TargetEmbeddings: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Its configuration, in the words of a ``config.json``."""

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree that it reads in one pass."""

    @property
    def graph_tokens(self) -> int:
        """Tokens of the longest text whose passes are replayed as CUDA graphs; 0 for none.

        A drafter's own work should be so, too, lest it be slower beside them than it has to.
        """

    def fingerprint(self) -> Array:
        """A sample of its weights in float32: the same in any dtype, up to rounding."""


class DraftLM(Protocol):
    """A second model that drafts; ``specbench.models.draft.model.DraftModel`` in a run.

    Ids are the target's. With ``own`` logits are over the draft's own ids, which `to_target_ids`
    translates: cheaper to search where the draft's vocabulary is smaller than the target's.
    """

    device: torch.device
    vocab_size: int  # of its own ids that it can propose
    forwards: int  # passes since ``begin``
    tokens: int  # rows of those passes

    @property
    def n_parameters(self) -> int: ...

    def begin(self, tokens: IntArray, seed: int = 0) -> None:
        """Start a turn: read the text ``tokens [n]``, reset the counters, seed ``draw``.

        Draws differ from a verifier's with the same seed.
        """

    def free_rows(self, length: int) -> int:
        """Tokens that its context still takes behind a text of ``length`` tokens.

        Negative where the text itself is too long: the method then drafts nothing.
        """

    def catch_up(self, tokens: IntArray, *, own: bool = False) -> torch.Tensor:
        """Read what is new in the text ``tokens [n]``; logits ``[vocab]`` behind it.

        Nodes still held are dropped.
        """

    def catching_up(self, tokens: IntArray, *, own: bool = False) -> ModelWork[torch.Tensor]:
        """`catch_up`, its pass handed out."""

    def extend(self, tokens: Ids, parents: Ids, *, own: bool = False) -> torch.Tensor:
        """Read nodes ``[n]`` behind the text; they are numbered as they come.

        Args:
            tokens: ``[n]``; a device tensor spares the copy.
            parents: ``[n]`` numbers of the nodes they hang below, -1 for the text itself. On the
                host they may also name nodes of this very call; a device tensor must not.
            own: as above.

        Returns:
            Logits ``[n, vocab]``, float32 or float64; -inf for ids that it cannot propose.

        Raises:
            ValueError: more nodes than reserved, or a parent that does not come before its child.
        """

    def extending(self, tokens: Ids, parents: Ids, *, own: bool = False) -> ModelWork[torch.Tensor]:
        """`extend`, its pass handed out."""

    def commit_path(self, path: IntArray, survivors: IntArray | None = None) -> None:
        """Commit the rows of accepted nodes; the others are dropped.

        Args:
            path: ``[a]`` held nodes from the text downwards; those never fed are left out.
            survivors: ``[s]`` descendants of the path's last node that stay, parents before
                children; they are numbered 0 .. s - 1 from now on.
        """

    def drop_nodes(self) -> None: ...

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """``[n]`` ids drawn from rows of probabilities ``[n, vocab]``."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """``[n]`` own ids of the rows ``[n, own vocab]`` that `catch_up` or `extend` gave last.

        Where their pass tells them, nobody searches the logits again.
        """

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor: ...

    def to_target_vocab(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """``[..., target's vocab]`` of ``[..., own vocab]``; ``fill`` for what the draft lacks."""

    def report(self) -> Mapping[str, int]:
        """Its counters, for the method's own ``report``."""
