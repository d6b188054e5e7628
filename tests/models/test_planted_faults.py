"""The check at load on right random models, which pass, and on planted faults, which are found.

17 families, widths 64 to 1,024, initial ranges .02 to .4, float32, plain and packed; the counts of
the tests are the counts of models and faults. A fault is in our passes only, as a mistake of ours
would be; those of the last part are in the model or its products.
"""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.errors import ConfigurationError
from specbench.kernels import attention
from specbench.kernels.architectures import usable_context
from specbench.kernels.attention import AttentionPlan
from specbench.kernels.compiled_pass import packed_model
from specbench.models import target as target_module
from specbench.models.checks import self_check
from specbench.models.hidden_states import decoder_layers
from specbench.models.loading import offered_attention
from specbench.models.target import Target
from specbench.results.manifest import ModelInfo

LONGEST, NODES = 90, 12
ALL_PACKED = 10**9
ROTARY = ("Llama", "Granite", "Qwen3")

_MHA = {"num_key_value_heads": 8}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
_CAPPED = {
    "sliding_window": 12, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 4.0,
}  # fmt: skip
_SCALES = {
    "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
}  # fmt: skip
_LLAMA_4 = {
    "attn_temperature_tuning": True, "floor_scale": 64, "attn_scale": 0.1, "head_dim": 8,
    "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "num_local_experts": 4,
    "intermediate_size_mlp": 128,
}  # fmt: skip
_SCALED_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
FAMILIES = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 12}),
    "Qwen2": ("qwen2", _QWEN_WINDOW),
    "Qwen2, all in view": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Phi-3": ("phi3", {"sliding_window": 20}),
    "Gemma": ("gemma", {}),
    "Gemma-2": ("gemma2", _CAPPED),
    "Gemma-3": ("gemma3_text", _MIXED),
    "Granite": ("granite", _SCALES),
    "StarCoder2": ("starcoder2", {"sliding_window": 12}),
    "OLMo-2": ("olmo2", {}),
    "Cohere": ("cohere", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "GPT-2": ("gpt2", {"n_layer": 2, "n_head": 8, "n_positions": 512} | _MHA),
    "GPT-NeoX": ("gpt_neox", _MHA),
    "OPT": ("opt", _MHA),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ministral-3": ("ministral3", {"rope_parameters": _SCALED_ROPE}),
    "Llama-4": ("llama4_text", _LLAMA_4),
    "Gemma, looking ahead": ("gemma", {"use_bidirectional_attention": True}),
    "Gemma-3, looking ahead": ("gemma3_text", _MIXED | {"use_bidirectional_attention": True}),
}
RIGHT = [name for name in FAMILIES if "ahead" not in name and name != "Llama-4"]


def build(name, width=64, spread=0.1, seed=0):
    """Random weights, norms and biases too, in float32."""
    torch.manual_seed(seed)
    kind, numbers = FAMILIES[name]
    if "n_head" in numbers:
        numbers = numbers | {"n_embd": width}
    sizes = {
        "vocab_size": 96, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": width // 8, "max_position_embeddings": 1024, "initializer_range": spread,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "ffn_dim": 2 * width,
        "word_embed_proj_dim": width,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **(sizes | numbers))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=offered_attention(config, "sdpa")
    )
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += spread * torch.randn_like(weight)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def check(model, make=Target, packed=False, longest=LONGEST):
    return self_check.checked(
        model,
        lambda network: make(
            network, max_len=longest, max_nodes=NODES, packed_bytes=ALL_PACKED if packed else 0
        ),
        what="model.id=tiny",
        longest=longest,
    )


def slow_but(quick, cases):
    return [c if c in quick else pytest.param(*c, marks=pytest.mark.slow) for c in cases]


SHAPES = ((64, 0.02), (384, 0.4), (1024, 0.1), (1024, 0.4))
QUICK = [("Llama", 64, 0.02), ("Granite", 384, 0.4), ("StarCoder2", 384, 0.4)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "width", "spread"),
    slow_but(QUICK, [(name, *shape) for name in RIGHT for shape in SHAPES]),
)
def test_a_right_model_passes(family, width, spread, packed):
    found = check(build(family, width, spread), packed=packed)[1]
    assert max(found.difference.values()) <= found.tolerance < 0.1


