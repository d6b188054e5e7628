"""The benches of the engine compare what they say, on a model small enough for a test."""

import numpy as np
import pytest
import torch

from scripts.bench import engine, others
from specbench.decoding.structs import DraftTree
from specbench.models.target import Target
from tests.conftest import tiny_model


@pytest.fixture
def target(everything_packed):
    model = tiny_model("llama", dtype=torch.float32, vocab_size=1024)
    return Target(model, max_len=300, max_nodes=8, packed_bytes=1 << 20, one_call=False)


def test_the_best_of_the_libraries_is_the_engines_own_choice_without_panels(target):
    layers = engine.Layers(target.model)
    plan = layers.plan_libraries()
    assert plan.keys() == target.packed_weights["plan"].keys()
    assert "panels" not in {kind for kernels in plan.values() for kind in kernels.values()}
    target.prefill(np.arange(9))
    tree = DraftTree.chain(np.arange(3))
    wanted = target.forward(3, tree).logits
    before = [linear.by_rows for linear in layers._products]
    with layers.by_libraries():
        now = [linear.by_rows for linear in layers._products]
        torch.testing.assert_close(target.forward(3, tree).logits, wanted, atol=1e-3, rtol=0)
    assert all(a is not b for a, b in zip(before, now, strict=True))
    assert [linear.by_rows for linear in layers._products] == before


@pytest.mark.parametrize("calls", [False, True])
def test_a_pass_without_arithmetic_may_still_call_each_product(calls, target, monkeypatch):
    layers = engine.Layers(target.model)
    target.prefill(np.arange(9))
    asked = []
    (name,) = {kind for linear in layers._products for kind in linear.kernels.values()}
    real = engine.KERNELS[name]

    def counted(x, *rest):
        asked.append(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setitem(engine.KERNELS, name, counted)
    for linear in layers._products:
        linear.by_rows = [(counted if k is real else k, p) for k, p in linear.by_rows]
    with layers.without_arithmetic(calls):
        target.forward(3, DraftTree.empty())
    assert asked == [(1, engine.SMALL)] * len(layers._products) * calls


def test_the_products_calls_are_told_apart(target):
    found = engine.outside_arithmetic(target, 2, rounds=1)
    assert {*found} == {"rows", "whole_ms", "left_ms", "around_ms", "calls_ms", "share"}
    assert found["left_ms"] > 0 and found["share"] > 0


def test_other_engines_are_compared_prompt_by_prompt(monkeypatch):
    """Two that take twice and half the time of the first, on a clock that they move themselves."""
    now, asked = [0.0], []
    monkeypatch.setattr(others.time, "perf_counter", lambda: now[0])

    def engine_that_takes(name, seconds, ids):
        def answer(prompt):
            asked.append((name, tuple(prompt)))
            now[0] += seconds * len(prompt)
            return ids

        return answer

    answers = {
        "ours": engine_that_takes("ours", 1.0, [1, 2]),
        "slow": engine_that_takes("slow", 2.0, [1, 2]),
        "fast": engine_that_takes("fast", 0.5, [1, 3]),
    }
    found = others.in_turns(answers, [[5], [5, 6], [5, 6, 7]], rounds=2)
    assert found["ours"] == {"tokens_per_s": 1.0, "ratio": 1.0, "equal": "6/6"}
    assert found["slow"]["ratio"] == pytest.approx(0.5) and found["slow"]["equal"] == "6/6"
    assert found["fast"]["ratio"] == pytest.approx(2.0) and found["fast"]["equal"] == "0/6"
    first = [name for name, _ in asked[::3]]
    assert set(first) == set(answers) and len(asked) == 3 * 7
