"""Passes of fixed shape give what exact passes give; what a CUDA graph needs of them holds.

Capture itself needs a GPU (``tests/fake_cuda``); here the captured code runs uncaptured.
"""

import gc
import weakref
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.measure.session import make_target
from specbench.config.compose import compose
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import TreeGeometry
from specbench.decoding.verify import GreedyVerifier
from specbench.decoding.verify.greedy import longest_match
from specbench.errors import CaseFailed
from specbench.models.graph_target import (
    MOVED_ROWS,
    GraphTarget,
    StaticPass,
    no_graphs,
    row_bucket,
)
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, engine, side_by_side, tiny_model
from tests.models.test_target import trees

moving_model = cache(partial(tiny_model, "llama"))
moving_target = cache(partial(GraphTarget, capture=False, max_len=200, max_nodes=39))
PROMPT = np.arange(3, 33)
same = partial(torch.testing.assert_close, atol=1e-10, rtol=0)


def twins(architecture="llama", *, capture=False, **sizes):
    """An exact and a padded target over the same weights."""
    exact = Target(tiny_model(architecture), **sizes)
    return exact, GraphTarget(tiny_model(architecture), capture=capture, **sizes)


def same_caches(exact, other):
    end = exact.cache.length
    assert other.cache.length == end
    stored = (target.cache.storage[..., :end, :] for target in (other, exact))
    torch.testing.assert_close(*stored, atol=1e-9, rtol=0)


@pytest.fixture(scope="module")
def pairs():
    return cache(partial(twins, max_len=600, max_nodes=40))


@pytest.fixture
def only_warms_up(monkeypatch):
    """What a capture runs: its passes, of which the device keeps what they write to the cache."""

    def capture(step: StaticPass, _pool: object) -> None:
        for _ in range(3):
            step.device_part()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StaticPass, "capture", capture)


def test_buckets():
    assert [row_bucket(n) for n in (1, 2, 3, 17, 33, 65, 97, 128, 129)] == [
        1, 2, 4, 32, 48, 80, 128, 128, None,
    ]  # fmt: skip


@given(tree=trees(20), data=st.data())
def test_acceptance_on_the_device_is_the_walk(tree, data):
    """Few distinct tokens: deep acceptance, repeated siblings and ties of depth all occur."""
    n = len(tree)
    tokens = tree.tokens % 2
    choices = np.array(data.draw(st.lists(st.integers(0, 1), min_size=n + 1, max_size=n + 1)))
    aux = np.zeros(n, dtype=np.bool_)
    for i in range(n):
        parent = tree.parents[i]
        aux[i] = data.draw(st.booleans()) or (parent >= 0 and aux[parent])
    path = np.empty(n, dtype=np.int64)
    count = longest_match(tokens, tree.parents, aux, choices, path)

    def padded(values):
        row = torch.zeros(rows, dtype=torch.long)
        row[: len(values)] = torch.as_tensor(values)
        return row

    geometry = TreeGeometry(n)
    geometry.read(tree, VOCAB)
    step = StaticPass.__new__(StaticPass)
    step.rows = rows = 24
    step._row_numbers = torch.arange(rows)
    step.visible = torch.eye(rows, dtype=torch.bool)[None].clone()
    step.visible[0, : n + 1, : n + 1] = torch.from_numpy(geometry.visible[: n + 1, : n + 1])
    step._ids, step._parents = padded([0, *tokens])[None], padded([0, *(tree.parents + 1)])[None]
    step._depths = padded(geometry.depths[: n + 1])[None]
    step._candidates = padded(np.append(False, ~aux))[None]
    got, got_count = step._accept(padded(choices))
    assert int(got_count) == count + 1
    assert got[1 : count + 1].tolist() == (path[:count] + 1).tolist()
    assert got[count + 1 :].tolist() == list(range(count + 1, rows))


@pytest.mark.parametrize("commits", [True, False])
def test_passes_of_buffers_that_grew_are_let_go_without_a_collection(commits, rng):
    """Under ``gc.freeze`` those that hold themselves, and with them their graphs, would stay."""
    target = GraphTarget(
        tiny_model("llama"), capture=False, commits=commits, max_len=90, max_nodes=7, batch=2
    )
    rows = side_by_side(rng.integers(0, VOCAB, 4), 2)
    target.prefill(np.arange(5))
    gc.disable()
    try:
        for tree in (rows, DraftTree.chain(np.arange(3))):
            target.forward(3, tree)  # nobody asks what it found out
        old = [weakref.ref(step) for step in target._passes.values()]
        target.reserve(600, 7, 2)
        assert [ref() for ref in old] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("architecture", CARRIERS)