# -- faults in our passes -------------------------------------------------------------------------


def layers(model):
    return decoder_layers(model)


def attending(change):
    """Our attention with ``change(arguments)`` before it."""

    @contextmanager
    def plant(model):
        real = attention.attend

        def changed(module, query, key, value, mask, **kwargs):
            arguments = {"query": query, "key": key, "value": value} | kwargs
            change(arguments)
            q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
            out, weights = real(module, q, k, v, mask, **arguments)
            return arguments.get("after", lambda rows: rows)(out), weights

        attention.AttentionInterface.register(attention.ATTENTION_NAME, changed)
        try:
            yield
        finally:
            attention.AttentionInterface.register(attention.ATTENTION_NAME, real)

    return plant


def setting(choose):
    """Attributes of the model's modules, ``choose(model)`` gives (module, name, value) each."""

    @contextmanager
    def plant(model):
        before = []
        for holder, name, value in choose(model):
            held = holder if isinstance(holder, dict) else vars(holder)
            inner = getattr(holder, "_parameters", {}), getattr(holder, "_buffers", {})
            held = next((part for part in inner if name in part), held)
            before.append((held, name, held.get(name, plant)))
            held[name] = value
        try:
            yield
        finally:
            for held, name, value in reversed(before):
                held[name] = value
                if value is plant:
                    del held[name]

    return plant


def in_passes(plant):
    class Planted(Target):
        def through_layers(self, *args, **kwargs):
            with plant(self.model):
                return super().through_layers(*args, **kwargs)

    return Planted


def another_plan(change):
    """``change(mask, rows)`` of each pass over a tree, an additive mask, in place."""

    class Planted(Target):
        def plan_of(self, past, visible, own, rows):
            plan = super().plan_of(past, visible, own, rows)
            for mask in (plan.mask, *plan.windowed.values()):
                if mask is not None:
                    change(mask, rows)
            return plan

        def _in_one_call(self, ids, positions, visible, **more):
            if visible is not None:
                mask = self._additive(visible)
                change(mask, len(visible))
                visible = mask == 0
            return super()._in_one_call(ids, positions, visible, **more)

    return Planted


class SeesAll(in_passes(attending(lambda arguments: unhide(arguments)))):
    """No mask hides a row, layer by layer or in one call."""

    def _in_one_call(self, ids, positions, visible, **more):
        visible = None if visible is None else torch.ones_like(visible)
        return super()._in_one_call(ids, positions, visible, **more)


def other_positions(change):
    class Planted(Target):
        def through_layers(self, ids, positions, *more, **options):
            positions = change(positions, self.cache.length)
            return super().through_layers(ids, positions, *more, **options)

        def _in_one_call(self, ids, positions, visible, **more):
            positions = change(positions, self.cache.length)
            return super()._in_one_call(ids, positions, visible, **more)

    return Planted


def in_one_call(change):
    """``change(segment)`` of each pass that is run by one call."""

    class Planted(Target):
        def _in_one_call(self, *args, **kwargs):
            real = self.cache.segments
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.cache, "segments", lambda *a: [change(s) for s in real(*a)])
                return super()._in_one_call(*args, **kwargs)

    return Planted


def called_with(choose):
    """The one call is made while ``choose(model)`` gives (holder, name, value) of faults."""

    class Planted(Target):
        def _allocate(self, *args):
            with setting(choose)(self.model):
                super()._allocate(*args)

    return Planted


def after_prompt(change):
    """``change(cache)`` once the prompt is read."""

    class Planted(Target):
        def prefill(self, *args, **kwargs):
            scores = super().prefill(*args, **kwargs)
            change(self.cache)
            return scores

    return Planted


def window_by(more):
    """Masks of windows that are ``more`` tokens wider."""

    class Planted(Target):
        def plan_of(self, past, visible, own, rows):
            plan, text = super().plan_of(past, visible, own, rows), self._key_positions[:past]
            made = target_module.windowed_masks(
                [w + more for w in self.windows], text, own, rows, visible, self._additive
            )
            plan.windowed.update({w - more: mask for w, mask in made.items()})
            return plan

    return Planted


