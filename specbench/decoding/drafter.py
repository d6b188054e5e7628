"""The interface of a drafting method: propose, then learn what happened.

The rhythm of one turn, as the engine calls it::

    [reset]  prefill  [observe_prompt]  [observe_prompt_hidden]  begin
    (propose  [overlap]  observe)*  end  report

Who asks a model of its own while it drafts gives ``drafting``, see `ModelDrafter`.
``reset`` is called by the runner where the state scope says so; everything else by the engine.
All of it but ``setup`` counts in ``decode_s``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from specbench.arrays import IntArray
from specbench.config.schema import STATE_SCOPES
from specbench.decoding.protocols import ModelWork, alone
from specbench.decoding.structs import (
    BonusProposal,
    Counted,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, eq=False)
class Drafter:
    """Base of all methods; its defaults draft nothing and learn nothing.

    A method is a keyword-only dataclass whose fields are its knobs; ``conf/method/<name>.yaml``
    holds the same names. Check values in ``__post_init__`` (and call ``super().__post_init__()``).
    """

    name: str  # the method's name, as in ``method=<name>``
    version: int = 1  # raised by one whenever a number may move
    # how long what it learnt is kept: ``turn``, ``prompt`` (a case) or ``run``
    state_scope: str = "prompt"
    paper_scope: str = "prompt"  # what ``state_scope=paper`` stands for

    # Whether its trees say how likely their nodes are (``DraftTree.survival``).
    says_survival: ClassVar[bool] = False
    # Set by a drafter around this one. Who drafts token by token then says how likely they are, and
    # stops behind a token of which this says so, given its own probability and its survival.
    enough: Callable[[float, float], bool] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._require_one_of("state_scope", STATE_SCOPES)
        self._require_one_of("paper_scope", STATE_SCOPES)

    def _require(self, condition: bool, key: str, rule: str) -> None:
        """Refuse a knob: ``rule`` says what the value must be."""
        if not condition:
            value = getattr(self, key)
            raise ConfigurationError(
                f"method.{key}={value!r} is out of range for method={self.name}: it must be {rule}."
            )

    def _require_positive(self, *keys: str) -> None:
        for key in keys:
            self._require(getattr(self, key) >= 1, key, "at least 1")

    def _require_one_of(self, key: str, names: Collection[str]) -> None:
        if getattr(self, key) not in names:
            raise unknown_name(f"method.{key}", getattr(self, key), names)

    def _require_token(self, key: str, context: DraftContext) -> None:
        inside = 0 <= getattr(self, key) < context.vocab_size
        self._require(inside, key, f"in the vocabulary, below {context.vocab_size}")

    def starts_empty(self, turn: int) -> bool:
        """Whether it forgets everything before the turn of a case with this number, from 0."""
        return self.state_scope == "turn" or (self.state_scope == "prompt" and turn == 0)

    @property
    def needs(self) -> Needs:
        """What this drafter requires with its present knobs."""
        return Needs()

    def setup(self, context: DraftContext) -> None:
        """Open files and allocate buffers, once; never timed."""

    def reset(self) -> None:
        """Forget everything learnt since ``setup``."""

    def set_reference(self, output: IntArray) -> None:
        """The turn's plain greedy output, where ``needs.reference`` is set; before ``begin``."""

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        """Logits ``[n_prompt, vocab]`` of the prefill, where ``needs.prompt_logits`` is set.

        ``needs.first_logits`` promises no more than the last row.
        """

    def observe_prompt_hidden(self, prompt: IntArray, hidden: Mapping[int, torch.Tensor]) -> None:
        """Hidden states ``[n_prompt, hidden]`` of the prefill, by number.

        Where ``needs.hidden_layers`` is set. They are the drafter's to keep.
        """

    def begin(self, state: DecodeState) -> None:
        """Index the prompt. ``state`` already holds the first new token.

        In a later turn of a dialogue ``state.tokens[: state.n_seen]`` is text that the drafter has
        seen: who counts must count only what follows.
        """

    def propose(self, state: DecodeState) -> DraftTree:
        """The draft below ``state.root``; may be empty."""
        return DraftTree.empty()

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        """`propose`, with each pass of a model handed out; by default there is none."""
        yield from ()
        return self.propose(state)

    def overlap(self, state: DecodeState, tree: DraftTree) -> BonusProposal | None:
        """Work done while the target reads ``tree``, where ``needs.overlap`` is set.

        What the drafter drew meanwhile for the token after the tree's last node, or None.
        """
        return None

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        """Learn from a finished step; ``state`` already holds its tokens."""

    def end(self, state: DecodeState) -> None:
        """The turn is over (insert its text into a store kept across cases)."""

    def report(self) -> Mapping[str, Counted]:
        """What it counted in the turn that just ended, for the record; never timed."""
        return {}

    def close(self) -> None:
        """Release threads and files."""


@dataclass(kw_only=True, eq=False)
class ModelDrafter(Drafter):
    """Base of drafters that ask a model, or whose parts may: a class gives ``drafting``."""

    def propose(self, state: DecodeState) -> DraftTree:
        return alone(self.drafting(state))
