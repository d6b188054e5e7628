"""Adaptive drafts: how much of another method's draft is verified is decided step by step.

Four published rules, each a ``policy``, around one drafter that says how likely its nodes are
(``DraftTree.survival``: a draft model's probabilities, a suffix tree's counts):

threshold   transformers' assisted generation since 4.45. Reference code studied:
            huggingface/transformers 5.23, ``generation/candidate_generator.py``
            (``AssistedCandidateGenerator``) and ``ConfidenceCriteria``. The draft ends behind a
            token less likely than ``confidence``. Of the tokens that the target judged, once more
            than five hold accepted and rejected ones, the threshold becomes the one with the least
            false positives + 3 times false negatives (where scikit-learn is installed there).
survival    SpecDec++, arXiv 2405.19715; Kaffaljidhmah2/SpecDec_pp ``hf_generation.py``. The draft
            ends behind the token at which the product of the probabilities is below ``least`` (1 -
            its ``stop_threshold``), but not before ``shortest`` tokens.
marginal    vLLM's adaptive verification, vllm-project/vllm PR 47808,
            ``v1/worker/gpu/spec_decode/adaptive_verification.py``, for one sequence: as many of the
            likeliest nodes as give the most tokens for the time of a step. ``objective: plain``
            buys a node while its survival times a plain step's time is above its own price.
            With ``batch.budget=global`` nodes are chosen over the drafts of all texts that are
            decoded at once, and trusted as far as the group's last nodes were right; without it
            each text pays alone. Every 8 steps the group asks the surface whether a token of each
            would pay that is right as often as they were, and drafts nothing where it would not.
            A text that is last and of whose drafts no node pays rests for some steps.
bandit      BanditSpec, arXiv 2505.15141; sail-sg/BanditSpec ``generate_utils.py``
            (``ucb_length_spec_generate``): the draft's depth, 1 to ``arms``, by an upper confidence
            bound on tokens per second.

A step whose draft is cut to nothing is the step of plain decoding; what the drafter did for it is
paid all the same. ``offered_per_step`` in the records is what it drafted, ``n_drafted`` what was
verified. Draft models that draft token by token (sps) stop by the first two rules, and the bandit's
depth, before they draft more; other drafts are cut when they are done.
Where ours differs, and why:
    - All rules take trees: a rule judges a node's path; what the target judged are the children of
      accepted nodes. For chains this is what the codes do.
    - threshold: transformers' documentation says that the threshold lasts over calls; its code
      works on a copy that ends with the call, and so does ours with the turn.
    - survival: SpecDec++ has a trained head say how likely a token is, a token late (it reads the
      state of the token that was fed). Ours goes by the drafter's own probability, at once.
    - marginal: the price comes from a cost surface of this machine, measured beforehand, not from a
      profile at start; of one sequence the probabilities are this step's own, where vLLM sizes a
      batch by the last step's.
    - A draft that was drawn must not be cut before a token because of that token: what is left
      would be biased. There ``marginal`` is ``plain`` and, like the first two, cuts behind.
    - bandit: the code divides its exploration by the steps of all arms together, so that the bonus
      is the same for all and the arm with the best mean is always taken (``counts: all``);
      ``arm`` is UCB1's. ``reward: priced`` takes a step's price from a surface, which can be
      replayed; measured seconds cannot.
Checked: drives identical steps beside the authors' code: threshold in 13,037 of 13,037, bandit in
    8,519 of 8,522, marginal in 3,000 of 3,000; survival is from the text.
    ``tests/methods/test_adaptive.py`` has the rules in plain code.
Example: suffix decoding drafts a b c d after "x", each .9, .5, .9, .4 likely, so that they survive
    with .9, .45, .41, .16. ``survival`` with ``least`` .42 verifies a b c: c is the first token
    below it and ends the draft. ``bandit`` with the depth 2 verifies a b.
State kept: thresholds and arms for a turn, as in the codes; the drafter's own as ``state_scope``
    says (paper: ``run``, which is the default drafter's).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from specbench.arrays import BoolArray, FloatArray, IntArray
from specbench.config.schema import Count, NotNegative, Positive, Share
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.protocols import ModelCall, ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    Counted,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface

_LONGEST_REST = 16  # steps of a text without a draft
_LOOK = 8  # steps after which a group asks anew whether any draft could pay
_CONTEXTS = 64  # a price holds for so many cached tokens
_DOUBT = 4  # right tokens that a group is credited with before it has verified any


@dataclass(kw_only=True, eq=False)
class Adaptive(Composite):
    """Adaptive: another method's draft, cut at each step by a published rule.

    Attributes:
        drafter: the method that drafts, by its name in a configuration (which turns it into a
            drafter), or a drafter.
        policy: ``threshold``, ``survival``, ``marginal`` or ``bandit``, see the module's text.
        confidence: threshold: the probability that it begins with.
        refit: threshold: whether it moves.
        least: survival: path probability below which a draft ends.
        shortest: survival: tokens of a draft that this rule leaves alone.
        surface: marginal, and bandit with priced steps: a cost surface of this machine and model.
        objective: marginal: ``rate`` (tokens per second of the step) or ``plain``.
        arms: bandit: depths to choose from.
        exploration: bandit: what multiplies the logarithm of the step under the root.
        counts: bandit: ``all`` or ``arm``, the steps that the bonus is divided by.
        reward: bandit: tokens by ``measured`` seconds, or by ``priced`` ones.

    Raises:
        ConfigurationError: a value is out of range, a drafter that does not say how likely its
            nodes are, or no surface where one is needed.
    """

    name: str = "adaptive"
    version: int = 4
    paper_scope: Scope = "run"  # suffix decoding's
    drafter: Any = "suffix_decoding"
    policy: Literal["threshold", "survival", "marginal", "bandit"] = "threshold"
    confidence: Share = 0.4
    refit: bool = True
    least: Share = 0.7
    shortest: Count = 2
    surface: str | None = None
    objective: Literal["rate", "plain"] = "rate"
    arms: Positive = 4
    exploration: NotNegative = 6.0
    counts: Literal["all", "arm"] = "all"
    reward: Literal["measured", "priced"] = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._priced = self.policy == "marginal" or (
            self.policy == "bandit" and self.reward == "priced"
        )
        if self._priced and self.surface is None:
            raise ConfigurationError(
                f"method={self.name} with policy={self.policy} goes by what passes cost on this "
                "machine. Measure that: python run.py runner=cost output_dir=COST; then type "
                "method.surface=COST/surface.json."
            )
        if isinstance(self.drafter, Drafter):
            needs = self.drafter.needs
            if not needs.survival or needs.overlap:
                raise ConfigurationError(
                    f"method={self.name} cannot hold {self.drafter.name}: it does not say how "
                    "likely its nodes are. Type e.g. method.drafter=suffix_decoding, sps, opt_tree "
                    "or eagle2."
                )
        self._tree = DraftTree.empty()  # what the part drafted in this step
        self._kept = NO_TOKENS  # the nodes of it that are verified
        self._said: list[float] = []  # what a part said of the tokens that it drafted one by one
        self._offered: list[float] = []
        self._forget()

    @property
    def entries(self) -> list[Any]:
        return [self.drafter]

    @property
    def own_needs(self) -> Needs:
        clock = self.policy == "bandit" and self.reward == "measured"
        nodes = self.parts[0].needs.max_nodes
        return Needs(max_nodes=nodes, clock=clock, priced_rows=self.policy == "marginal")

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        needs = self.parts[0].needs
        self._drafts_by_model, self._tokens_suffice = needs.draft_model, needs.tokens_only
        self._shares = context.budget_shared and self.policy == "marginal"
        if self._priced:
            surface = self._measured(context)
            self._rows = RowPrices(surface, needs.max_nodes, plain=self.objective == "plain")
            if self._shares:
                self._rows.seconds(2, 0)  # refuses a surface without passes of several texts

    def _measured(self, context: DraftContext) -> CostSurface:
        assert self.surface is not None
        surface = CostSurface.read(Path(self.surface))
        target = context.target
        if target is not None:
            here = {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type}
            for key, value in here.items():
                measured = str(surface.model.get(key)).partition(":")[0]
                if measured != value:
                    raise ConfigurationError(
                        f"method.surface={self.surface} was measured with {key} {measured}, "
                        f"and this run has {value}. Measure one: python run.py runner=cost"
                    )
        return surface

    def _forget(self) -> None:
        self._confidence = self.confidence
        self._judged: list[tuple[float, bool]] = []  # probability, whether it was accepted
        self._arm, self._step = 0, 0
        self._means, self._calls = np.zeros(self.arms), np.zeros(self.arms)
        self._started = 0.0
        self._hopes = True  # whether any draft of the group could pay
        self._past = Past()
        self._rested = False  # whether the part was not asked in this step
        self._in_vain, self._rest = 0, 0  # drafts in a row that did not pay; steps without one

    def begin(self, state: DecodeState) -> None:
        self._forget()
        self._offered = []
        self._told = state.length  # tokens of the text that the part has seen
        super().begin(state)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        self._said = []
        asked = copy.copy(state)
        if self.policy != "bandit":
            asked.stop_when = self._enough
        else:
            self._started = time.perf_counter()
            self._choose()
            # Nothing deeper than the arm could be committed then, so that draft models stop there.
            asked.remaining = min(state.remaining, self._arm + 2)
        if self._shares and not state.step % _LOOK:
            self._hopes = yield self._asks(self._rows.hopes, DraftTree.empty(), state)
            self._past = self._past.half()
        rests, self._rest = self._rest > 0, max(self._rest - 1, 0)
        self._rested = rests or not self._hopes
        tree = DraftTree.empty()
        if not self._rested:
            self._tell(state)
            tree = yield from self.parts[0].drafting(asked)
        self._tree = tree
        self._offered.append(len(tree))
        if not self._hopes:
            return tree
        if self._shares:
            bought = yield self._asks(self._rows.bought, tree, state)
            kept = bought.kept
            if bought.last and not rests:
                self._in_vain = 0 if bought.pays else self._in_vain + 1
                self._rest = min(2**self._in_vain // 4, _LONGEST_REST)  # 0, 1, 2, 4, ..
        else:
            kept = self._worth(tree, state.length) if len(tree) else NO_TOKENS
        self._kept = np.flatnonzero(kept)
        return tree.take(self._kept) if len(self._kept) else DraftTree.empty()

    def _asks(self, answer: Callable[..., Any], tree: DraftTree, state: DecodeState) -> ModelCall:
        """For an answer over all texts that are decoded at once."""
        offer = Offer(tree, state.length, state.remaining, self._past)
        return ModelCall((answer.__name__, self.surface), offer, answer, choice=True)

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        verified = outcome.tree
        if self.policy == "threshold" and self.refit and len(verified):
            self._learn(verified, outcome.path)
        if self._shares and len(verified):
            self._past = self._past.plus(verified, len(outcome.path))
        seen = outcome
        if self._drafts_by_model and len(verified) < len(self._tree):
            # Its cache holds all that it drafted: the nodes that nobody verified are rejected ones.
            path = self._kept[outcome.path]
            seen = replace(outcome, tree=self._tree, path=path, next_tokens=None)
        if self._rested and self._tokens_suffice:
            return  # it is told when it drafts again
        self._told = state.length
        super().observe(state, seen)
        if self.policy == "bandit":
            self._reward(len(outcome.path) + 1, len(verified), state.length)

    def end(self, state: DecodeState) -> None:
        self._tell(state)
        super().end(state)

    def _tell(self, state: DecodeState) -> None:
        """Show the part what was committed while it rested."""
        if self._told < state.length:
            told, self._told = state.tokens[self._told :].copy(), state.length
            super().observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, told, None))

    def report(self) -> dict[str, Counted]:
        return {**super().report(), "offered_per_step": self._offered}

    # -- what is kept of a draft -----------------------------------------------------------------

    def _worth(self, tree: DraftTree, context: int) -> BoolArray:
        """``[n]`` whether a node is verified; a node's parent is, where it is."""
        if self.policy == "bandit":
            return _depths(tree.parents) <= self._arm + 1
        if self.policy == "marginal":
            return self._rows.bought([Offer(tree, context, 1)])[0].kept
        nodes = zip(self._chances(tree), _survival(tree), _depths(tree.parents), strict=True)
        return _behind(tree.parents, np.array([self._ends(*node) for node in nodes]))

    def _enough(self, chance: float, survival: float) -> bool:
        self._said.append(chance)
        return self._ends(chance, survival, len(self._said))

    def _ends(self, chance: float, survival: float, depth: int) -> bool:
        """Whether the draft ends behind a node at this depth, from 1."""
        if self.policy == "threshold":
            return chance < self._confidence
        return self.policy == "survival" and survival < self.least and depth >= self.shortest

    def _chances(self, tree: DraftTree) -> FloatArray:
        """``[n]`` probability of each node, given its parent."""
        if len(self._said) >= len(tree):  # a chain: as it was said, without a quotient's rounding
            return np.array(self._said[: len(tree)])
        survival = _survival(tree)
        above = np.append(survival, 1.0)[tree.parents]  # -1, the root, is the last one
        return np.divide(survival, above, out=np.zeros_like(survival), where=above > 0)

    # -- threshold -------------------------------------------------------------------------------

    def _learn(self, verified: DraftTree, path: IntArray) -> None:
        accepted = np.zeros(len(verified) + 1, dtype=np.bool_)  # the root is the last one
        accepted[path] = accepted[-1] = True
        chances = self._chances(verified)
        for node in np.flatnonzero(accepted[verified.parents]):
            self._judged.append((float(chances[node]), bool(accepted[node])))
        if len(self._judged) > 5 and len({right for _, right in self._judged}) == 2:
            self._confidence = best_threshold(*map(np.array, zip(*self._judged, strict=True)))

    # -- bandit ----------------------------------------------------------------------------------

    def _choose(self) -> None:
        """The arm of this step, from 0: a draft one deeper than its number."""
        self._step += 1
        if self._step < 2 * self.arms:
            self._arm = (self._step - 1) % self.arms
            return
        steps = self._calls.sum() if self.counts == "all" else self._calls
        with np.errstate(divide="ignore"):
            bonus = np.sqrt(self.exploration * math.log(self._step) / np.asarray(steps))
        self._arm = int((self._means + bonus).argmax())

    def _reward(self, tokens: int, nodes: int, context: int) -> None:
        if self.reward == "measured":
            seconds = time.perf_counter() - self._started
        else:
            seconds = float(self._rows.seconds(1, context)[nodes])
        calls = self._calls[self._arm]
        self._means[self._arm] = (self._means[self._arm] * calls + tokens / seconds) / (1 + calls)
        self._calls[self._arm] += 1