def query_order(arguments):
    """Query heads share keys as if these were repeated as a whole."""
    query, groups = arguments["query"], arguments["query"].shape[1] // arguments["key"].shape[1]
    kv = arguments["key"].shape[1]
    order = torch.arange(groups * kv).view(groups, kv).T.reshape(-1)
    arguments["query"] = query[:, order]


def unhide(arguments):
    plan = arguments["plan"]
    arguments["plan"] = AttentionPlan(
        mask=None if plan.mask is None else torch.zeros_like(plan.mask), causal=plan.causal
    )


def look_ahead(arguments):
    if arguments["plan"].causal:
        arguments["plan"] = AttentionPlan()


def first_hidden(arguments):
    plan = arguments["plan"]
    rows, keys = arguments["query"].shape[2], arguments["key"].shape[2]
    hidden = torch.zeros(1, 1, rows, keys) if plan.mask is None else plan.mask.clone()
    if plan.causal:
        hidden += torch.full((rows, keys), -1e9).triu(1)
    hidden[..., 1:, 0] = -1e9
    arguments["plan"] = AttentionPlan(mask=hidden)


def swap_layers(cache):
    cache.storage[:4] = cache.storage[[2, 3, 0, 1]]


def stale_row(cache):
    cache.storage[..., cache.length - 2, :] = cache.storage[..., cache.length - 3, :]


def lost_row(cache):
    cache.storage[..., cache.length - 3, :] = 0


def see_a_sibling(mask, rows):
    if rows > 3:
        mask[..., rows - 1, -2] = 0


def hide_the_root(mask, rows):
    mask[..., 1:, mask.shape[-1] - rows] = torch.finfo(mask.dtype).min


UNSEEN = ("k_proj", "norm", "ln_1")  # a bias of all keys moves no softmax; norms are no linears


def biases(model):
    for name, module in layers(model)[0].named_modules():
        if getattr(module, "bias", None) is not None and not name.endswith(UNSEEN):
            return [(module, "bias", 0 * module.bias)]
    raise AssertionError("no bias")


def no_norm(name):
    def choose(model):
        found = [m for n, m in layers(model)[1].named_modules() if n.endswith(name)]
        return [(found[0], "forward", lambda x, *_: x)]

    return choose


def own_rotary(model):
    return model.model.rotary_emb if hasattr(model, "model") else model.gpt_neox.rotary_emb


def in_order(positions, length):
    return positions[:, :1] + torch.arange(positions.shape[1])


def last_shifted(positions, length):
    """The last row of a tree at the position behind its own."""
    shifted = positions.clone()
    shifted[:, -1] += int(length > 0 and positions.shape[1] > 1) * 3
    return shifted


