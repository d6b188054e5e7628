from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.sam.automaton import START, SuffixAutomaton
from methods.sam.static_automaton import (
    DocumentAutomaton,
    StaticAutomaton,
    build,
    find_target,
    follow,
    grow_best_first,
    text_after,
)
from scripts import build_artifact as script
from specbench.artifacts import corpora
from specbench.artifacts.corpora import Corpus, tokenized
from tests.contract.driver import VOCABULARY, WordTokenizer
from tests.methods.suffix_reference import PlainCorpus, earlier_suffix

texts = st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v), max_size=40))
documents = st.lists(texts, max_size=6)


def array(tokens):
    return np.array(tokens, dtype=np.int64)


def frozen(documents):
    built = DocumentAutomaton()
    for document in documents:
        built.add(document)
    return built.finish(0)


# -- growing ---------------------------------------------------------------------------------------


@given(text=texts, room=st.integers(0, 9))
def test_every_prefix_repeats_what_a_search_finds(text, room):
    automaton = SuffixAutomaton()
    for n in range(1, len(text) + 1):
        automaton.extend(array(text), n - 1, n)
        assert automaton.repeated_suffix(n, room) == earlier_suffix(text[:n], room)


def test_growing_keeps_the_content(rng):
    text = rng.integers(0, 3, 5000)
    automaton = SuffixAutomaton()
    automaton.extend(text, 0, 5000)
    tail = text[-40:].tolist()
    length, after = automaton.repeated_suffix(5000)
    assert text[after - length : after].tolist() == tail[len(tail) - length :]
    for longer in range(after, 5000):
        assert text[longer - length - 1 : longer].tolist() != tail[len(tail) - length - 1 :]


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=200), most=st.integers(2, 40))
def test_a_text_beyond_the_cap_repeats_within_its_newest_half(text, most):
    automaton = SuffixAutomaton(most)
    for n in range(1, len(text) + 1):
        automaton.extend(array(text), n - 1, n)
        assert len(automaton) <= most
        held = text[n - len(automaton) : n]
        assert len(held) >= min(n, most // 2)
        length, after = earlier_suffix(held)
        assert automaton.repeated_suffix(n) == (length, after + n - len(held))


def test_memory_is_capped_under_many_insertions():
    n_insertions, most = 100_000, 4096
    text = np.random.default_rng(1).integers(0, 50, n_insertions)
    automaton = SuffixAutomaton(most)
    automaton.extend(text, 0, n_insertions)
    assert most // 2 <= len(automaton) <= most
    assert sum(array.nbytes for array in automaton.arrays) <= 124 * most + 200


# -- frozen ----------------------------------------------------------------------------------------


def test_a_state_with_many_transitions_finds_all_of_them(rng):
    followers = rng.permutation(300)
    automaton = frozen([[500, int(token)] for token in followers] + [[500, 7]] * 2)
    state = find_target(automaton.arrays, START, 500)
    for token in range(300):
        assert find_target(automaton.arrays, state, token) >= 0
    assert find_target(automaton.arrays, state, 300) == -1
    # Only the eight most frequent are drafted: 7, then the smallest.
    first = automaton.arrays.offsets[state]
    assert automaton.arrays.tokens[first : first + 8].tolist() == [7, *range(7)]


@given(documents=documents, text=texts)
def test_the_cursor_is_at_the_longest_suffix_in_the_corpus(documents, text):
    automaton, plain = frozen(documents), PlainCorpus([list(chain.from_iterable(documents))])
    cursor = np.zeros(2, dtype=np.int64)
    for n in range(1, len(text) + 1):
        follow(automaton.arrays, cursor, array(text), n - 1, n)
        suffix = plain.longest_suffix(text[:n])
        assert cursor[1] == len(suffix)
        if suffix:
            assert automaton.arrays.counts[cursor[0]] == plain.counts[suffix]


@given(
    documents=st.lists(texts.filter(bool), min_size=1, max_size=6),
    text=texts,
    budget=st.integers(1, 12),
    per_depth=st.integers(1, 8),
)
def test_drafts_are_those_of_counted_substrings(documents, text, budget, per_depth):
    automaton, plain = frozen(documents), PlainCorpus([list(chain.from_iterable(documents))])
    cursor = np.zeros(2, dtype=np.int64)
    follow(automaton.arrays, cursor, array(text), 0, len(text))
    context = plain.longest_suffix(text)
    nodes = grow_best_first(automaton.arrays, cursor[0], budget, per_depth)
    assert tuple(nodes.tolist()) == plain.best_first(context, budget, per_depth)
    if context:
        expected = plain.text_after(context, budget)
        assert text_after(automaton.arrays, cursor[0], budget).tolist() == expected


def test_every_id_of_the_vocabulary_is_known():
    built = DocumentAutomaton()
    built.add([1, 2, 3])
    automaton = built.finish(20)
    for token in range(20):
        assert find_target(automaton.arrays, START, token) > 0
    assert automaton.arrays.counts[find_target(automaton.arrays, START, 2)] == 2


# -- files -----------------------------------------------------------------------------------------


# -- building --------------------------------------------------------------------------------------


COMMAND = ("static_automaton", "--model", "vicuna7b")


class WithEnd(WordTokenizer):
    eos_token_id = 0


def built(tmp_path, monkeypatch, corpus):
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "words")
    build(WithEnd(), tmp_path / "sam.bin", corpus=corpus)
    return StaticAutomaton.open(tmp_path / "sam.bin", "words")


