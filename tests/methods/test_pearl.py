from functools import partial

import pytest

from methods.pearl import Pearl
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import GREEDY, Sampling
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import MatchVerifier, RejectionVerifier
from specbench.models.draft.speed_ratio import latency_ratio
from tests.conftest import VOCAB as TINY_VOCAB
from tests.conftest import tiny_draft
from tests.methods.table_turns import PROMPT, VOCAB, pair, turn


def pearl(draft, sampling=GREEDY, **knobs):
    drafter = Pearl(**knobs)
    drafter.setup(DraftContext(VOCAB, frozenset(), sampling=sampling, draft_model=draft))
    drafter.reset()
    return drafter


def plain_pearl(target_rule, draft_rule, text, gamma, steps):
    """The reference's loop in the plainest form: verified tokens of each round."""

    def draft(text):
        new = []
        for _ in range(gamma):
            new.append(draft_rule(text + new))
        return new

    text, pending, rounds = list(text), [], []
    for _ in range(steps):
        drafted = draft(text + pending)
        # Tests of the pending tokens and of the first new one, by what the target says there.
        tests = [*pending, drafted[0]]
        committed = []
        for token in tests:
            committed.append(target_rule(text + committed))
            if committed[-1] != token:
                break
        stands = committed == tests
        text += committed
        pending = drafted[1:] if stands else []
        rounds.append(committed)
    return rounds


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
@pytest.mark.parametrize("noise", [0.0, 0.8, 3.0])
def test_steps_are_those_of_the_plain_algorithm(gamma, noise):
    target, draft = pair(3, noise)

    def rule(logits):
        return lambda text: int(logits[text[-2], text[-1]].argmax())

    result = turn(target, pearl(draft, gamma=gamma), n=120)
    text = [*PROMPT.tolist(), result.output_ids[0]]
    steps = len(result.committed_per_step)
    rounds = plain_pearl(rule(target.table), rule(draft.table), text, gamma, steps)
    assert [len(r) for r in rounds][:-3] == result.committed_per_step[:-3]
    assert [t for r in rounds for t in r][:100] == result.output_ids[1:101]


def test_a_perfect_draft_gives_gamma_tokens_a_pass_and_nothing_for_free():
    target, draft = pair()
    result = turn(target, pearl(draft, gamma=4), n=1 + 1 + 4 * 7)
    assert result.committed_per_step == [1] + [4] * 7
    assert result.drafted_per_step == [0] + [3] * 7
    assert result.drafter["pre_verify"] == 1 and result.drafter["post_verify"] == 7
    # gamma passes of one row beside every pass of the target, until no more is wanted; the first
    # needs none: the prompt's pass has told.
    assert draft.fed == [1] * (3 + 4 * 6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_nothing_changes_the_text(gamma, seed):
    for noise, room in ((0.0, 10**6), (1.0, 10**6), (0.5, 20)):
        target, draft = pair(10 * seed, noise, room)
        expected = turn(target, Drafter(name="ar"), n=50).output_ids
        drafter = pearl(draft, gamma=gamma)
        for overlap in ("serial", "thread"):
            result = turn(target, drafter, n=50, overlap=overlap)
            assert result.output_ids == expected
            assert sum(result.committed_per_step) == 49  # no token beyond what was verified
        end = expected[20]
        stopped = turn(target, drafter, n=50, eos=frozenset({end}))
        assert stopped.output_ids == expected[: expected.index(end) + 1]


def test_drafts_respect_the_limit():
    target, draft = pair()
    for n in range(2, 12):
        result = turn(target, pearl(draft, gamma=4), n=n)
        assert len(result.output_ids) == n
        assert all(
            drafted <= n - 2 - sum(result.committed_per_step[:i])
            for i, drafted in enumerate(result.drafted_per_step)
        )


@pytest.mark.parametrize("overlap", ["serial", "thread"])
def test_a_draft_like_the_target_is_always_accepted_under_sampling(overlap):
    """The ratio test of the bonus, too: two draws of one distribution would often disagree."""
    sampling = Sampling(1.0)
    target, draft = pair()
    drafter = pearl(draft, sampling, gamma=4)
    result = turn(
        target, drafter, n=1 + 1 + 4 * 7, overlap=overlap, verifier=RejectionVerifier(sampling)
    )
    assert result.committed_per_step == [1] + [4] * 7
    matched = turn(target, drafter, n=1 + 1 + 4 * 7, verifier=MatchVerifier(sampling))
    assert len(matched.committed_per_step) > 8


def test_overlapped_and_serial_steps_are_the_same_under_sampling():
    sampling = Sampling(1.2, top_p=0.9)
    target, draft = pair(noise=1.0)
    drafter = pearl(draft, sampling, gamma=3)
    verifier = RejectionVerifier(sampling)
    for seed in range(5):
        results = [
            turn(target, drafter, n=60, overlap=how, verifier=verifier, seed=seed)
            for how in ("serial", "thread")
        ]
        assert results[0].output_ids == results[1].output_ids
        assert results[0].committed_per_step == results[1].committed_per_step
        assert results[0].drafter == results[1].drafter


@pytest.mark.parametrize("room", [{}, {"max_nodes": 2}], ids=["own", "union"])
def test_gamma_can_be_measured(room, make_target):
    """In a union too, whose common tree may be smaller than the chain that is timed."""
    target = make_target(**room)
    drafter = Pearl(gamma="auto")
    draft = tiny_draft(drafter.needs)
    ratio = partial(latency_ratio, target, draft, {})
    drafter.setup(
        DraftContext(TINY_VOCAB, frozenset(), target=target, draft_model=draft, latency_ratio=ratio)
    )
    assert 1 <= drafter.report()["gamma"] <= 64
