"""Both kinds of passes take turns, so that a busy moment hits both."""

import numpy as np
import pytest

from scripts.bench import passes, undrafted


def test_pairs_alternate_and_the_first_two_warm_up():
    order = []
    calls = {"float32": lambda: order.append("new"), passes.LAYERS: lambda: order.append("old")}
    found = passes.in_turns(calls, 3)
    assert order == ["old", "new", "new", "old"] * 2 + ["old", "new"]
    assert found["float32"]["ratio"] > 0 and found[passes.LAYERS]["ratio"] == 1
    assert all(line["fastest_ms"] <= line["ms"] for line in found.values())


def test_a_ratio_of_steps_is_of_neighbours_in_time():
    plain = np.linspace(0.02, 0.04, 64)  # the machine slows down: the ratio does not see it
    found = undrafted.against(plain * 1.01 + 0.001 * (np.arange(64) == 5), plain)
    assert found["ratio"] == pytest.approx(1.01)
    assert found["ratio_ci"] == pytest.approx([1.01, 1.01])
