import numpy as np
import pytest

from methods.ouroboros import Ouroboros
from specbench.decoding.structs import DecodeState, StepOutcome
from specbench.draft_structures.lookahead import NgramPool
from tests.methods.lookahead_reference import PlainLookahead
from tests.methods.table_turns import PROMPT, pair, ready, turn


def ouroboros(draft, eos=frozenset(), **knobs):
    knobs = {"gamma": 3, "ngram": 3, "window": 4, "guesses": 4} | knobs
    return ready(Ouroboros(**knobs), draft, eos=eos)


def plain_ouroboros(text, n, draft_says, target_says, first_level, pool, knobs, end):
    """Restate the published code's steps: drafts, phrases and committed tokens."""
    gamma, length = knobs["gamma"], knobs["ngram"] - 1
    ahead = PlainLookahead(draft_says, first_level, knobs["ngram"], knobs["guesses"], pool)
    steps, last = [], len(text) + n
    while len(text) < last and end not in text[-1:]:
        draft = []
        while len(draft) < gamma and end not in draft:
            new = ahead.new_tokens(text + draft)
            ahead.move(text + draft)
            draft += new[: new.index(end) + 1] if end in new else new
        draft = draft[:gamma]
        phrases = pool.get(draft[-1], [])[-knobs["topk"] :]
        choices = [target_says(text + draft[:i]) for i in range(len(draft) + 1)]
        right = 0
        while right < len(draft) and draft[right] == choices[right]:
            right += 1
        new = choices[: right + 1]
        if right < len(draft):
            for i in range(right, len(draft)):
                phrase = choices[i + 1 : i + 1 + length]
                goes_on = draft[i + 1 : i + length] == phrase[:-1]
                if len(phrase) == length and goes_on:
                    ahead.insert(draft[i], tuple(phrase))
        elif phrases:
            corrected, best = [], [choices[-1]]
            for phrase in phrases:
                corrections = [target_says(text + draft + list(phrase[:i])) for i in range(length)]
                corrected.append(tuple(corrections))
                same = 0
                while same < length - 1 and phrase[same] == corrections[same]:
                    same += 1
                if same + 1 > len(best):
                    best = corrections[: same + 1]
            pool[draft[-1]][-len(phrases) :] = corrected
            new = draft + best
        new = new[: last - len(text)]
        if end in new:
            new = new[: new.index(end) + 1]
        steps.append((draft, phrases, new))
        text = text + new
    return steps


PUBLISHED = [
    {"gamma": 4, "ngram": 7, "window": 8, "guesses": 8, "topk": 3},
    {"gamma": 4, "ngram": 6, "window": 5, "guesses": 5, "topk": 3},
    {"gamma": 6, "ngram": 5, "window": 6, "guesses": 6, "topk": 3},
    {"gamma": 3, "ngram": 4, "window": 3, "guesses": 3, "topk": 2},
    {"gamma": 2, "ngram": 3, "window": 2, "guesses": 4, "topk": 1},
]


@pytest.mark.parametrize("knobs", PUBLISHED)
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_the_published_code(knobs, seed):
    """For two turns, the second with a warm pool and in half of them an end token."""
    vocab_size = (6, 12, 8, 16)[seed]
    target, draft = pair(10 * seed, noise=0.3 + 0.2 * seed, vocab_size=vocab_size)
    drafter = ouroboros(draft, **knobs)
    n, end = 80, None
    for _ in range(2):
        eos = frozenset() if end is None else frozenset({end})
        drafter._ends = np.array(sorted(eos), dtype=np.int64)
        pool = {t: [*map(tuple, drafter._pool.after(t).tolist())] for t in range(vocab_size)}
        taken = record_steps(drafter)
        result = turn(target, drafter, n=n, eos=eos)
        text = [*PROMPT.tolist(), result.output_ids[0]]
        first_level = taken[0][2]
        expected = plain_ouroboros(
            text, n - 1, says(draft), says(target), first_level, pool, knobs, end
        )
        assert result.committed_per_step == [len(new) for _, _, new in expected]
        assert result.output_ids[1:] == [token for _, _, new in expected for token in new]
        left = n - 1
        for (chain, phrases, _), (plain_chain, plain_phrases, new) in zip(
            taken, expected, strict=True
        ):
            if left > knobs["gamma"] + 1:  # shorter where no more can be committed
                assert chain == plain_chain
                assert phrases == [list(phrase) for phrase in reversed(plain_phrases)]
            left -= len(new)
        if seed % 2:  # the token that the answer says last for the first time
            end = max(result.output_ids, key=result.output_ids.index)