FAULTS = {
    "the last node's position": (other_positions(last_shifted), ("Llama", "Mixtral")),
    "scale": (in_passes(attending(lambda a: a.update(scaling=a["scaling"] * 1.02))), ROTARY),
    "no soft cap": (in_passes(attending(lambda a: a.update(softcap=None))), ("Gemma-2",)),
    "soft cap twice": (in_passes(attending(lambda a: a.update(softcap=2.0))), ("Gemma-2",)),
    "heads swapped": (
        in_passes(attending(lambda a: a.update(query=a["query"].flip(1)))),
        ("Llama", "OPT", "GPT-2"),
    ),
    "grouped heads in another order": (in_passes(attending(query_order)), ROTARY),
    "keys in place of values": (
        in_passes(attending(lambda a: a.update(value=a["key"]))),
        ("Llama", "GPT-NeoX"),
    ),
    "key heads swapped": (
        in_passes(attending(lambda a: a.update(key=a["key"].flip(1)))),
        ("Qwen2", "OLMo-2"),
    ),
    "all rows see all": (SeesAll, ("Llama", "GPT-2", "Cohere")),
    "a prompt looks ahead": (in_passes(attending(look_ahead)), ("Llama", "OPT", "Mixtral")),
    "the first token unseen": (in_passes(attending(first_hidden)), ("Llama", "GPT-NeoX")),
    "a sibling seen": (another_plan(see_a_sibling), ("Llama", "Granite", "GPT-2")),
    "the root unseen": (another_plan(hide_the_root), ("Llama", "Mixtral")),
    "window wider by one": (window_by(1), ("Mistral", "StarCoder2", "Gemma-3")),
    "window narrower by one": (window_by(-1), ("Mistral", "Qwen2", "Gemma-2")),
    "window ignored": (
        in_passes(attending(lambda a: a.update(sliding_window=None))),
        ("Mistral", "Phi-3"),
    ),
    "positions shifted": (
        other_positions(lambda positions, length: positions + int(length > 0)),
        ("Llama", "GPT-2", "OPT"),
    ),
    "all positions shifted": (other_positions(lambda positions, _: positions + 1), ("GPT-2",)),
    "depths in order": (other_positions(in_order), ("Llama", "OPT", "Phi-3")),
    "positions forgotten": (other_positions(lambda positions, _: 0 * positions), ROTARY),
    "rotary base": (
        in_passes(setting(lambda m: [(own_rotary(m), "inv_freq", own_rotary(m).inv_freq ** 1.05)])),
        (*ROTARY, "GPT-NeoX"),
    ),
    "rotated backwards": (
        in_passes(setting(lambda m: [(own_rotary(m), "inv_freq", -own_rotary(m).inv_freq)])),
        ("Llama", "Cohere"),
    ),
    "positions of scaled attention forgotten": (
        in_passes(setting(lambda m: [(m.config.rope_parameters, "llama_4_scaling_beta", 0.0)])),
        ("Ministral-3",),
    ),
    "no norm of queries": (in_passes(setting(no_norm("q_norm"))), ("Qwen3", "Gemma-3")),
    "no norm of keys": (in_passes(setting(no_norm("k_norm"))), ("Qwen3", "OLMo-2")),
    "a bias dropped": (in_passes(setting(biases)), ("Qwen2", "OPT", "GPT-2", "StarCoder2")),
    "a layer left out": (
        in_passes(setting(lambda m: [(layers(m)[1], "forward", lambda x, *_, **__: x)])),
        ("Llama", "Gemma"),
    ),
    "another activation": (
        in_passes(setting(lambda m: [(layers(m)[1].mlp._modules, "act_fn", torch.nn.GELU())])),
        ("Llama", "Qwen3"),
    ),
    "residuals not scaled": (
        in_passes(setting(lambda m: [(layers(m)[0], "residual_multiplier", 1.0)])),
        ("Granite",),
    ),
    "logits not scaled": (
        in_passes(setting(lambda m: [(m.config, "logits_scaling", 1.0)])),
        ("Granite",),
    ),
    "embedding not scaled": (
        in_passes(setting(lambda m: [(m.model.embed_tokens, "embed_scale", torch.tensor(1.0))])),
        ("Gemma-2",),
    ),
    "a stale row": (after_prompt(stale_row), ("Llama", "GPT-2", "Mixtral")),
    "a lost row": (after_prompt(lost_row), ("Llama", "OPT")),
    "layers' rows swapped": (after_prompt(swap_layers), ("Llama", "Cohere")),
}
QUICK_FAULTS = [
    ("scale", "Llama"), ("heads swapped", "Llama"), ("grouped heads in another order", "Llama"),
    ("a sibling seen", "Llama"), ("window wider by one", "Mistral"), ("a bias dropped", "Qwen2"),
    ("window narrower by one", "Mistral"), ("depths in order", "Llama"),
    ("no norm of keys", "Qwen3"), ("rotary base", "Llama"), ("a stale row", "Llama"),
    ("the last node's position", "Mixtral"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "family"),
    slow_but(QUICK_FAULTS, [(fault, name) for fault in FAULTS for name in FAULTS[fault][1]]),
)
def test_a_fault_of_ours_is_found(fault, family):
    """Widths and initial ranges take turns; wide ones with large weights look at one key alone."""
    width, spread = ((64, 0.02), (384, 0.1), (64, 0.4))[len(fault + family) % 3]
    said = r"logits of a (chain|tree) differ|row \d+ of a (chain|tree) differs"
    with pytest.raises(ConfigurationError, match=said):
        check(build(family, width, spread), FAULTS[fault][0])


