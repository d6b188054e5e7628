"""Sampled output of every method follows the target's distribution.

A method whose drafts are not drawn from distributions it names (``DraftTree.probs`` is None) is
held to more than a distribution: its output is plain sampling's of the same seed, token for token,
and plain sampling follows the distribution (``test_sampling.py``). That is every method but SpS and
PEARL, whose output is compared by chi-square: the distributions of the texts of 1 to 4 tokens, and
of a token given the two before it over all of a turn (errors of 3 % in total variation are found).

========================================  ==================  ==================================
methods                                   verifier            compared, for which settings
========================================  ==================  ==================================
sps, pearl                                ``rejection``,      chi-square; all six of ``SAMPLINGS``
                                          ``block``
sps with the heuristic, with confidence   ``rejection``       chi-square; temperature 1
all of conf/method, but oracle            ``match``           token for token; top-k, top-p
all of conf/method but oracle, sps,       ``rejection``       token for token; top-k, top-p
pearl
card, card uncorrected, opt_tree,         ``match``,          token for token; all six of
ouroboros                                 ``rejection``       ``SAMPLINGS``
the same, sps and pearl, with tiny real   ``rejection``       token for token; temperature 1.1,
models in float64                                             top-p 0.95 (sps, pearl: ``match``)
========================================  ==================  ==================================

``oracle`` is left out: it knows the greedy output and works at temperature 0 alone.

A new method is in one of the rows without being named: one with a draft model is compared by
chi-square where its trees say what they were drawn from.
"""

import numpy as np
import pytest

from methods.card import Card
from methods.opt_tree import OptTree
from methods.ouroboros import Ouroboros
from methods.pearl import Pearl
from methods.sps import Sps
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import BlockVerifier, MatchVerifier, RejectionVerifier
from tests.conftest import VOCAB as TINY_VOCAB
from tests.conftest import engine, quick_first, tiny_draft
from tests.contract import driver
from tests.decoding import distributions as exact
from tests.decoding.distributions import P_LEAST, SAMPLINGS, VOCAB
from tests.decoding.table_models import TableDraft, TableTarget, table

NAMES = [name for name in driver.method_names() if name != "oracle"]


def watched(drafter):
    """A list that grows with every draft that says what it was drawn from."""
    drawn = []
    propose, overlap = drafter.propose, drafter.overlap

    def proposed(state):
        tree = propose(state)
        drawn.extend([tree] * (tree.probs is not None or tree.bonus is not None))
        return tree

    def guessed(state, tree):
        bonus = overlap(state, tree)
        drawn.extend([bonus] * (bonus is not None))
        return bonus

    drafter.propose, drafter.overlap = proposed, guessed
    return drawn


DRAWN = {  # with shorter drafts than the yaml's, and variants
    "sps": lambda: Sps(gamma=3),
    "pearl": lambda: Pearl(gamma=3),
    "heuristic": lambda: Sps(gamma=1, schedule="heuristic", max_gamma=4),
    "confidence": lambda: Sps(gamma=4, confidence=0.3),
}
FIXED = {
    "card": lambda: Card(k=6, r=3, max_depth=12),
    "card_uncorrected": lambda: Card(k=6, r=3, max_depth=12, correct=False),
    "opt_tree": lambda: OptTree(nodes=12, threshold=0.1, max_depth=4),
    "ouroboros": lambda: Ouroboros(gamma=3, ngram=3, window=4, guesses=4, topk=2),
}
VERIFIERS = {"match": MatchVerifier, "rejection": RejectionVerifier}
RATIO = {"rejection": RejectionVerifier, "block": BlockVerifier}  # of drawn drafts
WITH_DRAFT_MODEL = driver.with_draft_model()
# Those whose drafts are known not to be drawn need no look.
MAY_DRAW = DRAWN | {name: make for name, make in WITH_DRAFT_MODEL.items() if name not in FIXED}
MAY_DRAW |= {name: DRAWN[name] for name in ("sps", "pearl")}


# -- drafts that are drawn -------------------------------------------------------------------------


def on_tables(drafter, sampling):
    """Set up with a draft that is the target with some noise."""
    draft = TableDraft(exact.table(0) + 0.7 * exact.table(1))
    drafter.setup(DraftContext(VOCAB, frozenset(), sampling=sampling, draft_model=draft))
    return drafter


