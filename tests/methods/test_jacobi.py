import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.jacobi import Jacobi
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from tests.conftest import VOCAB
from tests.methods.toy_turns import continued, markov_rule, play


def jacobi(vocab_size=VOCAB, seed=0, **knobs):
    drafter = Jacobi(**knobs)
    drafter.setup(DraftContext(vocab_size=vocab_size, eos_ids=frozenset(), seed=seed))
    drafter.reset()
    return drafter


def committed(*tokens):
    """Make a state whose prompt is all but the last token."""
    state = DecodeState(np.array(tokens[:-1], dtype=np.int64), 50)
    state.commit(np.array(tokens[-1:], dtype=np.int64))
    return state


@pytest.mark.parametrize("fill", ["prompt", "vocabulary"])
def test_new_guesses_come_from_where_fill_says(fill):
    drafter, state = jacobi(block_len=200, fill=fill), committed(3, 5, 3, 9)
    drafter.begin(state)
    drawn = set(drafter.propose(state).tokens.tolist())
    assert drawn == {3, 5} if fill == "prompt" else len(drawn) > VOCAB // 2


def test_a_tree_that_is_not_its_own_moves_the_old_guesses_up():
    drafter, state = jacobi(block_len=4), committed(3, 4, 5, 6, 9)
    drafter.begin(state)
    before = drafter.propose(state).tokens.tolist()
    cut = DraftTree.chain(np.array(before[:2]))
    state.commit(np.array([before[0], 1]))
    drafter.observe(
        state, StepOutcome(cut, np.array([0]), np.array([before[0], 1]), np.array([7, 8, 9]))
    )
    assert drafter.propose(state).tokens.tolist()[:2] == before[2:]
    drafter.observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, NO_TOKENS, None))
    assert drafter.propose(state).tokens.tolist()[:2] == before[2:]


def plain_blocks(prompt, n, rule, block):
    """Run the published iteration; return for each block its passes and tokens (one after it, too).

    A pass recomputes the whole block from the one before; a pass that changes nothing ends it.
    """
    text, blocks = [*prompt, rule(list(prompt))], []
    while len(text) - len(prompt) < n:
        y, passes = [text[-1]] * block, 0
        while True:
            fresh = [rule(text + y[:i]) for i in range(block + 1)]
            passes, same, y = passes + 1, fresh[:block] == y, fresh[:block]
            if same or passes == block + 1:
                break
        blocks.append((passes, fresh))
        text += fresh
    return blocks


@given(seed=st.integers(0, 10**6), block=st.integers(1, 9), n=st.integers(1, 60))
def test_passes_of_every_block_are_those_of_the_published_iteration(seed, block, n):
    rule, prompt = markov_rule(seed, order=1 + seed % 2), [1, 2, 3]
    _, steps = play(jacobi(6, block_len=block, fill="last"), prompt, n, rule)
    sizes = iter([tokens for tokens, _ in steps])
    blocks = plain_blocks(prompt, n, rule, block)
    for passes, tokens in blocks:
        taken = [token for _ in range(passes) for token in next(sizes, [])]
        if tokens is blocks[-1][1]:  # cut at the limit
            assert taken == tokens[: len(taken)] and len(taken) <= block + 1
        else:
            assert taken == tokens
    assert next(sizes, None) is None


def plain_jacobi(prompt, n, rule, block):
    """The iteration on a moving block, with the last token as the new guess."""
    text = list(prompt)
    text.append(rule(text))
    y, steps = [text[-1]] * block, []
    while len(text) - len(prompt) < n:
        fresh = [rule(text + y[:i]) for i in range(block + 1)]
        accepted = 0
        while accepted < block and y[accepted] == fresh[accepted]:
            accepted += 1
        new = fresh[: accepted + 1][: n - (len(text) - len(prompt))]
        text += new
        y = fresh[accepted + 1 :]
        y += [y[-1] if y else text[-1]] * (block - len(y))
        steps.append(new)
    return steps


@given(seed=st.integers(0, 10**6), block=st.integers(1, 9), n=st.integers(1, 40))
def test_steps_of_a_moving_block_are_those_of_the_plain_iteration(seed, block, n):
    rule, prompt = markov_rule(seed), [1, 2, 3]
    drafter = jacobi(6, block_len=block, block="moving", fill="last")
    output, steps = play(drafter, prompt, n, rule)
    assert output == continued(rule, prompt, n)
    assert [tokens for tokens, _ in steps] == plain_jacobi(prompt, n, rule, block)


def test_the_same_seed_and_prompt_draw_the_same_guesses_after_other_cases():
    drafter = jacobi(6, fill="vocabulary")
    first = play(drafter, [1, 2, 3], 20, markov_rule(0))[1]
    play(drafter, [5, 4], 30, markov_rule(1))
    again = play(drafter, [1, 2, 3], 20, markov_rule(0))[1]
    assert [tree.tokens.tolist() for _, tree in first] == [t.tokens.tolist() for _, t in again]
    other = play(jacobi(6, seed=1, fill="vocabulary"), [1, 2, 3], 20, markov_rule(0))[1]
    assert first[0][1].tokens.tolist() != other[0][1].tokens.tolist()
