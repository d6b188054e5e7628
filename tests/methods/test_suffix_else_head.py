from dataclasses import dataclass

import numpy as np
import pytest

from methods.pld import PromptLookup
from methods.suffix_decoding import SuffixDecoding
from methods.suffix_else_head import SuffixElseHead
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftContext, DraftTree, Needs
from specbench.errors import ConfigurationError
from tests.methods import toy_turns


@dataclass(kw_only=True, eq=False)
class Fixed(Drafter):
    """In a head's place: always the same draft."""

    name: str = "fixed"

    @property
    def needs(self):
        return Needs(max_nodes=40)

    def propose(self, state):
        return DraftTree.chain(np.array([3, 4]))


@pytest.mark.parametrize("min_score", [0.0, 1.0, 2.5, 99.0])
def test_the_score_says_who_drafts(min_score):
    suffix, alone = SuffixDecoding(), SuffixDecoding()
    both = SuffixElseHead(drafters=[suffix, Fixed()], min_score=min_score)
    for drafter in (both, alone):
        drafter.setup(DraftContext(6, frozenset()))
        drafter.reset()
    taken = set()
    for seed in range(4):
        rule, prompt = toy_turns.markov_rule(seed), [1, 2, 3, 1, 2]
        answer, steps = toy_turns.play(both, prompt, 40, rule)
        assert answer == toy_turns.continued(rule, prompt, 40)
        # The method alone on the same steps, whichever part drafted them.
        following = iter(steps)

        def other(state, following=following):
            suffix_draft = SuffixDecoding.propose(alone, state)
            _, tree = next(following)
            enough = len(suffix_draft) > 0 and alone.score >= min_score
            expected = suffix_draft if enough else Fixed().propose(state)
            assert toy_turns.pairs(tree) == toy_turns.pairs(expected)
            assert set(tree.sources.tolist()) == {0 if enough else 1}
            taken.add(enough)
            return tree

        alone.propose = other
        toy_turns.play(alone, prompt, 40, rule)
    assert taken == ({False} if min_score == 99.0 else {True, False})


def test_parts_that_cannot_stand_here_are_refused():
    with pytest.raises(ConfigurationError, match=r"scores its drafts, and pld does not"):
        SuffixElseHead(drafters=[PromptLookup(), Fixed()])
    with pytest.raises(ConfigurationError, match="two methods"):
        SuffixElseHead(drafters=[SuffixDecoding()])
