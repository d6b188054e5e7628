"""Sampled output follows the target's distribution, whoever drafts.

Each verifier's law is checked exactly in ``test_enumerated_law.py``; here it is called by the
engine, turn by turn. Drawn drafts are compared by chi-square (``distributions.py`` says by which
statistics), all others token for token with plain sampling of the same seed, which is compared by
chi-square. Methods: ``test_sampling_methods.py``.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling, Uniforms, sample
from specbench.decoding.structs import DraftTree, Proposal
from specbench.decoding.tree import sibling_table
from specbench.decoding.verify import (
    BlockVerifier,
    GreedyVerifier,
    MatchVerifier,
    RejectionVerifier,
    TraversalVerifier,
    TypicalVerifier,
)
from specbench.decoding.verify.rejection import ratio_tests
from specbench.decoding.verify.traversal import traverse
from specbench.errors import CaseFailed
from specbench.models.scores import Scores
from tests.conftest import CARRIERS, engine, quick_first
from tests.conftest import VOCAB as TINY_VOCAB
from tests.decoding import distributions as exact
from tests.decoding.distributions import (
    DRAFTS,
    P_LEAST,
    PROMPT,
    SAMPLINGS,
    TRIALS,
    VOCAB,
    TreeDrafts,
    distribution_of,
    table,
    worst_p,
)
from tests.decoding.table_models import TableTarget
from tests.decoding.test_engine import Adversary

# verifier: (drafts compared by chi-square, drafts compared token for token)
# Drafts that are compared token for token: with ``match`` all, else those that are not drawn.
LOSSLESS = {
    verifier.name: verifier
    for verifier in (MatchVerifier, RejectionVerifier, BlockVerifier, TraversalVerifier)
}
PATHWISE = [("match", draft) for draft in DRAFTS]
PATHWISE += [(verifier, "top") for verifier in LOSSLESS if verifier != "match"]
# -- distributions --------------------------------------------------------------------------------


def check_engine(draft, sampling, n, verifier=RejectionVerifier):
    """Decode turn by turn, as runs do; test all tokens of longer turns."""
    subject = verifier(SAMPLINGS[sampling])
    outputs, _ = exact.turns(subject, TreeDrafts.named(draft, SAMPLINGS[sampling]), n, 16)
    assert worst_p(outputs, distribution_of(SAMPLINGS[sampling])) > P_LEAST
    assert exact.transitions_p(outputs, SAMPLINGS[sampling]) > P_LEAST


@pytest.mark.parametrize(
    ("verifier", "draft"),
    [(BlockVerifier, "chain"), (TraversalVerifier, "without")],
)
def test_so_does_the_engine_with_it(verifier, draft):
    check_engine(draft, "both", 100, verifier)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("verifier", "draft"),
    [
        *((RejectionVerifier, draft) for draft in ("chain", "without", "duplicates")),
        *((BlockVerifier, draft) for draft in ("chain", "without")),
        *((TraversalVerifier, draft) for draft in exact.DRAWN),
    ],
)
def test_so_does_the_engine_with_it_everywhere(verifier, draft, sampling):
    check_engine(draft, sampling, 400, verifier)


def check_plain(verifier, draft, sampling, n):
    drafter = TreeDrafts.named(draft, SAMPLINGS[sampling])
    outputs, per_step = exact.turns(LOSSLESS[verifier](SAMPLINGS[sampling]), drafter, n, 12)
    np.testing.assert_array_equal(outputs, exact.plain_turns(SAMPLINGS[sampling], n, 12))
    return per_step


@pytest.mark.parametrize(("verifier", "draft"), PATHWISE)
@pytest.mark.parametrize("sampling", ["hot", "both"])
def test_outputs_are_those_of_plain_sampling(verifier, draft, sampling):
    check_plain(verifier, draft, sampling, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "draft"), PATHWISE)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_outputs_are_those_of_plain_sampling_everywhere(verifier, draft, sampling):
    per_step = check_plain(verifier, draft, sampling, 60)
    assert per_step > 1.05 or draft == "disjoint"  # drafts are taken at all


@pytest.mark.parametrize("sampling", quick_first(SAMPLINGS, ["both"]))
def test_plain_sampling_follows_the_distribution(sampling):
    """The verifiers' random numbers, a seed a turn, as ``test_outputs_are_those_…`` ties them."""
    sampling = SAMPLINGS[sampling]
    numbers = Uniforms()
    uniforms = np.empty((TRIALS, exact.N_TOKENS))
    for seed in range(TRIALS):
        numbers.begin(seed)
        uniforms[seed] = numbers.take(exact.N_TOKENS)
    text = np.tile(PROMPT, (TRIALS, 1))
    p = sampling.probs(table(0))
    for k in range(exact.N_TOKENS):
        rows = p[text[:, -2], text[:, -1]]
        drawn = sample(rows, torch.from_numpy(uniforms[:, k])).numpy()
        text = np.concatenate([text, drawn[:, None]], 1)
    assert worst_p(text[:, len(PROMPT) :], distribution_of(sampling)) > P_LEAST
    assert exact.transitions_p(text[:, len(PROMPT) :], sampling) > P_LEAST