def says(model):
    return lambda text: int(model.table[text[-2], text[-1]].argmax())


def record_steps(drafter):
    """Record draft, phrases and the window's first level at every step."""
    taken, length = [], drafter.ngram - 1

    def propose(state):
        first = drafter._window._grid[0, 1:].tolist()
        tree = Ouroboros.propose(drafter, state)
        drafted = tree.sources == 0 if len(tree) else np.empty(0, dtype=bool)
        tokens = tree.tokens[len(drafted) and drafted.sum() :].reshape(-1, length).tolist()
        taken.append((tree.tokens[drafted].tolist(), tokens, first))
        return tree

    drafter.propose = propose
    return taken


def test_a_warm_pool_saves_passes():
    target, draft = pair(noise=0.3)
    drafter = ouroboros(draft, gamma=4, ngram=4)
    drafter.reset()
    cold = turn(target, drafter)
    warm = turn(target, drafter)
    drafter.reset()
    again = turn(target, drafter)
    assert cold.committed_per_step == again.committed_per_step
    assert cold.drafter == again.drafter
    assert warm.drafter["draft_forwards"] < cold.drafter["draft_forwards"]
    assert warm.drafter["phrase_tokens"] > 0


@pytest.mark.parametrize("correct", [False, True])
def test_phrases_after_a_rejected_draft_stay_by_default(correct):
    _, draft = pair()
    drafter = ouroboros(draft, gamma=2, ngram=3, topk=1, correct_rejected=correct)

    def write(_):
        yield from ()
        return np.array([5, 6])

    drafter._write = write
    drafter._pool.insert(np.array([[6, 4, 5]]))
    state = DecodeState(PROMPT, 20)
    state.commit(np.array([2]))
    drafter.begin(state)
    tree = drafter.propose(state)
    state.commit(np.array([7]))
    choices = np.array([7, 0, 2, 3, 1])  # not 5; after it 0, 2, then 3 and 1 along the phrase
    none = np.empty(0, dtype=np.int64)
    drafter.observe(state, StepOutcome(tree, none, state.tokens[-1:], choices))
    assert drafter._pool.after(6).tolist() == ([[2, 3]] if correct else [[4, 5]])


def test_lost_tokens_are_committed_by_the_knobs():
    """With a perfect draft model: the draft's length, and the tokens of a step."""
    target, draft = pair()
    knobs = {"gamma": 2, "ngram": 4, "window": 6, "guesses": 6}

    def longest(**switches):
        drafter = ouroboros(draft, **knobs, **switches)
        taken = record_steps(drafter)
        result = turn(target, drafter, n=120)
        return max(len(chain) for chain, _, _ in taken), max(result.committed_per_step)

    assert longest() == (2, 5)  # the draft, and N - 1 tokens of a phrase
    assert longest(lost_bonus=False) == (2, 6)
    assert longest(cut_draft=False)[0] == 4  # one token, then N - 1 at once
    assert longest(cut_draft=False, lost_bonus=False)[0] == 5


def test_replaced_phrases_keep_their_places_and_may_repeat():
    pool = NgramPool(10, 2, 4)
    pool.insert(np.array([[7, 1, 1], [7, 2, 2], [7, 3, 3], [7, 4, 4], [6, 1, 1]]))
    pool.replace(7, np.array([[8, 8], [9, 9]]))
    assert pool.after(7).tolist() == [[1, 1], [2, 2], [8, 8], [9, 9]]
    pool.replace(7, np.array([[1, 1], [9, 9]]))
    assert pool.after(7).tolist() == [[1, 1], [2, 2], [1, 1], [9, 9]]
    pool.insert(np.array([[7, 1, 1]]))  # the older of the two moves up
    assert pool.after(7).tolist() == [[2, 2], [1, 1], [9, 9], [1, 1]]
    assert pool.after(6).tolist() == [[1, 1]]