def test_rows_of_a_batch_layout_and_a_capture_in_mid_text(
    architecture, capture, only_warms_up, rng
):
    """What is captured overwrites nothing that is committed or held."""
    exact, fixed = twins(architecture, capture=capture, max_len=200, max_nodes=40, batch=5)
    text = rng.integers(0, VOCAB, 11)
    for target in (exact, fixed):
        target.prefill(text)
    for k, w in ((5, 3), (2, 1), (4, 6)):
        tree = side_by_side(rng.integers(0, VOCAB, k * w), w)
        captured = len(fixed.graphs)
        expected, got = exact.forward(3, tree), fixed.forward(3, tree)
        assert got.verified is None  # the host verifies these
        assert fixed.graphs[captured:] == [f"{k} x {w + 1} rows"] * capture
        same(got.logits, expected.logits)
        for target in (exact, fixed):  # made once, not by every step
            assert target.forward(3, tree).select is target.forward(3, tree).select
            target.commit(tree, np.arange(w, 2 * w, dtype=np.int64))
    same_caches(exact, fixed)
    end = exact.cache.length
    # So do passes over nodes: behind what is held as well.
    ids, depths = torch.tensor([4, 5, 6, 7, 8, 9]), torch.arange(6)
    for target in (exact, fixed):
        target.extend(ids, None, depths)
        target.cache.truncate(end)
    expected, got = (target.append(ids[:3]) for target in (exact, fixed))
    same(got.logits, expected.logits)


def test_a_path_whose_rows_the_pass_has_moved_away_is_refused(rng):
    exact, padded = pair = twins(max_len=200, max_nodes=8)
    text = rng.integers(0, VOCAB, 17)
    exact.prefill(text)
    right = int(exact.forward(3, DraftTree.empty()).greedy()[0])
    after = int(exact.forward(3, DraftTree.chain(np.array([right]))).greedy()[1])
    wrong = (right + 1) % VOCAB
    siblings = DraftTree(np.array([wrong, right]), np.array([-1, -1]))
    below = DraftTree(np.array([wrong, right, after]), np.array([-1, -1, 1]))
    chain = DraftTree.chain(np.array([right, (after + 1) % VOCAB, 5]))

    def commit_path(tree: DraftTree, path: list[int]) -> None:
        for target in pair:
            target.prefill(text)
            target.forward(3, tree)
            target.commit(tree, np.array(path, dtype=np.int64))
        same_caches(exact, padded)

    # What a verifier that stops sooner or goes on further asks for is still there.
    for tree, path in ((siblings, []), (siblings, [1]), (below, [1]), (chain, [0, 1, 2])):
        commit_path(tree, path)
    for tree, path in ((siblings, [0]), (below, [0]), (chain, [0, 2])):
        with pytest.raises(CaseFailed, match="another path than the verifier's"):
            commit_path(tree, path)


def test_a_pass_that_left_nan_behind_hurts_no_later_one(pairs, rng):
    exact, padded = pairs("llama")
    padded.cache.storage[..., 40:, :] = torch.nan
    padded.cache.clear()
    prompt = rng.integers(0, VOCAB, 20)
    for target in (exact, padded):
        target.prefill(prompt)
    tree = DraftTree.chain(rng.integers(0, VOCAB, 3))
    same(padded.forward(3, tree).logits, exact.forward(3, tree).logits)


