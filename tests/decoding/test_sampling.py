"""Sampled output follows the target's distribution, whoever drafts, in texts of 1 to 4 tokens.

``tests/decoding/distributions.py`` says by which statistics. What is covered; `GRID` below is this
table for the machine, and the first tests hold it against what there is:

=============  =============================================================================
verifier       compared with the target's distribution, for each of six settings
               (temperatures 0.3, 1 and 1.5, top-p 0.8, top-k 3, both)
=============  =============================================================================
``greedy``     token for token with plain decoding (``test_engine.py``); here temperature 0
``match``      token for token with plain sampling of the same seed, for all nine drafts;
               plain sampling itself by chi-square
``rejection``  by chi-square for the eight drafts that are drawn: a chain; siblings with and
               without replacement; duplicates among children; a draft that runs out of
               tokens; p = q (with and without replacement); disjoint support. Token for
               token with plain sampling for the ninth, which is not drawn. One node of any
               such draft exactly, not by a sample
``block``      a chain exactly (``test_enumerated_law.py``, as the others), and in the
               engine by chi-square; the other drafts as by ``rejection``
``typical``    lossy: by chi-square with the distribution that it is documented to have
=============  =============================================================================

Methods: ``test_sampling_methods.py``. Real models: ``test_sampling_models.py`` (the bundled one at
fixed contexts; tiny ones of six architectures), ``test_draft_methods.py`` (SpS and OPT-Tree with
two tiny models). Wrong verifiers must fail by the same threshold
(``test_wrong_verifiers_are_found``).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specbench.config.schema import VERIFIERS
from specbench.decoding.sampling import Sampling, Uniforms, sample
from specbench.decoding.structs import DraftTree, Proposal
from specbench.decoding.tree import sibling_table
from specbench.decoding.verify import (
    BlockVerifier,
    GreedyVerifier,
    MatchVerifier,
    RejectionVerifier,
    TypicalVerifier,
)
from specbench.decoding.verify.rejection import ratio_tests
from specbench.errors import CaseFailed
from specbench.models.scores import Scores
from specbench.results.records import LOSSY_VERIFIERS
from tests.conftest import engine
from tests.decoding import distributions as exact
from tests.decoding.distributions import (
    DRAFTS,
    DRAWN,
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

# verifier: (drafts compared by chi-square, drafts compared token for token)
GRID = {
    "greedy": ([], []),
    "match": ([], list(DRAFTS)),
    "rejection": (DRAWN, ["top"]),
    "block": (DRAWN, ["top"]),
    "typical": (["top"], []),
}
LOSSLESS = {"match": MatchVerifier, "rejection": RejectionVerifier, "block": BlockVerifier}
PATHWISE = [(name, draft) for name, (_, drafts) in GRID.items() for draft in drafts]


# -- the grid --------------------------------------------------------------------------------------


def test_the_grid_names_every_verifier_and_every_draft():
    assert GRID.keys() | {"auto"} == set(VERIFIERS)
    for name in LOSSLESS:
        assert {draft for drafts in GRID[name] for draft in drafts} == DRAFTS.keys()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_error_of_two_percent_is_found(sampling):
    """Power of the first token's test where the wrong mass is hardest to see."""
    p = distribution_of(SAMPLINGS[sampling]).sum((1, 2, 3))
    p = p[p > 0]
    if len(p) < 2:
        return
    limit = stats.chi2.isf(P_LEAST, len(p) - 1)
    for i, j in itertools.permutations(range(len(p)), 2):
        if p[i] > 0.02:
            distance = TRIALS * (0.02**2 / p[i] + 0.02**2 / p[j])
            assert stats.ncx2.sf(limit, len(p) - 1, distance) > 0.99


# -- distributions --------------------------------------------------------------------------------


def check_ratio(draft, sampling, n):
    drafter = TreeDrafts.named(draft, SAMPLINGS[sampling])
    outputs, per_step = exact.ratio_turns(drafter, SAMPLINGS[sampling], n)
    assert worst_p(outputs, distribution_of(SAMPLINGS[sampling])) > P_LEAST
    assert exact.transitions_p(outputs, SAMPLINGS[sampling]) > P_LEAST
    return per_step


@pytest.mark.parametrize(("draft", "sampling"), [("chain", "hot"), ("without", "both")])
def test_the_ratio_test_follows_the_targets_distribution(draft, sampling):
    check_ratio(draft, sampling, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAWN)
def test_the_ratio_test_follows_the_targets_distribution_everywhere(draft, sampling):
    per_step = check_ratio(draft, sampling, TRIALS)
    if draft.startswith("equal"):  # always accepted, whole
        assert per_step > 2.5
    elif draft == "disjoint":
        assert (per_step == 1) == (sampling in ("top_p", "top_k", "both"))
    else:
        assert per_step > 1.1


