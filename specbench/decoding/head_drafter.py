"""Drafters with a trained head: what it has still to read of the target's hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from specbench.config.schema import Text
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter, ModelDrafter
from specbench.decoding.structs import (
    AFTER_FINAL_NORM,
    Counted,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.results.records import LAUNCHED_DRAFTS

if TYPE_CHECKING:
    from specbench.arrays import IntArray


_Head = TypeVar("_Head")
_LENGTH_STEP = 512  # caches grow by so many tokens, so that few sizes are ever made


@dataclass(kw_only=True, eq=False)
class HeadDrafter(ModelDrafter):
    """Base of drafters that guess from the target's hidden states of committed tokens.

    The states wait here until the head reads them: in a union, or beside an automaton, it may not
    be asked for several steps, and must read them all the same.

    A class gives `max_nodes`, and `layers` where they are not the states after the final norm.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
    """

    head: Text = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._waiting: list[torch.Tensor] = []
        self._reserved = self._graph_tokens = self._launched = 0

    @property
    def max_nodes(self) -> int:
        """Nodes of its largest tree."""
        raise NotImplementedError

    @property
    def layers(self) -> tuple[int, ...]:
        """The states that the head reads, from the lowest layer up."""
        return (AFTER_FINAL_NORM,)

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens_only=False,
            hidden_layers=self.layers,
            heads=(self.head,),
            max_nodes=self.max_nodes,
        )

    def setup(self, context: DraftContext) -> None:
        self._reserved = 0
        self._graph_tokens = 0 if context.target is None else context.target.graph_tokens

    def _twin(self, context: DraftContext, load: Callable[[], _Head], *key: Hashable) -> _Head:
        """The head, whose weights the run's drafters share; what it has read is this one's.

        ``key``: what else than its folder and method decides what ``load`` gives.
        """
        which = (self.name, context.heads[self.head], *key)
        if which not in context.loaded:
            context.loaded[which] = load()
        head: _Head = copy.copy(context.loaded[which])  # its parameters stay where they are
        return head

    def foresee(self, n_prompt: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """All hidden states of the turn that begins, by number: in a replay that takes no times.

        What depends on no draft may be computed at once, which reads the weights once.
        """

    def check_layers(self, ids: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Warn where the states of other layers suit the head clearly better; untimed.

        Args:
            ids: ``[n]`` of a text.
            states: all its hidden states ``[n, hidden]``, the embedding's output first.
        """

    @torch.inference_mode()
    def propose(self, state: DecodeState) -> DraftTree:
        return super().propose(state)

    def observe_prompt_hidden(self, prompt: IntArray, hidden: Mapping[int, torch.Tensor]) -> None:
        self._waiting = [self._joined(hidden)]
        self._launched = 0

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if outcome.hidden is not None:
            self._waiting.append(self._joined(outcome.hidden))

    def end(self, state: DecodeState) -> None:
        self._waiting = []

    def report(self) -> Mapping[str, Counted]:
        """Beside a target on CUDA graphs: drafts whose own work was launched kernel by kernel."""
        return {LAUNCHED_DRAFTS: self._launched} if self._graph_tokens else {}

    def _room(self, state: DecodeState) -> int | None:
        """Tokens that a head's cache must hold from now on; None where it holds as many."""
        if len(state.buffer) <= self._reserved:
            return None
        self._reserved = self._graph_tokens  # graphs are made once for all texts
        if len(state.buffer) > self._reserved:
            self._reserved = -(-len(state.buffer) // _LENGTH_STEP) * _LENGTH_STEP
        return self._reserved

    def _joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        states = [hidden[layer] for layer in self.layers]
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def _unread(self) -> torch.Tensor | None:
        """``[n, width]`` states that were not taken before, side by side; None for none."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        return waiting[0] if len(waiting) == 1 else torch.cat(waiting)


def heads_of(drafter: Drafter) -> list[HeadDrafter]:
    """The drafters with a trained head that a drafter is, or is made of."""
    if isinstance(drafter, Composite):
        return [head for part in drafter.parts for head in heads_of(part)]
    return [drafter] if isinstance(drafter, HeadDrafter) else []
