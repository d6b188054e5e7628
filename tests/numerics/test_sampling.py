"""Sampled output follows the target's law, whoever drafts: chi-square on 1, 2, 3 and 4 tokens.

The smallest p of the four laws is compared with ``P_LEAST``. Seeds are fixed, so a test passes or
fails for good; of all seeds that could have been fixed, at most 4 in 10^4 would fail a right
verifier. Wrong verifiers must fail by the same threshold (``test_wrong_verifiers_are_found``).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specbench.clock import NullClock
from specbench.drafter import Drafter
from specbench.engine import Engine
from specbench.errors import CaseFailed
from specbench.records import LOSSY_VERIFIERS
from specbench.sampling import Sampling, Uniforms, sample
from specbench.scores import Scores
from specbench.structs import DraftTree, Proposal, Verdict
from specbench.tree import row_depths, sibling_table
from specbench.verify import (
    GreedyVerifier,
    MatchVerifier,
    RejectionVerifier,
    TypicalVerifier,
)
from specbench.verify.rejection import ratio_tests

VOCAB = 6
P_LEAST = 1e-4
PROMPT = np.array([3, 1], dtype=np.int64)
LAWS = {
    "cold": Sampling(0.3),
    "warm": Sampling(1.0),
    "hot": Sampling(1.5),
    "top_p": Sampling(1.0, top_p=0.8),
    "top_k": Sampling(1.5, top_k=3),
    "both": Sampling(1.0, top_p=0.7, top_k=4),
}


def table(seed: int, spread: float = 1.5) -> torch.Tensor:
    """Logits by the last two tokens."""
    numbers = np.random.default_rng(seed).normal(0, spread, (VOCAB, VOCAB, VOCAB))
    return torch.from_numpy(numbers).float()


class TableTarget:
    """A target whose logits depend on the last two tokens."""

    device = "cpu"

    def __init__(self, logits: torch.Tensor) -> None:
        self.table = logits

    def prefill(self, prompt, *, all_logits=False):
        self.text = prompt.tolist()
        return Scores(self.table[self.text[-2], self.text[-1]][None])

    def forward(self, root, tree, *, hidden_layers=()):
        self.root = int(root)
        pairs = [(self.text[-1], self.root)]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            pairs.append((pairs[parent + 1][1], token))
        before, last = zip(*pairs, strict=True)
        return Scores(self.table[list(before), list(last)])

    def keep(self, tree, path):
        self.text += [self.root, *(int(tree.tokens[i]) for i in path)]

    def room(self):
        return 1000


class TreeDrafts(Drafter):
    """A tree of fixed shape, its tokens drawn from a draft table or (``top``) the likeliest."""

    def __init__(self, parents, kind, logits, law):
        super().__init__(name="tree_drafts")
        self.parents, self.kind = np.array(parents, dtype=np.int64), kind
        self.q = law.probs(logits)
        self.host_q = self.q.double().numpy()

    def begin(self, state):
        self.random = np.random.default_rng(state.seed)

    def propose(self, state):
        pairs = [(int(state.tokens[-2]), state.root)]
        elders = {}
        for parent in self.parents.tolist():
            taken = elders.setdefault(parent, [])
            q = self.host_q[pairs[parent + 1]]
            if self.kind == "top":  # a function of the context: the next likeliest token
                token = int(np.argsort(-q, kind="stable")[len(taken)])
            else:
                if self.kind == "without":
                    q = q.copy()
                    q[taken] = 0
                mass = q.cumsum()
                # where nothing is left to draw, any token: the verifier must pass it over
                token = int(np.searchsorted(mass, mass[-1] * (1 - self.random.random())))
            taken.append(token)
            pairs.append((pairs[parent + 1][1], token))
        tokens = np.array([token for _, token in pairs[1:]], dtype=np.int64)
        if self.kind == "top":
            return DraftTree(tokens, self.parents)
        before, last = np.array(pairs).T[:, self.parents + 1]
        rows = self.q[before, last]
        proposal = Proposal(rows, np.arange(len(tokens)), self.kind == "replacement")
        return DraftTree(tokens, self.parents, probs=proposal)


def counts_of(verifier, drafter, target_table, n, n_tokens=4):
    """``[VOCAB] * 3`` how often each triple follows the first token, and how often the first."""
    engine = Engine(TableTarget(target_table), verifier, eos_ids=frozenset(), clock=NullClock)
    counts = np.zeros((VOCAB,) * n_tokens)
    accepted = 0
    for seed in range(n):
        result = engine.decode(PROMPT, drafter, max_new_tokens=n_tokens, seed=seed)
        counts[tuple(result.output_ids)] += 1
        accepted += n_tokens - 1 - len(result.accepted_per_step)
    return counts, accepted / n


def law_of(target_table, law, n_tokens=4):
    """``[VOCAB] * n_tokens`` the exact probability of every output."""
    p = law.probs(target_table.double()).numpy()
    joint = np.zeros((VOCAB,) * n_tokens)
    for ids in itertools.product(range(VOCAB), repeat=n_tokens):
        text = [*PROMPT.tolist(), *ids]
        joint[ids] = np.prod([p[text[i], text[i + 1], text[i + 2]] for i in range(n_tokens)])
    return joint


def p_value(counts, joint):
    """Chi-square; cells expected fewer than five times are put together; none where impossible."""
    expected = joint.reshape(-1) * counts.sum()
    seen = counts.reshape(-1)
    if seen[expected == 0].any():
        return 0.0
    few = expected < 5
    expected = np.append(expected[~few], expected[few].sum())
    seen = np.append(seen[~few], seen[few].sum())
    possible = expected > 1e-9
    statistic = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    return float(stats.chi2.sf(statistic, max(possible.sum() - 1, 1)))


def worst_p(counts, joint):
    """The smallest p over the laws of the first 1, 2, 3 and 4 tokens."""
    worst = 1.0
    for n in range(1, counts.ndim + 1):
        rest = tuple(range(n, counts.ndim))
        worst = min(worst, p_value(counts.sum(rest), joint.sum(rest)))
    return worst


CHAIN, PAIRS, BUSH = (-1, 0, 1), (-1, -1, 0, 0, 1, 2), (-1, -1, -1, 0, 0, 1, 2, 2, 3)
# name: (parents, how children are chosen, the draft's logits, its law where not the target's)
DRAFTS = {
    "chain": (CHAIN, "replacement", table(1), None),
    "with": (BUSH, "replacement", table(1), None),
    "without": (BUSH, "without", table(1), None),
    "top": (BUSH, "top", table(1), None),
    # draws repeat, and without replacement soon run out of tokens
    "duplicates": (PAIRS, "replacement", table(2), Sampling(0.2)),
    "exhausted": (BUSH, "without", table(2), Sampling(1.0, top_k=2)),
    "equal": (PAIRS, "replacement", table(0), None),
    "equal_without": (PAIRS, "without", table(0), None),
    "disjoint": (PAIRS, "replacement", -20 * table(0), Sampling(1.0, top_k=1)),
}
VERIFIERS = {"match": MatchVerifier, "rejection": RejectionVerifier}


def check_law(verifier, draft, law, n):
    parents, kind, logits, draft_law = DRAFTS[draft]
    drafter = TreeDrafts(parents, kind, logits, draft_law or law)
    counts, accepted = counts_of(VERIFIERS[verifier](law), drafter, table(0), n)
    assert worst_p(counts, law_of(table(0), law)) > P_LEAST
    return accepted


@pytest.mark.parametrize(
    ("verifier", "draft", "law"),
    [("match", "top", "top_p"), ("rejection", "chain", "hot"), ("rejection", "without", "both")],
)
def test_outputs_follow_the_targets_law(verifier, draft, law):
    check_law(verifier, draft, LAWS[law], 500)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_outputs_follow_the_targets_law_everywhere(verifier, draft, law):
    check_law(verifier, draft, LAWS[law], 2000)


# -- one node, exactly -----------------------------------------------------------------------------


def draws_without(q, width):
    """Every ordered choice of children without replacement, and its probability."""
    for ids in itertools.permutations(range(len(q)), width):
        chance, left = 1.0, q.copy()
        for x in ids:
            chance *= left[x] / left.sum() if left.sum() > 0 else 0.0
            left[x] = 0
        if chance > 0:
            yield ids, chance


def draws_with(q, width):
    for ids in itertools.product(range(len(q)), repeat=width):
        if np.prod(q[list(ids)]) > 0:
            yield ids, np.prod(q[list(ids)])


laws = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(sum)


@settings(max_examples=60, deadline=None)
@given(p=laws, q=laws, width=st.integers(1, 3), replacement=st.booleans())
def test_accepted_child_or_residual_token_has_the_targets_law(p, q, width, replacement):
    """The sum over all draws and all outcomes of the tests, not a sample."""
    p, q = (np.array(x, dtype=np.float64) / sum(x) for x in (p, q))
    total = np.zeros(4)
    for ids, chance in (draws_with if replacement else draws_without)(q, width):
        proposal = Proposal(torch.from_numpy(q)[None], np.zeros(width, dtype=np.int64), replacement)
        odds, rest = ratio_tests(
            torch.from_numpy(p)[None], np.arange(width)[None], torch.tensor(ids), proposal
        )
        reached = chance
        for x, odd in zip(ids, odds[0].clamp(max=1.0).tolist(), strict=True):
            total[x] += reached * odd
            reached *= 1 - odd
        total += reached * rest[0].numpy()
    if total.sum() > 0:  # else more children than the draft's law can give
        np.testing.assert_allclose(total, p, atol=1e-9)


def test_a_child_that_cannot_have_been_drawn_changes_nothing():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.0, 0.5, 0.5]])
    for replacement in (True, False):
        odds, rest = ratio_tests(
            p, np.array([[0]]), torch.tensor([0]), Proposal(q, np.zeros(1, np.int64), replacement)
        )
        assert odds.item() == 0.0
        assert rest.tolist() == p.tolist()


def test_equal_laws_accept_always_and_leave_the_law():
    p = torch.tensor([[0.1, 0.2, 0.7]])
    odds, rest = ratio_tests(
        p, np.array([[0]]), torch.tensor([1]), Proposal(p, np.zeros(1, dtype=np.int64))
    )
    assert odds.item() == 1.0 and rest.tolist() == p.tolist()


# -- wrong verifiers -------------------------------------------------------------------------------


class NoResidual(RejectionVerifier):
    """Draws the token after a rejection from the target's law, accepted tokens included."""

    def verify(self, tree, scores):
        verdict, choices = super().verify(tree, scores)
        row = int(verdict.path[-1]) + 1 if len(verdict.path) else 0
        again = self._draw(scores.logits[row : row + 1], self._uniforms.take(1))
        verdict.tokens[-1] = int(again[0])
        return verdict, choices