def test_texts_get_an_end_token(tmp_path, monkeypatch):
    corpus = Corpus({"name": "toy"}, tokenized(["a b", "a"], WithEnd()))
    automaton = built(tmp_path, monkeypatch, corpus)
    assert (automaton.header["n_documents"], automaton.header["n_tokens"]) == (2, 5)
    # Twice as a text's end; once for each id of the vocabulary, itself included.
    state = find_target(automaton.arrays, START, 0)
    assert automaton.arrays.counts[state] == 2 + VOCABULARY
    assert automaton.header["corpus"] == corpus.described()


def test_ids_get_the_end_token_that_they_lack(tmp_path, monkeypatch):
    corpus = Corpus({"name": "toy"}, [[5, 6, 0], [5, 7]])
    automaton = built(tmp_path, monkeypatch, corpus)
    assert automaton.header["n_tokens"] == 6
    assert automaton.arrays.text[:8].tolist() == [5, 6, 0, 5, 7, 0, 0, 1]


@pytest.fixture
def tokenizer(monkeypatch, tmp_path):
    word_tokenizer = WordTokenizer()
    monkeypatch.setattr("specbench.models.loading.load_tokenizer", lambda cfg: word_tokenizer)
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "words")
    return word_tokenizer


def test_the_script_builds_from_texts(tokenizer, tmp_path, capsys):
    source, out = tmp_path / "corpus.txt", tmp_path / "sam.bin"
    source.write_text("the cat sat\n\nthe cat slept\n", encoding="utf-8")
    assert script.main([*COMMAND, "--texts", str(source), "--out", str(out)]) == 0
    assert "6 tokens in 2 documents of files" in capsys.readouterr().out
    opened = StaticAutomaton.open(out, "words")
    ids = tokenizer(["the cat"])["input_ids"][0]
    state = find_target(opened.arrays, find_target(opened.arrays, START, ids[0]), ids[1])
    assert opened.arrays.counts[state] == 2


def test_the_script_builds_from_recorded_answers_once_each(tokenizer, tmp_path, monkeypatch):
    turns = [(array([1, 2]), array([3, 4])), (array([5]), array([6]))]
    monkeypatch.setattr(corpora, "recorded_turns", lambda path, tokenizer_hash: iter(turns))
    out = tmp_path / "sam.bin"
    runs = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert script.main([*COMMAND, "--outputs", *runs, "--out", str(out)]) == 0
    opened = StaticAutomaton.open(out, "words")
    assert opened.header["n_documents"] == 2
    assert opened.header["n_tokens"] == 6
    # An id of the vocabulary has one occurrence of its own.
    assert opened.arrays.counts[START] == 6 + VOCABULARY