# -- the distribution of a verifier that does not follow the target's ------------------------------

EPSILON, DELTA = 0.09, 0.3


def typical_distribution(drafter, sampling):
    """``[VOCAB] * 4`` what typical acceptance is documented to emit, in the plainest form."""
    p = sampling.probs(table(0).double()).numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1, keepdims=True)
    likely = (p > np.minimum(EPSILON, DELTA * np.exp(-entropy))) | (p == p.max(-1, keepdims=True))
    joint = np.zeros((VOCAB,) * exact.N_TOKENS)

    def follow(text, chance):
        if len(text) >= len(PROMPT) + exact.N_TOKENS:
            joint[tuple(text[len(PROMPT) : len(PROMPT) + exact.N_TOKENS])] += chance
            return
        (tokens,) = drafter.draw(np.array(text[-2:-1]), np.array(text[-1:]))
        branches = [text]
        for token, parent in zip(tokens.tolist(), drafter.parents.tolist(), strict=True):
            above = branches[parent + 1]
            passed = above is not None and likely[above[-2], above[-1], token]
            branches.append([*above, token] if passed else None)
        longest = max((branch for branch in branches if branch is not None), key=len)
        after = np.where(likely, p, 0)[longest[-2], longest[-1]]
        for token in np.flatnonzero(after):
            follow([*longest, int(token)], chance * after[token] / after.sum())

    first = p[PROMPT[-2], PROMPT[-1]]
    for token in np.flatnonzero(first):
        follow([*PROMPT.tolist(), int(token)], first[token])
    return joint


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["warm", "hot", "both"])
def test_typical_acceptance_has_the_distribution_it_is_documented_to_have(sampling):
    drafter = TreeDrafts.named("top", SAMPLINGS[sampling])
    expected = typical_distribution(drafter, SAMPLINGS[sampling])
    assert expected.sum() == pytest.approx(1)
    verifier = TypicalVerifier(SAMPLINGS[sampling], epsilon=EPSILON, delta=DELTA)
    outputs, per_step = exact.turns(verifier, drafter, 1500, exact.N_TOKENS)
    assert worst_p(outputs, expected) > P_LEAST
    assert worst_p(outputs, distribution_of(SAMPLINGS[sampling])) < P_LEAST  # and it is another one
    assert per_step > 1.4


# -- one node, exactly -----------------------------------------------------------------------------


