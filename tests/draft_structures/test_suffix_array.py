import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.draft_structures import suffix_array as array
from specbench.draft_structures.suffix_array import (
    SEPARATOR,
    build_suffix_array,
    find_range,
    sort_by_doubling,
)

SORTERS = [
    sort_by_doubling,
    pytest.param(
        build_suffix_array,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("pydivsufsort") is None, reason="needs the extra `rest`"
        ),
    ),
]


def plain(text):
    return sorted(range(len(text)), key=lambda i: text[i:])


def tokens_of(text):
    return np.array(text, dtype=np.int32)


@pytest.mark.parametrize("sort", SORTERS)
def test_banana(sort):
    # b = 2, a = 1, n = 3: a, ana, anana, banana, na, nana.
    assert sort(tokens_of([2, 1, 3, 1, 3, 1])).tolist() == [5, 3, 1, 0, 4, 2]


@pytest.mark.parametrize("sort", SORTERS)
@given(
    text=st.one_of(
        st.lists(st.integers(SEPARATOR, 2), min_size=2, max_size=60),
        st.lists(st.sampled_from([SEPARATOR, 0, 255, 256, 65_536, 150_000]), min_size=2),
    )
)
def test_equals_sorting_the_suffixes(sort, text):
    assert sort(tokens_of(text)).tolist() == plain(text)


@pytest.mark.parametrize("n", [0, 1])
def test_texts_too_short_to_sort(n):
    assert build_suffix_array(np.zeros(n, dtype=np.int32)).tolist() == list(range(n))


def test_the_fallback_is_taken_where_the_package_is_missing(monkeypatch):
    monkeypatch.setattr(array.importlib.util, "find_spec", lambda name: None)
    called = []
    monkeypatch.setattr(array, "sort_by_doubling", lambda tokens: called.append(tokens))
    build_suffix_array(tokens_of([1, 2]))
    assert len(called) == 1


def test_repetitive_texts_sort_in_few_rounds():
    text = np.tile(tokens_of([5, 1, 5, 2]), 20_000)
    order = sort_by_doubling(text)
    rank = np.empty(len(text), dtype=np.int64)
    rank[order] = np.arange(len(text))
    # Each neighbour pair differs in its first token, or leaves it to the suffixes after it.
    left, right = order[:-1], order[1:]
    first = text[left] != text[right]
    assert (text[left] <= text[right]).all()
    behind = np.append(rank, -1)
    assert (behind[left[~first] + 1] < behind[right[~first] + 1]).all()


@given(
    text=st.lists(st.integers(SEPARATOR, 3), min_size=1, max_size=50),
    query=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_a_range_holds_exactly_the_occurrences(text, query):
    tokens = tokens_of(text)
    suffixes = build_suffix_array(tokens)
    context = np.array([9, *query], dtype=np.int64)
    first, last = find_range(tokens, suffixes, context, 1, len(query))
    expected = [i for i in range(len(text)) if text[i : i + len(query)] == query]
    assert sorted(suffixes[first:last].tolist()) == expected
