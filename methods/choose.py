"""Choose: which of several drafters drafts is decided at each step by what each would have scored.

Papers: HedgeSpec, "Not-a-Bandit: Provably No-Regret Drafter Selection in Speculative Decoding for
    LLMs", arXiv 2510.20064; NormalHedge, "A Parameter-Free Hedging Algorithm", NeurIPS 2009, arXiv
    0903.2851; TapOut, arXiv 2511.02017; UCB1, Auer, Cesa-Bianchi and Fischer 2002. No code of
    HedgeSpec or TapOut is public.
Policies:
hedge      The committed text tells what every part's draft would have scored at a step, so none is
           explored. A part's loss is minus the tokens of its draft that the text goes on with
           (``loss: length``), or whether its first token is wrong (``token``). Its regret grows by
           the played part's loss minus its own, and NormalHedge draws the next step's part with
           weights [R]+ / c * exp([R]+^2 / 2c), where c makes the mean of exp([R]+^2 / 2c) be e.
ucb        TapOut: each part once, then the largest mean reward + sqrt(2 ln(steps) / its steps).
thompson   TapOut: the largest of draws from Beta(1 + rewards, 1 + steps - rewards).
fixed      Always the part number ``arm``, which a choice is compared with.

The bandits' reward is TapOut's blend of accepted tokens over ``longest`` and over drafted nodes.
Only the played part pays for passes of its own. Parts that cost none (automata, n-grams) are all
asked for a draft before the step. A trained head reads each committed state anyway; it is scored
by its likeliest token after each, as far as its tree is deep.
Where ours differs, and why:
    - A draft that the text has not gone beyond yet is scored as far as the text goes, and the rest
      later. The paper waits for the end of a chunk.
    - A drafter's tokens are compared with the text; the paper sums the overlap of distributions,
      which automata lack. For greedy decoding both are the same.
    - TapOut's arms are rules that stop one draft model; here they are methods. The weights of its
      reward are not in the text that we have: ``blend`` weighs both halves alike.
    - ``skip_empty`` (ours, off): a part without a draft is not drawn where others have one, and
      its regret rests. ``draw: false`` plays the likeliest part, the first of equals.
Example: parts draft "a b", "a x" and nothing, the second is played and the text goes on "a b c":
    lengths 2, 1, 0, so the regrets grow by 1, 0 and -1 and the first part is drawn next.
State kept: regrets and rewards with what the parts keep, under our state scope (HedgeSpec: for a
    turn; TapOut: for a run).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import MinLen
from numba import njit

from specbench.arrays import Array, BoolArray, FloatArray
from specbench.config.schema import Count, Positive, Share
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.errors import ConfigurationError
from specbench.models.heads.drafter import HeadDrafter

_STREAM = 65  # of random numbers: another one than a verifier's with the same seed


@dataclass(slots=True)
class _PastStep:
    """A step whose drafts the text has not decided yet.

    Attributes:
        length: tokens that had been committed before it.
        drafts: of parts that were asked, by their number.
        awake: ``[parts]`` whose regret it changes.
        scored: ``[parts]`` accepted tokens that their regrets hold already.
    """

    length: int
    played: int
    drafts: Mapping[int, DraftTree]
    awake: BoolArray
    scored: FloatArray


@dataclass(kw_only=True, eq=False)
class Choose(Composite):
    """Choose: at each step one of several methods drafts, by regret or reward so far.

    Attributes:
        drafters: the parts, by their methods' names in a configuration (which turns them into
            drafters), or drafters.
        policy: ``hedge``, ``ucb``, ``thompson`` or ``fixed``, see the module's text.
        loss: hedge: accepted ``length``, or the first ``token`` alone.
        draw: hedge: draw a part by the weights, instead of taking the likeliest.
        skip_empty: hedge: draw only among parts that have a draft, if any has one.
        blend: ucb, thompson: weight of accepted over ``longest``; the rest weighs accepted over
            drafted.
        longest: ucb, thompson: accepted tokens that earn the first half whole.
        arm: fixed: the part that drafts, counted from 0.

    Raises:
        ConfigurationError: a value is out of range, or a part cannot be chosen or scored.
    """

    name: str = "choose"
    paper_scope: Scope = "run"
    drafters: Annotated[list[Any], MinLen(1)] = field(
        default_factory=lambda: ["suffix_decoding", "pld", "cacheback"]
    )
    policy: Literal["hedge", "ucb", "thompson", "fixed"] = "hedge"
    loss: Literal["length", "token"] = "length"
    draw: bool = True
    skip_empty: bool = False
    blend: Share = 0.5
    longest: Positive = 8
    arm: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.arm < len(self.drafters), "arm", "the number of one of method.drafters")
        for part in self.drafters:
            if not isinstance(part, Drafter):
                continue
            if part.needs.overlap:
                raise ConfigurationError(
                    f"method={self.name} cannot hold {part.name}, which drafts while the target "
                    "reads its draft. Leave it out."
                )
            passes = part.needs.draft_model or part.needs.heads
            if self.policy == "hedge" and passes and not getattr(part, "scores_rows", False):
                raise ConfigurationError(
                    f"method={self.name} with policy=hedge scores each part at each step, and a "
                    f"draft of {part.name} costs passes. Type method.policy=ucb, or leave it out."
                )
        self._forget()

    @property
    def entries(self) -> list[Any]:
        return self.drafters

    @property
    def own_needs(self) -> Needs:
        return Needs(
            max_nodes=max(part.needs.max_nodes for part in self.parts),
            # Regrets and rewards come of drafts: no text alone brings them back.
            tokens_only=self.policy == "fixed" or self.state_scope == "turn",
        )

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        # Compiles, or loads what was compiled before, outside any clock.
        matched(NO_TOKENS, NO_TOKENS, NO_TOKENS)
        hedge_weights(self._regrets)

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _forget(self) -> None:
        self._regrets = np.zeros(len(self.drafters))
        self._plays, self._rewards = np.zeros_like(self._regrets), np.zeros_like(self._regrets)
        self._past: list[_PastStep] = []
        self._guesses: dict[int, list[int]] = {}
        self._played: list[int] = []
        self._asks, self._asks_s = 0, 0.0

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._past, self._played, self._drafts_now = [], [], -1
        self._guesses = {
            i: [] for i, part in enumerate(self.parts) if isinstance(part, HeadDrafter)
        }
        self._asks, self._asks_s = 0, 0.0
        self._random = np.random.default_rng([state.seed, _STREAM])

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        drafts: dict[int, DraftTree] = {}
        if self.policy == "hedge":
            drafts = yield from self._ask(state)
            self._settle(state)
        played = self._choose(drafts)
        self._played.append(played)
        self._drafts_now = played
        tree = drafts.get(played)
        if tree is None:
            tree = yield from self.parts[played].drafting(state)
        if self.policy == "hedge":
            awake = self._awake(drafts)
            scored = np.zeros(len(self.drafters))
            self._past.append(_PastStep(state.length, played, drafts, awake, scored))
        return tree

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        played, drafted = self._drafts_now, len(outcome.tree)
        self._drafts_now = -1
        if played >= 0:
            self._plays[played] += 1
        if drafted:
            accepted = len(outcome.path)
            reach = min(accepted / self.longest, 1.0)
            self._rewards[played] += self.blend * reach + (1 - self.blend) * accepted / drafted
        # Of a draft that was not theirs the others see what was committed, and the root's row.
        hidden, logits, choices = outcome.tree_hidden, outcome.logits, outcome.next_tokens
        other = replace(
            outcome,
            tree=DraftTree.empty(),
            path=NO_TOKENS,
            next_tokens=None if choices is None else choices[:1],
            logits=None if logits is None else logits[:1],
            tree_hidden=None if hidden is None else {i: rows[:1] for i, rows in hidden.items()},
        )
        for i, part in enumerate(self.parts):
            part.observe(state, outcome if i == played else other)

    def report(self) -> dict[str, ReportValue]:
        """Add the part of each step, and the drafts that were asked for and not played."""
        names = [part.name for part in self.parts]
        played = [names[i] for i in self._played]
        asks: dict[str, ReportValue] = {
            "unplayed_drafts": self._asks,
            "unplayed_drafts_s": self._asks_s,
        }
        return {**super().report(), "played": played, **asks}

    # -- the choice ------------------------------------------------------------------------------

    def _choose(self, drafts: Mapping[int, DraftTree]) -> int:
        if self.policy == "fixed":
            return self.arm
        if self.policy == "hedge":
            weights = hedge_weights(self._regrets)
            awake = weights * self._awake(drafts)
            weights = awake / awake.sum() if awake.any() else weights
            if self.draw:
                return int(self._random.choice(len(weights), p=weights))
            return int(weights.argmax())
        if self.policy == "thompson":
            failures = self._plays - self._rewards
            return int(self._random.beta(1 + self._rewards, 1 + failures).argmax())
        if not self._plays.all():
            return int(self._plays.argmin())
        bonus = np.sqrt(2 * math.log(self._plays.sum()) / self._plays)
        return int((self._rewards / self._plays + bonus).argmax())

    def _awake(self, drafts: Mapping[int, DraftTree]) -> BoolArray:
        """Mark the parts that may be drawn, ``[parts]``: all, or those with a draft."""
        if not self.skip_empty:
            return np.ones(len(self.drafters), dtype=np.bool_)
        return np.array([i not in drafts or len(drafts[i]) > 0 for i in range(len(self.drafters))])

    # -- hedge: what each part would have scored -------------------------------------------------

    def _ask(self, state: DecodeState) -> ModelWork[dict[int, DraftTree]]:
        """Ask parts without passes for drafts, and heads for their guesses after each token."""
        start, drafts = time.perf_counter(), {}
        for i, part in enumerate(self.parts):
            if isinstance(part, HeadDrafter):
                self._guesses[i] += (yield from part.first_guesses(state)).tolist()
            else:
                drafts[i] = yield from part.drafting(state)
        self._asks += len(self.drafters) - 1
        self._asks_s += time.perf_counter() - start
        return drafts

    def _settle(self, state: DecodeState) -> None:
        """Add to the regrets what the text has decided since the last step."""
        past, self._past = self._past, []
        for step in past:
            after = state.tokens[step.length :]
            lengths, undecided = np.zeros(len(self.drafters)), False
            for i, part in enumerate(self.parts):
                if isinstance(part, HeadDrafter):
                    guesses = self._guesses[i][step.length - state.n_prompt - 1 :]
                    draft = DraftTree.chain(np.array(guesses[: part.max_levels], dtype=np.int64))
                else:
                    draft = step.drafts[i]
                tokens = (
                    draft.tokens if draft.aux is None else np.where(draft.aux, -1, draft.tokens)
                )
                lengths[i], more = matched(tokens, draft.parents, after)
                undecided |= bool(more)
            if self.loss == "token":
                lengths, undecided = np.minimum(lengths, 1), len(after) == 0
            gain = lengths - step.scored
            self._regrets += (gain - gain[step.played]) * step.awake
            step.scored = lengths
            if undecided:
                self._past.append(step)


@njit(cache=True)
def matched(tokens: Array, parents: Array, text: Array) -> tuple[int, bool]:
    """Count the tokens of ``text`` on the tree's longest path along it.

    Returns:
        The count, and whether the tree has nodes left beyond a path that holds all of ``text``.
    """
    depths = np.full(len(parents) + 1, -1)  # by row; row 0 is the root, -1 is off the text
    depths[0] = longest = 0
    for node in range(len(parents)):
        depth = depths[parents[node] + 1]
        if depth == len(text):
            return longest, True
        if depth >= 0 and tokens[node] == text[depth]:
            depths[node + 1] = depth + 1
            longest = max(longest, depth + 1)
    return longest, False


@njit(cache=True)
def hedge_weights(regrets: Array) -> Array:
    """Compute NormalHedge's weights of ``[n]`` regrets; alike where none is positive."""
    largest = max(regrets.max(), 0.0)
    if largest == 0.0:
        return np.full(len(regrets), 1 / len(regrets))
    halves = np.maximum(regrets / largest, 0.0) ** 2 / 2  # no scale matters
    low, high = 0.5 / (1 + math.log(len(regrets))), 0.5
    for _ in range(60):
        middle = (low + high) / 2
        if np.exp(halves / middle).mean() > math.e:
            low = middle
        else:
            high = middle
    weights = np.sqrt(halves) * np.exp(halves / high)
    return weights / weights.sum()