def test_what_is_captured_after_a_failure_has_memory_of_its_own(monkeypatch):
    """The allocator may take the old pool for one that is still recorded to."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pools = {}

    def capture(step, pool):
        pools[step.rows] = pool
        if step.rows == 2:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(StaticPass, "capture", capture)
    target = GraphTarget(tiny_model("llama"), capture=True, max_len=100, max_nodes=7)
    assert pools == {1: 0, 2: 0, 4: 1, 8: 1}
    assert list(target.reasons) == ["1 x 2 rows"]


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, ["1 x 1 rows", "1 x 2 rows", "1 x 4 rows"]),
        (
            {"batch": 5, "layouts": [(5, 4)]},
            ["1 x 1 rows", "1 x 2 rows", "1 x 4 rows", "5 x 4 rows"],
        ),
        ({"drafts": True}, ["1 nodes", "2 nodes", "4 nodes"]),
        (
            {"layers": (1, -1)},
            [f"1 x {n} rows{more}" for more in ("", ", hidden states 1 -1") for n in (1, 2, 4)],
        ),
    ],
    ids=["trees", "rows", "draft", "hidden states"],
)
def test_known_passes_are_captured_when_buffers_are_made(options, shapes, only_warms_up):
    layers = options.get("layers", ())
    sizes = {key: value for key, value in options.items() if key != "layers"}
    target = GraphTarget(tiny_model("llama"), capture=True, max_len=200, max_nodes=3, **sizes)
    for _ in range(2):  # two labels whose heads read the same: known once their files are read
        target.expect(layers)
    assert target.graphs == shapes
    target.reserve(400, 2)  # fewer nodes and no batch: the buffers stay as wide as they were
    if "drafts" not in options:  # and no pass of a case makes another
        target.prefill(np.arange(5))
        target.forward(3, DraftTree.empty(), hidden_layers=layers)
    described = target.describe()
    assert sorted(described["graphs"]) == sorted(shapes) and not described["eager"]


def test_passes_without_a_fixed_shape_run_eagerly_and_say_why(rng):
    exact, target = pair = twins(max_len=100, max_nodes=150)
    for member in pair:
        member.prefill(np.arange(5))
    for n in (3, 140, 0, 128):
        tree = DraftTree(rng.integers(0, VOCAB, n), np.full(n, -1))
        same(target.forward(3, tree).logits, exact.forward(3, tree).logits)
    assert target.eager_passes == 2
    assert target.reasons == dict.fromkeys(("141 rows", "129 rows"), "more than 128 rows")

    def nodes(max_len, max_nodes, text, n):
        """Why so many nodes behind a text are read without a shape; what they get is the same."""
        exact, target = pair = twins(max_len=max_len, max_nodes=max_nodes)
        for member in pair:
            member.prefill(np.arange(text) % VOCAB)
        ids = torch.arange(n) % VOCAB
        same(target.append(ids).logits, exact.append(ids).logits)
        return target.reasons

    end = "8 nodes at the end of the cache"  # which leaves five rows: for the nodes, no padding
    assert nodes(245, 5, 251, 5) == {end: "padded, they exceed its 256 rows"}
    assert nodes(300, 6, 5, 35) == {"35 nodes": "more than the 8 rows reserved"}
    assert nodes(300, 140, 5, 140) == {"140 nodes": "more than 128 rows"}


def test_where_there_are_no_graphs_passes_are_eager_and_the_reason_is_kept():
    sizes = {"max_len": 64, "max_nodes": 8}
    target = make_target(tiny_model("llama"), compose(["engine=graph"]), **sizes)
    assert type(target) is Target
    assert "CUDA" in target.describe()["reason"]
    configured = make_target(tiny_model("llama"), compose([]), **sizes)
    assert configured.describe() == {"engine": "eager"}
    model = tiny_model("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "lm_head": 1}
    assert "2 devices" in no_graphs(model)


@given(st.data())
def test_moving_an_accepted_path_is_a_plain_gather(data):
    """Also of one longer than what the pass moves itself."""
    n = data.draw(st.integers(0, 39))
    count = data.draw(st.integers(0, n))
    path = np.sort(data.draw(st.permutations(range(n)))[:count]).astype(np.int64)
    model = moving_model()
    target = moving_target(model)
    target.cache.storage.copy_(torch.randn_like(target.cache.storage))
    target.cache.length = 11
    before = target.cache.storage.clone()
    slots = torch.arange(11, 11 + 40)
    rows = np.arange(40)
    rows[1 : count + 1] = path + 1
    first = slice(MOVED_ROWS)
    target.cache.move(slots[first], torch.from_numpy(rows)[first] + 11)  # as the pass does
    target._move_rest(path)
    moved_rows = np.concatenate(([0], path + 1)) + 11
    actual = target.cache.storage[:, :1, :, 11 : 12 + count]
    assert torch.equal(actual, before[:, :1, :, moved_rows])
    assert torch.equal(target.cache.storage[..., :11, :], before[..., :11, :])


def test_a_deep_branch_is_committed_as_in_the_eager_target():
    stock, fused = (
        Target(tiny_model("llama"), max_len=200, max_nodes=39),
        GraphTarget(tiny_model("llama"), capture=False, max_len=200, max_nodes=39),
    )
    truth = engine(stock).decode(PROMPT, Drafter(name="plain"), max_new_tokens=30).output_ids
    wrong = (truth[1] + 1) % VOCAB
    tree = DraftTree(np.array([wrong, *truth[1:27]]), np.array([-1, -1, *range(1, 26)]))
    logits = []
    for target in (stock, fused):
        target.prefill(PROMPT)
        verdict = GreedyVerifier().verify(tree, target.forward(truth[0], tree))
        assert len(verdict.path) == 26 > MOVED_ROWS
        target.commit(tree, verdict.path)
        logits.append(target.forward(int(verdict.tokens[-1]), DraftTree.empty()).logits)
    torch.testing.assert_close(*logits, atol=1e-10, rtol=0)
