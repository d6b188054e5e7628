"""The interface of a drafting method: propose, then learn what happened.

The rhythm of one turn, as the engine calls it::

    [reset]  prefill  [observe_prompt]  [observe_prompt_hidden]  begin
    (propose  [overlap]  observe)*  end  report

Who asks a model of its own while it drafts gives ``drafting``, see `ModelDrafter`.
``reset`` is called by the runner where the state scope says so; everything else by the engine.
All of it but ``setup`` counts in ``decode_s``.
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
    ``Literal``); what hangs together is checked in ``__post_init__``, after the base's.
    """

    name: str  # the method's name, as in ``method=<name>``
    version: int = 1  # raised by one whenever a number may move
    # how long what it learnt is kept; ``prompt``: for a case
    state_scope: Scope = "prompt"
    paper_scope: Scope = "prompt"  # what ``state_scope=paper`` stands for

    def __post_init__(self) -> None:
        types = types_of(type(self))
        for knob in fields(self):
            if knob.init:
                check_knob(self.name, knob.name, getattr(self, knob.name), types[knob.name])

    def _require(self, condition: bool, key: str, rule: str) -> None:
        """Refuse a knob that its type alone lets pass: ``rule`` says what it must be."""
        if not condition:
            raise knob_error(self.name, key, getattr(self, key), rule)

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

    def report(self) -> Mapping[str, ReportValue]:
        """What it counted in the turn that just ended, for the record; never timed."""
        return {}

    def close(self) -> None:
        """Release threads and files."""


@dataclass(kw_only=True, eq=False)
class ModelDrafter(Drafter):
    """Base of drafters that ask a model, or whose parts may: a class gives ``drafting``."""

    def propose(self, state: DecodeState) -> DraftTree:
        return run_to_completion(self.drafting(state))
