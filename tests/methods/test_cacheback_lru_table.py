import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.cacheback.table import LruTable
from tests.methods.cacheback_reference import PlainTable


def filled(tokens, *shape):
    table = LruTable(*shape)
    table.insert_windows(np.array(tokens, dtype=np.int64), 0, len(tokens))
    return table


def test_an_empty_table_of_the_papers_capacity_is_small_and_grows_with_its_content():
    table = LruTable(1, 3, 2**20, 128)
    assert sum(array.nbytes for array in table.arrays) < 200_000
    tokens = np.random.default_rng(0).integers(0, 50_000, 20_000)
    assert table.insert_windows(tokens, 0, len(tokens))
    assert table.n_followers == len(tokens) - 3
    assert sum(array.nbytes for array in table.arrays) < 4_000_000


def test_memory_is_bounded_by_the_capacities():
    table = LruTable(1, 1, 3, 2)
    tokens = np.random.default_rng(0).integers(0, 9, 5_000)
    table.insert_windows(tokens, 0, len(tokens))
    assert len(table.arrays.leaders) == 3
    assert len(table.arrays.followers) == 6


def test_clearing_forgets_everything():
    table = filled([1, 2, 1, 3], 1, 1, 9, 9)
    table.clear()
    assert table.snapshot() == []
    table.insert_windows(np.array([5, 6]), 0, 2)
    assert table.snapshot() == [((5,), [(6,)])]


@pytest.mark.parametrize("alphabet", [3, 40, 4000])
def test_growth_keeps_content_and_order(alphabet):
    tokens = np.random.default_rng(alphabet).integers(0, alphabet, 6_000)
    shape = (2, 2, 5_000, 700)
    plain = PlainTable(*shape)
    plain.insert_windows(tokens.tolist(), 0, len(tokens))
    assert filled(tokens, *shape).snapshot() == plain.snapshot()


@given(
    tokens=st.lists(st.integers(0, 5), max_size=80),
    leader_len=st.integers(1, 3),
    follower_len=st.integers(1, 4),
    leader_capacity=st.integers(1, 6),
    follower_capacity=st.integers(1, 4),
    step=st.integers(1, 7),
)
def test_equals_ordered_dictionaries(
    tokens, leader_len, follower_len, leader_capacity, follower_capacity, step
):
    shape = (leader_len, follower_len, leader_capacity, follower_capacity)
    table, plain = LruTable(*shape), PlainTable(*shape)
    array = np.array(tokens, dtype=np.int64)
    for begin in range(0, len(tokens), step):
        end = min(len(tokens), begin + step)
        table.insert_windows(array, begin, end)
        plain.insert_windows(tokens, begin, end)
        assert table.snapshot() == plain.snapshot()
    assert len(table) == len(plain.entries)
    assert table.n_followers == sum(map(len, plain.entries.values()))
