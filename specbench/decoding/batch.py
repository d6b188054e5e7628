"""The decode loop over a static batch of sequences: each step is one target pass for all of them.

    all sequences draft -> one pass over the rows of all -> each judges, commits, observes

While they draft, calls of their drafters to a shared model are answered together.

This loop and the one over a single sequence share `Decoding`'s parts. One loop for both would carry
lists, finished sequences and their failures through the path whose speed is compared with other
programs', and could not overlap a drafter with the pass.

A finished sequence leaves, and its slot stays empty: the others' steps then have fewer rows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from specbench.arrays import IntArray
from specbench.decoding.drafter import Drafter
from specbench.decoding.protocols import ModelCall, ModelWork
from specbench.decoding.structs import NO_TOKENS
from specbench.decoding.turn import (
    BatchPassTarget,
    DecodeResult,
    Decoding,
    SlotDraft,
    StopRules,
    with_method_name,
)
from specbench.decoding.verify import Verifier
from specbench.errors import CaseFailed
from specbench.storage.jsonl import DiskError
from specbench.system.clock import END, OTHER, PREFILL, SETUP, STEP, Clock, Timings, make_clock

log = logging.getLogger(__name__)

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Input of one slot, see `Engine.decode`.

    ``drafter`` serves this slot alone; ``reset_s``: seconds its reset took, part of its work.
    """

    prompt: IntArray
    drafter: Drafter
    seed: int = 0
    seen: IntArray = field(default_factory=lambda: NO_TOKENS)
    reset_s: float = 0.0


@dataclass(slots=True)
class BatchResult:
    """Results of a batch, in the order of its requests.

    Attributes:
        turns: each request's result, or why it failed. Its times are the group's until it ended:
            all prompts, all drafters' work, and the steps in which it ran.
        full_s: seconds of the steps in which all sequences ran.
        pass_s: seconds of the target's passes after the prompts; None on a GPU, which the host does
            not wait for.
        model_passes, model_s: passes of the drafters' models while drafting, for all sequences, and
            their seconds on the host, which on a GPU are launches only.
    """

    turns: list[DecodeResult | Exception] = field(default_factory=list)
    full_s: float = 0.0
    pass_s: float | None = None
    model_passes: int = 0
    model_s: float = 0.0


class BatchEngine:
    """Decode a batch against one target, with a drafter for each sequence.

    Args:
        verifiers: one for each slot of ``target``, because they hold random numbers.
        eos_ids, context_length, vocab_size: see `StopRules`.
        phases: take times inside the steps too.
        clock: makes the clock; by default the one for the target's device.
    """

    def __init__(
        self,
        target: BatchPassTarget,
        verifiers: Sequence[Verifier],
        *,
        eos_ids: frozenset[int],
        context_length: int | None = None,
        vocab_size: int | None = None,
        phases: bool = False,
        clock: Callable[[], Clock] | None = None,
    ) -> None:
        self.target, self._verifiers = target, verifiers
        self._rules = StopRules(eos_ids, context_length, vocab_size)
        self._clock = clock() if clock else make_clock(str(target.device), phases)

    def decode(self, requests: Sequence[TurnRequest], *, max_new_tokens: int) -> BatchResult:
        """Decode one turn of each request, all of one method.

        A sequence fails alone if its prompt, draft, drafter, rows of a joint pass or scores are at
        fault; the others go on as if it had ended.

        Raises:
            ValueError: more requests than slots.
        """
        if len(requests) > len(self.target.slots):
            raise ValueError(f"{len(requests)} sequences for {len(self.target.slots)} slots")
        group = _Group()
        clock = self._clock
        clock.begin(max_new_tokens)
        for slot, request in enumerate(requests):
            with group.isolated(slot):
                turn = self._turn(slot, request, max_new_tokens)
                turn.read_prompt()
                clock.prefill_done()
                turn.begin()
                group.running[slot] = turn
            group.leave()
            clock.setup_done()
        full_steps = 0
        while group.running:
            full_steps += len(group.running) == len(requests)
            self._step(group)
            group.leave()
            clock.step_done()
        times = _GroupTimes.from_laps(clock.laps(), sum(request.reset_s for request in requests))
        results: dict[int, DecodeResult] = {}
        for slot, turn in group.ended.items():
            with group.isolated(slot):  # the drafter reports here
                results[slot] = turn.finish(times.until(turn, len(requests), clock.phases))
        return BatchResult(
            [results.get(slot) or group.errors[slot] for slot in range(len(requests))],
            math.fsum(times.step_s[:full_steps]),
            None if self.target.device.type == "cuda" else group.pass_s,
            group.model_passes,
            group.model_s,
        )

    def _turn(self, slot: int, request: TurnRequest, max_new_tokens: int) -> Decoding:
        return Decoding(
            self.target.slots[slot],
            self._verifiers[slot],
            self._rules,
            request.drafter,
            request.prompt,
            max_new_tokens,
            request.seed,
            request.seen,
        )

    def _step(self, group: _Group) -> None:
        clock = self._clock
        self._draft(group)
        drafts: list[SlotDraft] = [(slot, t.state.root, t.tree) for slot, t in group.turns()]
        clock.phase("draft")
        if not drafts:
            return
        layers = group.running[drafts[0][0]].needs.hidden_layers
        start = time.perf_counter()
        scores = group.answer_jointly(
            {draft[0]: draft for draft in drafts},
            lambda joint: self.target.forward(joint, hidden_layers=layers),
        )
        group.pass_s += time.perf_counter() - start
        clock.phase("verify")
        for slot, slot_scores in scores.items():
            with group.isolated(slot):
                group.running[slot].judge(slot_scores)
        clock.phase("accept")
        for slot, turn in group.turns():
            with group.isolated(slot):
                turn.commit()
        clock.phase("cache")
        for slot, turn in group.turns():
            with group.isolated(slot):
                turn.observe()
        clock.phase("observe")

    @torch.inference_mode()
    def _draft(self, group: _Group) -> None:
        """Let all sequences draft; in each round, answer calls together where possible."""
        waiting: dict[int, tuple[ModelWork[None], ModelCall]] = {}

        def resume(slot: int, work: ModelWork[None], answer: object) -> None:
            with group.isolated(slot):
                try:
                    waiting[slot] = (work, work.send(answer))
                except StopIteration:
                    self.target.check(slot, group.running[slot].tree)

        for slot, turn in group.turns():
            resume(slot, turn.drafting(), None)
        while waiting:
            passes = {slot: item for slot, item in waiting.items() if not item[1].choice}
            calls = passes or waiting
            waiting = {slot: item for slot, item in waiting.items() if slot not in calls}
            by_weights: dict[Hashable, list[int]] = {}
            for slot, (_, call) in calls.items():
                by_weights.setdefault(call.shared, []).append(slot)
            for slots in by_weights.values():
                start = time.perf_counter()
                answers = group.answer_jointly(
                    {slot: calls[slot][1].request for slot in slots}, calls[slots[0]][1].answer
                )
                if passes:
                    group.model_s += time.perf_counter() - start
                    group.model_passes += 1
                for slot, answer in answers.items():
                    resume(slot, calls[slot][0], answer)


