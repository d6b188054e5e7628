"""A model that decodes otherwise here than in transformers is refused, and no other."""

import math
from functools import partial

import pytest
import torch

from specbench.errors import ConfigurationError
from specbench.kernels.attention import AttentionPlan, attend
from specbench.models.checks import self_check
from specbench.models.checks.self_check import measure_spread
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import tiny_model
from tests.models.test_architectures import (
    DTYPES,
    build,
    checked_target,
    equal_answers,
    why_refused,
)
from tests.tiny_checkpoint import tiny_tokenizer

# The widest and the narrowest always, the others with the slow tests.
CARRIED_DTYPES = [
    dtype if dtype in ("float64", "bfloat16") else pytest.param(dtype, marks=pytest.mark.slow)
    for dtype in DTYPES
]
REFUSED = {
    "gpt-oss": "attention sinks",
    "Llama-4": "beyond 16 tokens attention is chunked",
    "StableLM": r"logits of a (chain|tree) differ by .* layer 0 .*StableLmAttention",
    "Nemotron": r"logits of a (chain|tree) differ by .* layer 0 .*NemotronAttention",
    "DeepSeek-V3": "multi-head latent attention",
    "Phi-3, LongRoPE past its switch": r"beyond 40 tokens LongRoPE .* model\.context_length=28",
    "Llama, dynamic RoPE outgrown": "beyond 40 tokens dynamic RoPE",
    "GPT-J": "GPTJForCausalLM computes attention itself",
    "Mamba": "layers of kind linear_attention keep a state",
    "LFM2": "layers of kind conv keep a state",
}


def check(model, make=Target, longest=60, **options):
    """As a run checks what it has loaded."""
    return self_check.checked(
        model,
        lambda network: make(network, max_len=longest, max_nodes=12),
        what="model.id=tiny",
        longest=longest,
        **options,
    )[1]


# Importing an architecture takes longer than checking it.
FAST = ("gpt-oss", "StableLM", "DeepSeek-V3", "Phi-3, LongRoPE past its switch")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in REFUSED]
)
def test_features_that_are_not_computed_here_are_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=REFUSED[name]) as caught:
        checked_target(build(name, torch.float32))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("dtype", CARRIED_DTYPES)
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral, window", "Mixtral", "Gemma-2, soft-capping", "Phi-3, LongRoPE"]
)
def test_what_decodes_rightly_is_not_refused(name, dtype):
    assert why_refused(name, dtype) == ""


class SeesAll(Target):
    """Draft rows see each other as in a chain."""

    def _additive(self, seen):
        return torch.zeros(seen.shape, dtype=self.dtype)


class NoWindow(Target):
    """Layers with a sliding window see all of the text."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.windows = ()


class OnePositionOff(Target):
    """Draft rows stand one position too far."""

    def through_layers(self, ids, positions, *more, **options):
        return super().through_layers(ids, positions + int(self.cache.length > 0), *more, **options)


class DepthsInOrder(Target):
    """A tree's nodes stand where those of a chain would."""

    def through_layers(self, ids, positions, *more, **options):
        in_order = positions[:, :1] + torch.arange(ids.shape[1])
        return super().through_layers(ids, in_order, *more, **options)


class LosesAnEarlyKey(Target):
    """The cache forgets a token of the text."""

    def prefill(self, *args, **kwargs):
        scores = super().prefill(*args, **kwargs)
        self.cache.storage[:, :, :, self.cache.length - 3] = 0
        return scores


FAULTS = [SeesAll, NoWindow, OnePositionOff, DepthsInOrder, LosesAnEarlyKey]


@pytest.mark.parametrize("dtype", CARRIED_DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, dtype):
    for drafts in (False, True):
        model = tiny_model("mistral_window", dtype=getattr(torch, dtype))
        with pytest.raises(ConfigurationError, match=r"logits of a (chain|tree) differ"):
            check(model, fault, drafts=drafts)


@pytest.mark.parametrize("drafts", [False, True])
def test_passes_of_fixed_shape_are_checked_as_well(drafts):
    """They are what a GPU replays; here they run uncaptured."""
    make = partial(GraphTarget, drafts=drafts)
    check(tiny_model("mistral_window"), make, drafts=drafts)

    class SeesAllKeys(GraphTarget):
        def through_layers(self, tokens, positions, plan, *more, **options):
            if plan.mask is not None:
                plan.windowed.clear()
                plan.mask = torch.zeros_like(plan.mask)
            return super().through_layers(tokens, positions, plan, *more, **options)

    with pytest.raises(ConfigurationError, match="logits of a chain differ"):
        check(tiny_model("mistral_window"), partial(SeesAllKeys, drafts=drafts), drafts=drafts)


def test_a_routers_near_tie_is_no_fault(monkeypatch):
    """In one row another expert was chosen; in a model without experts that row is a fault.

    So it is in a mixture where it is wrong in every text.
    """
    with pytest.raises(ConfigurationError, match=r"logits of a (chain|tree) differ"):
        check(build("Mixtral", torch.float32), SeesAll)  # most rows differ
    compute, off = self_check._our_rows, iter([])

    @torch.inference_mode()
    def with_another_expert(*args):
        rows = compute(*args)
        rows["tree"][2] += next(off)
        return rows

    monkeypatch.setattr(self_check, "_our_rows", with_another_expert)
    off = iter([1.0, 1.0, 0.0])
    check(build("Mixtral", torch.float32))
    for name, by in (("Mixtral", [1.0] * 4), ("Llama", [1.0])):
        off = iter(by)
        with pytest.raises(ConfigurationError, match="logits of a tree differ by 1 "):
            check(build(name, torch.float32))


