"""Both kinds of passes take turns, so that a busy moment hits both."""

from scripts.bench import passes


def test_pairs_alternate_and_the_first_two_warm_up():
    order = []
    found = passes.pair(lambda: order.append("new"), lambda: order.append("old"), 3)
    assert order == ["old", "new", "new", "old"] * 2 + ["old", "new"]
    assert found["ratio"] > 0
    assert found["one_call_fastest_ms"] <= found["one_call_ms"]
    assert found["layers_fastest_ms"] <= found["layers_ms"]