def test_a_child_that_cannot_have_been_drawn_changes_nothing():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.0, 0.5, 0.5]])
    for replacement in (True, False):
        proposal = Proposal(q, np.zeros(1, np.int64), replacement)
        odds, rest = ratio_tests(p, np.array([[0]]), torch.tensor([0]), proposal)
        assert odds.item() == 0.0
        assert rest.tolist() == p.tolist()
        table, tokens = np.array([[0], [-1]]), np.zeros(1, np.int64)
        nodes, left = traverse(table, tokens, np.array([1e-9]), p.numpy().__getitem__, proposal)
        assert not len(nodes) and left.tolist() == p[0].tolist()


# -- wrong verifiers -------------------------------------------------------------------------------


class NoResidual(RejectionVerifier):
    """After a rejection draws from all of the target's distribution, not from what is left."""

    def verify(self, tree, scores):
        accepted = super().verify(tree, scores)
        row = int(accepted.path[-1]) + 1 if len(accepted.path) else 0
        again = self._draw(scores.logits[row : row + 1], self._uniforms.take(1))
        accepted.tokens[-1] = int(again[0])
        return accepted


class KnownNumbers(RejectionVerifier):
    """Tests with the very numbers that the drafter draws with."""

    def begin(self, seed):
        super().begin(seed)
        self.seed = seed

    def first(self, scores):
        token = super().first(scores)
        self._uniforms._random = np.random.default_rng(self.seed)
        return token


def typical(sampling):
    return TypicalVerifier(sampling, epsilon=EPSILON, delta=DELTA)


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [
        (NoResidual, "chain"),
        pytest.param(KnownNumbers, "chain", marks=pytest.mark.slow),
    ],
)
def test_wrong_verifiers_are_found(wrong, draft):
    sampling = SAMPLINGS["warm"]
    outputs, _ = exact.turns(wrong(sampling), TreeDrafts.named(draft, sampling), 250, 16)
    p = min(worst_p(outputs, distribution_of(sampling)), exact.transitions_p(outputs, sampling))
    assert p < P_LEAST


# -- what verifiers promise besides ----------------------------------------------------------------


@pytest.mark.parametrize("verifier", [MatchVerifier, RejectionVerifier])
@pytest.mark.parametrize("draft", ["chain", "with", "without", "top"])
def test_all_rows_at_once_decide_as_row_by_row(verifier, draft, monkeypatch):
    """The way of a GPU, on the CPU: the same tokens in the same steps."""
    sampling = SAMPLINGS["warm"]
    loop = engine(TableTarget(table(0)), verifier(sampling))
    runs = []
    for lazy in (True, False):
        for module in ("match", "rejection"):
            monkeypatch.setattr(
                f"specbench.decoding.verify.{module}.row_by_row", lambda _, lazy=lazy: lazy
            )
        for seed in range(6):
            drafter = TreeDrafts.named(draft, sampling)
            result = loop.decode(PROMPT, drafter, max_new_tokens=20, seed=seed)
            runs.append((result.output_ids, result.committed_per_step))
    assert runs[:6] == runs[6:]


@pytest.mark.parametrize("draft", ["with", "without", "top"])
def test_rejection_at_temperature_0_is_greedy(draft):
    drafter = TreeDrafts.named(draft, SAMPLINGS["warm"])
    outputs = []
    for verifier in (GreedyVerifier(), RejectionVerifier(Sampling(0.0))):
        loop = engine(TableTarget(table(0)), verifier)
        outputs.append(loop.decode(PROMPT, drafter, max_new_tokens=30).output_ids)
    assert outputs[0] == outputs[1]


def test_typical_acceptance_by_hand():
    """p = .6 .3 .1: entropy .898, so the limit is min(.09, .3 * .407) = .09; .1 passes, .05 not."""
    sampling = Sampling(1.0)
    rows = torch.tensor([[0.6, 0.3, 0.1], [0.65, 0.3, 0.05], [1.0, 1e-9, 1e-9], [0.4, 0.3, 0.3]])
    tree = DraftTree(np.array([2, 2, 0]), np.array([-1, 0, 1]))
    verifier = TypicalVerifier(sampling, epsilon=0.09, delta=0.3)
    verifier.begin(0)
    accepted = verifier.verify(tree, Scores(rows.log()))
    assert accepted.path.tolist() == [0]
    assert accepted.tokens[0] == 2 and accepted.tokens[1] in (0, 1)
    assert accepted.next_tokens.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("verifier", [*LOSSLESS.values(), typical])
