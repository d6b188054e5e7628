"""Methods with a draft model leave greedy decoding untouched, whatever the draft is."""

from functools import partial

import numpy as np
import pytest
import torch

from methods.card import Card
from methods.opt_tree import OptTree
from methods.ouroboros import Ouroboros
from methods.pearl import Pearl
from methods.sps import Sps
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DecodeState, DraftContext, StepOutcome
from specbench.decoding.verify import RejectionVerifier
from specbench.models.draft.model import latency_ratio
from tests.conftest import ARCHITECTURES, VOCAB, quick_first, tiny_draft
from tests.contract import driver
from tests.decoding.test_engine import engine
from tests.methods.table_turns import pair, ready, turn

# Every method with a draft model, found by its needs, and variants of some.
METHODS = driver.with_draft_model() | {
    "sps": lambda: Sps(gamma=3),
    "heuristic": lambda: Sps(gamma=2, schedule="heuristic", max_gamma=5),
    "confidence": lambda: Sps(gamma=6, confidence=0.3),
    "opt_tree": lambda: OptTree(nodes=12, threshold=0.1, max_depth=4),
    "card": lambda: Card(k=6, r=3, max_depth=12),
    "card_uncorrected": lambda: Card(k=6, r=3, max_depth=12, correct=False),
    "card_chain": lambda: Card(k=1, r=2, max_depth=8),
    "pearl": lambda: Pearl(gamma=3),
    "ouroboros": lambda: Ouroboros(gamma=3, ngram=3, window=4, guesses=4, topk=2),
    "ouroboros_window_of_one": lambda: Ouroboros(gamma=2, ngram=4, window=1, guesses=2, topk=1),
}
OVERLAPPED = [name for name, make in METHODS.items() if make().needs.overlap]
# With a perfect draft, whole chains are accepted; a tree need not hold the likeliest path, and
# uncorrected branches take the places of the right ones.
ALWAYS_RIGHT = ("sps", "heuristic")
SELDOM_RIGHT = ("confidence", "opt_tree", "card_uncorrected")
KINDS = ("itself", "stranger", "smaller", "reduced")


def draft_of(kind: str, drafter: Drafter, architecture: str):
    """Give the target itself, an unrelated model, or a smaller or reduced vocabulary."""
    if kind == "smaller":
        return tiny_draft(drafter.needs, seed=2, vocab_size=30, target_vocab=VOCAB)
    if kind == "reduced":
        ids = np.array([-1, *range(5, VOCAB, 3)])
        return tiny_draft(
            drafter.needs, vocab_size=len(ids), target_vocab=VOCAB, id_map=ids, context_length=40
        )
    return tiny_draft(drafter.needs, architecture, seed=0 if kind == "itself" else 1)


def check_greedy(target, method: str, kind: str, architecture: str, rng, turns: int) -> None:
    """Against plain decoding, serial and overlapped."""
    serial, threaded = engine(target, overlap="serial"), engine(target, overlap="thread")
    drafter = METHODS[method]()
    ready(drafter, draft_of(kind, drafter, architecture), vocab=VOCAB)
    committed = []
    for seed in range(turns):  # the second one finds the first one's caches
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 25)))
        expected = serial.decode(prompt, Drafter(name="plain"), max_new_tokens=24).output_ids
        result = serial.decode(prompt, drafter, max_new_tokens=24, seed=seed)
        assert result.output_ids == expected
        assert result.drafter["draft_forwards"] <= result.drafter["draft_tokens"]
        committed += result.committed_per_step
        if drafter.needs.overlap:
            overlapped = threaded.decode(prompt, drafter, max_new_tokens=24, seed=seed)
            assert overlapped.output_ids == expected
            assert overlapped.committed_per_step == result.committed_per_step
            assert overlapped.drafter == result.drafter
        if kind == "itself" and method in ALWAYS_RIGHT:  # the deepest path is accepted
            steps = zip(result.committed_per_step, result.depth_per_step, strict=True)
            assert all(count == depth + 1 for count, depth in steps)
    if kind == "itself":
        assert np.mean(committed) > (1.2 if method in SELDOM_RIGHT else 1.9)


