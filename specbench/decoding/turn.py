"""One turn in progress: the parts of a step, shared by the loops over one and many sequences.

    propose -> (a pass) -> judge -> commit -> observe

The drafter sees a pass's greedy tokens, and logits or hidden states if its ``needs`` declare them;
only the verifier accepts tokens; only the stop rules end a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.device import to_device
from specbench.decoding.drafter import Drafter
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    AcceptedPath,
    BonusProposal,
    DecodeState,
    DraftTree,
    StepOutcome,
)
from specbench.decoding.verify import PassScores, Verifier
from specbench.errors import CaseFailed
from specbench.system.clock import Timings

# -- interface of a target, live or recorded -------------------------------------------------------


class StepScores(PassScores, Protocol):
    """Scores of a pass, with the hidden states by number that drafters may need."""

    @property
    def hidden(self) -> Mapping[int, torch.Tensor] | None: ...


class SequenceTarget(Protocol):
    """One sequence's part of a target: its prompt's pass, and its keys and values."""

    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> StepScores: ...

    def commit(self, tree: DraftTree, path: IntArray) -> None: ...

    def free_rows(self) -> int: ...


class PassTarget(SequenceTarget, Protocol):
    """A target of the loop: ``specbench.models.target.Target``, or a recorded output."""

    @property
    def device(self) -> torch.device: ...

    def forward(
        self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()
    ) -> StepScores: ...


SlotDraft: TypeAlias = tuple[int, int, DraftTree]  # slot, root, draft in a joint pass


class BatchPassTarget(Protocol):
    """A target for several sequences: ``specbench.models.batch_target.BatchTarget``."""

    @property
    def device(self) -> torch.device: ...

    @property
    def slots(self) -> Sequence[SequenceTarget]: ...

    def check(self, slot: int, tree: DraftTree) -> None:
        """Refuse a malformed draft before it is in a pass with others (CaseFailed)."""

    def forward(
        self, drafts: Sequence[SlotDraft], *, hidden_layers: tuple[int, ...] = ()
    ) -> Sequence[StepScores]:
        """Run one pass over the rows of all drafts, each from a different slot and checked."""


# -- a turn ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class DecodeResult:
    """One turn: its output, its counts step by step, and its times."""

    # the new tokens, up to and including the first end token or the limit
    output_ids: list[int] = field(default_factory=list)
    # ``eos``, ``length`` (the limit of new tokens) or ``context`` (the model's)
    finish_reason: str = ""
    # tokens committed by each step, the target's own one included
    committed_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)  # candidate nodes of each step's tree
    depth_per_step: list[int] = field(default_factory=list)  # depth of each step's tree
    # for each step the source of each accepted node, if the drafter names sources
    sources_per_step: list[list[int]] | None = None
    n_aux: int = 0  # auxiliary nodes over all steps
    # the drafter's counts (``Drafter.report``)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)

    def add(self, tree: DraftTree, depth: int, path: IntArray, committed: int) -> None:
        aux = 0 if tree.aux is None else int(tree.aux.sum())
        self.n_aux += aux
        self.committed_per_step.append(committed)
        self.drafted_per_step.append(len(tree) - aux)
        self.depth_per_step.append(depth)
        if tree.sources is not None:
            if self.sources_per_step is None:
                self.sources_per_step = [[] for _ in self.committed_per_step[:-1]]
            self.sources_per_step.append([int(s) for s in tree.sources[path[:committed]]])
        elif self.sources_per_step is not None:
            self.sources_per_step.append([])

    @property
    def n_target_passes(self) -> int:
        """Target passes after prefill."""
        return len(self.committed_per_step)

    @property
    def n_drafted(self) -> int:
        return sum(self.drafted_per_step)


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules that end a turn.

    Attributes:
        eos_ids: ids that end an output.
        context_length: tokens the model can hold; no output and no draft goes beyond it, because
            learned position embeddings end there.
        vocab_size: ids that the model has embeddings of.
    """

    eos_ids: frozenset[int]
    context_length: int | None = None
    vocab_size: int | None = None

    def limit(self, prompt: IntArray, max_new_tokens: int) -> int:
        """Return how many new tokens fit after ``prompt [n]``.

        Raises:
            CaseFailed: the prompt has no tokens, one that the model has no embedding of, or does
                not fit.
        """
        n_prompt = len(prompt)
        if n_prompt == 0:
            raise CaseFailed("empty_prompt", "the prompt has no tokens")
        if self.vocab_size is not None and (largest := int(prompt.max())) >= self.vocab_size:
            raise CaseFailed(
                "unknown_token",
                f"the prompt has the token {largest}, and the model has embeddings of "
                f"{self.vocab_size}: take the tokenizer that it was trained with",
            )
        if self.context_length is None:
            return max_new_tokens
        if n_prompt >= self.context_length:
            raise CaseFailed(
                "prompt_too_long",
                f"the prompt has {n_prompt} tokens, and the model's context is "
                f"{self.context_length}",
            )
        return min(max_new_tokens, self.context_length - n_prompt)

    def truncate(self, tree: DraftTree, length: int, rows: int) -> DraftTree:
        """Cut a draft to the cache's free ``rows`` and the model's positions.

        Parents come first, so any prefix is a tree; drafters rely on the numbers of its nodes.
        """
        if self.context_length is not None:
            rows = min(rows, tree.nodes_above(self.context_length - length))
        return tree if len(tree) <= rows else tree.take(np.arange(rows))

    def cut(self, tokens: IntArray) -> IntArray:
        """Cut tokens after the first end token."""
        for i, token in enumerate(tokens.tolist()):
            if token in self.eos_ids:
                return tokens[: i + 1]
        return tokens