class SiblingsAgain(RejectionVerifier):
    """Treats draws without replacement as draws with it."""

    def verify(self, tree, scores):
        return super().verify(replace(tree, probs=replace(tree.probs, replacement=True)), scores)


class KnownNumbers(RejectionVerifier):
    """Tests with the very numbers that the drafter draws with."""

    def begin(self, seed):
        super().begin(seed)
        self.seed = seed

    def first(self, scores):
        token = super().first(scores)
        self._uniforms._random = np.random.default_rng(self.seed)
        return token


class AlwaysOnce(MatchVerifier):
    """Accepts as if the draft's law were the target's."""

    def verify(self, tree, scores):
        verdict, choices = super().verify(tree, scores)
        if not len(verdict.path):
            verdict = Verdict(np.array([0]), np.append(tree.tokens[0], verdict.tokens))
        return verdict, choices


def typical(law):
    return TypicalVerifier(law, epsilon=0.09, delta=0.3)


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [
        (NoResidual, "chain"),
        pytest.param(SiblingsAgain, "without", marks=pytest.mark.slow),
        pytest.param(KnownNumbers, "chain", marks=pytest.mark.slow),
        pytest.param(AlwaysOnce, "chain", marks=pytest.mark.slow),
        pytest.param(typical, "top", marks=pytest.mark.slow),
        pytest.param(lambda law: MatchVerifier(Sampling(1.2)), "top", marks=pytest.mark.slow),
    ],
)
def test_wrong_verifiers_are_found(wrong, draft, request):
    law = LAWS["warm"]
    parents, kind, logits, _ = DRAFTS[draft]
    n = 3000 if request.node.get_closest_marker("slow") else 500
    counts, _ = counts_of(wrong(law), TreeDrafts(parents, kind, logits, law), table(0), n)
    assert worst_p(counts, law_of(table(0), law)) < P_LEAST


