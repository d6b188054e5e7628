"""Each verifier's law, with exact probabilities: it is the target's, and planted faults show.

Of a chain the accepted length must be the rule's closed form, and nothing that keeps the law
accepts more than ``block`` (arXiv 2403.10444).
"""

from unittest import mock

import numpy as np
import pytest
import torch

from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import Proposal
from specbench.decoding.verify import (
    BlockVerifier,
    MatchVerifier,
    RejectionVerifier,
    TraversalVerifier,
    TypicalVerifier,
    block,
    rejection,
    traversal,
)
from tests.conftest import quick_first
from tests.decoding.enumerated import EXACT, Chance, best_possible, examine, fixed_pair, random_pair

SOLVED = 1e-7  # how far off the optimum of a linear program may be
CHAIN = (-1, 0, 1, 2)
PAIRS = {
    "the paper's example": fixed_pair([1, 2], [2, 1], 2),
    "nothing in common": fixed_pair([1, 1, 0, 0], [0, 0, 1, 1], 2),
    "the same law": fixed_pair([1, 2, 1], [1, 2, 1], 2),
    "1 deep": random_pair(CHAIN[:1], 4, 1),
    "2 deep": random_pair(CHAIN[:2], 4, 2),
    "2 deep, peaked": random_pair(CHAIN[:2], 4, 3, spread=0.3),
    "3 deep": random_pair(CHAIN[:3], 3, 4),
    "3 deep, target cut to 2": random_pair(CHAIN[:3], 3, 5, cut=2),
    "3 deep, draft cut to 2": random_pair(CHAIN[:3], 3, 6, cut_draft=2),
    "4 deep": random_pair(CHAIN, 2, 7),
    "4 deep, peaked": random_pair(CHAIN, 2, 8, spread=0.3),
    "siblings with replacement": random_pair((-1, -1, 0, 1), 3, 9),
    "siblings without": random_pair((-1, -1, 0, 0), 3, 10, replacement=False),
    "two chains without": random_pair((-1, -1, 0, 1), 3, 11, replacement=False),
    "three siblings": random_pair((-1, -1, -1), 3, 12),
    "three siblings without": random_pair((-1, -1, -1), 4, 13, replacement=False),
    "five nodes with replacement": random_pair((-1, -1, 0, 0, 1), 2, 14),
    "five nodes without": random_pair((-1, -1, 0, 0, 1), 3, 15, replacement=False),
}
LARGE = [
    "siblings with replacement",
    "two chains without",
    "three siblings",
    "three siblings without",
    "five nodes without",
]
NAMES = quick_first(PAIRS, PAIRS.keys() - LARGE)
RULES = {MatchVerifier: None, RejectionVerifier: "token"}
RULES |= dict.fromkeys((BlockVerifier, TraversalVerifier), "block")


def is_chain(pair):
    return pair.parents == CHAIN[: len(pair.parents)]


def wrong(pair, verifier, **more):
    """Return which of ``law`` and ``length`` are violated."""
    law, accepted = examine(pair, lambda: verifier(Sampling(1.0)), **more)
    faults = {"law"} if abs(law - pair.law()).max() > EXACT else set()
    if is_chain(pair):
        most, rule = pair.accepted("block"), RULES[verifier]
        exact = rule is None or abs(accepted - pair.accepted(rule)) < EXACT
        faults |= set() if exact and accepted < most + EXACT else {"length"}
    elif verifier is TraversalVerifier and not faults:
        _, token_wise = examine(pair, lambda: RejectionVerifier(Sampling(1.0)))
        least = 1e-3 if len({*pair.parents}) > 1 else -EXACT  # on one level they are the same rule
        best = best_possible(pair) + SOLVED
        faults |= set() if token_wise + least < accepted < best else {"length"}
    return faults


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verifier", RULES)
def test_verifiers_keep_the_law_and_accept_what_their_rule_says(verifier, name):
    assert not wrong(PAIRS[name], verifier)


@pytest.mark.parametrize("name", [name for name in PAIRS if is_chain(PAIRS[name])])
def test_of_a_chain_nothing_lossless_accepts_more_than_block(name):
    best = best_possible(PAIRS[name])
    assert PAIRS[name].accepted("block") == pytest.approx(best, abs=SOLVED)


def test_block_accepts_more_than_token_wise_where_it_can():
    more = [p.accepted("block") - p.accepted("token") for p in PAIRS.values() if is_chain(p)]
    assert min(more) > -EXACT and sum(gain > 1e-3 for gain in more) >= 5
    # Section 2 of the paper: 11/9 against 10/9.
    example = PAIRS["the paper's example"]
    assert example.accepted("block") == pytest.approx(11 / 9)
    assert example.accepted("token") == pytest.approx(10 / 9)


@pytest.mark.parametrize("verifier", [RejectionVerifier, BlockVerifier, TraversalVerifier])
@pytest.mark.parametrize("name", ["1 deep", "3 deep"])
def test_a_bonus_proposal_is_one_more_token_of_the_chain(verifier, name):
    assert "law" not in wrong(PAIRS[name], verifier, bonus=True)


# -- wrong verifiers -------------------------------------------------------------------------------


def test_typical_acceptance_is_found_to_be_lossy():
    pair = PAIRS["2 deep"]
    law, _ = examine(pair, lambda: TypicalVerifier(Sampling(1.0), epsilon=0.09, delta=0.3))
    assert abs(law - pair.law()).max() > 0.01


