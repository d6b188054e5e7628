"""The recorded output in the target's place: what it refuses, its states and passes."""

import numpy as np
import pytest
import torch

from specbench.decoding.structs import DraftTree
from specbench.errors import CaseFailed
from specbench.replay.replayer import RecordedTarget
from specbench.replay.states import states_along
from tests.conftest import VOCAB


def test_a_malformed_tree_is_refused_and_there_are_no_logits():
    target = RecordedTarget(VOCAB, 4)
    target.load(np.array([1, 2, 3]))
    with pytest.raises(CaseFailed, match="malformed"):
        target.forward(1, DraftTree(np.array([VOCAB]), np.array([-1])))
    with pytest.raises(CaseFailed, match="no logits"):
        _ = target.forward(1, DraftTree.empty()).logits


@pytest.mark.parametrize("max_nodes", [40, 0], ids=["beside_a_method", "ar_alone"])
def test_states_of_an_output_are_those_of_one_pass_over_it(make_target, max_nodes):
    target = make_target(max_nodes=max_nodes)
    prompt, output = np.split(np.random.default_rng(1).integers(0, VOCAB, 59), [9])
    states = states_along(target, prompt, output, (1, 2))  # longer than one pass of 41 rows
    text = np.concatenate([prompt, output[:-1]])
    expected = make_target().prefill(text, hidden_layers=(1, 2)).hidden
    for layer, rows in states.items():
        torch.testing.assert_close(rows, expected[layer], atol=1e-9, rtol=0)
