"""What is compared takes turns, so that a busy moment hits all; a command is measured whole."""

import subprocess

import numpy as np
import pytest
import torch

from scripts.bench import engine, passes, start, steps, undrafted
from specbench.decoding.drafter import Drafter
from specbench.models.target import Target
from tests.conftest import tiny_model


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


def test_the_parts_of_steps_are_taken_of_the_same_answer():
    model = tiny_model("llama", dtype=torch.float64)
    drafts = engine.Scripted(name="rows")
    drafts.tree = engine.random_tree(3, 64, 0)
    drafters = {("one call", "ar"): Drafter(name="ar"), ("layers", "rows"): drafts}
    targets = {key: Target(model, max_len=64, max_nodes=4) for key in drafters}
    found = steps.one_answer(targets, drafters, np.arange(5), 9, frozenset())
    assert len(found["one call", "ar"]) == 8 >= len(found["layers", "rows"]) > 0
    rows = [row for each in found.values() for row in each]
    assert all(len(row) == len(steps.PARTS) and min(row) > 0 for row in rows)


def test_a_command_is_measured_with_its_children():
    inner = "x = bytearray(200 << 20); sum(range(3_000_000))"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    found = start.timed(["-c", outer])
    assert found["peak_mb"] > 200 and found["cpu_s"] > 0.05 and found["wall_s"] > 0.05
    with pytest.raises(subprocess.CalledProcessError):
        start.timed(["-c", "raise SystemExit(2)"])