def best_threshold(chances: FloatArray, accepted: BoolArray) -> float:
    """The probability that, taken as the least one to go on with, costs the fewest mistakes.

    A false positive costs 1, a false negative 3, each as a share of its class; of equals the
    largest threshold. Both classes are there.
    """
    thresholds = np.unique(chances)[::-1]
    taken = chances >= thresholds[:, None]
    false_positives = (taken & ~accepted).sum(1) / (~accepted).sum()
    false_negatives = 1 - (taken & accepted).sum(1) / accepted.sum()
    return float(thresholds[(false_positives + 3 * false_negatives).argmin()])


# -- marginal: which nodes of drafts are worth the rows that they take in a pass -------------------


class Past(NamedTuple):
    """What became of a text's nodes in its last steps.

    Attributes:
        verified: nodes that were bought.
        expected: how many of them would be right by their ``survival``.
        accepted: how many were.
    """

    verified: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0

    def half(self) -> Past:
        """What is long ago counts less and less."""
        return Past(*(number / 2 for number in self))

    def plus(self, tree: DraftTree, accepted: int) -> Past:
        expected = self.expected + float(_survival(tree).sum())
        return Past(self.verified + len(tree), expected, self.accepted + accepted)


class Offer(NamedTuple):
    """A text's draft, behind so many tokens; ``remaining``: new ones that it may still have."""

    tree: DraftTree
    length: int
    remaining: int
    past: Past = Past()