def test_logits_that_are_not_finite_fail_the_case(verifier):
    broken = table(0)
    broken[:, 4] = torch.nan
    loop = engine(TableTarget(broken), verifier(SAMPLINGS["warm"]))
    drafter = TreeDrafts.named("chain", SAMPLINGS["warm"])
    with pytest.raises(CaseFailed, match="not finite"):
        loop.decode(PROMPT, drafter, max_new_tokens=200)


@pytest.mark.parametrize("verifier", [*LOSSLESS.values(), typical])
def test_device_tokens_outside_the_vocabulary_fail_the_case(verifier):
    subject = verifier(SAMPLINGS["warm"])
    subject.begin(0)
    proposal = Proposal(torch.full((1, VOCAB), 1 / VOCAB), np.zeros(1, dtype=np.int64))
    tree = DraftTree(torch.tensor([VOCAB]), np.array([-1]), probs=proposal)
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        subject.verify(tree, Scores(table(0)[0, :2], depths=np.array([0, 1])))


# -- probabilities and draws -----------------------------------------------------------------------


@given(
    logits=st.lists(st.integers(-4, 4), min_size=2, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 1.5]),
    top_p=st.sampled_from([0.2, 0.7, 1.0]),
    top_k=st.integers(0, 10),
)
def test_probabilities_equal_the_plain_rule(logits, temperature, top_p, top_k):
    sampling = Sampling(temperature, top_p, top_k)
    weights = np.exp(np.array(logits) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(logits):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    total, mass, nucleus = sum(weights[order]), 0.0, []
    for i in order:
        if mass < top_p - 1e-12:
            nucleus.append(i)
        mass += weights[i] / total
    expected = np.zeros(len(logits))
    expected[nucleus] = weights[nucleus] / weights[nucleus].sum()
    probs = sampling.probs(torch.tensor(logits, dtype=torch.float64))
    np.testing.assert_allclose(probs.numpy(), expected, atol=1e-12)


def test_half_precision_is_raised_and_no_temperature_overflows():
    logits = torch.tensor([40.0, 39.0, -torch.inf], dtype=torch.bfloat16)
    probs = Sampling(1e-38).probs(logits)
    assert probs.dtype == torch.float32 and probs.tolist() == [1.0, 0.0, 0.0]
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
    seeded = np.random.default_rng(7).random(5)
    assert not np.isclose(ahead, seeded).any() and not np.isclose(1 - ahead, seeded).any()


def test_children_by_hand():
    parents = np.array([-1, -1, 0, 0, 1, 4])
    aux = np.array([False, False, False, True, False, False])
    assert sibling_table(parents, aux).tolist() == [
        [0, 1], [2, -1], [4, -1], [-1, -1], [-1, -1], [5, -1], [-1, -1],
    ]  # fmt: skip


# -- real passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", CARRIERS)
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.5, top_p=0.9, top_k=12)], ids=str)
def test_any_tree_leaves_a_seeds_output_untouched(architecture, sampling, make_target):
    """Drafts that were not drawn: what plain sampling with the same seed emits, token by token."""
    target = make_target(architecture)
    run = engine(target, RejectionVerifier(sampling))
    accepted = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(0, TINY_VOCAB, 9)
        plain = run.decode(prompt, Drafter(name="ar"), max_new_tokens=24, seed=seed)
        drafter = Adversary(truth=plain.output_ids, honesty=0.6, seed=seed)
        drafted = run.decode(prompt, drafter, max_new_tokens=24, seed=seed)
        assert drafted.output_ids == plain.output_ids
        assert target.cache.length >= len(prompt) + 23
        accepted += 23 - drafted.n_target_passes
    assert accepted > 0