@pytest.mark.parametrize(
    ("method", "kind"),
    # What a vocabulary changes is the draft model's: a chain, a tree, and a chain with guesses.
    [(method, "itself") for method in METHODS]
    + quick_first(
        [(method, "stranger") for method in METHODS],
        [(method, "stranger") for method in ("sps", "opt_tree", "card", "pearl", "ouroboros")],
        unpack=True,
    )
    + [(method, kind) for method in ("sps", "card", "ouroboros") for kind in KINDS[2:]],
)
def test_greedy_output_is_plain_decoding(method, kind, make_target, rng):
    architecture = "mistral_window" if kind in ("stranger", "reduced") else "llama"
    check_greedy(make_target(architecture), method, kind, architecture, rng, turns=2)


OURS = {"cut_draft": False, "lost_bonus": False, "correct_rejected": True}
ON_TABLES = [
    *(partial(Card, **{"k": 4, "r": 3} | x) for x in ({}, {"correct": False}, {"max_depth": 5})),
    partial(Card, k=1, r=1),
    *(partial(Pearl, gamma=gamma) for gamma in (1, 2, 4)),
    partial(Ouroboros, gamma=3, ngram=3, window=4, guesses=4),
    partial(Ouroboros, gamma=1, ngram=3, window=4, guesses=4, topk=0),
    partial(Ouroboros, gamma=3, ngram=2, window=1, guesses=1, topk=1),
    partial(Ouroboros, gamma=6, ngram=5, window=4, guesses=4),
    partial(Ouroboros, gamma=2, ngram=4, window=1, guesses=4),
    partial(Ouroboros, gamma=3, ngram=3, window=4, guesses=4, **OURS),
    partial(Ouroboros, gamma=2, ngram=5, window=4, guesses=4, **OURS),
]


@pytest.mark.parametrize("make", ON_TABLES, ids=lambda make: f"{make.func.__name__}{make.keywords}")
@pytest.mark.parametrize("seed", range(2))
def test_nothing_changes_the_text(make, seed):
    """At any end: the limit, an end token, the draft's context; with nothing learnt, then some."""
    for noise, room in ((0.0, 10**6), (1.0, 10**6), (0.5, 20)):
        target, draft = pair(10 * seed, noise, room)
        expected = turn(target, Drafter(name="ar"), n=50).output_ids
        drafter = ready(make(), draft, target)
        for overlap in ("serial", "thread"):
            result = turn(target, drafter, n=50, overlap=overlap)
            assert result.output_ids == expected
            assert sum(result.committed_per_step) == 49  # no token beyond what was verified
            assert max(result.drafted_per_step) <= drafter.needs.max_nodes
        if make.func is Ouroboros:
            assert max(draft.fed, default=0) <= drafter.needs.draft_nodes
        end = expected[20]
        stopped = turn(target, drafter, n=50, eos=frozenset({end}))
        assert stopped.output_ids == expected[: expected.index(end) + 1]


@pytest.mark.parametrize(
    ("make", "knob", "limit"),
    [
        (partial(Card, k=4, r="auto"), "r", 64),
        (partial(Card, k=4, r="auto", max_depth=1), "r", 1),
        (partial(Pearl, gamma="auto"), "gamma", 64),
    ],
)
@pytest.mark.parametrize("room", ["of its own", "of a union"])
def test_the_ratio_of_speeds_can_be_measured(make, knob, limit, room, make_target):
    """In a union the common tree may be smaller than the chain that is timed."""
    drafter = make()
    target = make_target(max_nodes=drafter.needs.max_nodes if room == "of its own" else 2)
    draft = tiny_draft(drafter.needs)
    ratio = partial(latency_ratio, target, draft, {})
    drafter.setup(
        DraftContext(VOCAB, frozenset(), target=target, draft_model=draft, latency_ratio=ratio)
    )
    if knob == "r":
        drafter.begin(None)
    assert 1 <= drafter.report()[knob] <= limit
    assert target.cache.length == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_for_every_architecture(architecture, method, kind, make_target, rng):
    check_greedy(make_target(architecture), method, kind, architecture, rng, turns=4)