class Decoding:
    """One sequence decoded by one drafter.

    Args:
        target: the sequence's part of the model's passes.
        drafter: set up and, if its state scope requires it, reset.
        seed: for verifiers and drafters that draw random numbers.
        seen: tokens of the case's last turn, if the drafter has not been reset since.

    Attributes:
        tree: the draft of the step; ``finished``: whether there is no further step.

    Raises:
        CaseFailed: the prompt does not fit.
    """

    __slots__ = (
        "_accepted",
        "_committed",
        "_limited",
        "_rules",
        "_scores",
        "_target",
        "_verifier",
        "drafter",
        "finished",
        "needs",
        "result",
        "state",
        "tree",
    )  # fmt: skip

    def __init__(
        self,
        target: SequenceTarget,
        verifier: Verifier,
        rules: StopRules,
        drafter: Drafter,
        prompt: IntArray,
        max_new_tokens: int,
        seed: int = 0,
        seen: IntArray = NO_TOKENS,
    ) -> None:
        limit = rules.limit(prompt, max_new_tokens)
        self._target, self._verifier, self._rules = target, verifier, rules
        self.drafter, self.needs = drafter, drafter.needs
        self._limited = limit < max_new_tokens
        self.state = DecodeState(np.ascontiguousarray(prompt, dtype=np.int64), limit, seed, seen)
        self.result = DecodeResult()
        self.finished = False
        self._scores: StepScores
        self._accepted: AcceptedPath
        self._committed: IntArray
        self.tree: DraftTree
        verifier.begin(seed)

    def read_prompt(self) -> None:
        """Run the pass over the prompt and commit the first token."""
        needs, state = self.needs, self.state
        self._scores = self._target.prefill(
            state.tokens, all_logits=needs.prompt_logits, hidden_layers=needs.hidden_layers
        )
        state.commit(np.array([self._verifier.first(self._scores)], dtype=np.int64))

    def begin(self) -> None:
        """Show the drafter the prompt."""
        needs, state, scores = self.needs, self.state, self._scores
        if needs.prompt_logits or needs.first_logits:
            self.drafter.observe_prompt(state.buffer[: state.n_prompt], scores.logits)
        if needs.hidden_layers and scores.hidden is not None:
            self.drafter.observe_prompt_hidden(state.buffer[: state.n_prompt], scores.hidden)
        del self._scores  # the next pass may use their memory
        self.drafter.begin(state)
        self.finished = self._is_finished()

    def propose(self) -> None:
        self._set_tree(self.drafter.propose(self.state))

    def drafting(self) -> ModelWork[None]:
        """Run `propose` as a generator that yields the drafter's passes."""
        self._set_tree((yield from self.drafter.drafting(self.state)))

    def _set_tree(self, tree: DraftTree) -> None:
        self.tree = self._rules.truncate(tree, self.state.length, self._target.free_rows())

    def judge(self, scores: StepScores, bonus: BonusProposal | None = None) -> None:
        """Decide which draft tokens are accepted, and where the turn stops."""
        draft = self.tree if bonus is None else replace(self.tree, bonus=bonus)
        self._accepted = self._verifier.verify(draft, scores)
        self._committed = self._rules.cut(self._accepted.tokens[: self.state.remaining])
        self._scores = scores

    def commit(self) -> None:
        self._target.commit(self.tree, self._accepted.path)
        self.state.commit(self._committed)
        self.state.step += 1

    def observe(self) -> None:
        """Show the drafter the step, and count it."""
        needs, scores, tree, path = self.needs, self._scores, self.tree, self._accepted.path
        count = len(self._committed)
        self.finished = self._is_finished()
        self.drafter.observe(
            self.state,
            StepOutcome(
                tree=tree,
                path=path,
                committed=self._committed,
                next_tokens=self._accepted.next_tokens,
                logits=scores.logits if needs.logits else None,
                hidden=_committed_states(scores.hidden, path, count),
                tree_hidden=scores.hidden if needs.tree_hidden else None,
                finished=self.finished,
            ),
        )
        del self._scores
        self.result.add(tree, int(scores.depths.max()), path, count)

    def end(self) -> None:
        """Tell the drafter that the turn is complete; its share of the time ends here."""
        self.drafter.end(self.state)

    def finish(self, timings: Timings) -> DecodeResult:
        """Complete the result of the finished turn."""
        result = self.result
        result.timings = timings
        result.output_ids = self.state.new_tokens.tolist()
        if self.state.root in self._rules.eos_ids:
            result.finish_reason = "eos"
        else:
            result.finish_reason = "context" if self._limited else "length"
        result.drafter = self.drafter.report()
        return result

    def _is_finished(self) -> bool:
        return self.state.remaining <= 0 or self.state.root in self._rules.eos_ids


def with_method_name(drafter: Drafter, error: CaseFailed) -> CaseFailed:
    """Prefix invalid-draft errors with the method's name."""
    if error.kind != "invalid_draft":
        return error
    return CaseFailed(error.kind, f"method={drafter.name}: {error}")


def _committed_states(
    hidden: Mapping[int, torch.Tensor] | None, path: IntArray, count: int
) -> dict[int, torch.Tensor] | None:
    """Copy ``[count, hidden]`` of root and accepted nodes; a pass would overwrite views."""
    if not hidden:
        return None
    device = next(iter(hidden.values())).device
    rows = to_device(np.concatenate(([-1], path))[:count] + 1, device)
    return {i: states.index_select(0, rows) for i, states in hidden.items()}
