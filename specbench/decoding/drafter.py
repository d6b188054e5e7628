"""The interface of a drafting method: propose, then learn what happened.

The rhythm of one turn, as the engine calls it::

    [reset]  prefill  [observe_prompt]  [observe_prompt_hidden]  begin
    (propose  [overlap]  observe)*  end  report

A drafter that runs a model while it drafts defines ``drafting``, see `ModelDrafter`.
The runner calls ``reset`` according to the state scope; the engine calls everything else.
All calls but ``setup`` count in ``decode_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeAlias

from specbench.arrays import IntArray
from specbench.config.validate import check_knob, knob_error, types_of
from specbench.decoding.protocols import ModelWork, run_to_completion
from specbench.decoding.structs import (
    BonusProposal,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)

if TYPE_CHECKING:
    import torch

Scope: TypeAlias = Literal["turn", "prompt", "run"]


@dataclass(kw_only=True, eq=False)
class Drafter:
    """Base of all methods; its defaults draft nothing and learn nothing.

    A method is a keyword-only dataclass whose fields are its knobs; ``conf/method/<name>.yaml``
    holds the same names. Their types state the values' limits (``Annotated[int, Ge(1)]``,
    ``Literal``); rules across knobs are checked in ``__post_init__``, after the base's.
    """

    name: str  # the method's name, as in ``method=<name>``
    version: int = 1  # raised by one whenever a result may change
    # how long its learnt state is kept; ``prompt``: for a case
    state_scope: Scope = "prompt"
    paper_scope: Scope = "prompt"  # the scope behind ``state_scope=paper``

    def __post_init__(self) -> None:
        types = types_of(type(self))
        for knob in fields(self):
            if knob.init:
                check_knob(self.name, knob.name, getattr(self, knob.name), types[knob.name])

    def _require(self, condition: bool, key: str, rule: str) -> None:
        """Refuse a knob that its type alone accepts: ``rule`` says what it must be."""
        if not condition:
            raise knob_error(self.name, key, getattr(self, key), rule)

    def starts_empty(self, turn: int) -> bool:
        """Return whether it forgets everything before a case's turn of this number, from 0."""
        return self.state_scope == "turn" or (self.state_scope == "prompt" and turn == 0)

    @property
    def needs(self) -> Needs:
        """Requirements of this drafter with its present knobs."""
        return Needs()

    def setup(self, context: DraftContext) -> None:
        """Open files and allocate buffers, once; never timed."""

    def reset(self) -> None:
        """Forget everything learnt since ``setup``."""

    def set_reference(self, output: IntArray) -> None:
        """Take the turn's plain greedy output, if ``needs.reference`` is set; before ``begin``."""

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        """Take the prefill's logits ``[n_prompt, vocab]``, if ``needs.prompt_logits`` is set.

        With ``needs.first_logits`` only the last row is promised.
        """

    def observe_prompt_hidden(self, prompt: IntArray, hidden: Mapping[int, torch.Tensor]) -> None:
        """Take the prefill's hidden states ``[n_prompt, hidden]`` by number; it may keep them.

        Called if ``needs.hidden_layers`` is set.
        """

    def begin(self, state: DecodeState) -> None:
        """Index the prompt. ``state`` already holds the first new token.

        In a later turn of a dialogue the drafter has already seen ``state.tokens[: state.n_seen]``:
        counts must include only what follows.
        """

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the draft below ``state.root``; it may be empty."""
        return DraftTree.empty()

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        """Run `propose` as a generator that yields each pass of a model; none by default."""
        yield from ()
        return self.propose(state)

    def overlap(self, state: DecodeState, tree: DraftTree) -> BonusProposal | None:
        """Work while the target reads ``tree``, if ``needs.overlap`` is set.

        Returns a draw for the token after the tree's last node, or None.
        """
        return None

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        """Learn from a finished step; ``state`` already holds its tokens."""

    def end(self, state: DecodeState) -> None:
        """Finish the turn (insert its tokens into a store kept across cases)."""

    def report(self) -> Mapping[str, ReportValue]:
        """Return its counts of the turn that just ended, for the record; never timed."""
        return {}

    def close(self) -> None:
        """Release threads and files."""


@dataclass(kw_only=True, eq=False)
class ModelDrafter(Drafter):
    """Base of drafters that run a model, or whose parts may: a class defines ``drafting``."""

    def propose(self, state: DecodeState) -> DraftTree:
        return run_to_completion(self.drafting(state))