class Bought(NamedTuple):
    """What becomes of a text's draft.

    Attributes:
        kept: ``[n]`` which nodes are verified; a node's parent is, where it is.
        pays: whether it gains more time than its rows take.
        last: whether no other text has more tokens ahead of it.
    """

    kept: BoolArray
    pays: bool
    last: bool


class RowPrices:
    """Buys rows for the drafts of texts that are decoded at once.

    A token is worth the time that it saves of plain decoding. A text that ends is not replaced, so
    a group takes as long as its last text. Any token saves its own row in a step; the rest of a
    step is saved once all texts that are last have gained a token. As some texts gain much and
    others nothing, the least gain of n is taken to be their mean over the root of n (as in a
    Rayleigh law), and each text's part of the rest an n-th of that.

    How likely nodes are, drafters say from few counts, and mostly too much. So what they say is
    scaled by what became of the group's last nodes, and never up.

    Args:
        surface: with passes of several texts where there are several.
        most: nodes of a draft.
        plain: a node is bought while it pays for itself, and not for the most tokens a second.
    """

    def __init__(self, surface: CostSurface, most: int, *, plain: bool) -> None:
        self._surface, self._most, self._plain = surface, most, plain
        self._known: dict[tuple[int, int], FloatArray] = {}

    def hopes(self, offers: Sequence[Offer]) -> list[bool]:
        """For all texts alike, whether a token of each would pay for its row.

        Of some of the texts at least, and right as often as the group's last nodes were.
        """
        context, texts = _context(offers), len(offers)
        price = self.seconds(texts, context)[: texts + 1]
        worth = np.sort(self._worth(_last(offers), context))[::-1]
        worth = worth * _right([offer.past.verified for offer in offers], offers)
        return [bool((np.cumsum(worth)[: len(price) - 1] > price[1:] - price[0]).any())] * texts

    def bought(self, offers: Sequence[Offer]) -> list[Bought]:
        """The nodes worth most of all drafts, as many as pay; a parent goes before its children."""
        texts, trees, last = len(offers), [offer.tree for offer in offers], _last(offers)
        if not any(map(len, trees)):
            none = np.empty(0, dtype=np.bool_)
            return [Bought(none, pays=False, last=bool(is_last)) for is_last in last]
        context = _context(offers)
        price = self.seconds(texts, context)
        worth = self._worth(last, context)
        worth = worth * _right([offer.past.expected for offer in offers], offers)
        each = [_survival(tree) * w for tree, w in zip(trees, worth, strict=True)]
        saved = np.concatenate(each)
        order = np.argsort(-saved, kind="stable")
        price = price[: len(order) + 1]
        if self._plain or any(tree.probs is not None for tree in trees):
            unpaid = saved[order] <= np.diff(price)
            count = int(unpaid.argmax()) if unpaid.any() else len(order)
        else:
            gained = price[0] + np.append(0.0, np.cumsum(saved[order]))
            count = int((gained / price).argmax())
        bought = np.zeros(len(order), dtype=np.bool_)
        bought[order[:count]] = True
        # A node's part of what the rows take is like any other's.
        net = (saved - (price[count] - price[0]) / max(count, 1)) * bought
        ends = np.cumsum([len(tree) for tree in trees])[:-1]
        return [
            Bought(
                kept if tree.probs is None else _behind(tree.parents, ~kept),
                bool(gain.sum() > 0),
                bool(is_last),
            )
            for tree, kept, gain, is_last in zip(
                trees, np.split(bought, ends), np.split(net, ends), last, strict=True
            )
        ]

    def _worth(self, last: BoolArray, context: int) -> FloatArray:
        """``[texts]`` seconds that a token of each saves."""
        texts = len(last)
        step_s = self.seconds(texts, context)[0]
        equal = own = step_s / texts
        if texts > 1:
            own = min(max(step_s - self.seconds(texts - 1, context)[0], 0.0), equal)
        return own + last * texts * (equal - own) / last.sum() ** 1.5

    def seconds(self, texts: int, context: int) -> FloatArray:
        """Of a pass over the roots of texts and 0, 1, .. nodes, as many as they may be.

        Raises:
            ConfigurationError: the surface has no such passes.
        """
        place = texts, context // _CONTEXTS
        if place not in self._known:
            rows = texts + np.arange(texts * self._most + 1.0)
            each, middle = np.full_like(rows, texts), np.full_like(rows, place[1] + 0.5)
            self._known[place] = self._surface.joint_pass_s(each, rows, middle * _CONTEXTS)
        return self._known[place]


