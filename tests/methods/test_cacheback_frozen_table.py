from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from methods.cacheback.frozen_table import WindowCounter, frequent_followers


def plain_table(documents, leader_len, follower_len, leader_capacity, follower_capacity):
    """Leader to followers, the most frequent first and ties by tokens, with plain counters."""
    windows = Counter()
    for document in documents:
        for i in range(len(document) - leader_len - follower_len + 1):
            window = tuple(document[i : i + leader_len + follower_len])
            windows[window[:leader_len], window[leader_len:]] += 1
    leaders = Counter()
    for (leader, _), count in windows.items():
        leaders[leader] += count
    frequent = sorted(leaders, key=lambda leader: (-leaders[leader], leader))[:leader_capacity]
    table = {}
    for leader in frequent:
        followers = [(-count, f) for (owner, f), count in windows.items() if owner == leader]
        table[leader] = [follower for _, follower in sorted(followers)][:follower_capacity]
    return table


def content(table):
    return {
        tuple(leader): table.followers(tuple(leader)) for leader in table.arrays.leaders.tolist()
    }


def counted(documents, leader_len, follower_len, capacities, vocab_size, chunk=1 << 20):
    with WindowCounter(leader_len + follower_len, vocab_size, chunk=chunk) as counter:
        for document in documents:
            counter.add(document)
        return frequent_followers(counter, leader_len, *capacities)


@given(
    documents=st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=6),
    leader_len=st.integers(1, 3),
    follower_len=st.integers(1, 5),
    capacities=st.tuples(st.integers(1, 12), st.integers(1, 5)),
    chunk=st.sampled_from([1, 7, 1000]),
    vocab_size=st.sampled_from([5, 49_152, 151_936]),
)
def test_equals_plain_counters_whatever_the_chunks_and_the_packing(
    documents, leader_len, follower_len, capacities, chunk, vocab_size
):
    table = counted(documents, leader_len, follower_len, capacities, vocab_size, chunk)
    assert content(table) == plain_table(documents, leader_len, follower_len, *capacities)


def test_windows_are_sampled_by_share_and_seed():
    def sampled(seed):
        with WindowCounter(2, 100, keep=0.25, seed=seed) as counter:
            counter.add(np.random.default_rng(0).integers(0, 100, 40_000))
            table = frequent_followers(counter, 1, 100, 100)
            return counter.n_windows, content(table)

    assert abs(sampled(1)[0] - 10_000) < 400
    assert sampled(1) == sampled(1) != sampled(2)
