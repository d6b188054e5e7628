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
MAX_LEN, NEW_TOKENS = 128, 32
# A prompt that repeats itself, as most that methods find something in.
PROMPTS = [np.tile(driver.toy_turn(seed)[0][:7], 4) for seed in range(20)]


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    model_type, sizes = ARCHITECTURES[request.param]
    model = build((model_type, sizes | {"vocab_size": driver.VOCABULARY}), torch.float64)
    return Target(model, max_len=MAX_LEN, max_nodes=MAX_LEN, batch=16)


def decoded(target, drafter):
    """Outputs, and the tokens of the longest step."""
    turns = []
    for prompt in PROMPTS:
        drafter.reset()
        turns.append(engine(target).decode(prompt, drafter, max_new_tokens=NEW_TOKENS))
    longest = max(max(turn.committed_per_step) for turn in turns)
    return [turn.output_ids for turn in turns], longest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_methods_without_a_head_answer_as_plain_decoding(target, tmp_path, monkeypatch):
    expected, _ = decoded(target, Drafter(name="ar"))
    different, longest = [], {}
    for name in driver.method_names():
        drafter = driver.instantiate(name)
        if drafter.needs.heads or drafter.needs.draft_model:
            continue
        drafter.setup(driver.toy_context(drafter, tmp_path, monkeypatch))
        outputs, longest[name] = decoded(target, drafter)
        if outputs != expected:
            different.append(name)
    assert not different
    assert sum(tokens > 1 for tokens in longest.values()) > 10  # methods that saw drafts accepted


def test_texts_in_one_pass_have_sinks_and_latents_are_refused():
    target = Target(build("gpt-oss", torch.float64), max_len=64, max_nodes=8)
    batch, tree = BatchTarget(target, 2), DraftTree.chain(np.arange(4, 9))
    for slot, prompt in zip(batch.slots, PROMPTS, strict=False):
        slot.prefill(prompt)
    for slot in range(2):
        batch.check(slot, tree)
    for slot, scores in zip(batch.slots, batch.forward([(0, 7, tree), (1, 8, tree)]), strict=True):
        with target.on(slot.cache):
            alone = target.forward(7 if slot is batch.slots[0] else 8, tree)
        torch.testing.assert_close(scores.logits, alone.logits, atol=1e-10, rtol=0)
    with pytest.raises(ConfigurationError, match=r"latents \(kv_lora_rank\) read one text"):
        BatchTarget(Target(build("DeepSeek-V2"), max_len=64), 2)
