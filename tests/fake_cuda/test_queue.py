"""A pass is queued, not waited for, and its buffers are left alone until it is done."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specbench.decoding import tree as tree_module
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DraftTree, Needs
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import VOCAB, side_by_side, tiny_model
from tests.fake_cuda import decoders
from tests.fake_cuda.decoders import DEVICE, PROMPT, decode

VERIFIER = GreedyVerifier()


def pair(**options):
    sizes = {"max_len": 128, "max_nodes": 7, "batch": 3}
    exact = Target(tiny_model("llama"), **sizes)
    queued = decoders.target(**sizes, **options)
    for target in (exact, queued):
        target.prefill(PROMPT)
    return exact, queued


@dataclass(kw_only=True, eq=False)
class OverlapDrafter(Drafter):
    """Drafts fixed tokens, and calls ``work`` during the target's pass."""

    name: str = "overlap"
    work: object

    @property
    def needs(self):
        return Needs(overlap=True, max_nodes=7)

    def propose(self, state):
        return DraftTree.chain(np.array([5, 6]))

    def overlap(self, state, tree):
        self.work()


@pytest.mark.parametrize("overlap", ["stream", "thread", "serial"])
def test_drafting_starts_before_the_host_waits_for_the_pass(pretended, overlap, monkeypatch):
    target, queued, waited = decoders.target(max_nodes=7), [], []
    forward = GraphTarget.forward

    def counting(self, *args, **options):
        scores = forward(self, *args, **options)
        queued.append(pretended.counts["waits"])
        return scores

    def work():
        waited.append(pretended.counts["waits"])

    monkeypatch.setattr(GraphTarget, "forward", counting)
    result = decode(target, OverlapDrafter(work=work), overlap=overlap)
    decoders.plain(torch.float64).check(result.output_ids)
    assert len(waited) == result.n_target_passes > 8
    if overlap != "thread":  # there, the scheduler's choice
        between = [after - before for before, after in zip(queued, waited, strict=True)]
        assert set(between) == {0 if overlap == "stream" else 1}


def test_failed_drafting_is_waited_for(pretended):
    """Else memory of its queued work would be freed too early."""

    def fails():
        torch.ones(4, device=DEVICE)
        raise RuntimeError("no memory for the draft")

    with pytest.raises(RuntimeError, match="no memory"):
        decode(decoders.target(max_nodes=7), OverlapDrafter(work=fails), overlap="stream")
    main, *_, side = (s for s in pretended.streams if s.index == 0)
    assert main.clock[side] == side.clock[side] > 0


@pytest.mark.parametrize("commits", [True, False])
def test_buffers_are_loaded_again_only_when_their_pass_is_done(pretended, commits, rng):
    """The result of a pass is not lost, even if it is read later."""
    exact, queued = pair(commits=commits)
    chains = [DraftTree.chain(rng.integers(0, VOCAB, 3)) for _ in range(3)]
    rows = [side_by_side(rng.integers(0, VOCAB, 6), 2) for _ in range(2)]
    for trees in (chains, rows):
        scores = [queued.forward(4, tree) for tree in trees]
        for tree, queued_scores in zip(trees, scores, strict=True):
            exact_scores = exact.forward(4, tree)
            if queued_scores.verified is not None:
                verdict = VERIFIER.verify(tree, exact_scores)
                path, next_tokens, _ = queued_scores.verified
                assert path.tolist() == verdict.path.tolist()
                assert next_tokens.tolist() == verdict.next_tokens.tolist()
        assert scores[-1].greedy().tolist() == exact_scores.greedy().tolist()


def test_commit_waits_if_the_pass_is_under_way(pretended):
    exact, queued = pair()
    tree = DraftTree.chain(exact.forward(3, DraftTree.empty()).greedy().numpy())  # the true token
    waits = pretended.counts["waits"]
    queued.forward(3, tree)
    assert pretended.counts["waits"] == waits
    queued.commit(tree, np.array([0]))
    assert pretended.counts["waits"] == waits + 1
    exact.forward(3, tree)
    exact.commit(tree, np.array([0]))
    following = [engine.forward(4, tree).greedy().tolist() for engine in (exact, queued)]
    assert following[0] == following[1]


def test_ids_on_the_device_are_refused_when_the_outcome_is_read(gpu, monkeypatch):
    """The host cannot look at them before the pass."""
    _, queued = pair()
    monkeypatch.setattr(tree_module, "host_tokens", lambda _: NO_TOKENS)
    tree = DraftTree(torch.tensor([VOCAB], device=DEVICE), np.array([-1]))
    scores = queued.forward(3, tree)
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        VERIFIER.verify(tree, scores)
    with pytest.raises(CaseFailed, match="outside the vocabulary"):
        queued.commit(tree, np.array([], dtype=np.int64))
