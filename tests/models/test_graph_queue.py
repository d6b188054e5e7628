"""A pass of fixed shape is queued, not waited for; its buffers are left alone until it is done.

Checked without a GPU on a device that does queued work as late as it may.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbench.decoding import tree as tree_module
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DraftTree, Needs
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed
from specbench.models.graph_target import GraphTarget
from specbench.models.static_pass import FixedShape, StaticPass
from specbench.models.target import Target
from tests.conftest import VOCAB, engine, side_by_side, tiny_model
from tests.models.test_graph_target import twins

SIZES = {"max_len": 120, "max_nodes": 7, "batch": 3}


class LateDevice:
    """Queues what passes ask of their device, and does none of it before somebody waits.

    Attributes:
        log: ``queued`` and ``read`` in order, and whatever tests add.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.queue: deque = deque()
        self.real: dict = {}
        for owner, name in ((StaticPass, "_ship"), (FixedShape, "run"), (StaticPass, "_tell")):
            real = self.real[name] = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda step, real=real: self.queue.append(lambda: real(step))
            )
        make = StaticPass.__init__

        def made(step: StaticPass, *args: int) -> None:
            make(step, *args)
            step._done = Event(self)
            step.outputs = (torch.zeros(step.batch * step.rows, VOCAB), step._result.clone())

        monkeypatch.setattr(StaticPass, "__init__", made)

    def wait_for(self, event: Event) -> None:
        with torch.inference_mode():
            while event in self.queue:
                work = self.queue.popleft()
                if work is not event:
                    work()


class Event:
    """In place of a CUDA event."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.device.log.append("queued")
        self.device.queue.append(self)

    def synchronize(self) -> None:
        self.device.log.append("read")
        self.device.wait_for(self)


@pytest.fixture
def late(monkeypatch):
    return LateDevice(monkeypatch)


@dataclass(kw_only=True, eq=False)
class Beside(Drafter):
    """Drafts a part of the true output, then nonsense, and works beside the pass."""

    name: str = "beside"
    truth: list[int]
    log: list[str]
    overlapped: list[int] = field(default_factory=list)

    @property
    def needs(self):
        return Needs(overlap=True, max_nodes=7)

    def propose(self, state):
        at = state.length - state.n_prompt
        true = self.truth[at : at + state.step % 4]
        return DraftTree.chain(np.array([*true, 5, 6], dtype=np.int64))

    def overlap(self, state, tree):
        self.log.append("overlap")
        self.overlapped.append(state.step)


def no_streams(monkeypatch) -> None:
    """The calls of ``overlap=stream``; what they order, a single queue keeps in order."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


@pytest.mark.parametrize(
    ("overlap", "step"),
    [
        ("stream", ["queued", "overlap", "read"]),
        ("thread", None),  # which of the first two comes first is the scheduler's choice
        ("serial", ["queued", "read", "overlap"]),
    ],
    ids=str,
)
def test_drafting_beside_a_pass_starts_before_anybody_waits(overlap, step, late, monkeypatch, rng):
    no_streams(monkeypatch)
    prompt = rng.integers(3, VOCAB, 20)
    exact, target = twins(**SIZES)
    truth = engine(exact).decode(prompt, Drafter(name="plain"), max_new_tokens=30).output_ids
    loop = engine(target, overlap="thread")
    loop.overlap = overlap  # on a CPU ``stream`` would become ``thread``
    drafter = Beside(truth=truth, log=late.log)
    result = loop.decode(prompt, drafter, max_new_tokens=30)
    assert result.output_ids == truth
    assert max(result.committed_per_step) > 1
    steps = result.n_target_passes
    found = [late.log[i : i + 3] for i in range(0, len(late.log), 3)]
    if step is not None:
        assert found == [step] * steps
    else:
        assert [each[-1] for each in found] == ["read"] * steps
    assert sorted(set(late.log)) == ["overlap", "queued", "read"]
    assert len(late.log) == 3 * steps  # one pass, one wait


def pair(**options):
    exact = Target(tiny_model("llama"), **SIZES)
    queued = GraphTarget(tiny_model("llama"), capture=False, **SIZES, **options)
    text = np.arange(3, 14)
    for target in (exact, queued):
        target.prefill(text)
    return exact, queued


