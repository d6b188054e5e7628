"""SAM-Decoding step by step against its published algorithm, restated as searches in lists.

Of equally frequent continuations and of equally probable nodes the order is ours (methods/sam.py).
"""

import numpy as np
import pytest

from methods.pld import PromptLookup
from methods.sam import SuffixAutomatonDecoding
from methods.sam.static_automaton import DocumentAutomaton
from specbench.decoding.structs import DecodeState, DraftContext, StepOutcome
from tests.methods.suffix_reference import PlainCorpus, earlier_suffix

VOCABULARY, END = 6, 0
ALPHA, TOP_K, THRESHOLD = 2.0, 2, 3


def chain(tokens):
    return list(tokens), list(range(-1, len(tokens) - 1))


def published(text, corpus, rows, bias, auxiliary):
    """Tokens and parents of the draft, None where the auxiliary drafts.

    ``text`` ends with the root, whose match is looked up before it is added to the automata.
    """
    dynamic, after = earlier_suffix(text)
    context = corpus.longest_suffix(text)
    static = len(context) - bias
    if not auxiliary:
        if dynamic >= static:
            return chain(text[after:-1][: min(rows - 1, int(ALPHA * dynamic))])
        return corpus.best_first(context, min(rows - 1, int(ALPHA * static)), TOP_K)
    if max(dynamic, static) < THRESHOLD:
        return None
    if dynamic < static:
        return chain(corpus.text_after(context, rows - 1))
    # A shorter match if fewer than `rows` tokens lie between it and the root.
    _, after = earlier_suffix(text, room=rows + 1)
    return chain(text[after:-1][: rows - 1])


def steps(seed, tmp_path, *, auxiliary, bias, rows=6):
    """Pairs of our draft and the published one, over the steps of a random turn."""
    random = np.random.default_rng(seed)
    corpus = [random.integers(0, VOCABULARY, random.integers(4, 12)).tolist() for _ in range(3)]
    built = DocumentAutomaton(END)
    for document in corpus:
        built.add(document)
    path = tmp_path / f"{seed}.bin"
    built.finish(VOCABULARY).write(path, tokenizer_hash="toy", header={})
    documents = [*corpus, *([token] for token in range(VOCABULARY))]
    ended = [d if d[-1] == END else [*d, END] for d in documents]
    plain = PlainCorpus([[token for document in ended for token in document]])  # as one text
    drafter = SuffixAutomatonDecoding(
        max_predicts=rows, alpha=ALPHA, top_k=TOP_K, len_bias=bias, len_threshold=THRESHOLD,
        auxiliary=PromptLookup(num_tokens=2, dummy_token=4) if auxiliary else None,
    )  # fmt: skip
    files = {"static_automaton": path}
    drafter.setup(DraftContext(VOCABULARY, frozenset(), "toy", 512, files))
    drafter.reset()
    source = [token for document in corpus for token in document]
    # The turn quotes its corpus and itself.
    text = random.integers(0, VOCABULARY, 5).tolist()
    while len(text) < 60:
        quoted = source if random.random() < 0.5 else text
        begin, size = random.integers(0, len(quoted)), random.integers(1, 9)
        text += [*quoted[begin : begin + size], int(random.integers(0, VOCABULARY))]
    text = np.array(text[:60], dtype=np.int64)
    state = DecodeState(text[:10], 50)
    state.commit(text[10:11])
    drafter.begin(state)
    while state.length < 60:
        ours = drafter.propose(state)
        so_far = state.tokens.tolist()
        yield ours, published(so_far, plain, rows, bias, auxiliary)
        committed = text[state.length : state.length + int(random.integers(1, 4))]
        state.commit(committed)
        path_ = np.arange(0)
        drafter.observe(state, StepOutcome(ours, path_, committed, None))


@pytest.mark.parametrize(("auxiliary", "bias"), [(False, 0), (False, 1), (True, 0), (True, 2)])
def test_every_step_is_the_published_one(auxiliary, bias, tmp_path):
    compared, kinds = 0, set()
    for seed in range(12):
        for ours, expected in steps(seed, tmp_path, auxiliary=auxiliary, bias=bias):
            kinds |= set(ours.sources.tolist()) if len(ours) else set()
            compared += 1
            if expected is None:
                assert set(ours.sources.tolist()) == {2}
            else:
                assert (ours.tokens.tolist(), ours.parents.tolist()) == expected
    assert compared >= 200
    assert kinds == ({0, 1, 2} if auxiliary else {0, 1})
