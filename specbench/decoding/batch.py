"""The decode loop over several texts in lock-step: each step is one target pass for all of them.

    every text drafts -> one pass over the rows of all -> every text judges, commits, observes

While they draft, what their drafters ask of a model in common is answered for all at once.

It is a second loop, beside the one over a single text, and both are made of `Decoding`'s parts. One
loop for both would have to carry lists, leaving texts and their failures through the path whose
speed is measured against others', and could not overlap a drafter with the pass.

A text that is over leaves, and nobody takes its slot: the rows of the others' steps get fewer.
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

_Asked = TypeVar("_Asked")
_Got = TypeVar("_Got")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What one slot is to decode, see `Engine.decode`.

    ``drafter`` is this slot's own; ``reset_s``: what it took to empty it, a part of its work.
    """

    prompt: IntArray
    drafter: Drafter
    seed: int = 0
    seen: IntArray = field(default_factory=lambda: NO_TOKENS)
    reset_s: float = 0.0


@dataclass(slots=True)
class BatchResult:
    """What came of the requests, in their order.

    Attributes:
        turns: of each its result, or why it failed. Its times are the group's until it ended: the
            prompts of all, the drafters' work for all, the steps in which it ran.
        full_s: seconds of the steps in which all texts ran.
        pass_s: of the target's passes behind the prompts; None on a GPU, which the host does not
            wait for.
        model_passes, model_s: of the drafters' models while they drafted, for all texts; seconds
            of the host, which on a GPU are launches alone.
    """

    turns: list[DecodeResult | Exception] = field(default_factory=list)
    full_s: float = 0.0
    pass_s: float | None = None
    model_passes: int = 0
    model_s: float = 0.0


class BatchEngine:
    """Runs a drafter a text against one target.

    Args:
        verifiers: one for each slot of ``target``, for they hold random numbers.
        eos_ids, context_length, vocab_size: see `StopRules`.
        phases: take times inside the steps too.
        clock: makes the clock; by default one that suits the target's device.
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

        A text whose prompt, draft, drafter, rows in a common pass or scores are at fault fails
        alone; the others go on as if it had ended.

        Raises:
            ValueError: more requests than slots.
        """
        if len(requests) > len(self.target.slots):
            raise ValueError(f"{len(requests)} texts for {len(self.target.slots)} slots")
        group = _Group()
        clock = self._clock
        clock.begin(max_new_tokens)
        for slot, request in enumerate(requests):
            with group.alone(slot):
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
        times = _GroupTimes.of(clock.laps(), sum(request.reset_s for request in requests))
        told: dict[int, DecodeResult] = {}
        for slot, turn in group.ended.items():
            with group.alone(slot):  # its drafter reports of itself
                told[slot] = turn.told(times.until(turn, len(requests), clock.phases))
        return BatchResult(
            [told.get(slot) or group.errors[slot] for slot in range(len(requests))],
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
        asked: list[SlotDraft] = [(slot, t.state.root, t.tree) for slot, t in group.each()]
        clock.phase("draft")
        if not asked:
            return
        layers = group.running[asked[0][0]].needs.hidden_layers
        begun = time.perf_counter()
        scores = group.answered(
            {one[0]: one for one in asked},
            lambda some: self.target.forward(some, hidden_layers=layers),
        )
        group.pass_s += time.perf_counter() - begun
        clock.phase("verify")
        for slot, own in scores.items():
            with group.alone(slot):
                group.running[slot].judge(own)
        clock.phase("accept")
        for slot, turn in group.each():
            with group.alone(slot):
                turn.commit()
        clock.phase("cache")
        for slot, turn in group.each():
            with group.alone(slot):
                turn.observe()
        clock.phase("observe")

    @torch.inference_mode()
    def _draft(self, group: _Group) -> None:
        """The drafts of all: in each round the calls that can be are answered together."""
        waiting: dict[int, tuple[ModelWork[None], ModelCall]] = {}

        def go_on(slot: int, work: ModelWork[None], found: object) -> None:
            with group.alone(slot):
                try:
                    waiting[slot] = (work, work.send(found))
                except StopIteration:
                    self.target.check(slot, group.running[slot].tree)

        for slot, turn in group.each():
            go_on(slot, turn.drafting(), None)
        while waiting:
            passes = {slot: one for slot, one in waiting.items() if not one[1].choice}
            asking = passes or waiting
            waiting = {slot: one for slot, one in waiting.items() if slot not in asking}
            alike: dict[Hashable, list[int]] = {}
            for slot, (_, call) in asking.items():
                alike.setdefault(call.shared, []).append(slot)
            for slots in alike.values():
                begun = time.perf_counter()
                answers = group.answered(
                    {slot: asking[slot][1].request for slot in slots}, asking[slots[0]][1].answer
                )
                if passes:
                    group.model_s += time.perf_counter() - begun
                    group.model_passes += 1
                for slot, answer in answers.items():
                    go_on(slot, asking[slot][0], answer)


class _Alone:
    """See `_Group.alone`. A generator's context manager would take a tenth of the loop's time."""

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
    """The texts of a group by slot: those that run, those that ended, and why others failed."""

    def __init__(self) -> None:
        self.running: dict[int, Decoding] = {}
        self.ended: dict[int, Decoding] = {}
        self.errors: dict[int, Exception] = {}
        self.model_passes, self.model_s, self.pass_s = 0, 0.0, 0.0

    def each(self) -> list[tuple[int, Decoding]]:
        """Those that run; one that fails meanwhile may leave."""
        return list(self.running.items())

    def alone(self, slot: int) -> _Alone:
        """What fails within it ends this text and no other."""
        return _Alone(self, slot)

    def failed(self, slot: int, error: Exception) -> None:
        turn = self.running.pop(slot, None)
        if turn is not None and isinstance(error, CaseFailed):
            error = with_method_name(turn.drafter, error)
        self.errors[slot] = error

    def answered(
        self, asked: Mapping[int, _Asked], answer: Callable[[Sequence[_Asked]], Sequence[_Got]]
    ) -> dict[int, _Got]:
        """By slot what each gets of what all ask at once.

        Where that fails each asks by itself, so that one at fault fails alone. An answer changes
        nothing before it is whole, so it can be asked for again.
        """
        try:
            return dict(zip(asked, answer(list(asked.values())), strict=True))
        except Exception as error:
            if len(asked) > 1:
                log.warning("a pass of %d texts is made for each: %s", len(asked), error)
        found: dict[int, _Got] = {}
        for slot, one in asked.items():
            with self.alone(slot):
                (found[slot],) = answer([one])
        return found

    def leave(self) -> None:
        """Those that are over go."""
        for slot, turn in self.each():
            if turn.finished:
                with self.alone(slot):
                    turn.end()
                    self.ended[slot] = self.running.pop(slot)


@dataclass(frozen=True, slots=True)
class _GroupTimes:
    """Seconds of a group: of all prompts, of all drafters' work outside steps, of each step."""

    prefill_s: float
    setup_s: float
    step_s: list[float]
    phase_s: dict[str, float]

    @staticmethod
    def of(laps: Sequence[tuple[str, float]], reset_s: float) -> _GroupTimes:
        """Of a clock's laps, with ``reset_s`` before them."""
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

    def until(self, turn: Decoding, texts: int, phases: bool) -> Timings:
        """The group's times until one of its ``texts`` ended; of phases that one's equal share."""
        steps = self.step_s[: turn.state.step]
        return Timings(
            self.prefill_s,
            self.setup_s + math.fsum(steps),
            self.setup_s,
            steps,
            {name: seconds / texts for name, seconds in self.phase_s.items()} if phases else None,
        )
