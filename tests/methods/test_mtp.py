"""MTP against transformers' own ``generate(use_mtp=True)``: the same drafts at each step."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from methods.mtp import Mtp
from specbench.decoding.structs import DraftContext
from specbench.errors import ConfigurationError, WeightsNotFound
from specbench.models.heads import mtp
from specbench.models.target import Target
from tests.conftest import engine, quick_first
from tests.models.heads import tiny_heads

VOCAB = 10
CASES = [("glm4_moe", 1), ("glm4_moe", 2), ("deepseek_v3", 1), ("deepseek_v3", 2)]


@pytest.fixture
def checkpoint(request, tmp_path, monkeypatch):
    """A model of two layers and so many MTP layers, its folder and their number."""
    kind, n_mtp = request.param
    config, tensors = tiny_heads.mtp(n_mtp, vocab=VOCAB, below=2, kind=kind)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    ignored = [rf"model\.layers\.{2 + i}\..*" for i in range(n_mtp)]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", ignored)
    # Each id is mostly followed by the next one, in the target and in the MTP layers.
    embedding = torch.nn.init.orthogonal_(model.get_input_embeddings().weight)
    model.lm_head.weight.data = embedding.detach().roll(1, 0)
    size = tiny_heads.HIDDEN
    plus = 0.7 * torch.eye(size, 2 * size)
    ahead = {key: w + plus if "eh_proj" in key else w for key, w in tensors.items()}
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | ahead, tmp_path / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path, n_mtp


def transformers_drafts(model, prompt, n, monkeypatch):
    """Return the output, and the draft of each step by the text's length before it."""
    drafts, get = {}, MTPCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        ids, logits = get(self, input_ids, *args, **kwargs)
        drafts[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    with monkeypatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", watched)
        ids = torch.from_numpy(prompt)[None]
        out = model.generate(ids, max_new_tokens=n, do_sample=False, use_mtp=True)
    return out[0, len(prompt) :].tolist(), drafts


def our_drafts(target, drafter, folder, prompt, n):
    drafter.setup(
        DraftContext(VOCAB, frozenset(), max_len=64, target=target, heads={"mtp": folder})
    )
    drafts, propose = {}, drafter.propose

    def watched(state):
        tree = propose(state)
        drafts[state.length] = tree.tokens.tolist()
        return tree

    drafter.propose = watched
    return engine(target).decode(prompt, drafter, max_new_tokens=n), drafts


def check_drafts(checkpoint, monkeypatch, n_prompts=4):
    model, folder, n_layers = checkpoint
    draw, n_compared, n_accepted = np.random.default_rng(4), 0, 0
    for _ in range(n_prompts):
        model.set_attn_implementation("sdpa")
        prompt = draw.integers(0, VOCAB, draw.integers(n_layers, 14))
        output, expected = transformers_drafts(model, prompt, 20, monkeypatch)
        target = Target(model, max_len=64, max_nodes=8)
        drafter = Mtp(total=n_layers + 1, depth=n_layers - 1)
        result, drafts = our_drafts(target, drafter, folder, prompt, 20)
        assert result.output_ids == output
        for length, tokens in drafts.items():  # the last steps draft what may be committed
            if tokens:
                assert tokens == expected[length][: len(tokens)]
                n_compared += 1
        n_accepted += sum(result.committed_per_step) - len(result.committed_per_step)
    assert n_compared > 20 and n_accepted > 15


@pytest.mark.parametrize("checkpoint", quick_first(CASES, CASES[1::2]), indirect=True)
def test_drafts_are_transformers_own(checkpoint, monkeypatch):
    check_drafts(checkpoint, monkeypatch)


@pytest.mark.parametrize("checkpoint", [("glm4_moe", 2)], indirect=True)
@pytest.mark.parametrize("fault", ["embedding", "reread", "layer"])
def test_a_fault_does_not_pass(checkpoint, fault, monkeypatch):
    class Faulty(mtp.MtpHead):
        if fault == "reread":
            _reread = property(lambda _: None, lambda *_: None)

        def catching_up(self, ids, states):
            return super().catching_up(ids.roll(int(fault == "embedding")), states)

        def _call(self, *given):
            self._layer *= fault != "layer"
            return super()._call(*given)

    monkeypatch.setattr(mtp, "MtpHead", Faulty)
    with pytest.raises(AssertionError):
        check_drafts(checkpoint, monkeypatch)


@pytest.mark.parametrize("checkpoint", CASES[:2], indirect=True)
def test_trees_of_one_layer_and_what_is_refused(checkpoint):
    model, folder, n_layers = checkpoint
    target, prompt = Target(model, max_len=64, max_nodes=8), np.array([3, 1, 4, 1, 5])
    if n_layers == 1:  # it goes on with its own output
        result, drafts = our_drafts(target, Mtp(total=8, depth=2, top_k=2), folder, prompt, 20)
        assert len(drafts[6]) == 7 and len(result.committed_per_step) < 19
    else:
        with pytest.raises(ConfigurationError, match=r"Type method.top_k=1 method.depth=1"):
            our_drafts(target, Mtp(total=8, depth=2), folder, prompt, 20)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsNotFound, match="has no MTP layers"):
        mtp.load(folder, target)
    model.config.num_mtp_layers = 0
    model.config.save_pretrained(folder)
    with pytest.raises(ConfigurationError, match=r"target's own checkpoint"):
        mtp.load(folder, target)
