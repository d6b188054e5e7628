import pytest

from methods.pearl import Pearl
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import MatchVerifier, RejectionVerifier
from tests.methods.table_turns import PROMPT, pair, ready, turn


def plain_pearl(target_rule, draft_rule, text, gamma, steps):
    """Run the reference's loop in its plainest form: verified tokens of each round."""

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

    result = turn(target, ready(Pearl(gamma=gamma), draft), n=120)
    text = [*PROMPT.tolist(), result.output_ids[0]]
    steps = len(result.committed_per_step)
    rounds = plain_pearl(rule(target.table), rule(draft.table), text, gamma, steps)
    assert [len(r) for r in rounds][:-3] == result.committed_per_step[:-3]
    assert [t for r in rounds for t in r][:100] == result.output_ids[1:101]


def test_a_perfect_draft_gives_gamma_tokens_a_pass_and_nothing_for_free():
    target, draft = pair()
    result = turn(target, ready(Pearl(gamma=4), draft), n=1 + 1 + 4 * 7)
    assert result.committed_per_step == [1] + [4] * 7
    assert result.drafted_per_step == [0] + [3] * 7
    assert result.drafter["pre_verify"] == 1 and result.drafter["post_verify"] == 7
    # gamma passes of one row during every pass of the target, up to the limit; the first token
    # needs none: it comes from the prompt's pass.
    assert draft.fed == [1] * (3 + 4 * 6)


@pytest.mark.parametrize("overlap", ["serial", "thread"])
def test_a_draft_like_the_target_is_always_accepted_under_sampling(overlap):
    """The ratio test of the bonus, too: two draws of one distribution would often disagree."""
    sampling = Sampling(1.0)
    target, draft = pair()
    drafter = ready(Pearl(gamma=4), draft, sampling=sampling)
    result = turn(
        target, drafter, n=1 + 1 + 4 * 7, overlap=overlap, verifier=RejectionVerifier(sampling)
    )
    assert result.committed_per_step == [1] + [4] * 7
    matched = turn(target, drafter, n=1 + 1 + 4 * 7, verifier=MatchVerifier(sampling))
    assert len(matched.committed_per_step) > 8
