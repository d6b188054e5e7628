"""Replaying against a recorded output takes exactly the live run's steps."""

import numpy as np
import pytest
import torch

from methods.cacheback import Cacheback
from methods.pld import PromptLookup
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext, DraftTree, Needs
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed
from specbench.replay.recorded_target import PathLearner, RecordedTarget
from specbench.replay.recording import record_output
from tests.conftest import VOCAB

CONTEXT = DraftContext(VOCAB, frozenset())


def methods() -> list[Drafter]:
    budget = {"table": "dynamic", "total_draft_len": 24, "chaining_reserved": 4}
    return [Cacheback(**budget), Cacheback(**budget, merge=True), PromptLookup(num_tokens=4)]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_steps_equal_the_live_runs(architecture, which, make_target):
    live = Engine(make_target(architecture), GreedyVerifier(), eos_ids=frozenset())
    target = RecordedTarget(VOCAB, 40)
    replay = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    drafter = methods()[which]
    drafter.setup(CONTEXT)
    sped_up = False
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(0, 6, 30)  # few ids: much repeats
        drafter.reset()
        expected = live.decode(prompt, drafter, max_new_tokens=60)
        drafter.reset()
        target.load(np.array(expected.output_ids))
        got = replay.decode(prompt, drafter, max_new_tokens=60)
        assert got.output_ids == expected.output_ids
        assert got.committed_per_step == expected.committed_per_step
        assert got.drafted_per_step == expected.drafted_per_step
        sped_up |= max(got.committed_per_step) > 1
    assert sped_up  # otherwise nothing was compared


def test_a_malformed_tree_is_refused_and_there_are_no_logits():
    target = RecordedTarget(VOCAB, 4)
    target.load(np.array([1, 2, 3]))
    with pytest.raises(CaseFailed, match="malformed"):
        target.forward(1, DraftTree(np.array([VOCAB]), np.array([-1])))
    with pytest.raises(CaseFailed, match="no logits"):
        _ = target.forward(1, DraftTree.empty()).logits


@pytest.mark.parametrize("max_nodes", [40, 0], ids=["beside_a_method", "ar_alone"])
def test_recorded_candidates_are_the_targets_likeliest(make_target, max_nodes):
    target = make_target()
    prompt = np.random.default_rng(1).integers(0, VOCAB, 9)
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    drafter = PromptLookup(num_tokens=4)
    drafter.setup(CONTEXT)
    output = np.array(engine.decode(prompt, drafter, max_new_tokens=50).output_ids)
    if not max_nodes:
        target = make_target(max_nodes=max_nodes)
    # Longer than one pass of 41 rows.
    found = record_output(target, prompt, output, top=5).candidates
    assert found.shape == (50, 5)
    assert (found[:, 0] == output).all()
    whole = target.prefill(np.concatenate([prompt, output[:-1]]), all_logits=True).logits
    expected = whole[len(prompt) - 1 :].topk(5).indices.numpy()
    np.testing.assert_array_equal(found, expected)


class Learner(Drafter):
    """Drafts the truth up to a depth, and notes what it is shown."""

    def __init__(self, truth, depth):
        super().__init__(name="learner")
        self.truth, self.depth, self.shown = truth, depth, []

    @property
    def needs(self):
        return Needs(tokens_only=False, logits=True, max_nodes=40)

    def propose(self, state):
        at = state.length - state.n_prompt
        good = self.truth[at : at + self.depth]
        # A wrong sibling before each right node: rejected rows lie between accepted ones.
        tokens = np.stack([(good + 1) % VOCAB, good], axis=1).reshape(-1)
        above = np.repeat(np.arange(-1, 2 * len(good) - 1, 2), 2)
        return DraftTree(tokens, above)

    def observe(self, state, outcome):
        self.shown.append((outcome.tree.tokens.tolist(), outcome.logits.argmax(-1).tolist()))
        assert outcome.tree.parents.tolist() == list(range(-1, len(outcome.tree) - 1))
        assert outcome.path.tolist() == list(range(len(outcome.tree)))


def test_a_learner_is_shown_the_accepted_path_and_its_candidates():
    output = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    candidates = np.stack([output, (output + 7) % VOCAB], axis=1)
    target = RecordedTarget(VOCAB, 40)
    learner = Learner(output, depth=2)
    drafter = PathLearner(name="learner", inner=learner, target=target)
    assert not drafter.needs.logits
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    target.load(output, candidates)
    result = engine.decode(np.array([8, 8, 8]), drafter, max_new_tokens=10)
    assert result.output_ids == output.tolist()
    assert result.committed_per_step == [3, 3, 3]
    # Steps commit 1 4 1 | 5 9 2 | 6 5 3; the last one ends the turn and is not shown.
    assert learner.shown == [([1, 4], [1, 4, 1]), ([5, 9], [5, 9, 2])]
    assert target.passes == [(1, 5, 3), (1, 5, 6), (1, 5, 9)]
    logits = target.path_logits(2)
    assert logits.topk(2).indices.tolist() == [[6, 13], [5, 12], [3, 10]]
    assert torch.isinf(logits).sum() == 3 * (VOCAB - 2)


def test_passes_are_logged_with_layout_rows_and_context():
    target = RecordedTarget(VOCAB, 8)
    target.load(np.array([1, 2, 3, 4]))
    target.prefill(np.arange(5))
    target.forward(1, DraftTree.empty())
    target.commit(DraftTree.empty(), np.empty(0, dtype=np.int64))
    target.forward(2, DraftTree(np.array([3, 4, 5, 6]), np.array([-1, 0, -1, 2]), rows=(2, 2)))
    assert target.passes == [(1, 1, 5), (2, 3, 6)]
    target.load(np.array([1, 2]))
    assert target.passes == []