@pytest.mark.parametrize(
    ("window", "longest", "said"),
    [(12, 60, "reached"), (300, 60, "not reached"), (300, 10_000_000, "too long")],
)
def test_windows_are_outgrown_where_that_is_cheap(window, longest, said, monkeypatch):
    monkeypatch.setitem(self_check.FLOPS, "cpu", 5e6)
    model = tiny_model("mistral")
    model.config.sliding_window = window
    target = Target(tiny_model("llama"), max_len=60, max_nodes=12)
    text, lengths = self_check.make_text(model, longest)
    assert said in lengths[f"window of {window}"]
    assert (len(text.prompt) > window) == (said == "reached")
    assert target.cache.max_len > len(text.prompt)


def test_without_finite_logits_nothing_is_refused():
    """Its cases fail and say so (`nan_logits`), as they did."""
    model = tiny_model("llama", dtype=torch.float32)
    model.lm_head.weight.data.fill_(torch.nan)
    assert check(model).tolerance is None


def test_our_own_nan_is_refused(monkeypatch):
    monkeypatch.setattr(
        self_check, "_our_rows", lambda *_: {"chain": torch.full((7, 48), torch.nan)}
    )
    with pytest.raises(ConfigurationError, match="differ by inf"):
        check(tiny_model("llama"))


def test_a_run_without_drafts_is_checked_by_its_one_row_passes():
    model = tiny_model("llama")
    target, found = self_check.checked(
        model, lambda m: Target(m, max_len=60, max_nodes=0), what="x", longest=60
    )
    assert target.max_nodes == 0 and found.difference.keys() == {"chain", "tree"}
    # No hook stays that the run would pay for.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_spread_of_passes_that_agree_is_that_of_roundings():
    logits = torch.tensor([[1.0, -8.0]], dtype=torch.bfloat16)
    same = measure_spread(logits, logits)
    assert same.value == 0.0
    assert same.tolerance(4) == 4 * 2 * 2**-7 * 8
    apart = measure_spread(logits, logits + 1, logits - 2)
    assert (apart.value, apart.tolerance(4)) == (2.0, 8.0)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused():
    tokenizer = tiny_tokenizer()
    last, size = max((i, token) for token, i in tokenizer.get_vocab().items())[0], len(tokenizer)
    self_check.check_tokenizer(tiny_model("llama", vocab_size=size), tokenizer, "model.id=x")
    with pytest.raises(ConfigurationError, match=rf"1 tokens .* \(id {last}\)"):
        self_check.check_tokenizer(tiny_model("llama", vocab_size=last), tokenizer, "model.id=x")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    self_check.check_tokenizer(tiny_model("llama", vocab_size=size), tokenizer, "model.id=x")


def heads(*shape):
    return torch.randn(*shape, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("causal", [False, True])
def test_soft_capping_is_the_formula(causal):
    """Against one query and one key at a time."""
    rows = 5
    query, key, value = heads(1, 4, rows), heads(1, 2, rows), heads(1, 2, rows)
    mask = None if causal else heads(1, 1, rows)[..., :rows]
    out, _ = attend(
        torch.nn.Module(), query, key, value, None,
        scaling=0.3, softcap=0.7, plan=AttentionPlan(mask=mask, causal=causal),
    )  # fmt: skip
    for head in range(4):
        for i in range(rows):
            seen = list(range(i + 1 if causal else rows))
            dots = [float(query[0, head, i] @ key[0, head // 2, j]) for j in seen]
            scores = torch.tensor([0.7 * math.tanh(0.3 / 0.7 * dot) for dot in dots]).double()
            if mask is not None:
                scores = scores + mask[0, 0, i]
            wanted = torch.softmax(scores, 0) @ value[0, head // 2, seen]
            # The softmax is transformers', in float32.
            assert torch.allclose(out[0, i, head], wanted, atol=1e-6, rtol=0)


def test_gemma_2_answers_as_transformers_does():
    assert equal_answers("Gemma-2, soft-capping") == 6


def test_soft_capped_logits_are_transformers_own():
    """To the last digits of float64 in a chain; the caps do bite."""
    capped = partial(build, "Gemma-2, soft-capping")
    found = check(capped(torch.float64)).difference
    assert found["chain"] < 1e-12
    assert found["tree"] < 1e-5  # the softmax is in float32, and more keys are hidden here
    model = capped(torch.float64)
    ids = torch.arange(4, 24)[None]
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    bare = model(ids).logits
    assert not torch.allclose(bare, capped(torch.float64)(ids).logits, atol=1e-3)


def test_attention_swallows_no_argument_that_it_does_not_know():
    q = heads(1, 2, 3)
    attend(torch.nn.Module(), q, q, q, None, position_ids=None, use_cache=True, s_aux=None)
    with pytest.raises(ConfigurationError, match=r"Linear .* s_aux \(attention sinks\), tail"):
        attend(torch.nn.Linear(1, 1), q, q, q, None, s_aux=torch.zeros(2), tail=3)