class _Isolated:
    """See `_Group.isolated`. A generator's context manager would cost a tenth of the loop."""

    __slots__ = ("_group", "_slot")

    def __init__(self, group: _Group, slot: int) -> None:
        self._group, self._slot = group, slot

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, DiskError):
            return False
        self._group.failed(self._slot, error)
        return True


class _Group:
    """A batch by slot: its running sequences, its ended ones, and why others failed."""

    def __init__(self) -> None:
        self.running: dict[int, Decoding] = {}
        self.ended: dict[int, Decoding] = {}
        self.errors: dict[int, Exception] = {}
        self.model_passes, self.model_s, self.pass_s = 0, 0.0, 0.0

    def turns(self) -> list[tuple[int, Decoding]]:
        """List the running sequences, so that one that fails meanwhile may leave."""
        return list(self.running.items())

    def isolated(self, slot: int) -> _Isolated:
        """Let an error inside end this sequence and no other."""
        return _Isolated(self, slot)

    def failed(self, slot: int, error: Exception) -> None:
        turn = self.running.pop(slot, None)
        if turn is not None and isinstance(error, CaseFailed):
            error = with_method_name(turn.drafter, error)
        self.errors[slot] = error

    def answer_jointly(
        self,
        requests: Mapping[int, _Request],
        answer: Callable[[Sequence[_Request]], Sequence[_Answer]],
    ) -> dict[int, _Answer]:
        """Answer all slots with one call; return answers by slot.

        If that fails, call it for each slot, so that only the slot at fault fails. An answer
        changes nothing before it is complete, so the call can be repeated.
        """
        try:
            return dict(zip(requests, answer(list(requests.values())), strict=True))
        except Exception as error:
            if len(requests) > 1:
                log.warning(
                    "repeating a joint pass of %d sequences one by one: %s", len(requests), error
                )
        answers: dict[int, _Answer] = {}
        for slot, request in requests.items():
            with self.isolated(slot):
                (answers[slot],) = answer([request])
        return answers

    def leave(self) -> None:
        """Remove finished sequences."""
        for slot, turn in self.turns():
            if turn.finished:
                with self.isolated(slot):
                    turn.end()
                    self.ended[slot] = self.running.pop(slot)


@dataclass(frozen=True, slots=True)
class _GroupTimes:
    """Seconds of a batch: all prompts, all drafters' work outside steps, each step."""

    prefill_s: float
    setup_s: float
    step_s: list[float]
    phase_s: dict[str, float]

    @staticmethod
    def from_laps(laps: Sequence[tuple[str, float]], reset_s: float) -> _GroupTimes:
        """Add up a clock's laps, with ``reset_s`` before them."""
        prefill, setup, step = 0.0, reset_s, 0.0
        steps: list[float] = []
        phases = {PREFILL: 0.0, SETUP: reset_s}
        for name, seconds in laps:
            phase = OTHER if name in (STEP, END) else name
            phases[phase] = phases.get(phase, 0.0) + seconds
            if name == PREFILL:
                prefill += seconds
            elif name == SETUP:
                setup += seconds
            else:
                step += seconds
            if name == STEP:
                steps.append(step)
                step = 0.0
        return _GroupTimes(prefill, setup, steps, phases)

    def until(self, turn: Decoding, sequences: int, phases: bool) -> Timings:
        """Sum the times until ``turn`` ended; phases are divided by ``sequences``."""
        steps = self.step_s[: turn.state.step]
        return Timings(
            self.prefill_s,
            self.setup_s + math.fsum(steps),
            self.setup_s,
            steps,
            {name: seconds / sequences for name, seconds in self.phase_s.items()}
            if phases
            else None,
        )
