"""The decode loop, the only one in the project.

    propose -> one target pass over root + draft -> verify -> commit accepted rows -> stop rules
    -> observe

Of a pass the drafter sees greedy tokens, and logits or hidden states where ``needs`` declares them;
only the verifier accepts; only this loop stops. One pass commits at least one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.config.schema import OVERLAP_MODES
from specbench.decoding.device import to_device
from specbench.decoding.drafter import Drafter
from specbench.decoding.pass_target import PassTarget, StepScores
from specbench.decoding.structs import (
    NO_TOKENS,
    BonusProposal,
    DecodeState,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.decoding.verify import Verifier
from specbench.errors import CaseFailed, unknown_name
from specbench.system.clock import Clock, Timings, make_clock


@dataclass(slots=True)
class DecodeResult:
    """One turn: its counts step by step, and what else is known when it is over."""

    # the new tokens, up to and including the first end token or the limit
    output_ids: list[int] = field(default_factory=list)
    # ``eos``, ``length`` (the limit of new tokens) or ``context`` (the model's)
    finish_reason: str = ""
    # tokens committed by each step, the target's own one included
    committed_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)  # candidate nodes of each step's tree
    depth_per_step: list[int] = field(default_factory=list)  # depth of each step's tree
    # for each step the source of each accepted node, where the drafter names sources
    sources_per_step: list[list[int]] | None = None
    n_aux: int = 0  # auxiliary nodes over all steps
    # what the drafter counted (``Drafter.report``)
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
        """Those after prefill."""
        return len(self.committed_per_step)

    @property
    def n_drafted(self) -> int:
        return sum(self.drafted_per_step)


class Engine:
    """Runs drafters against one target.

    Args:
        context_length: tokens the model can hold; no answer grows beyond it, and no draft has a
            position beyond it, which learned embeddings of positions lack.
        overlap: when drafters with ``needs.overlap`` do their parallel part: ``serial`` (after the
            pass; the same schedule, hence the same tokens), ``thread`` (the pass runs in another
            thread), ``stream`` (CUDA: another stream) or ``auto``: one of the latter two, and
            ``serial`` where phases are taken, which nothing else can tell apart.
        phases: take times inside the steps too.
        clock: makes the clock; by default one that suits the target's device.

    Raises:
        ConfigurationError: an unknown ``overlap``.
    """

    def __init__(
        self,
        target: PassTarget,
        verifier: Verifier,
        *,
        eos_ids: frozenset[int],
        context_length: int | None = None,
        overlap: str = "auto",
        phases: bool = False,
        clock: Callable[[], Clock] | None = None,
    ) -> None:
        if overlap not in OVERLAP_MODES:
            raise unknown_name("engine.overlap", overlap, OVERLAP_MODES)
        self.target = target
        self.verifier = verifier
        self.eos_ids = eos_ids
        self.context_length = context_length
        on_gpu = str(target.device).startswith("cuda")
        if overlap == "auto":
            overlap = "serial" if phases else "stream" if on_gpu else "thread"
        self.overlap = "thread" if overlap == "stream" and not on_gpu else overlap
        self._clock = clock() if clock else make_clock(str(target.device), phases)
        self._eos = np.array(sorted(eos_ids), dtype=np.int64)
        self._pool: ThreadPoolExecutor | None = None
        self._side_stream: torch.cuda.Stream | None = None

    def decode(
        self,
        prompt: IntArray,
        drafter: Drafter,
        *,
        max_new_tokens: int,
        seed: int = 0,
        seen: IntArray = NO_TOKENS,
    ) -> DecodeResult:
        """Decode one turn.

        Args:
            prompt: ``[n_prompt]`` ids.
            drafter: set up and, where its state scope says so, reset.
            max_new_tokens: the first token included.
            seed: for verifiers and drafters that draw random numbers.
            seen: the text of the case's last turn, where the drafter has not been reset since.

        Raises:
            CaseFailed: the prompt does not fit, the draft is invalid, or logits are not finite.
        """
        try:
            return self._decode(prompt, drafter, max_new_tokens, seed, seen)
        finally:
            # OpenMP keeps a team for each thread that ran a pass, and while all teams together are
            # larger than the machine, every label's passes wait in their sleep instead of spinning.
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def _decode(
        self, prompt: IntArray, drafter: Drafter, max_new_tokens: int, seed: int, seen: IntArray
    ) -> DecodeResult:
        limit = self._limit(len(prompt), max_new_tokens)
        needs = drafter.needs
        state = DecodeState(np.ascontiguousarray(prompt, dtype=np.int64), limit, seed, seen)
        result = DecodeResult()
        clock = self._clock
        self.verifier.begin(seed)

        clock.begin()
        scores = self.target.prefill(
            state.tokens, all_logits=needs.prompt_logits, hidden_layers=needs.hidden_layers
        )
        state.commit(np.array([self.verifier.first(scores)], dtype=np.int64))
        clock.prefill_done()

        if needs.prompt_logits or needs.first_logits:
            drafter.observe_prompt(state.buffer[: state.n_prompt], scores.logits)
        if needs.hidden_layers and scores.hidden is not None:
            drafter.observe_prompt_hidden(state.buffer[: state.n_prompt], scores.hidden)
        drafter.begin(state)
        clock.setup_done()

        finished = self._finished(state)
        while not finished:
            finished = self._step(state, drafter, needs, clock, result)
            clock.step_done()

        clock.finish_begin()
        drafter.end(state)
        result.timings = clock.end()
        result.output_ids = state.new_tokens.tolist()
        if state.root in self.eos_ids:
            result.finish_reason = "eos"
        else:
            result.finish_reason = "context" if limit < max_new_tokens else "length"
        result.drafter = drafter.report()
        return result

    def _step(
        self, state: DecodeState, drafter: Drafter, needs: Needs, clock: Clock, result: DecodeResult
    ) -> bool:
        tree = self._cut(drafter.propose(state), state)
        clock.phase("draft")

        try:
            scores, bonus = self._pass(state, drafter, tree, needs, clock)
            clock.phase("verify")
            judged = tree if bonus is None else replace(tree, bonus=bonus)
            verdict = self.verifier.verify(judged, scores)
        except CaseFailed as error:
            if error.kind == "invalid_draft":
                raise CaseFailed(error.kind, f"method={drafter.name}: {error}") from error
            raise
        path = verdict.path
        committed = self._committed(state, verdict.tokens)
        clock.phase("accept")

        self.target.commit(tree, path)
        state.commit(committed)
        state.step += 1
        clock.phase("cache")

        finished = self._finished(state)
        drafter.observe(
            state,
            StepOutcome(
                tree=tree,
                path=path,
                committed=committed,
                next_tokens=verdict.next_tokens,
                logits=scores.logits if needs.logits else None,
                hidden=_of_committed(scores.hidden, path, len(committed)),
                tree_hidden=scores.hidden if needs.tree_hidden else None,
                finished=finished,
            ),
        )
        result.add(tree, int(scores.depths.max()), path, len(committed))
        clock.phase("observe")
        return finished

    def _pass(
        self, state: DecodeState, drafter: Drafter, tree: DraftTree, needs: Needs, clock: Clock
    ) -> tuple[StepScores, BonusProposal | None]:
        """The target pass, with the drafter's parallel part, if any, between launch and wait.

        Only the serial emulation can tell their times apart; else both are in ``verify``.
        """
        layers = needs.hidden_layers
        if not needs.overlap:
            return self.target.forward(state.root, tree, hidden_layers=layers), None
        if self.overlap == "thread":
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="target-pass")
            waiting = self._pool.submit(self.target.forward, state.root, tree, hidden_layers=layers)
            try:
                bonus = drafter.overlap(state, tree)
            finally:  # a pass still running would write into the next turn's cache
                scores = waiting.result()
            return scores, bonus
        if self.overlap == "stream":
            return self._pass_beside_stream(state, drafter, tree, layers)
        scores = self.target.forward(state.root, tree, hidden_layers=layers)
        _ = scores.verified  # waits for a pass that was only queued: serial means after it
        clock.phase("verify")
        bonus = drafter.overlap(state, tree)
        clock.phase("draft")
        return scores, bonus

    def _pass_beside_stream(
        self, state: DecodeState, drafter: Drafter, tree: DraftTree, layers: tuple[int, ...]
    ) -> tuple[StepScores, BonusProposal | None]:
        """The pass on the present stream and the drafter's part on another one.

        The pass is queued and not waited for: the verifier waits, when it asks what was accepted.
        The other one starts behind all that was asked for before the pass, and what comes after
        waits for both.
        """
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self.target.device)
        present = torch.cuda.current_stream(self.target.device)
        self._side_stream.wait_stream(present)
        scores = self.target.forward(state.root, tree, hidden_layers=layers)
        try:
            with torch.cuda.stream(self._side_stream):
                bonus = drafter.overlap(state, tree)
        finally:  # drafting that goes on would write into the next turn's cache
            present.wait_stream(self._side_stream)
        return scores, bonus

    # -- stop rules ------------------------------------------------------------------------------

    def _cut(self, tree: DraftTree, state: DecodeState) -> DraftTree:
        """What of a draft the cache has rows for and the model positions.

        Parents come first, so any prefix is a tree; drafters rely on its nodes' numbers.
        """
        fitting = self.target.free_rows()
        if self.context_length is not None:
            fitting = min(fitting, tree.nodes_above(self.context_length - state.length))
        return tree if len(tree) <= fitting else tree.take(np.arange(fitting))

    def _limit(self, n_prompt: int, max_new_tokens: int) -> int:
        if n_prompt == 0:
            raise CaseFailed("empty_prompt", "the prompt has no tokens")
        if self.context_length is None:
            return max_new_tokens
        if n_prompt >= self.context_length:
            raise CaseFailed(
                "prompt_too_long",
                f"the prompt has {n_prompt} tokens, and the model's context is "
                f"{self.context_length}",
            )
        return min(max_new_tokens, self.context_length - n_prompt)

    def _committed(self, state: DecodeState, tokens: IntArray) -> IntArray:
        """Accepted tokens and the target's own, cut at the limit and at the first end token."""
        committed = tokens[: state.remaining]
        ends = np.flatnonzero(np.isin(committed, self._eos))
        return committed[: ends[0] + 1] if len(ends) else committed

    def _finished(self, state: DecodeState) -> bool:
        return state.remaining <= 0 or state.root in self.eos_ids


def _of_committed(
    hidden: Mapping[int, torch.Tensor] | None, path: IntArray, count: int
) -> dict[int, torch.Tensor] | None:
    """``[count, hidden]`` of the root and the accepted nodes; no views, which a pass overwrites."""
    if not hidden:
        return None
    device = next(iter(hidden.values())).device
    rows = to_device(np.concatenate(([-1], path))[:count] + 1, device)
    return {i: states.index_select(0, rows) for i, states in hidden.items()}
