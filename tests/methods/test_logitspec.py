import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.logitspec import LogitSpec
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, StepOutcome
from tests.conftest import VOCAB, engine
from tests.contract import driver
from tests.decoding.table_models import TableTarget, table


def ready(vocab_size=VOCAB, **knobs):
    drafter = LogitSpec(**knobs)
    drafter.setup(DraftContext(vocab_size, frozenset()))
    drafter.reset()
    return drafter


def logits_of(ranking, vocab_size):
    row = torch.full((1, vocab_size), -50.0)
    row[0, list(ranking)] = torch.arange(len(ranking), 0, -1).float()
    return row


def plain_draft(text, ranking, max_ngram, num_tokens, capacity, caps):
    """The rule in sentences: the branches below the last token of ``text``."""
    *before, root = text

    def continuation(key):
        for n in range(min(max_ngram, len(key)), 0, -1):
            ends = [e for e in range(n, len(before)) if before[e - n : e] == key[-n:]]
            full = [e for e in ends if e + num_tokens <= len(before)]
            if ends:
                at = full[-1] if full else ends[0]
                return before[at : at + num_tokens]
        return []

    remaining = capacity - 1
    branches = [continuation(text)[:remaining]]
    for rank, token in enumerate(ranking):
        remaining -= len(branches[-1])
        if token == root:
            branches.append([])
        else:
            cap = caps[0] if rank <= 8 else caps[1] if rank <= 32 else caps[2]
            branches.append([token, *continuation([*text, token])][: min(cap, remaining)])
    return branches


@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    steps=st.lists(st.integers(1, 7), max_size=6),
    seed=st.integers(0, 99),
    max_ngram=st.integers(1, 4),
    num_tokens=st.integers(1, 9),
    capacity=st.integers(2, 30),
    caps=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_drafts_are_those_of_the_plain_rule(
    text, steps, seed, max_ngram, num_tokens, capacity, caps
):
    random = np.random.default_rng(seed)
    knobs = {"max_ngram": max_ngram, "num_tokens": num_tokens, "capacity": capacity, "caps": caps}
    drafter = ready(40, **knobs)
    state = DecodeState(np.array(text[:-1], dtype=np.int64), 50)
    state.commit(np.array(text[-1:], dtype=np.int64))
    ranking = random.permutation(40)
    drafter.observe_prompt(state.tokens[:-1], logits_of(ranking, 40))
    drafter.begin(state)
    for count in [*steps, 1]:
        tree = drafter.propose(state)
        paths = plain_draft(state.tokens.tolist(), ranking.tolist(), **knobs)
        expected = DraftTree.from_paths(paths)
        assert tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        # A step that accepts the last nodes of a chain of its own: its last row chose the root.
        chain = DraftTree.chain(random.integers(0, 4, count))
        committed = np.concatenate([chain.tokens[: count - 1], random.integers(0, 4, 1)])
        ranking = random.permutation(40)
        rows = [logits_of(random.permutation(40), 40) for _ in range(count + 1)]
        rows[count - 1] = logits_of(ranking, 40)
        state.commit(committed)
        drafter.observe(
            state,
            StepOutcome(chain, np.arange(count - 1), committed, None, logits=torch.cat(rows)),
        )


@pytest.mark.parametrize("knobs", [{}, {"capacity": 9, "num_tokens": 3}])
@pytest.mark.parametrize("seed", range(2))
def test_greedy_output_is_that_of_plain_decoding_and_comes_sooner(seed, knobs):
    loop = engine(TableTarget(table(seed, driver.VOCABULARY, 3.0)))
    prompt = driver.toy_text(seed, 30)
    plain = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=60)
    drafter = ready(driver.VOCABULARY, **knobs)
    union = Union(drafters=[ready(driver.VOCABULARY, **knobs), LogitSpec(max_ngram=1)])
    union.setup(DraftContext(driver.VOCABULARY, frozenset()))
    for method in (drafter, union):
        result = loop.decode(prompt, method, max_new_tokens=60)
        assert result.output_ids == plain.output_ids
        assert result.n_target_passes < plain.n_target_passes
        assert result.drafted_per_step[0] > 1  # from the logits of the prompt's last row