# -- what verifiers promise besides ----------------------------------------------------------------


@pytest.mark.parametrize("draft", ["top", "with"])
def test_match_repeats_plain_sampling_token_for_token(draft):
    law = LAWS["hot"]
    parents, kind, logits, _ = DRAFTS[draft]
    engine = Engine(TableTarget(table(0)), MatchVerifier(law), eos_ids=frozenset(), clock=NullClock)
    steps = 0
    for seed in range(12):
        plain = engine.decode(PROMPT, Drafter(name="ar"), max_new_tokens=20, seed=seed)
        drafted = engine.decode(
            PROMPT, TreeDrafts(parents, kind, logits, law), max_new_tokens=20, seed=seed
        )
        assert drafted.output_ids == plain.output_ids
        steps += drafted.n_target_passes
    assert steps < 12 * 19  # something was accepted


@pytest.mark.parametrize("verifier", [MatchVerifier, RejectionVerifier])
@pytest.mark.parametrize("draft", ["chain", "with", "without", "top"])
def test_all_rows_at_once_decide_as_row_by_row(verifier, draft, monkeypatch):
    """The way of a GPU, on the CPU: the same tokens in the same steps."""
    law = LAWS["warm"]
    parents, kind, logits, _ = DRAFTS[draft]
    engine = Engine(TableTarget(table(0)), verifier(law), eos_ids=frozenset(), clock=NullClock)
    runs = []
    for lazy in (True, False):
        for module in ("match", "rejection"):
            monkeypatch.setattr(f"specbench.verify.{module}.row_by_row", lambda _, lazy=lazy: lazy)
        for seed in range(6):
            drafter = TreeDrafts(parents, kind, logits, law)
            result = engine.decode(PROMPT, drafter, max_new_tokens=20, seed=seed)
            runs.append((result.output_ids, result.accepted_per_step))
    assert runs[:6] == runs[6:]