def _right(of: Sequence[float], offers: Sequence[Offer]) -> float:
    """The share of so many that was accepted, at most 1."""
    accepted = sum(offer.past.accepted for offer in offers)
    return min((accepted + _DOUBT) / (sum(of) + _DOUBT), 1.0)


def _context(offers: Sequence[Offer]) -> int:
    return sum(offer.length for offer in offers) // len(offers)


def _last(offers: Sequence[Offer]) -> BoolArray:
    """``[texts]`` whether no other has more tokens ahead."""
    left = np.array([offer.remaining for offer in offers])
    last: BoolArray = left == left.max()
    return last


# -- trees -----------------------------------------------------------------------------------------


def _survival(tree: DraftTree) -> FloatArray:
    if not len(tree):
        return np.empty(0)
    assert tree.survival is not None
    return tree.survival


def _behind(parents: IntArray, ended: BoolArray) -> BoolArray:
    """``[n]`` the nodes that no ancestor ended the draft above."""
    kept = np.ones(len(parents) + 1, dtype=np.bool_)  # the root is the last one
    for node, parent in enumerate(parents.tolist()):
        kept[node] = kept[parent] and (parent < 0 or not ended[parent])
    return kept[:-1]


def _depths(parents: IntArray) -> IntArray:
    """``[n]`` from 1."""
    depths = np.zeros(len(parents) + 1, dtype=np.int64)  # the root is the last one
    for node, parent in enumerate(parents.tolist()):
        depths[node] = depths[parent] + 1
    return depths[:-1]
