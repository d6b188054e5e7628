"""Measuring a cost surface: a tiny model's weights, random ones without a hub, refusals."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from runners import cost
from runners.measure import pass_times, session
from runners.measure.pass_times import median_with_ends, pass_s, random_tree, time_rows
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError, OutputRefused
from specbench.models.graph_target import GraphTarget, StaticPass
from specbench.replay.cost_surface import CostSurface
from specbench.results import records
from tests.small_run import run_here

GRID = [
    "runner=cost",
    "runner.contexts=[4,12]",
    "runner.tree_rows=[1,3,6]",
    "runner.batch_contexts=[4]",
    "runner.batch_k=[1,3]",
    "runner.batch_w=[0,2]",
    "runner.texts=[1,2]",
    "runner.text_rows=[1,8]",
    "runner.passes=2",
]
TINY_SHAPE = [
    "model=vicuna7b",
    "model.shape=true",
    "model.dtype=float32",
    "model.device=cpu",
    "model.shape_config.hidden_size=32",
    "model.shape_config.intermediate_size=48",
    "model.shape_config.num_hidden_layers=2",
    "model.shape_config.num_attention_heads=4",
    "model.shape_config.num_key_value_heads=2",
    "model.shape_config.vocab_size=99",
    "engine.packed.enabled=false",
]


execute = partial(run_here, [])


def test_a_surface_of_real_weights(small, tmp_path, capsys):
    out = tmp_path / "cost"
    assert execute(*small, *GRID, f"output_dir={out}") == 0
    surface = CostSurface.read(out / cost.SURFACE)
    assert surface.tree.samples.shape == (3, 2, 2)
    assert surface.batch.samples.shape == (2, 2, 1, 2)
    assert surface.prefill.samples.shape == (2, 2)
    assert surface.texts.samples.shape == (2, 2, 2, 2)
    seconds = surface.joint_pass_s(*np.array([[2.0], [16.0], [12.0]]))
    assert seconds == pytest.approx(surface.texts.fitted[1, 1, 1])
    assert (surface.tree.samples > 0).all()
    assert surface.model["weights_hash"]
    assert {"hardware", "versions", "git"} <= surface.machine.keys()
    assert json.loads((out / records.MANIFEST).read_text())["status"] == "complete"
    printed = capsys.readouterr().out
    assert "free here:" in printed
    assert "relative error" in printed
    # The same command again prints the table and measures nothing.
    assert execute(*small, *GRID, f"output_dir={out}", launch=None) == 0
    assert "free here:" in capsys.readouterr().out
    with pytest.raises(OutputRefused, match=r"runner\.passes: there 2, here 3"):
        execute(*small, *GRID, "runner.passes=3", f"output_dir={out}")


def test_the_cache_is_left_as_it_was_by_every_pass(make_target):
    target = make_target(batch=3, max_nodes=8)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 48, 10)
    expected = target.prefill(prompt).greedy().item()
    target.prefill(prompt)
    for tree in (random_tree(5, 48, rng), cost._random_rows(3, 2, 48, rng)):
        assert pass_s(target, tree, 10) > 0
        assert target.cache.length == 10
    target.cache.truncate(9)
    again = target.forward(int(prompt[-1]), DraftTree.empty()).greedy().item()
    assert again == expected


@pytest.mark.parametrize(("room", "rows"), [(100, [1, 2, 4, 8, 16, 64]), (9, [1, 2, 4, 8])])
def test_a_run_times_as_many_rows_as_the_context_holds(make_target, room, rows):
    target = make_target(max_nodes=3)
    times = time_rows(target, np.arange(10), room, seed=0)
    assert times["context"] == 10
    assert [int(n) for n in times["seconds"]] == rows
    assert min(times["seconds"].values()) > 0
    assert [int(n) for n in times["prices"]] == rows[1:]
    assert all(low <= middle <= high for middle, low, high in times["prices"].values())


def test_rows_are_timed_in_rounds_of_few_rows_first(make_target, monkeypatch):
    """A machine that becomes twice as slow in some rounds, and a pass that others disturb once."""
    passes = []
    slow_rounds = (1, 2, 5, 16)

    def fake_pass_s(_, tree, context):
        rows = len(tree.tokens) + 1
        passes.append(rows)
        timed = len(passes) - 6  # each number of rows is warmed up
        number = (timed - 1) // 3 if timed <= 45 else 15 + (timed - 46) // 4
        disturbed = 5.0 if timed == 20 else 0.0
        return (0.03 + 0.001 * rows) * (2 if number in slow_rounds else 1) + disturbed

    monkeypatch.setattr(pass_times, "pass_s", fake_pass_s)
    times = time_rows(make_target(max_nodes=3), np.arange(10), 100, seed=0)
    assert set(passes[6:51]) == {1, 2, 4}
    assert set(passes[51:]) == {1, 8, 16, 64}
    assert len(passes) >= 6 + 45 + 24
    for rows, (middle, low, high) in times["prices"].items():
        expected = (0.03 + 0.001 * int(rows)) / 0.031
        assert (middle, low, high) == pytest.approx((expected, expected, expected))
        assert times["seconds"][rows] == pytest.approx(0.03 + 0.001 * int(rows))


@pytest.mark.parametrize(("pass_seconds", "few", "more"), [(0.5, 14, 6), (1.0, 7, 5), (3.0, 3, 3)])
def test_slow_passes_are_timed_in_few_rounds(make_target, monkeypatch, pass_seconds, few, more):
    """Of which fewer than six show no interval, and so give no warning of a slow baseline."""
    calls = []
    monkeypatch.setattr(
        pass_times, "pass_s", lambda *_, context: calls.append(context) or pass_seconds
    )
    times = time_rows(make_target(max_nodes=3), np.arange(10), 100, seed=0)
    assert len(calls) == 6 + 3 * few + 4 * more
    ends = {int(rows): len(interval) - 1 for rows, interval in times["prices"].items()}
    of_more = 2 if more >= 6 else 0
    assert ends == dict.fromkeys((2, 4), 2 if few >= 6 else 0) | dict.fromkeys((8, 16, 64), of_more)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_median_of_fewer_than_six_has_no_ends(n):
    assert median_with_ends([float(i) for i in range(n)]) == [(n - 1) / 2]


@pytest.mark.parametrize(("n", "left_out"), [(6, 0), (9, 1), (15, 3), (60, 21)])
def test_the_ends_of_a_median_leave_out_what_chance_allows(n, left_out):
    """Ranks of the interval for a median that holds for any distribution (e.g. Conover 1999)."""
    values = [float(i) for i in range(n)]
    middle, low, high = median_with_ends(values[::-1])
    assert (middle, low, high) == ((n - 1) / 2, left_out, n - 1 - left_out)


def test_no_graph_is_captured_within_a_timed_pass(tmp_path, monkeypatch):
    """A batch layout is captured at its first pass, for texts of all lengths."""
    monkeypatch.setattr(session, "no_graphs", lambda model: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(GraphTarget, "captures", True)
    events = []

    def capture(step, _pool):
        if step.batch > 1:
            events.append((step.batch, step.rows))

    monkeypatch.setattr(StaticPass, "capture", capture)
    monkeypatch.setattr(cost.log, "info", lambda text, *args: events.append(text % args))
    longer = ["runner.contexts=[4,300]", "runner.batch_contexts=[4,300]", "engine=graph"]
    command = [*TINY_SHAPE, *GRID, *longer, "method=pld", f"output_dir={tmp_path}/cost"]
    assert execute(*command) == 0
    started = events.index("batch passes: warming up") + 1
    timed = events.index("batch passes: round 1 of 2")
    expected = {(3, 1), (3, 3)}
    assert {event for event in events[started:timed] if isinstance(event, tuple)} == expected
    assert expected.isdisjoint(events[timed:])


@pytest.mark.slow  # over a second
def test_of_random_weights_without_a_hub_an_interrupted_measurement_keeps_its_rounds(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "cost"
    command = [*TINY_SHAPE, *GRID, "method=pld", f"output_dir={out}"]

    batch_rounds, round_once = [], cost.PassGrid.round

    def stop(passes, *arguments):
        batch_rounds.extend([passes] * ("k" in passes.axes))
        if len(batch_rounds) == 2:  # behind its warm-up
            raise KeyboardInterrupt
        return round_once(passes, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cost.PassGrid, "round", stop)
        with pytest.raises(KeyboardInterrupt):
            execute(*command)
    saved = (out / cost.ROUNDS).read_bytes()
    assert saved.count(b"\n") == 1, "kinds take turns"
    monkeypatch.setattr(cost, "random_tree", lambda nodes, *_: DraftTree.empty())
    assert execute(*command) == 0
    assert (out / cost.ROUNDS).read_bytes().startswith(saved)
    surface = CostSurface.read(out / cost.SURFACE)
    assert (surface.model["name"], surface.model["shape"]) == ("vicuna7b", True)
    first = json.loads(saved.splitlines()[0])
    np.testing.assert_array_equal(surface.tree.samples[..., 0], first["pass_s"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runner.tree_rows=[2,4]", "begin with 1"),
        ("runner.tree_rows=[1,4,2]", "must be ascending"),
        ("runner.contexts=[]", "runner.contexts"),
        ("runner.batch_k=[]", "go together"),
        ("runner.contexts=[4,5000]", "holds 2048"),
        ("runner.passes=0", "at least 1"),
    ],
)
def test_impossible_grids_are_refused(override, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        execute(*TINY_SHAPE, *GRID, override, f"output_dir={tmp_path}/cost")


def test_questions_are_not_answered_with_random_weights(tmp_path):
    with pytest.raises(ConfigurationError, match="only cost measurements"):
        execute(*TINY_SHAPE, "method=pld", f"output_dir={tmp_path}/run")