@pytest.mark.parametrize("method", OVERLAPPED)
def test_sampled_output_does_not_depend_on_the_overlap(method, make_target, rng):
    sampling = Sampling(1.1, top_p=0.95)
    drafter = METHODS[method]()
    ready(drafter, draft_of("itself", drafter, "llama"), sampling=sampling)
    prompt = rng.integers(0, VOCAB, 9)
    for seed in range(2):
        results = []
        for overlap in ("serial", "thread"):
            loop = engine(make_target(), overlap=overlap)
            loop.verifier = RejectionVerifier(sampling)
            results.append(loop.decode(prompt, drafter, max_new_tokens=20, seed=seed))
        assert results[0].output_ids == results[1].output_ids
        assert results[0].committed_per_step == results[1].committed_per_step


def test_the_cost_of_a_perfect_draft(make_target, rng):
    """Per step, one pass catches up (two tokens) and gamma - 1 passes add one each."""
    drafter = ready(Sps(gamma=3), tiny_draft(Sps(gamma=3).needs, seed=0))
    result = engine(make_target()).decode(rng.integers(0, VOCAB, 9), drafter, max_new_tokens=21)
    assert result.committed_per_step == [4] * 5
    # The first step's catching up is the prompt's own pass.
    assert result.drafter == {
        "draft_forwards": 5 * 3 - 1,
        "draft_tokens": 5 * 2 + 4 * 2,
        "devices": 1,
        "devices_asked": 1,
    }


def test_drafts_beyond_the_drafts_context_are_not_made(make_target, rng):
    draft = tiny_draft(Sps(gamma=3).needs, seed=0, context_length=16)
    drafter = ready(Sps(gamma=3), draft)
    loop = engine(make_target())
    for n_prompt in (9, 30):
        prompt = rng.integers(0, VOCAB, n_prompt)
        expected = loop.decode(prompt, Drafter(name="plain"), max_new_tokens=20).output_ids
        result = loop.decode(prompt, drafter, max_new_tokens=20)
        assert result.output_ids == expected
        assert result.drafted_per_step[-1] == 0
        assert (result.n_drafted > 0) == (n_prompt == 9)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, top_p=0.8), Sampling(1.4, top_k=4)], ids=str
)
def test_sampled_chains_come_from_the_rows_they_name(sampling, rng):
    """Node i is drawn from the draft's processed distribution after the text and earlier nodes."""
    for options in ({}, {"vocab_size": 17, "id_map": np.array([-1, *range(2, VOCAB, 3)])}):
        draft = tiny_draft(Sps(gamma=4).needs, target_vocab=VOCAB, **options)
        drafter = ready(Sps(gamma=4), draft, sampling=sampling)
        fresh = tiny_draft(Sps(gamma=4).needs, target_vocab=VOCAB, **options)
        state = DecodeState(rng.integers(0, VOCAB, 7), 40, seed=3)
        state.commit(np.array([5]))
        drafter.begin(state)
        for accepted in (4, 0, 2):
            tree = drafter.propose(state)
            assert tree.probs is not None and tree.probs.row.tolist() == [0, 1, 2, 3]
            for node in range(4):
                text = np.concatenate([state.tokens, tree.tokens[:node]])
                fresh.begin(text)
                row = fresh.catch_up(text, draft_vocab=True)
                distribution = fresh.to_target_vocab(sampling.probs(row))
                torch.testing.assert_close(tree.probs.q[node], distribution, atol=1e-12, rtol=0)
                assert distribution[tree.tokens[node]] > 0
            path = np.arange(accepted)
            committed = np.append(tree.tokens[:accepted], 11)
            state.commit(committed)
            drafter.observe(state, StepOutcome(tree, path, committed, None))