def wrong_products(change):
    """``change(packed)`` gives layers of products in place of those that were packed."""

    class Planted(Target):
        def _allocate(self, *args):
            packed = packed_model(self.model)
            with setting(lambda m: [(m, "_specbench_packed", change(packed))])(self.model):
                super()._allocate(*args)

    return Planted


def another_layers_product(packed):
    (_, *rest), second = packed.layers
    return replace(packed, layers=((second[0], *rest), second))


def bias_lost(packed):
    (first, *rest), second = packed.layers
    return replace(packed, layers=((replace(first, bias=0 * first.bias), *rest), second))


# What the others plant in layers, where a pass is run by one call.
OF_ONE_CALL = {
    "a tree as a chain": in_one_call(lambda s: replace(s, visible=None)),
    "a key of the text unseen": in_one_call(lambda s: replace(s, past=max(0, s.past - 1))),
    "a sibling seen": another_plan(see_a_sibling),
    "all rows see all": SeesAll,
    "positions shifted": FAULTS["positions shifted"][0],
    "a stale row": after_prompt(stale_row),
    "scale": called_with(lambda m: [(layers(m)[0].self_attn, "scaling", 0.4)]),
    "layers in another order": called_with(
        lambda m: [(m.model._modules, "layers", torch.nn.ModuleList([*layers(m)][::-1]))]
    ),
    "another layer's norm": called_with(
        lambda m: [(layers(m)[0].input_layernorm, "weight", layers(m)[1].input_layernorm.weight)]
    ),
    "another layer's weight": wrong_products(another_layers_product),
    "a bias lost": wrong_products(bias_lost),
    "rotary base": called_with(
        lambda m: [(own_rotary(m), "inv_freq", own_rotary(m).inv_freq * 1.1)]
    ),
}


@pytest.mark.parametrize("fault", OF_ONE_CALL)
def test_a_fault_of_the_one_call_is_found(fault):
    family = "Qwen2, all in view" if "bias" in fault else "Qwen3"
    with pytest.raises(ConfigurationError, match=r"logits of a (chain|tree) differ.*packed"):
        check(build(family, 64, 0.4), OF_ONE_CALL[fault], packed=True)


# -- faults of the model itself -------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.4])
@pytest.mark.parametrize(
    "family",
    [pytest.param("Gemma, looking ahead", marks=pytest.mark.slow), "Gemma-3, looking ahead"],
)
def test_a_model_whose_own_passes_disagree_is_refused(family, spread):
    """Its spread had been taken for rounding, and four times as much had been allowed."""
    with pytest.raises(ConfigurationError, match=r"in transformers itself, passes .* look.* ahead"):
        check(build(family, spread=spread))


def test_attention_that_is_scaled_by_the_rows_of_a_pass_is_refused():
    """Llama-4 counts rows: in a tree they are no positions. Texts that stay below are right."""
    with pytest.raises(ConfigurationError, match=r"logits of a tree differ .*Llama4"):
        check(build("Llama-4"))
    found = check(build("Llama-4"), longest=40)[1]
    assert list(found.lengths.values()) == ["not reached by this run's texts"]
    with pytest.raises(ConfigurationError, match=r"beyond 64 tokens .* model\.context_length=52"):
        usable_context(build("Llama-4"), "model.id=tiny", LONGEST, NODES)


def test_positions_of_the_check_lie_on_both_sides_of_a_step():
    found = check(build("Ministral-3"))[1]
    assert (found.prompt, list(found.lengths.values())) == (64 - 5, ["reached"])
    assert np.isfinite(found.spread)


def test_tokens_that_roundings_move_are_counted_and_said():
    """Each id has a twin with nearly the same weights: near ties everywhere."""
    moved = None
    for seed in range(20):
        model = build("Llama", seed=seed)
        head = model.lm_head.weight.data
        head[48:] = head[:48] * (1 + 3e-7 * torch.randn_like(head[:48]))
        found = check(model)[1]
        if found.moved:
            moved = ModelInfo(self_check=found.to_json())
            break
    assert moved is not None
    assert 0 < found.moved <= found.positions
    assert not check(build("Llama"))[1].moved
