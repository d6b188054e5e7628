import numpy as np
import pytest

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


@pytest.mark.parametrize("alphabet", [3, 40, 4000])
def test_growth_keeps_content_and_order(alphabet):
    tokens = np.random.default_rng(alphabet).integers(0, alphabet, 6_000)
    shape = (2, 2, 5_000, 700)
    plain = PlainTable(*shape)
    plain.insert_windows(tokens.tolist(), 0, len(tokens))
    assert filled(tokens, *shape).snapshot() == plain.snapshot()
