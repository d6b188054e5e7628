"""Drafters with a trained head: what it has still to read of the target's states, and its graphs.

Next to a target whose passes are replayed, launching a head kernel by kernel would take longer
than necessary. Both of its parts have a fixed shape: rows that were committed are padded,
trees are drafted whole. What exceeds the shapes is launched as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.config.schema import Text
from specbench.decoding.composite import Composite
from specbench.decoding.device import fill, to_device
from specbench.decoding.drafter import Drafter, ModelDrafter
from specbench.decoding.protocols import ModelWork, TargetInfo, run_to_completion
from specbench.decoding.structs import (
    AFTER_FINAL_NORM,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.kernels.cuda_graphs import GraphRecorder, RecordedCall
from specbench.results.records import LAUNCHED_DRAFTS

Work: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_LENGTH_STEP = 512  # caches grow by so many tokens, so that few sizes are ever made


@dataclass(kw_only=True, eq=False)
class HeadDrafter(ModelDrafter):
    """Base of drafters that guess from the target's hidden states of committed tokens.

    The states wait here until the head reads them: in a union, or beside an automaton, it may not
    be asked for several steps, and must read them all the same.

    A class gives `max_nodes`, `_levels`, `_load`, `_growing` and `_tree_of`, and `layers` where
    they are not the states after the final norm.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
    """

    reads_root: ClassVar[bool] = False  # whether `_growing` is told the root, see there
    scores_rows: ClassVar[bool] = True  # whether each row that is read gives a guess

    head: Text = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._waiting: list[torch.Tensor] = []
        self._feature: torch.Tensor = torch.empty(0)  # of the root, once `begin` has read
        self._reserved = self._graph_tokens = self._launched = 0
        self._graphs: HeadGraphs | None = None

    @property
    def max_nodes(self) -> int:
        """Nodes of its largest tree."""
        raise NotImplementedError

    @property
    def layers(self) -> tuple[int, ...]:
        """The states that the head reads, from the lowest layer up."""
        return (AFTER_FINAL_NORM,)

    @property
    def _levels(self) -> int:
        """Levels of its largest tree."""
        raise NotImplementedError

    @property
    def max_levels(self) -> int:
        """Levels of its largest tree."""
        return self._levels

    @property
    def _nodes_read(self) -> int:
        """The most nodes that the head's cache holds at once."""
        return 0

    @property
    def _variant(self) -> Hashable:
        """Further key of what `_load` gives, besides folder and method."""
        return None

    def _load(self, folder: Path, target: TargetInfo) -> Any:
        """Load the ``TrainedHead`` of a folder."""
        raise NotImplementedError

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Draft ``levels`` levels of a tree; ``feature [1, hidden]`` leads to the first.

        ``number [1]`` is the root of a drafter that `reads_root`. Of others it is how many of the
        levels count, where a graph drafts more of them, else None.
        """
        raise NotImplementedError

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        """Build the tree from what `_growing` gives for as many levels or more."""
        raise NotImplementedError

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens_only=False,
            hidden_layers=self.layers,
            heads=(self.head,),
            max_nodes=self.max_nodes,
        )

    def setup(self, context: DraftContext) -> None:
        target = context.target
        assert target is not None
        self._reserved, self._graph_tokens = 0, target.graph_tokens
        self._device, self._dtype = target.device, target.dtype
        self._state_size = target.embeddings.embedding.shape[1]
        folder = context.heads[self.head]
        which = (self.name, folder, self._variant)
        if which not in context.head_cache:
            context.head_cache[which] = self._load(folder, target)
        # The run's drafters share its parameters; what it has read is this one's.
        self._head = copy.copy(context.head_cache[which])
        ids = self._head.target_ids
        self._n_ids = context.vocab_size if ids is None else len(ids)  # that it can draft

    def foresee(self, n_prompt: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """Receive all hidden states of the next turn, by number, in a replay that is not timed.

        What depends on no draft may be computed at once, which reads the weights once.
        """

    def check_layers(self, ids: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Warn where the states of other layers suit the head clearly better; untimed.

        Args:
            ids: ``[n]`` of a text.
            states: all its hidden states ``[n, hidden]``, the embedding's output first.
        """

    @torch.inference_mode()
    def begin(self, state: DecodeState) -> None:
        if len(state.buffer) > self._reserved:
            self._reserve(len(state.buffer))
        if self._head.layers:
            self._head.cache.truncate(0)
        run_to_completion(self._catch_up(state))

    @torch.inference_mode()
    def propose(self, state: DecodeState) -> DraftTree:
        return super().propose(state)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        levels = min(self._levels, state.remaining - 1)
        if levels < 1:
            return DraftTree.empty()
        replayed = yield from self._catch_up(state)
        drafted = None
        if self._graphs is not None:
            length = self._head.cache.length if self._head.layers else 0
            number = state.root if self.reads_root else levels
            drafted = self._graphs.draft(length, self._feature, number)
        self._launched += drafted is None or not replayed
        if drafted is None:
            root = to_device(np.array([state.root]), self._device) if self.reads_root else None
            drafted = yield from self._growing(self._feature, levels, root)
        return self._tree_of(drafted, levels)

    def first_guesses(self, state: DecodeState) -> ModelWork[IntArray]:
        """Guess the token after each one committed since the last call, ``[n]`` on the host.

        The last guess follows the root. The first call of a turn guesses that one alone.
        """
        features, after = self._feature, state.tokens[-1:]
        if self._waiting:
            states = torch.cat(self._waiting)
            after, self._waiting = state.tokens[-len(states) :], []
            ids = to_device(after.copy(), self._device)
            features = yield from self._head.catching_up(ids, states)
            self._feature = features[-1:]
        logits = yield from self._scoring_first(features, after)
        guesses: IntArray = self._head.to_target_ids(logits.argmax(-1)).cpu().numpy()
        return guesses

    def _scoring_first(self, features: torch.Tensor, after: IntArray) -> ModelWork[torch.Tensor]:
        """Compute the first level's logits ``[n, vocab]``; ``after [n]`` follow the rows."""
        logits: torch.Tensor = yield from self._head.scoring(features)
        return logits

    def observe_prompt_hidden(self, prompt: IntArray, hidden: Mapping[int, torch.Tensor]) -> None:
        self._waiting = [self._joined(hidden)]
        self._launched = 0

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if outcome.hidden is not None:
            self._waiting.append(self._joined(outcome.hidden))

    def end(self, state: DecodeState) -> None:
        self._waiting = []

    def report(self) -> Mapping[str, ReportValue]:
        """Beside a target on CUDA graphs: drafts whose own work was launched kernel by kernel."""
        return {LAUNCHED_DRAFTS: self._launched} if self._graph_tokens else {}

    def _joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        states = [hidden[layer] for layer in self.layers]
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def _reserve(self, tokens: int) -> None:
        """Make the head's cache and graphs for texts of so many tokens."""
        self._reserved = self._graph_tokens  # graphs are made once for all texts
        if tokens > self._reserved:
            self._reserved = -(-tokens // _LENGTH_STEP) * _LENGTH_STEP
        head, reads = self._head, bool(self._head.layers)
        rows = self._levels + 1 if reads else 0  # the root's, and a path of its own
        nodes = max(self._nodes_read, rows if self._graph_tokens else 0)
        head.reserve(self._reserved, nodes)
        if self._graphs is not None:
            self._graphs.release()
        if self._graph_tokens:
            self._graphs = HeadGraphs(
                self._read,
                self._drafted,
                size=head.shape.hidden_size if reads else self._state_size,
                width=len(self.layers) * self._state_size,
                rows=rows,
                span=max(rows, nodes),
                longest=head.cache.rows if reads else 0,
                dtype=self._dtype,
                device=self._device,
            )

    def _catch_up(self, state: DecodeState) -> ModelWork[bool]:
        """Read unread states; return True if there were none, or a graph read them."""
        waiting, self._waiting = self._waiting, []
        states = waiting[0] if len(waiting) == 1 else torch.cat(waiting) if waiting else None
        if not self._head.layers:
            if states is not None:
                self._feature = states[-1:]
            return True
        cache = self._head.cache
        if states is None:
            cache.drop_nodes()
            return True
        # Each row goes with the token after it, the last one with the root.
        after = state.buffer[cache.length + 1 : cache.length + 1 + len(states)]
        if self._graphs is not None and self._graphs.read(cache.length, states, after):
            cache.read(len(states))
            self._feature = self._graphs.feature
            return True
        ids = to_device(after.copy(), self._device)
        self._feature = (yield from self._head.catching_up(ids, states))[-1:]
        return False

    # -- what graphs are recorded of ---------------------------------------------------------------

    def _read(self, numbers: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        head = self._on_fixed_rows(numbers[:1])._head
        features: torch.Tensor = run_to_completion(head.catching_up(numbers[2:], states))
        return features.index_select(0, numbers[1:2] - 1)

    def _drafted(self, feature: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        fixed = self._on_fixed_rows(numbers[:1])
        return run_to_completion(fixed._growing(feature, self._levels, numbers[1:]))

    def _on_fixed_rows(self, length: torch.Tensor) -> HeadDrafter:
        """Copy this drafter, with a cache whose committed rows ``length [1]`` is on the device."""
        other = copy.copy(self)
        if self._head.layers:
            other._head = copy.copy(self._head)
            other._head.cache = self._head.cache.fixed(length)
        return other


class HeadGraphs(GraphRecorder):
    """The graphs of one drafter's head.

    What the head's cache holds is lost, so make it before a text is read.

    Args:
        read: of how many committed rows there were before, how many are new, and the ids behind
            those, in one array ``[2 + rows]``; and of the new rows' states ``[rows, width]``: gives
            ``[1, size]``.
        draft: of what was read last ``[1, size]``, of committed rows and a number of the method's
            ``[2]``, and of the keys: gives what the drafter makes its tree of.
        rows: committed rows that are read at once at most; 0 for a head that reads none.
        span: rows of the cache that a graph writes after the committed ones.
        longest: rows of the cache; 0 where the head has none.

    Attributes:
        feature: ``[1, size]`` what was read last; the next reading overwrites it.
    """

    def __init__(
        self,
        read: Work,
        draft: Work,
        *,
        size: int,
        width: int,
        rows: int,
        span: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self._most, self._span, self._longest = rows, span, longest
        self._steps: dict[str, RecordedCall] = {}
        with torch.inference_mode(False):  # they may be written to outside of that mode, too
            self.feature = torch.zeros(1, size, dtype=dtype, device=device)
            self._states = torch.zeros(rows, width, dtype=dtype, device=device)
            # One row is read where nothing was loaded: no place is before the first.
            self._new = torch.ones(2 + rows, dtype=torch.int64, device=device)
            self._draft_input = torch.ones(2, dtype=torch.int64, device=device)

        def keep(numbers: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            return self.feature.copy_(read(numbers, states))

        if rows:
            self._add("reading", keep, self._new, self._states)
        self._add("drafting", draft, self.feature, self._draft_input)

    def release(self) -> None:
        """Let go of all graphs at once: they and this hold each other, as long as none collects."""
        self._steps.clear()

    def _add(self, kind: str, work: Work, *given: torch.Tensor) -> None:
        call = RecordedCall(self, lambda first, second: (work(first, second),), *given)
        if self.record(call, kind):
            self._steps[kind] = call

    def _step(self, kind: str, length: int) -> RecordedCall | None:
        if self._longest and length + self._span > self._longest:
            return None
        return self._steps.get(kind)

    def read(self, length: int, states: torch.Tensor, ids: IntArray) -> bool:
        """Read ``states [n, width]`` after ``length`` rows; ``ids [n]`` follow them.

        False where no graph does it, and nothing was read.
        """
        step, n = self._step("reading", length), len(states)
        if step is None or n > self._most:
            return False
        fill(self._new, np.concatenate(([length, n], ids)))
        self._states[:n] = states
        step.run()
        return True

    def draft(self, length: int, feature: torch.Tensor, number: int) -> torch.Tensor | None:
        """Run ``draft`` after ``length`` rows; None if no graph does it."""
        step = self._step("drafting", length)
        if step is None:
            return None
        if feature is not self.feature:
            self.feature.copy_(feature)
        fill(self._draft_input, np.array([length, number]))
        step.run()
        return step.outputs[0].clone()  # the next run of any of these graphs may overwrite it


def heads_of(drafter: Drafter) -> list[HeadDrafter]:
    """List the drafters with a trained head that a drafter is, or is made of."""
    if isinstance(drafter, Composite):
        return [head for part in drafter.parts for head in heads_of(part)]
    return [drafter] if isinstance(drafter, HeadDrafter) else []
