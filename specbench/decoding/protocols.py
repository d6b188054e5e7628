"""What a drafter may know of the target, and how it runs a model of its own.

A drafter whose drafts take passes of a model yields them one by one, as a generator. For a single
sequence each call is answered at once; in a batch one pass answers the calls of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from specbench.arrays import Array, IntArray

if TYPE_CHECKING:
    import torch

_Result = TypeVar("_Result")
Ids: TypeAlias = "IntArray | torch.Tensor"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A pass that a drafter requests of its model.

    Attributes:
        shared: calls with an equal value may be answered together: the weights that they read, and
            whatever else must agree.
        request: the inputs of this call.
        answer: maps the requests of one or several such calls to their answers, in order.
        choice: a decision over the drafts of all sequences, once all are there, and not a pass.
    """

    shared: Hashable
    request: Any
    answer: Callable[[Sequence[Any]], Sequence[Any]]
    choice: bool = False


ModelWork: TypeAlias = Generator[ModelCall, Any, _Result]  # yields calls, is sent answers


def run_to_completion(work: ModelWork[_Result]) -> _Result:
    """Run the generator to its end, answering one call at a time."""
    answer = None
    while True:
        try:
            call = work.send(answer)
        except StopIteration as done:
            result: _Result = done.value
            return result
        (answer,) = call.answer([call.request])


class TargetEmbeddings(Protocol):
    """The target's embedding and LM head, read-only, on the target's device and in its dtype.

    Model-specific steps after the embedding (Gemma's scale) or the LM head (a cap, a scale) are
    not applied.
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
        """Format of a trained head's packed weights (``engine.draft_weights``), as for the LM head.

        None where the LM head is not packed.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute ``[..., vocab]`` from states ``[..., hidden]`` after the final norm.

        Uses the target's packed weights where it has them.
        """


class TargetInfo(Protocol):
    """A drafter's view of the target; ``specbench.models.target.Target`` in a run."""

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
        """Its configuration, with the keys of a ``config.json``."""

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree that it reads in one pass."""

    @property
    def graph_tokens(self) -> int:
        """Tokens of the longest sequence whose passes are replayed as CUDA graphs; 0 for none.

        A drafter should then use graphs, too: launches would dominate its time.
        """

    def fingerprint(self) -> Array:
        """Sample its weights in float32: the same in any dtype, up to rounding."""


class DraftLM(Protocol):
    """A second model that drafts; ``specbench.models.draft.model.DraftModel`` in a run.

    Ids are the target's. With ``draft_vocab`` logits are over the draft's own ids, which
    `to_target_ids` translates: cheaper to search where its vocabulary is smaller than the target's.
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
        """Count the tokens that its context still takes after ``length`` tokens.

        Negative where these alone are too many: the method then drafts nothing.
        """

    def catch_up(self, tokens: IntArray, *, draft_vocab: bool = False) -> torch.Tensor:
        """Read the new part of the sequence ``tokens [n]``; return logits ``[vocab]`` after it.

        Nodes still held are dropped.
        """

    def catching_up(
        self, tokens: IntArray, *, draft_vocab: bool = False
    ) -> ModelWork[torch.Tensor]:
        """Run `catch_up` as a generator that yields its pass."""

    def expect_chain(self, count: int) -> None:
        """Prepare `likeliest_chain` of so many tokens; untimed."""

    def likeliest_chain(self, tokens: IntArray, count: int) -> torch.Tensor | None:
        """Read a sequence's new part and draft the likeliest ``[count]`` ids, in one CUDA graph.

        The ids are the target's; all drafted tokens but the last are held nodes. None where no
        graph does it: `catch_up` and `extend` do.
        """

    def extend(self, tokens: Ids, parents: Ids, *, draft_vocab: bool = False) -> torch.Tensor:
        """Read nodes ``[n]`` after the sequence; they are numbered as they come.

        Args:
            tokens: ``[n]``; a device tensor spares the copy.
            parents: ``[n]`` numbers of the nodes they hang below, -1 for the sequence itself. On
                the host they may also name nodes of this call; a device tensor must not.
            draft_vocab: as above.

        Returns:
            Logits ``[n, vocab]``, float32 or float64; -inf for ids that it cannot propose.

        Raises:
            ValueError: more nodes than reserved, or a parent that does not come before its child.
        """

    def extending(
        self, tokens: Ids, parents: Ids, *, draft_vocab: bool = False
    ) -> ModelWork[torch.Tensor]:
        """Run `extend` as a generator that yields its pass."""

    def commit_path(self, path: IntArray, survivors: IntArray | None = None) -> None:
        """Commit the rows of accepted nodes; the others are dropped.

        Args:
            path: ``[a]`` held nodes from the sequence downwards; those never fed are left out.
            survivors: ``[s]`` descendants of the path's last node that stay, parents before
                children; they are numbered 0 .. s - 1 from now on.
        """

    def drop_nodes(self) -> None: ...

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """Draw ``[n]`` ids from rows of probabilities ``[n, vocab]``."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Give ``[n]`` ids of the rows ``[n, draft vocab]`` that `catch_up` or `extend` gave last.

        Where their pass computed them, the logits are not searched again.
        """

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor: ...

    def to_target_vocab(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Map ``[..., draft vocab]`` to the target's; ``fill`` for ids that the draft lacks."""

    def report(self) -> Mapping[str, int]:
        """Return its counters, for the method's ``report``."""
