"""Replaying against a recorded output takes exactly the live run's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from methods.cacheback import Cacheback
from methods.pld import PromptLookup
from specbench.clock import NullClock
from specbench.engine import Engine
from specbench.errors import CaseFailed
from specbench.recorded import RecordedTarget
from specbench.structs import DraftContext, DraftTree
from specbench.verify import GreedyVerifier
from tests.conftest import VOCAB

if TYPE_CHECKING:
    from specbench.drafter import Drafter

CONTEXT = DraftContext(VOCAB, frozenset())


def methods() -> list[Drafter]:
    budget = {"table": "dynamic", "total_draft_len": 24, "chaining_reserved": 4}
    return [Cacheback(**budget), Cacheback(**budget, merge=True), PromptLookup(num_tokens=4)]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_steps_equal_the_live_runs(architecture, which, make_target):
    live = Engine(make_target(architecture), GreedyVerifier(), eos_ids=frozenset(), clock=NullClock)
    target = RecordedTarget(VOCAB, 40)
    replay = Engine(target, GreedyVerifier(), eos_ids=frozenset(), clock=NullClock)
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
        assert got.accepted_per_step == expected.accepted_per_step
        assert got.drafted_per_step == expected.drafted_per_step
        sped_up |= max(got.accepted_per_step) > 1
    assert sped_up  # otherwise nothing was compared


def test_a_malformed_tree_is_refused():
    target = RecordedTarget(VOCAB, 4)
    target.load(np.array([1, 2, 3]))
    with pytest.raises(CaseFailed, match="malformed"):
        target.forward(1, DraftTree(np.array([VOCAB]), np.array([-1])))


def test_there_are_no_logits():
    target = RecordedTarget(VOCAB, 4)
    target.load(np.array([1, 2, 3]))
    with pytest.raises(CaseFailed, match="no logits"):
        _ = target.forward(1, DraftTree.empty()).logits
