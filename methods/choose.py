"""Choose: each step, the method that would have scored most so far drafts.

Papers: HedgeSpec ("Not-a-Bandit"), arXiv 2510.20064, with NormalHedge, arXiv 0903.2851; TapOut,
    arXiv 2511.02017, with UCB1 (Auer, Cesa-Bianchi, Fischer 2002). No code of either is public.
hedge      The text tells what each part's draft would have scored at a step, so nothing is
           explored. A part's loss is minus the tokens of its draft that the text goes on with
           (``loss: length``), or whether its first is wrong (``token``). Its regret R grows by the
           played part's loss minus its own; NormalHedge draws the next part with weights
           [R]+ / c * exp([R]+^2 / 2c), where the mean of exp([R]+^2 / 2c) is e.
ucb        Each part once, then the largest mean reward + sqrt(2 ln(steps) / its steps).
thompson   The largest of draws from Beta(1 + rewards, 1 + steps - rewards).
fixed      Always part number ``arm``, to compare with: a replay counts its passes exactly.
The bandits' reward blends accepted tokens over ``longest`` and over drafted nodes, as TapOut's.
Only the played part pays for passes. Under ``hedge`` all parts that need no passes draft at each
step. A trained head is scored by its likeliest token after each committed state, which it reads
anyway, up to its tree's depth.
Where ours differs, and why:
    - A draft longer than the text is scored as far as the text goes, and later the rest; HedgeSpec
      waits for a chunk's end, and sums overlaps of distributions, which automata lack.
    - TapOut's arms are rules that stop one draft model; here they are methods. The weights of its
      reward are not in the text that we have: ``blend`` gives both halves the same.
    - ``draw: false`` takes the part of the largest weight, the first of equals.
Checked: ``tests/methods/test_choose.py`` restates NormalHedge, UCB1 and the scores in plain code.
Example: parts draft "a b", "a x" and nothing, the second is played and the text goes on "a b c":
    lengths 2, 1, 0, so the regrets grow by 1, 0 and -1 and the first part is drawn next.
State kept: regrets for a turn, as in the paper; rewards and the parts' own as ``state_scope`` says
    (TapOut: ``run``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from annotated_types import MinLen
from numba import njit

from specbench.arrays import Array, FloatArray
from specbench.config.schema import Count, Positive, Share
from specbench.decoding import structs
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftTree, Needs
from specbench.errors import ConfigurationError
from specbench.models.heads.drafter import HeadDrafter

Drafts: TypeAlias = Sequence[DraftTree | None]  # by part; None of one that is not asked
_STREAM = 65  # of random numbers: another one than a verifier's with the same seed


@dataclass(slots=True)
class _OpenStep:
    """A step whose drafts the text has not decided yet."""

    length: int  # tokens committed before it
    played: int
    drafts: Drafts
    scored: FloatArray  # [parts] tokens that the regrets already count


@dataclass(kw_only=True, eq=False)
class Choose(Composite):
    """Choose: at each step one of several methods drafts, by regret or reward so far.

    Attributes:
        drafters: the parts, by their methods' names in a configuration, or drafters.
        policy: ``hedge``, ``ucb``, ``thompson`` or ``fixed``, see the module's text.
        loss: hedge: ``length`` or ``token``.
        draw: hedge: whether to draw by the weights or to take the likeliest.
        blend: ucb, thompson: weight of accepted over ``longest``; the rest: accepted over drafted.
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
    blend: Share = 0.5
    longest: Positive = 8
    arm: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.arm < len(self.drafters), "arm", "the number of one of method.drafters")
        for part in self.drafters:
            needs = part.needs if isinstance(part, Drafter) else Needs()
            passes = needs.draft_model or needs.heads
            scored = self.policy != "hedge" or not passes or getattr(part, "scores_rows", False)
            if needs.overlap or not scored:
                raise ConfigurationError(
                    f"method={self.name} cannot hold {part.name}: it works beside the target, or "
                    "policy=hedge would pay for drafts that are not played. Leave it out, or try "
                    "method.policy=ucb."
                )
        self._plays, self._rewards = np.zeros((2, len(self.drafters)))

    @property
    def entries(self) -> list[Any]:
        return self.drafters

    @property
    def own_needs(self) -> Needs:
        suffice = self.policy in ("hedge", "fixed")  # a bandit's rewards need passes
        return Needs(max_nodes=max(p.needs.max_nodes for p in self.parts), tokens_only=suffice)

    def setup(self, context: structs.DraftContext) -> None:
        super().setup(context)
        matched(NO_TOKENS, NO_TOKENS, NO_TOKENS)  # compiled here, outside any clock
        hedge_weights(np.zeros(1))

    def reset(self) -> None:
        super().reset()
        self._plays, self._rewards = np.zeros((2, len(self.drafters)))

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._random = np.random.default_rng([state.seed, _STREAM])
        self._regrets = np.zeros(len(self.drafters))
        self._open: list[_OpenStep] = []
        self._guesses: list[list[int]] = [[] for _ in self.drafters]  # of heads
        self._played: list[int] = []
        self._asking_s, self._drafts_now = 0.0, -1

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        drafts: Drafts = [None] * len(self.drafters)
        if self.policy == "hedge":
            drafts = yield from self._ask(state)
            self._settle(state)
        played = self._drafts_now = self._choose()
        self._played.append(played)
        self._open.append(_OpenStep(state.length, played, drafts, np.zeros_like(self._regrets)))
        tree = drafts[played]
        return (yield from self.parts[played].drafting(state)) if tree is None else tree

    def observe(self, state: DecodeState, outcome: structs.StepOutcome) -> None:
        played, self._drafts_now = self._drafts_now, -1
        if drafted := len(outcome.tree):
            accepted = len(outcome.path)
            reach = min(accepted / self.longest, 1.0)
            self._rewards[played] += self.blend * reach + (1 - self.blend) * accepted / drafted
        self._plays[played] += played >= 0
        # The other parts see the committed tokens and the root's row, as if none had been drafted.
        logits = None if outcome.logits is None else outcome.logits[:1]
        none = DraftTree.empty()
        other = replace(outcome, tree=none, path=NO_TOKENS, next_tokens=None, logits=logits)
        for i, part in enumerate(self.parts):
            part.observe(state, outcome if i == played else other)

    def report(self) -> dict[str, structs.ReportValue]:
        """Add the part of each step, and the seconds of asking parts under ``hedge``."""
        played = [self.parts[i].name for i in self._played]
        return {**super().report(), "played": played, "asking_s": self._asking_s}

    def _choose(self) -> int:
        if self.policy == "fixed":
            return self.arm
        if self.policy == "hedge":
            weights = hedge_weights(self._regrets)
            draws = self._random.choice(len(weights), p=weights) if self.draw else weights.argmax()
            return int(draws)
        if self.policy == "thompson":
            failures = self._plays - self._rewards
            return int(self._random.beta(1 + self._rewards, 1 + failures).argmax())
        if not self._plays.all():
            return int(self._plays.argmin())
        bonus = np.sqrt(2 * math.log(self._plays.sum()) / self._plays)
        return int((self._rewards / self._plays + bonus).argmax())

    def _ask(self, state: DecodeState) -> ModelWork[Drafts]:
        """Collect drafts of parts that need no passes, and heads' guesses after each token."""
        start, drafts = time.perf_counter(), []
        for guesses, part in zip(self._guesses, self.parts, strict=True):
            draft: DraftTree | None = None
            if isinstance(part, HeadDrafter):
                guesses += (yield from part.first_guesses(state)).tolist()
            else:
                draft = yield from part.drafting(state)
            drafts.append(draft)
        self._asking_s += time.perf_counter() - start
        return drafts

    def _settle(self, state: DecodeState) -> None:
        """Add to the regrets the scores that the text has decided since the last step."""
        steps, self._open = self._open, []
        for step in steps:
            text, lengths, more = state.tokens[step.length :], np.zeros_like(step.scored), False
            for i, (part, draft) in enumerate(zip(self.parts, step.drafts, strict=True)):
                if draft is None:
                    assert isinstance(part, HeadDrafter)
                    guesses = self._guesses[i][step.length - state.n_prompt - 1 :]
                    draft = DraftTree.chain(np.array(guesses[: part.max_levels], dtype=np.int64))
                aux = False if draft.aux is None else draft.aux
                lengths[i], undecided = matched(
                    np.where(aux, -1, draft.tokens), draft.parents, text
                )
                more |= bool(undecided)
            if self.loss == "token":
                lengths, more = np.minimum(lengths, 1), False
            gain, step.scored = lengths - step.scored, lengths
            self._regrets += gain - gain[step.played]
            self._open += [step] * more


@njit(cache=True)
def matched(tokens: Array, parents: Array, text: Array) -> tuple[int, bool]:
    """Count the tokens of ``text`` along the tree; also whether the tree continues after all."""
    depths = np.full(len(parents) + 1, -1)  # by row; row 0 is the root, -1 is off the text
    depths[0] = longest = 0
    for node in range(len(parents)):
        depth = depths[parents[node] + 1]
        if depth == len(text):
            return depth, True
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
