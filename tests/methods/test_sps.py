import pytest
import torch

from methods.sps import Sps
from tests.methods.table_turns import PROMPT, pair, ready, turn


def plain_assisted(text, n, draft, target, gamma, heuristic, confidence):
    """Restate assisted generation: tokens drafted and committed by every step."""
    text, last, steps = list(text), len(text) + n, []
    while len(text) < last:
        drafted = []
        while len(drafted) < min(gamma, last - len(text) - 1):
            seen = torch.softmax(draft.table[tuple((text + drafted)[-2:])], -1)
            drafted.append(int(seen.argmax()))
            if seen.max() < confidence:
                break
        new = []
        for i in range(len(drafted) + 1):
            before = (text + drafted[:i])[-2:]
            new.append(int(target.table[tuple(before)].argmax()))
            if i < len(drafted) and drafted[i] != new[-1]:
                break
        if heuristic:
            gamma = gamma + 2 if len(new) == len(drafted) + 1 else max(1, gamma - 1)
        steps.append((len(drafted), len(new)))
        text += new
    return steps


@pytest.mark.parametrize("heuristic", [False, True])
@pytest.mark.parametrize("confidence", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_steps_are_those_of_assisted_generation(heuristic, confidence, seed):
    """Greedy: 5 tokens at first with the heuristic, else 4 (Chen et al.)."""
    gamma = 5 if heuristic else 4
    target, draft = pair(10 * seed, noise=0.25 * seed, vocab_size=(8, 16)[seed % 2])
    schedule = "heuristic" if heuristic else "constant"
    drafter = ready(Sps(gamma=gamma, confidence=confidence, schedule=schedule), draft)
    for _ in range(2):
        drafter.reset()
        result = turn(target, drafter, n=100)
        text = [*PROMPT.tolist(), result.output_ids[0]]
        expected = plain_assisted(text, 99, draft, target, gamma, heuristic, confidence)
        taken = zip(result.drafted_per_step, result.committed_per_step, strict=True)
        assert list(taken) == expected


def test_the_heuristic_goes_on_where_it_was_and_is_bounded():
    target, draft = pair()  # the draft is the target
    drafter = ready(Sps(gamma=5, schedule="heuristic", max_gamma=10), draft)
    assert turn(target, drafter, n=40).drafted_per_step[:4] == [5, 7, 9, 10]
    assert turn(target, drafter, n=40).drafted_per_step[:2] == [10, 10]
    drafter.reset()
    assert turn(target, drafter, n=40).drafted_per_step[:2] == [5, 7]
    assert drafter.needs.max_nodes == 10
