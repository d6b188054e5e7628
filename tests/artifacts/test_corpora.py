import itertools
import sys
import types

import pytest

from specbench.artifacts import corpora, documentation
from specbench.artifacts.corpora import Corpus, tokenized
from specbench.errors import ConfigurationError
from tests.contract.driver import WordTokenizer


def test_documents_are_sampled_by_share_and_seed():
    texts = [str(i) for i in range(10_000)]
    first = list(corpora.sample_documents(texts, 0.1, 0))
    assert abs(len(first) - 1000) < 120
    assert first == list(corpora.sample_documents(texts, 0.1, 0))
    assert list(corpora.sample_documents(texts, 1.0, 0)) == texts


def test_a_corpus_stops_near_max_tokens_and_hashes_what_was_read():
    endless = Corpus({}, tokenized(itertools.repeat("a b c"), WordTokenizer()), 5000)
    assert sum(map(len, endless)) == 5001
    whole = Corpus({}, tokenized(["a b c"] * 1667, WordTokenizer()))
    assert len(list(whole)) == 1667
    assert endless.described() == whole.described()


def test_prose_is_told_from_code():
    text = """
    This function returns the number of words in the sentence that was given to it,
    and nothing else.

    >>> count(x=3, y=[1, 2, 3])  # 0x3f  == result_of["the_call"] + 17

    Short one.
    """
    assert list(documentation.paragraphs(text)) == [
        "This function returns the number of words in the sentence that was given to it, and "
        "nothing else."
    ]


def test_blank_lines_separate_documents_and_a_byte_order_mark_is_no_part_of_one(tmp_path):
    path = tmp_path / "corpus.txt"
    text = "\ufeffthe cat sat on the mat\nand the cat slept\n\n\na dog came\n\nthe cat sat still\n"
    path.write_text(text, encoding="utf-8")
    assert list(corpora.file_texts([path])) == [
        "the cat sat on the mat\nand the cat slept\n",
        "a dog came\n",
        "the cat sat still\n",
    ]


def test_a_text_without_blank_lines_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "PIECE", 10)
    path = tmp_path / "long.txt"
    path.write_text("one two\n" * 50, encoding="utf-8")
    pieces = list(corpora.file_texts([path]))
    assert "".join(pieces) == path.read_text(encoding="utf-8")
    assert max(map(len, pieces)) <= 16


@pytest.mark.parametrize(
    ("name", "row", "texts"),
    [
        ("openwebtext", {"text": "x"}, ["x"]),
        ("ultrachat", {"data": ["x", "y"]}, ["x", "y"]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}]}, ["x"]),
    ],
)
def test_every_message_of_a_dialogue_is_a_text(monkeypatch, name, row, texts):
    hub = types.SimpleNamespace(load_dataset=lambda *_, **__: [row, row])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(corpora.hub_texts(name, None)) == 2 * texts
    with pytest.raises(ConfigurationError, match="ultrachat"):
        list(corpora.hub_texts("ultrachatt", None))