def test_token_wise_acceptance_under_another_name_is_found():
    with mock.patch.object(BlockVerifier, "verify", RejectionVerifier.verify):
        assert wrong(PAIRS["3 deep"], BlockVerifier) == {"length"}
    with mock.patch.object(TraversalVerifier, "verify", RejectionVerifier.verify):
        assert wrong(PAIRS["siblings without"], TraversalVerifier) == {"length"}


def cut(q):
    q = q.where(q >= q.sort().values[:, -2:-1], 0.0)
    return q / q.sum(-1, keepdim=True)


def uncapped(p, q, tokens):
    with mock.patch.object(torch.Tensor, "clamp", lambda values, **_: values):
        return judged(p, q, tokens)


def mixed(p, q, tokens):
    """Test with weights of 1: each row by itself."""
    rows = [judged(p[i : i + 2], q[i : i + 2], tokens[i : i + 2])[0][-1:] for i in range(len(q))]
    return torch.cat(rows), judged(p, q, tokens)[1]


def flipped(p, children, tokens, proposal):
    return ratios(p, children, tokens, Proposal(proposal.q, proposal.row, not proposal.replacement))


def as_eldest(p, children, tokens, proposal):
    """Each sibling judged as if none had been rejected before."""
    odds, rest = ratios(p, children, tokens, proposal)
    for rank in range(children.shape[1]):
        odds[:, rank] = ratios(p, children[:, rank : rank + 1], tokens, proposal)[0][:, 0]
    return odds, rest


judged, ratios, numbers = block.block_tests, rejection.ratio_tests, Chance.numbers
BLOCK = {
    "weight not capped": uncapped,
    "odds of each row by itself": mixed,
    "all accepted": lambda *a: (torch.ones(len(a[2])), judged(*a)[1]),
    "odds of the row before": lambda *a: (judged(*a)[0].roll(1), judged(*a)[1]),
    "draft's row of another place": lambda p, q, t: judged(p, q.roll(1, 0), t),
    "draft's row cut to its top tokens": lambda p, q, t: judged(p, cut(q), t),
    "residual without the weight": lambda p, q, t: (judged(p, q, t)[0], (p[:-1] - q).clamp(min=0)),
    "token after it from the target": lambda p, q, t: (judged(p, q, t)[0], p[:-1]),
}
REJECTION = [
    (flipped, "siblings without"),  # the other way round it is right: only doubles are passed over
    (as_eldest, "siblings without"),
    pytest.param(as_eldest, "siblings with replacement", marks=pytest.mark.slow),
    (lambda *a: (ratios(*a)[0], a[0]), "siblings without"),  # the token after it from the target
]


def unscaled(row, token, replacement):
    left = np.maximum(row.p - row.q, 0)
    reject(row, token, replacement)
    row.p = left / left.sum() if left.any() else row.p


def keeping(attribute):
    def rejected(row, token, replacement):
        value = getattr(row, attribute)
        reject(row, token, replacement)
        setattr(row, attribute, value)

    return rejected


reject, siblings = traversal._Row.reject, traversal.sibling_table
TRAVERSAL = {
    "youngest first": ("sibling_table", lambda *a: siblings(*a)[:, ::-1]),
    "left not scaled": ("_Row.reject", unscaled),
    "weight not lowered": ("_Row.reject", keeping("weight")),
    "rejected child's mass kept": ("_Row.reject", keeping("p")),
    "drawn token kept": ("_Row.reject", lambda row, token, _: reject(row, token, True)),
}


def counted(passed, *_, **__):
    """How many passed before the first failure, where the last success counts."""
    return (passed > 0).long().cumprod(-1).sum(-1, keepdim=True)


def one_fewer(passed, *_, **__):
    return (passed.max(-1, keepdim=True).values - 1).clamp(min=0)


def not_normalised(probs, uniforms):
    """A token by the sum of masses that do not add up to 1."""
    mass = probs.cumsum(-1)
    return (
        torch.searchsorted(mass, uniforms.unsqueeze(-1)).squeeze(-1).clamp(max=mass.shape[-1] - 1)
    )


@pytest.mark.parametrize("fault", BLOCK)
def test_a_fault_planted_into_blocks_odds_is_found(fault):
    with mock.patch.object(block, "block_tests", BLOCK[fault]):
        assert "law" in wrong(PAIRS["3 deep"], BlockVerifier)


@pytest.mark.parametrize(("fault", "name"), REJECTION)
def test_a_fault_planted_into_the_ratio_test_is_found(fault, name):
    with mock.patch.object(rejection, "ratio_tests", fault):
        assert "law" in wrong(PAIRS[name], RejectionVerifier)


@pytest.mark.parametrize("fault", TRAVERSAL)
def test_a_fault_planted_into_the_traversal_is_found(fault):
    name, wrong_way = TRAVERSAL[fault]
    with mock.patch(f"specbench.decoding.verify.traversal.{name}", wrong_way):
        assert "law" in wrong(PAIRS["siblings without"], TraversalVerifier)


@pytest.mark.parametrize("amax", [counted, one_fewer])
def test_a_wrong_count_of_accepted_tokens_is_found(amax):
    with mock.patch.object(torch.Tensor, "amax", amax):
        assert "law" in wrong(PAIRS["3 deep"], BlockVerifier)


@pytest.mark.parametrize("verifier", RULES)
def test_one_number_in_the_place_of_all_is_found(verifier):
    def shared(chance, start, stop):
        return numbers(chance, 0, 1).repeat(stop - start)

    with mock.patch.object(Chance, "numbers", shared):
        assert "law" in wrong(PAIRS["3 deep"], verifier)


def test_masses_that_are_not_normalised_are_found():
    with mock.patch.object(block, "sample", not_normalised):
        assert "law" in wrong(PAIRS["3 deep"], BlockVerifier)