def test_buffers_are_loaded_again_only_when_their_pass_is_done(late, rng):
    """And what a pass found out is not lost, though nobody had asked yet."""
    exact, queued = pair()
    verifier = GreedyVerifier()
    trees = [DraftTree.chain(rng.integers(0, VOCAB, 3)) for _ in range(4)]
    scores = [queued.forward(int(tree.tokens[0]), tree) for tree in trees]
    assert late.log == ["queued", *["read", "queued"] * 3]
    for tree, found in zip(trees, scores, strict=True):
        verdict = verifier.verify(tree, exact.forward(int(tree.tokens[0]), tree))
        path, own = found.verified
        assert path.tolist() == verdict.path.tolist()
        assert own.tolist() == verdict.next_tokens.tolist()
    assert late.log.count("read") == 4
    _ = scores[-1].verified
    assert late.log.count("read") == 4


@pytest.mark.parametrize("commits", [True, False])
def test_so_are_those_of_passes_that_the_host_verifies(commits, late, rng):
    """Batch rows, and drawing verifiers: none reads an outcome, so loading waits by itself."""
    exact, queued = pair(commits=commits)
    rows = [side_by_side(rng.integers(0, VOCAB, 6), 2) for _ in range(2)]
    chains = [DraftTree.chain(rng.integers(0, VOCAB, 3)) for _ in range(2)]
    for trees in (rows, [] if commits else chains):
        for tree in trees:
            queued.forward(4, tree)
        assert late.log[-3:] == ["queued", "read", "queued"] or not trees
        if trees:
            step = queued._passes[(3, 256, 3, ()) if trees is rows else (4, 256, 1, ())]
            late.wait_for(step._done)
            wanted = exact.forward(4, trees[-1]).logits
            got = step.logits.view(step.batch, step.rows, -1)
            got = torch.cat([got[0, :1], got[:, 1:].flatten(0, 1)]) if trees is rows else got[0]
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


def test_keep_waits_where_nobody_has(late):
    exact, queued = pair()
    plain = exact.forward(3, DraftTree.empty()).greedy()
    tree = DraftTree.chain(plain.numpy())  # the true next token
    queued.forward(3, tree)
    assert late.log == ["queued"]
    queued.commit(tree, np.array([0]))
    assert late.log == ["queued", "read"]
    assert queued.cache.length == 13
    exact.forward(3, tree)
    exact.commit(tree, np.array([0]))
    stored = (target.cache.storage[:, :1, :, :13] for target in (queued, exact))
    torch.testing.assert_close(*stored, atol=1e-9, rtol=0)


def test_ids_on_the_device_are_refused_when_the_outcome_is_read(late, monkeypatch):
    """The host cannot look at them before the pass."""
    _, queued = pair()
    monkeypatch.setattr(tree_module, "host_tokens", lambda _: NO_TOKENS)
    monkeypatch.setattr(StaticPass, "_ship", late.real["_ship"])  # those ids are written behind it
    tree = DraftTree(torch.tensor([VOCAB]), np.array([-1]))
    scores = queued.forward(3, tree)
    assert late.log == ["queued"]
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        GreedyVerifier().verify(tree, scores)
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        queued.commit(tree, np.array([], dtype=np.int64))
    assert late.log == ["queued", "read"]


def test_drafting_that_fails_beside_a_pass_is_waited_for(monkeypatch):
    no_streams(monkeypatch)
    waited = []
    stream = SimpleNamespace(wait_stream=lambda _: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)

    class Failing(Drafter):
        @property
        def needs(self):
            return Needs(overlap=True)

        def overlap(self, state, tree):
            raise RuntimeError("no memory for the draft")

    loop = engine(Target(tiny_model("llama"), **SIZES))
    loop.overlap = "stream"
    with pytest.raises(RuntimeError, match="no memory"):
        loop.decode(np.arange(9), Failing(name="failing"), max_new_tokens=5)
    assert waited == [1]


@pytest.mark.parametrize("batch", [1, 3], ids=["tree", "rows"])
def test_steps_write_into_the_buffers_that_a_graph_reads(batch, rng):
    target = GraphTarget(tiny_model("llama"), capture=False, **SIZES)
    target.prefill(rng.integers(0, VOCAB, 11))
    seen: dict[int, list[int]] = {}
    for n in (0, 1, 3, 7) * 3 if batch == 1 else (1, 2) * 3:
        tokens = rng.integers(0, VOCAB, n * batch)
        tree = DraftTree.chain(tokens) if batch == 1 else side_by_side(tokens, n)
        verdict = GreedyVerifier().verify(tree, target.forward(3, tree))
        target.commit(tree, verdict.path)
        step = target._passes[n + 1, 256, batch, ()]
        buffers = [value for value in vars(step).values() if isinstance(value, torch.Tensor)]
        addresses = [buffer.data_ptr() for buffer in (*buffers, target.cache.storage)]
        assert len(addresses) >= 8
        assert seen.setdefault(n, addresses) == addresses