@pytest.mark.parametrize("draft", ["with", "without", "top"])
def test_rejection_at_temperature_0_is_greedy(draft):
    parents, kind, logits, _ = DRAFTS[draft]
    drafter = TreeDrafts(parents, kind, logits, LAWS["warm"])
    outputs = []
    for verifier in (GreedyVerifier(), RejectionVerifier(Sampling(0.0))):
        engine = Engine(TableTarget(table(0)), verifier, eos_ids=frozenset(), clock=NullClock)
        outputs.append(engine.decode(PROMPT, drafter, max_new_tokens=30).output_ids)
    assert outputs[0] == outputs[1]


def test_typical_acceptance_by_hand():
    """p = .6 .3 .1: entropy .898, so the limit is min(.09, .3 * .407) = .09; .1 passes, .05 not."""
    law = Sampling(1.0)
    rows = torch.tensor([[0.6, 0.3, 0.1], [0.65, 0.3, 0.05], [1.0, 1e-9, 1e-9], [0.4, 0.3, 0.3]])
    tree = DraftTree(np.array([2, 2, 0]), np.array([-1, 0, 1]))
    verifier = TypicalVerifier(law, epsilon=0.09, delta=0.3)
    verifier.begin(0)
    verdict, choices = verifier.verify(tree, Scores(rows.log()))
    assert verdict.path.tolist() == [0]
    assert verdict.tokens[0] == 2 and verdict.tokens[1] in (0, 1)
    assert choices.tolist() == [0, 0, 0, 0]


