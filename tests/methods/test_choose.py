"""Choose against plain forms of NormalHedge, UCB1 and its own scores."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import brentq

from methods.choose import Choose, hedge_weights
from methods.eagle import Eagle2
from methods.hydra_heads import Hydra
from methods.medusa import Medusa
from methods.sps import Sps
from methods.suffix_decoding import SuffixDecoding
from methods.suffix_else_head import SuffixElseHead
from specbench.decoding.drafter import Drafter
from specbench.decoding.protocols import run_to_completion
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.errors import ConfigurationError
from specbench.models.heads.drafter import HeadDrafter
from tests.methods import toy_turns
from tests.models.heads import tiny_heads

PROMPT, LENGTH = [1, 2, 3, 1, 2], 60


@dataclass(kw_only=True, eq=False)
class Knowing(Drafter):
    """Drafts ``rights[position]`` tokens of the text, then a wrong one; nothing for -1."""

    name: str = "knowing"
    rights: np.ndarray
    text: np.ndarray

    def propose(self, state):
        right = self.rights[state.length]
        tokens = self.text[state.length : state.length + right + 1].copy()
        tokens[right:] = (tokens[right:] + 1) % 6
        return DraftTree.chain(tokens)

    def observe(self, state, outcome):
        if len(outcome.tree):
            assert len(outcome.path) == min(self.rights[state.length - state.last_committed], 99)


@dataclass(kw_only=True, eq=False)
class KnowingHead(HeadDrafter):
    """Guesses the tokens right at whose position ``rights`` is positive."""

    name: str = "head"
    head: str = "of this test"
    rights: np.ndarray
    text: np.ndarray
    max_levels = 2
    needs = Needs()

    def setup(self, context):
        pass

    def begin(self, state):
        self._done = state.length - 1

    def guesses(self, start, end):
        return (self.text[start:end] + (self.rights[start:end] < 1)) % 6

    def first_guesses(self, state):
        yield from ()
        start, self._done = self._done + 1, state.length
        return self.guesses(start, state.length + 1)

    def drafting(self, state):
        yield from ()
        return DraftTree.chain(self.guesses(state.length, state.length + 2))

    def observe(self, state, outcome):
        assert len(outcome.tree) in (0, 2)


def parts_of(seed):
    """Return a rule, three parts, and the tokens that each would have right at a position."""
    rule, draw = toy_turns.markov_rule(seed), np.random.default_rng(seed)
    text = np.array(PROMPT + toy_turns.continued(rule, PROMPT, LENGTH + 20))
    rights = [draw.integers(-1, most, len(text)) for most in (3, 4, 9)]
    kinds = (Knowing, KnowingHead, Knowing)
    parts = [kind(rights=r, text=text) for kind, r in zip(kinds, rights, strict=True)]
    rights[1] = (rights[1] > 0) * (1 + (np.roll(rights[1], -1) > 0))
    return rule, rights, parts


def plain_weights(regrets):
    positive = [max(r, 0.0) for r in regrets]
    if not any(positive):
        return [1 / len(regrets)] * len(regrets)

    def excess(c):
        return sum(math.exp(r * r / (2 * c)) for r in positive) / len(positive) - math.e

    top = max(positive) ** 2
    c = brentq(excess, top / (2.2 * (1 + math.log(len(regrets)))), top / 1.9, xtol=1e-14)
    raw = [r / c * math.exp(r * r / (2 * c)) for r in positive]
    return [w / sum(raw) for w in raw]


def test_weights_are_normal_hedge_s():
    draw = np.random.default_rng(0)
    for n in [1, 2, 4, 7] * 50:
        regrets = draw.normal(size=n) * 10 ** draw.uniform(-2, 3)
        assert hedge_weights(regrets) == pytest.approx(plain_weights(regrets), abs=1e-9)


@pytest.mark.parametrize("loss", ["length", "token"])
def test_hedge_takes_the_parts_of_a_plain_form(loss):
    n_played = Counter()
    for seed in range(5):
        rule, rights, parts = parts_of(seed)
        chooser = Choose(drafters=parts, loss=loss, draw=False)
        chooser.setup(DraftContext(6, frozenset()))
        _, steps = toy_turns.play(chooser, PROMPT, LENGTH, rule)
        length, past = len(PROMPT) + 1, []
        for (committed, _), played in zip(steps, chooser._played, strict=True):
            regrets = np.zeros(3)
            for root, taken in past:  # from scratch: what the text so far says of each step
                n_read = length - root
                scores = [min(max(r[root], 0), n_read, n_read if loss == "length" else 1)
                          for r in rights]  # fmt: skip
                regrets += np.array(scores) - scores[taken]
            assert played == int(np.argmax(plain_weights(regrets)))
            past.append((length, played))
            n_played[played] += 1
            length += len(committed)
    assert len(n_played) == 3


def test_draws_are_the_turn_s_regrets_last_a_turn_and_rewards_until_reset():
    rule, _, parts = parts_of(0)
    chooser, played = Choose(drafters=parts, draw=False), []
    chooser.setup(DraftContext(6, frozenset()))
    for _ in range(2):
        toy_turns.play(chooser, PROMPT, LENGTH, rule)
        played.append(chooser._played)
    assert played[0] == played[1] and chooser._plays.any()
    chooser.reset()
    assert not chooser._plays.any()
    chooser, first = Choose(drafters=parts), []
    for seed in range(20):  # all weights are alike
        chooser.begin(DecodeState(np.array(PROMPT), LENGTH, seed=seed))
        first.append(chooser._choose())
    assert {*first} == {0, 1, 2}


def test_ucb_takes_the_parts_of_the_formula_and_thompson_learns():
    for seed in range(5):
        rule, _, parts = parts_of(seed)
        chooser = Choose(drafters=parts, policy="ucb")
        chooser.setup(DraftContext(6, frozenset()))
        _, steps = toy_turns.play(chooser, PROMPT, LENGTH, rule)
        rewards = [[], [], []]
        for n, ((committed, tree), played) in enumerate(zip(steps, chooser._played, strict=True)):
            bounds = [np.mean(r) + math.sqrt(2 * math.log(n) / len(r)) if r else math.inf
                      for r in rewards]  # fmt: skip
            assert played == bounds.index(max(bounds))
            accepted = min(len(committed), len(tree) + 1) - 1
            both = accepted / 8, accepted / max(len(tree), 1)
            rewards[played].append(sum(both) / 2)
        taken = []
        chooser = Choose(drafters=parts, policy="thompson", longest=4)
        chooser.setup(DraftContext(6, frozenset()))
        for _ in range(5):
            toy_turns.play(chooser, PROMPT, LENGTH, rule)
            taken += chooser._played
        assert taken.count(2) > taken.count(0)


@pytest.mark.parametrize(
    "make",
    [lambda: Eagle2(total=3, depth=1, top_k=1), lambda: Medusa(levels=[1, 1]),
     lambda: Hydra(levels=[1, 1])],
)  # fmt: skip
def test_a_head_s_guesses_are_the_first_tokens_of_its_drafts(make, tmp_path):
    heads, text = tiny_heads.save_each(tmp_path), np.random.default_rng(3).integers(0, 30, 20)
    guessing, drafting = make(), make()
    state = DecodeState(text[:4], 20)
    state.commit(text[4:5])
    states = tiny_heads.states_of(text, guessing.layers)
    for head in (guessing, drafting):
        head.setup(DraftContext(30, frozenset(), target=tiny_heads.Ghost(), heads=heads))
        head.observe_prompt_hidden(text[:4], {i: rows[:4] for i, rows in states.items()})
        head.begin(state)
    guesses, first_tokens = [], [int(drafting.propose(state).tokens[0])]
    for n_committed in (0, 1, 3, 2, 1, 4):
        for _ in range(n_committed):
            read = {i: rows[state.length - 1 : state.length] for i, rows in states.items()}
            state.commit(text[state.length : state.length + 1])
            outcome = StepOutcome(DraftTree.empty(), NO_TOKENS, NO_TOKENS, None, hidden=read)
            guessing.observe(state, outcome)
            drafting.observe(state, outcome)
            first_tokens.append(int(drafting.propose(state).tokens[0]))
        guesses += run_to_completion(guessing.first_guesses(state)).tolist()
    assert guesses == first_tokens and len(set(guesses)) > 3


def test_parts_that_cannot_be_scored_are_refused():
    with pytest.raises(ConfigurationError, match=r"cannot hold sps: .* method.policy=ucb"):
        Choose(drafters=[Sps()])
    Choose(drafters=[Sps()], policy="ucb")
    with pytest.raises(ConfigurationError, match="cannot hold suffix_else_head"):
        Choose(drafters=[SuffixElseHead(drafters=[SuffixDecoding(), Eagle2()])])
    with pytest.raises(ConfigurationError, match="arm"):
        Choose(arm=3)