def check_distribution(method, verifier, sampling, n):
    drafter = on_tables(MAY_DRAW[method](), sampling)
    drawn = watched(drafter)
    verifier = RATIO[verifier](sampling)
    outputs, per_step = exact.turns(verifier, drafter, n, 16, overlap="serial")
    assert drawn or method not in DRAWN
    assert exact.worst_p(outputs, exact.distribution_of(sampling)) > P_LEAST
    assert exact.transitions_p(outputs, sampling) > P_LEAST
    assert per_step > 1.3


@pytest.mark.parametrize("verifier", quick_first(RATIO, ["block"]))
@pytest.mark.parametrize("method", sorted(MAY_DRAW.keys() - {"heuristic", "confidence"}))
def test_drawn_drafts_leave_the_distribution(method, verifier):
    check_distribution(method, verifier, SAMPLINGS["both"], 60)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", RATIO)
@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        *((method, sampling) for method in ("sps", "pearl") for sampling in SAMPLINGS),
        ("heuristic", "warm"),
        ("confidence", "warm"),
    ],
)
def test_drawn_drafts_leave_the_distribution_everywhere(method, sampling, verifier):
    check_distribution(method, verifier, SAMPLINGS[sampling], 1000)


@pytest.mark.slow
def test_pearls_guesses_are_accepted_by_the_ratio():
    """More often than where the target draws without regard to them."""
    sampling = SAMPLINGS["hot"]
    per_step = []
    for verifier in (RejectionVerifier, MatchVerifier):
        drafter = on_tables(Pearl(gamma=3), sampling)
        per_step.append(exact.turns(verifier(sampling), drafter, 150, 16, overlap="serial")[1])
    assert per_step[0] > per_step[1] + 0.1


# -- drafts that are not: plain sampling, token for token ------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("method", FIXED)
def test_a_draft_model_without_draws_is_plain_sampling(method, verifier, sampling):
    drafter = on_tables(FIXED[method](), SAMPLINGS[sampling])
    verifier = VERIFIERS[verifier](SAMPLINGS[sampling])
    outputs, per_step = exact.turns(verifier, drafter, 40, 16, overlap="serial")
    np.testing.assert_array_equal(outputs, exact.plain_turns(SAMPLINGS[sampling], 40, 16))
    assert per_step > 1.05


SAMPLING = Sampling(0.8, top_p=0.95, top_k=6)


@pytest.mark.parametrize("verifier", quick_first(VERIFIERS, ["rejection"]))
@pytest.mark.parametrize("name", NAMES)
def test_any_method_is_plain_sampling(name, verifier, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.getbasetemp() / "contract-artifacts"
    drafter = driver.instantiate(name)
    drafter.setup(driver.toy_context(drafter, cache, monkeypatch, sampling=SAMPLING))
    # So peaked that texts repeat themselves, and retrieval finds something.
    logits = table(0, driver.VOCABULARY, 4.0)
    loop = engine(TableTarget(logits), VERIFIERS[verifier](SAMPLING), overlap="serial")
    prompt = np.array([5, 9], dtype=np.int64)
    drawn = watched(drafter)
    # A head or a draft model guesses from the first token on.
    n_new = 16 if drafter.needs.heads or drafter.needs.draft_model else 60
    expected = exact.plain_turns(SAMPLING, 2, n_new, logits, prompt)
    for seed, plain in enumerate(expected):
        drafter.reset()
        result = loop.decode(prompt, drafter, max_new_tokens=n_new, seed=seed)
        if drawn and verifier == "rejection":  # the target's in distribution alone
            assert name in MAY_DRAW, f"add {name} to DRAWN above, with a maker for six tokens"
            return
        assert result.output_ids == plain.tolist()


@pytest.mark.parametrize(
    ("method", "verifier"),  # a drawn draft's tokens are the target's in distribution alone
    [(method, "rejection") for method in FIXED] + [("sps", "match"), ("pearl", "match")],
)
def test_with_tiny_models_too(method, verifier, make_target, rng):
    sampling = Sampling(1.1, top_p=0.95)
    drafter = (FIXED | DRAWN)[method]()
    draft = tiny_draft(drafter.needs, seed=0)
    context = DraftContext(TINY_VOCAB, frozenset(), sampling=sampling, draft_model=draft)
    drafter.setup(context)
    loop = engine(make_target(), VERIFIERS[verifier](sampling), overlap="serial")
    prompt, steps = rng.integers(0, TINY_VOCAB, 9), 0
    for seed in range(2):
        drafter.reset()
        plain = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=24, seed=seed)
        result = loop.decode(prompt, drafter, max_new_tokens=24, seed=seed)
        assert result.output_ids == plain.output_ids
        steps += result.n_target_passes
    assert steps < 2 * 23