def check_engine(draft, sampling, n, verifier=RejectionVerifier):
    """The verifier as it is called, turn by turn; all tokens of longer turns are looked at."""
    made = verifier(SAMPLINGS[sampling])
    outputs, _ = exact.turns(made, TreeDrafts.named(draft, SAMPLINGS[sampling]), n, 16)
    assert worst_p(outputs, distribution_of(SAMPLINGS[sampling])) > P_LEAST
    assert exact.transitions_p(outputs, SAMPLINGS[sampling]) > P_LEAST


@pytest.mark.parametrize(
    ("verifier", "draft"), [(RejectionVerifier, "without"), (BlockVerifier, "chain")]
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


@pytest.mark.parametrize(
    "sampling",
    [s if s == "both" else pytest.param(s, marks=pytest.mark.slow) for s in SAMPLINGS],
)
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
    for place in range(exact.N_TOKENS):
        rows = p[text[:, -2], text[:, -1]]
        drawn = sample(rows, torch.from_numpy(uniforms[:, place])).numpy()
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


some_distribution = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(sum)


@given(p=some_distribution, q=some_distribution, width=st.integers(1, 3), replacement=st.booleans())
def test_accepted_child_or_residual_token_has_the_targets_distribution(p, q, width, replacement):
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
    if total.sum() > 0:  # else more children than the draft's distribution can give
        np.testing.assert_allclose(total, p, atol=1e-9)


def test_a_child_that_cannot_have_been_drawn_changes_nothing():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.0, 0.5, 0.5]])
    for replacement in (True, False):
        odds, rest = ratio_tests(
            p, np.array([[0]]), torch.tensor([0]), Proposal(q, np.zeros(1, np.int64), replacement)
        )
        assert odds.item() == 0.0
        assert rest.tolist() == p.tolist()


# -- wrong verifiers -------------------------------------------------------------------------------


class NoResidual(RejectionVerifier):
    """After a rejection draws from all of the target's distribution, not from what is left."""

    def verify(self, tree, scores):
        verdict = super().verify(tree, scores)
        row = int(verdict.path[-1]) + 1 if len(verdict.path) else 0
        again = self._draw(scores.logits[row : row + 1], self._uniforms.take(1))
        verdict.tokens[-1] = int(again[0])
        return verdict


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
    """Accepts as if the draft's distribution were the target's."""

    def verify(self, tree, scores):
        verdict = super().verify(tree, scores)
        if not len(verdict.path):
            tokens = np.append(tree.tokens[0], verdict.tokens)
            verdict = replace(verdict, path=np.array([0]), tokens=tokens)
        return verdict


def typical(sampling):
    return TypicalVerifier(sampling, epsilon=EPSILON, delta=DELTA)


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [
        (NoResidual, "chain"),
        pytest.param(SiblingsAgain, "without", marks=pytest.mark.slow),
        pytest.param(KnownNumbers, "chain", marks=pytest.mark.slow),
        pytest.param(AlwaysOnce, "chain", marks=pytest.mark.slow),
        pytest.param(typical, "top", marks=pytest.mark.slow),
        pytest.param(lambda sampling: MatchVerifier(Sampling(1.2)), "top", marks=pytest.mark.slow),
    ],
)
def test_wrong_verifiers_are_found(wrong, draft):
    sampling = SAMPLINGS["warm"]
    outputs, _ = exact.turns(wrong(sampling), TreeDrafts.named(draft, sampling), 250, 16)
    found = min(worst_p(outputs, distribution_of(sampling)), exact.transitions_p(outputs, sampling))
    assert found < P_LEAST


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
    verdict = verifier.verify(tree, Scores(rows.log()))
    assert verdict.path.tolist() == [0]
    assert verdict.tokens[0] == 2 and verdict.tokens[1] in (0, 1)
    assert verdict.next_tokens.tolist() == [0, 0, 0, 0]


def test_lossy_verifiers_are_known_to_the_records():
    classes = (GreedyVerifier, *LOSSLESS.values(), TypicalVerifier)
    assert {cls.name for cls in classes if not cls.lossless} == set(LOSSY_VERIFIERS)


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
    made = verifier(SAMPLINGS["warm"])
    made.begin(0)
    proposal = Proposal(torch.full((1, VOCAB), 1 / VOCAB), np.zeros(1, dtype=np.int64))
    tree = DraftTree(torch.tensor([VOCAB]), np.array([-1]), probs=proposal)
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        made.verify(tree, Scores(table(0)[0, :2], depths=np.array([0, 1])))


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
    total, mass, kept = sum(weights[order]), 0.0, []
    for i in order:
        if mass < top_p - 1e-12:
            kept.append(i)
        mass += weights[i] / total
    expected = np.zeros(len(logits))
    expected[kept] = weights[kept] / weights[kept].sum()
    found = sampling.probs(torch.tensor(logits, dtype=torch.float64))
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


def test_children_by_hand():
    parents = np.array([-1, -1, 0, 0, 1, 4])
    aux = np.array([False, False, False, True, False, False])
    assert sibling_table(parents, aux).tolist() == [
        [0, 1], [2, -1], [4, -1], [-1, -1], [-1, -1], [5, -1], [-1, -1],
    ]  # fmt: skip