def test_lossy_verifiers_are_known_to_the_records():
    classes = (GreedyVerifier, MatchVerifier, RejectionVerifier, TypicalVerifier)
    assert {cls.name for cls in classes if not cls.lossless} == set(LOSSY_VERIFIERS)


@pytest.mark.parametrize("verifier", [MatchVerifier, RejectionVerifier, typical])
def test_logits_that_are_not_finite_fail_the_case(verifier):
    broken = table(0)
    broken[:, 4] = torch.nan
    engine = Engine(
        TableTarget(broken), verifier(LAWS["warm"]), eos_ids=frozenset(), clock=NullClock
    )
    drafter = TreeDrafts(CHAIN, "replacement", table(1), LAWS["warm"])
    with pytest.raises(CaseFailed, match="not finite"):
        engine.decode(PROMPT, drafter, max_new_tokens=200)


@pytest.mark.parametrize("verifier", [MatchVerifier, RejectionVerifier, typical])
def test_device_tokens_outside_the_vocabulary_fail_the_case(verifier):
    made = verifier(LAWS["warm"])
    made.begin(0)
    proposal = Proposal(torch.full((1, VOCAB), 1 / VOCAB), np.zeros(1, dtype=np.int64))
    tree = DraftTree(torch.tensor([VOCAB]), np.array([-1]), probs=proposal)
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        made.verify(tree, Scores(table(0)[0, :2]))


# -- probabilities and draws -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=2, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 1.5]),
    top_p=st.sampled_from([0.2, 0.7, 1.0]),
    top_k=st.integers(0, 10),
)
def test_probabilities_equal_the_plain_rule(logits, temperature, top_p, top_k):
    law = Sampling(temperature, top_p, top_k)
    weights = np.exp(np.array(logits) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(logits):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    total, mass, kept = sum(weights[order]), 0.0, []
    for i in order:
        if mass < top_p - 1e-12:
            kept.append(i)
        mass += weights[i] / total
    expected = np.zeros(len(logits))
    expected[kept] = weights[kept] / weights[kept].sum()
    found = law.probs(torch.tensor(logits, dtype=torch.float64))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_half_precision_is_raised_and_no_temperature_overflows():
    logits = torch.tensor([40.0, 39.0, -torch.inf], dtype=torch.bfloat16)
    found = Sampling(1e-38).probs(logits)
    assert found.dtype == torch.float32 and found.tolist() == [1.0, 0.0, 0.0]
    assert Sampling(0.0).probs(torch.tensor([1.0, 3.0, 3.0])).tolist() == [0.0, 1.0, 0.0]


def test_draws_at_the_borders():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(5, -1)
    uniforms = torch.tensor([1e-300, 0.25, 0.25 + 1e-12, 0.9, 1.0], dtype=torch.float64)
    assert sample(probs, uniforms).tolist() == [1, 1, 3, 3, 3]


def test_a_turns_numbers_come_in_order_and_are_not_the_seeds_own():
    numbers = Uniforms()
    numbers.begin(7)
    ahead = numbers.peek(5).copy()
    parts = [*numbers.take(2), *numbers.peek(1), *numbers.take(3)]
    assert parts == [*ahead[:2], ahead[2], *ahead[2:]]
    assert ((ahead > 0) & (ahead <= 1)).all()
    own = np.random.default_rng(7).random(5)
    assert not np.isclose(ahead, own).any() and not np.isclose(1 - ahead, own).any()


def test_geometry_by_hand():
    parents = np.array([-1, -1, 0, 0, 1, 4])
    aux = np.array([False, False, False, True, False, False])
    assert row_depths(parents).tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert sibling_table(parents, aux).tolist() == [
        [0, 1], [2, -1], [4, -1], [-1, -1], [-1, -1], [5, -1], [-1, -1],
    ]  # fmt: skip
