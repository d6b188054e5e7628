"""The decode loop over one sequence; ``specbench.decoding.batch`` has the one over several.

    propose -> one target pass over root + draft -> verify -> commit accepted rows -> stop rules
    -> observe

The parts of a step are `specbench.decoding.turn.Decoding`'s. One pass commits at least one token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from specbench.arrays import IntArray
from specbench.config.schema import OVERLAP_MODES
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, BonusProposal
from specbench.decoding.turn import (
    DecodeResult,
    Decoding,
    PassTarget,
    StepScores,
    StopRules,
    with_method_name,
)
from specbench.decoding.verify import Verifier
from specbench.errors import CaseFailed, unknown_name
from specbench.system.clock import Clock, make_clock


class Engine:
    """Decode with drafters against one target.

    Args:
        eos_ids, context_length, vocab_size: see `StopRules`.
        overlap: when drafters with ``needs.overlap`` do their parallel part: ``serial`` (after the
            pass; the same schedule, hence the same tokens), ``thread`` (the pass runs in another
            thread), ``stream`` (CUDA: another stream) or ``auto``: one of the latter two, and
            ``serial`` where phases are timed, which only it can tell apart.
        phases: take times inside the steps too.
        clock: makes the clock; by default the one for the target's device.

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
        vocab_size: int | None = None,
        overlap: str = "auto",
        phases: bool = False,
        clock: Callable[[], Clock] | None = None,
    ) -> None:
        if overlap not in OVERLAP_MODES:
            raise unknown_name("engine.overlap", overlap, OVERLAP_MODES)
        self.target = target
        self.verifier = verifier
        self._rules = StopRules(eos_ids, context_length, vocab_size)
        on_gpu = str(target.device).startswith("cuda")
        if overlap == "auto":
            overlap = "serial" if phases else "stream" if on_gpu else "thread"
        self.overlap = "thread" if overlap == "stream" and not on_gpu else overlap
        self._clock = clock() if clock else make_clock(str(target.device), phases)
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
            drafter: set up and, if its state scope requires it, reset.
            max_new_tokens: the first token included.
            seed: for verifiers and drafters that draw random numbers.
            seen: tokens of the case's last turn, if the drafter has not been reset since.

        Raises:
            CaseFailed: the prompt does not fit, the draft is invalid, or logits are not finite.
        """
        turn = Decoding(
            self.target, self.verifier, self._rules, drafter, prompt, max_new_tokens, seed, seen
        )
        try:
            return self._decode(turn)
        finally:
            # OpenMP keeps a team for each thread that ran a pass. If all teams together exceed the
            # machine, the passes of every method sleep instead of spinning.
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def _decode(self, turn: Decoding) -> DecodeResult:
        clock = self._clock
        clock.begin(turn.state.remaining)
        turn.read_prompt()
        clock.prefill_done()
        turn.begin()
        clock.setup_done()
        while not turn.finished:
            self._step(turn, clock)
            clock.step_done()
        clock.finish_begin()
        turn.end()
        return turn.finish(clock.end())

    def _step(self, turn: Decoding, clock: Clock) -> None:
        turn.propose()
        clock.phase("draft")
        try:
            scores, bonus = self._pass(turn, clock)
            clock.phase("verify")
            turn.judge(scores, bonus)
        except CaseFailed as error:
            raise with_method_name(turn.drafter, error) from error
        clock.phase("accept")
        turn.commit()
        clock.phase("cache")
        turn.observe()
        clock.phase("observe")

    def _pass(self, turn: Decoding, clock: Clock) -> tuple[StepScores, BonusProposal | None]:
        """Run the target pass, and the drafter's parallel part between its launch and its end.

        Only the serial emulation can separate their times; otherwise both are in ``verify``.
        """
        state, drafter, tree, needs = turn.state, turn.drafter, turn.tree, turn.needs
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
            return self._pass_with_side_stream(turn)
        scores = self.target.forward(state.root, tree, hidden_layers=layers)
        _ = scores.verified  # waits for a pass that was only queued: serial means after it
        clock.phase("verify")
        bonus = drafter.overlap(state, tree)
        clock.phase("draft")
        return scores, bonus

    def _pass_with_side_stream(self, turn: Decoding) -> tuple[StepScores, BonusProposal | None]:
        """Run the pass on the present stream and the drafter's part on a side stream.

        The pass is only queued: the verifier waits for it when it reads the accepted path. The side
        stream starts after all work queued before the pass, and later work waits for both.
        """
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self.target.device)
        state, tree = turn.state, turn.tree
        present = torch.cuda.current_stream(self.target.device)
        self._side_stream.wait_stream(present)
        scores = self.target.forward(state.root, tree, hidden_layers=turn.needs.hidden_layers)
        try:
            with torch.cuda.stream(self._side_stream):
                bonus = turn.drafter.overlap(state, tree)
        finally:  # unfinished drafting would write into the next turn's cache
            present.wait_stream(self._side_stream)
        return scores, bonus
