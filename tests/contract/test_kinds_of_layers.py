"""Methods over layers that cache something else than keys and values of one size, in float64."""

import numpy as np
import pytest
import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError
from specbench.models.batch_target import BatchTarget
from specbench.models.target import Target
from tests.conftest import engine
from tests.contract import driver
from tests.models.test_architectures import ARCHITECTURES, build

KINDS = ["gpt-oss", "DeepSeek-V3", "Qwen3-Next", "Bamba", "LFM2"]
# A prompt that repeats itself, as most that methods find something in.
PROMPTS = [np.tile(driver.toy_turn(seed)[0][:7], 4) for seed in range(20)]


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    model_type, sizes = ARCHITECTURES[request.param]
    model = build((model_type, sizes | {"vocab_size": driver.VOCABULARY}), torch.float64)
    return Target(model, max_len=128, max_nodes=128, batch=16)


def decoded(target, drafter):
    """Outputs, and whether some draft was accepted."""
    turns = []
    for prompt in PROMPTS:
        drafter.reset()
        turns.append(engine(target).decode(prompt, drafter, max_new_tokens=32))
    return [t.output_ids for t in turns], any(max(t.committed_per_step) > 1 for t in turns)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_methods_without_a_head_answer_as_plain_decoding(target, tmp_path, monkeypatch):
    expected, _ = decoded(target, Drafter(name="ar"))
    accepting = 0
    for name in driver.method_names():
        drafter = driver.instantiate(name)
        if not (drafter.needs.heads or drafter.needs.draft_model):
            drafter.setup(driver.toy_context(drafter, tmp_path, monkeypatch))
            outputs, accepted = decoded(target, drafter)
            assert outputs == expected, name
            accepting += accepted
    assert accepting > 10


def test_texts_in_one_pass_have_sinks_and_latents_are_refused():
    target = Target(build("gpt-oss", torch.float64), max_len=64, max_nodes=8)
    batch, tree = BatchTarget(target, 2), DraftTree.chain(np.arange(4, 9))
    for number, slot in enumerate(batch.slots):
        slot.prefill(PROMPTS[number])
        batch.check(number, tree)
    together = batch.forward([(0, 7, tree), (1, 8, tree)])
    for root, slot, scores in zip((7, 8), batch.slots, together, strict=True):
        with target.on(slot.cache):
            alone = target.forward(root, tree).logits
        torch.testing.assert_close(scores.logits, alone, atol=1e-10, rtol=0)
    with pytest.raises(ConfigurationError, match=r"latents \(kv_lora_rank\) read one text"):
        BatchTarget(Target(build("DeepSeek-V2"), max_len=64), 2)
