"""The check at load: right random models pass, planted faults are found, and no others refused.

A fault is in our passes only, as a mistake of ours would be; those of the last part are in the
model itself.
"""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import ConfigurationError
from specbench.kernels import attention
from specbench.kernels.architectures import usable_context
from specbench.kernels.attention import AttentionPlan, attend
from specbench.kernels.compiled_pass import packed_model
from specbench.models import target as target_module
from specbench.models.checks import self_check
from specbench.models.checks.self_check import measure_spread
from specbench.models.graph_target import GraphTarget
from specbench.models.hidden_states import decoder_layers as layers
from specbench.models.kv_cache import KVCache
from specbench.models.target import Target
from tests.conftest import quick_first, tiny_model
from tests.models import test_architectures as tiny
from tests.models.test_architectures import equal_answers, why_refused
from tests.tiny_checkpoint import tiny_tokenizer

LONGEST, NODES = 90, 12
ALL_PACKED = 10**9
_LLAMA_4 = {
    "attn_temperature_tuning": True, "floor_scale": 64, "attn_scale": 0.1, "head_dim": 8,
    "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "num_local_experts": 4,
    "intermediate_size_mlp": 64,
}  # fmt: skip
_SCALED_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_SCALES = {
    "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
}  # fmt: skip
_AHEAD = {"use_bidirectional_attention": True, "head_dim": 8}
# Beside those of the page: what else a check must get right.
MORE = {
    "Youtu, one size": ("youtu", tiny._LATENT | {"qk_rope_head_dim": 8, "head_dim": 8}),
    "Granite, scaled": ("granite", _SCALES),
    "Ministral-3": ("ministral3", {"rope_parameters": _SCALED_ROPE, "head_dim": 8}),
    "Llama-4, scaled by rows": ("llama4_text", _LLAMA_4),
    "Gemma, looking ahead": ("gemma", _AHEAD),
    "Gemma-3, looking ahead": ("gemma3_text", tiny._MIXED | _AHEAD),
}
RIGHT = [
    "Llama", "Mistral, window", "Qwen2, window", "Qwen2", "Qwen3", "Phi-3, window", "Gemma",
    "Gemma-2, soft-capping", "Gemma-3", "Granite, scaled", "StarCoder2, window", "OLMo-2", "Cohere",
    "SmolLM3", "GPT-2", "GPT-NeoX", "OPT", "Mixtral", "Ministral-3",
]  # fmt: skip


def build(name, width=32, spread=0.1, **more):
    """Random weights, norms and biases too, in float32."""
    return tiny.build(MORE.get(name, name), width=width, spread=spread, noise=spread, **more)


def check(model, make=Target, longest=LONGEST, packed=False, drafts=False):
    """As a run checks what it has loaded."""
    options = {"packed_bytes": ALL_PACKED} if packed else {}
    return self_check.checked(
        model,
        lambda network: make(network, max_len=longest, max_nodes=NODES, **options),
        subject="model.id=tiny",
        longest=longest,
        drafts=drafts,
    )[1]


DTYPES = quick_first(tiny.DTYPES, ("float64", "bfloat16"))  # the widest and the narrowest


# -- what is right ---------------------------------------------------------------------------------

SHAPES = ((32, 0.02), (384, 0.4), (1024, 0.1), (1024, 0.4))
QUICK = [("Llama", (32, 0.02)), ("Granite, scaled", (384, 0.4)), ("Mixtral", (32, 0.02))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", quick_first([(n, s) for n in RIGHT for s in SHAPES], QUICK))
def test_a_right_model_passes(case, packed):
    name, (width, spread) = case
    result = check(build(name, width, spread), packed=packed)
    assert max(result.difference.values()) <= result.tolerance < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Mistral, window", "Mixtral", "Gemma-2, soft-capping"])
def test_what_decodes_rightly_is_not_refused(name, dtype):
    assert why_refused(name, dtype) == ""


def test_without_finite_logits_nothing_is_refused():
    """Its cases fail and say so (`nan_logits`), as they did."""
    model = tiny_model("llama", dtype=torch.float32)
    model.lm_head.weight.data.fill_(torch.nan)
    assert check(model).tolerance is None


def test_a_run_without_drafts_is_checked_by_its_one_row_passes():
    model = tiny_model("llama")
    target, result = self_check.checked(
        model, lambda m: Target(m, max_len=60, max_nodes=0), subject="x", longest=60
    )
    parts = {"chain", "tree", "continued chain", "continued tree"}
    assert target.max_nodes == 0 and result.difference.keys() == parts
    # No hook stays that the run would pay for.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("window", "longest", "length"),
    [(12, 60, "reached"), (300, 60, "not reached by"), (300, 10_000_000, "too long")],
)
def test_windows_are_outgrown_where_that_is_cheap(window, longest, length, monkeypatch):
    monkeypatch.setitem(self_check.FLOPS, "cpu", 5e6)
    model = tiny_model("mistral")
    model.config.sliding_window = window
    text, lengths = self_check.make_text(model, longest)
    assert length in lengths[f"window of {window}"]
    assert (len(text.prompt) > window) == (length == "reached")


def test_positions_of_the_check_lie_on_both_sides_of_a_step():
    result = check(build("Ministral-3"))
    assert (result.prompt, list(result.lengths.values())) == (64 - 5, ["reached"])
    assert math.isfinite(result.spread)


def test_tokens_that_roundings_move_are_counted():
    """Each id has a twin with nearly the same weights: near ties everywhere."""
    for seed in range(20):
        model = build("Llama", seed=seed)
        head = model.lm_head.weight.data
        half = len(head) // 2
        head[half:] = head[:half] * (1 + 3e-7 * torch.randn_like(head[:half]))
        result = check(model)
        if result.moved:
            break
    assert 0 < result.moved <= result.positions
    assert not check(build("Llama")).moved


def test_the_spread_of_passes_that_agree_is_that_of_roundings():
    logits = torch.tensor([[1.0, -8.0]], dtype=torch.bfloat16)
    same = measure_spread(logits, logits)
    assert same.value == 0.0
    assert same.tolerance(4) == 4 * 2 * 2**-7 * 8
    apart = measure_spread(logits, logits + 1, logits - 2)
    assert (apart.value, apart.tolerance(4)) == (2.0, 8.0)


# -- faults in our passes --------------------------------------------------------------------------


def attending(change):
    """Our attention with ``change(arguments)`` before it, in all passes of a target."""

    @contextmanager
    def plant(_model):
        real = attention.attend

        def changed(module, query, key, value, mask, **kwargs):
            arguments = {"query": query, "key": key, "value": value} | kwargs
            change(arguments)
            q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
            return real(module, q, k, v, mask, **arguments)

        attention.AttentionInterface.register(attention.ATTENTION_NAME, changed)
        try:
            yield
        finally:
            attention.AttentionInterface.register(attention.ATTENTION_NAME, real)

    return in_passes(plant)


@contextmanager
def attributes(choose, model):
    """Attributes of the model's modules, ``choose(model)`` gives (module, name, value) each."""
    with pytest.MonkeyPatch.context() as patch:
        for holder, name, value in choose(model):
            inner = getattr(holder, "_parameters", {}), getattr(holder, "_buffers", {})
            default = holder if isinstance(holder, dict) else vars(holder)
            patch.setitem(next((part for part in inner if name in part), default), name, value)
        yield


def setting(choose):
    return in_passes(partial(attributes, choose))


def in_passes(plant):
    class Planted(Target):
        def through_layers(self, *args, **kwargs):
            with plant(self.model):
                return super().through_layers(*args, **kwargs)

    return Planted


def another_plan(change):
    """``change(mask, rows)`` of each pass over a tree, an additive mask, in place."""

    class Planted(Target):
        def plan_of(self, past, visible, positions, rows):
            plan = super().plan_of(past, visible, positions, rows)
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
            with attributes(choose, self.model):
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
        def plan_of(self, past, visible, positions, rows):
            plan, text = super().plan_of(past, visible, positions, rows), self._key_positions[:past]
            masks = target_module.windowed_masks(
                [w + more for w in self.windows], text, positions, rows, visible, self._additive
            )
            plan.windowed.update({w - more: mask for w, mask in masks.items()})
            return plan

    return Planted


def query_order(arguments):
    """Query heads share keys as if these were repeated as a whole."""
    query, kv = arguments["query"], arguments["key"].shape[1]
    order = torch.arange(query.shape[1]).view(-1, kv).T.reshape(-1)
    arguments["query"] = query[:, order]


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
    for storage in cache._storage:
        storage[..., cache.length - 2, :] = storage[..., cache.length - 3, :]


def lost_row(cache):
    for storage in cache._storage:
        storage[..., cache.length - 3, :] = 0


def swap_keys_and_values(cache):
    for keys, values in cache._layers:
        keys[:], values[:] = values.clone(), keys.clone()


def committing(change):
    """``change(cache, commit, rows, count)`` in place of ``cache.commit``."""

    class Planted(Target):
        def new_cache(self, *args):
            cache = super().new_cache(*args)
            cache.commit = partial(change, cache, cache.commit)
            return cache

    return Planted


def commit_keys_alone(cache, commit, rows, count, retained=0):
    before = [values.clone() for _, values in cache._layers]
    commit(rows, count, retained)
    for (_, values), old in zip(cache._layers, before, strict=True):
        values[:] = old


def commit_all_states(cache, commit, rows, count, retained=0):
    """The state goes on behind all rows of the pass, as if all were accepted."""
    KVCache.commit(cache, rows, count)
    for key, read in cache._passes.items():
        state = cache.layers[key]
        cache.layers[key] = read.behind(state, None, read.window.shape[-1] - state.inputs.shape[-1])
    cache._passes = {}


def other_heads(arguments):
    if arguments.get("s_aux") is not None:
        arguments["s_aux"] = arguments["s_aux"].roll(1)


def see_a_sibling(mask, rows):
    if rows > 3:
        mask[..., rows - 1, -2] = 0


def hide_the_root(mask, rows):
    mask[..., 1:, mask.shape[-1] - rows] = torch.finfo(mask.dtype).min


def biases(model):
    unseen = ("k_proj", "norm", "ln_1")  # a bias of all keys moves no softmax; norms are no linears
    named = [(n, m) for n, m in layers(model)[0].named_modules() if not n.endswith(unseen)]
    module = next(m for _, m in named if getattr(m, "bias", None) is not None)
    return [(module, "bias", 0 * module.bias)]


def own_rotary(model):
    return model.model.rotary_emb if hasattr(model, "model") else model.gpt_neox.rotary_emb


def in_order(positions, length):
    return positions[:, :1] + torch.arange(positions.shape[1])


def last_shifted(positions, length):
    """The last row of a tree at the position behind its own."""
    shifted = positions.clone()
    shifted[:, -1] += int(length > 0 and positions.shape[1] > 1) * 3
    return shifted


SEES_ALL = another_plan(lambda mask, rows: mask.zero_())
FAULTS = {
    "the last node's position": (other_positions(last_shifted), ("Llama", "Mixtral")),
    "scale": (attending(lambda a: a.update(scaling=a["scaling"] * 1.02)), ("Llama", "GPT-NeoX")),
    "no soft cap": (attending(lambda a: a.update(softcap=None)), ("Gemma-2, soft-capping",)),
    "grouped heads in another order": (attending(query_order), ("Llama", "Qwen3")),
    "keys in place of values": (attending(lambda a: a.update(value=a["key"])), ("Qwen2", "OPT")),
    "all rows see all": (SEES_ALL, ("Mistral, window", "Mixtral", "GPT-2")),
    "a prompt looks ahead": (attending(look_ahead), ("Llama", "OPT", "Mixtral")),
    "the first token unseen": (attending(first_hidden), ("Llama", "GPT-NeoX")),
    "a sibling seen": (another_plan(see_a_sibling), ("Llama", "Granite, scaled")),
    "the root unseen": (another_plan(hide_the_root), ("Llama", "Mixtral")),
    "window wider by one": (window_by(1), ("Mistral, window", "StarCoder2, window")),
    "window narrower by one": (window_by(-1), ("Mistral, window", "Gemma-2, soft-capping")),
    "window ignored": (
        attending(lambda a: a.update(sliding_window=None)),
        ("Mistral, window", "Gemma-3", "gpt-oss"),
    ),
    "positions shifted": (
        other_positions(lambda positions, length: positions + int(length > 0)),
        ("Mistral, window", "GPT-2", "OPT"),
    ),
    "depths in order": (other_positions(in_order), ("Mistral, window", "OPT")),
    "rotary base": (
        setting(lambda m: [(own_rotary(m), "inv_freq", own_rotary(m).inv_freq ** 1.05)]),
        ("Llama", "GPT-NeoX", "DeepSeek-V3"),
    ),
    "positions of scaled attention forgotten": (
        setting(lambda m: [(m.config.rope_parameters, "llama_4_scaling_beta", 0.0)]),
        ("Ministral-3",),
    ),
    "a bias dropped": (setting(biases), ("Qwen2", "OPT", "GPT-2", "StarCoder2, window")),
    "a layer left out": (
        setting(lambda m: [(layers(m)[1], "forward", lambda x, *_, **__: x)]),
        ("Llama", "Gemma"),
    ),
    "a stale row": (after_prompt(stale_row), ("Llama", "GPT-2", "Mixtral", "DeepSeek-V2")),
    "a lost row": (after_prompt(lost_row), ("Mistral, window", "OPT", "DeepSeek-V3")),
    "sinks dropped": (attending(lambda a: a.update(s_aux=None)), ("gpt-oss", "Granite, window")),
    "sinks of other heads": (attending(other_heads), ("gpt-oss", "Flint")),
    "keys and values swapped": (after_prompt(swap_keys_and_values), ("Llama", "Youtu, one size")),
    # Only what follows a commit shows these.
    "rows of a path stay": (
        committing(lambda _, commit, rows, count, *more: commit(None, count, *more)),
        ("Mistral, window", "Llama", "DeepSeek-V3"),
    ),
    "values of a path stay": (committing(commit_keys_alone), ("Llama", "DeepSeek-V2")),
    "states of all rows": (committing(commit_all_states), ("LFM2", "Qwen3-Next", "Bamba")),
    "layers' rows swapped": (after_prompt(swap_layers), ("Llama", "Cohere")),
}
PAIRS = [(fault, name) for fault, (_, names) in FAULTS.items() for name in names]
QUICK_FAULTS = [p for p in PAIRS if p[1] in ("Llama", "Qwen2") or p[0].startswith("window ")]
SAID = r"logits of a (continued )?(chain|tree) differ"


@pytest.mark.parametrize("pair", quick_first(PAIRS, QUICK_FAULTS))
def test_a_fault_of_ours_is_found(pair):
    """Widths and initial ranges take turns; wide ones with large weights look at one key alone."""
    width, spread = ((32, 0.02), (192, 0.1), (32, 0.4))[len("".join(pair)) % 3]
    with pytest.raises(ConfigurationError, match=SAID):
        check(build(pair[1], width, spread), FAULTS[pair[0]][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("fault", [f for f, (_, names) in FAULTS.items() if names[0] == RIGHT[1]])
def test_faults_are_found_in_every_dtype_and_of_a_draft_model(fault, drafts, dtype):
    model = tiny_model("mistral_window", dtype=getattr(torch, dtype))
    with pytest.raises(ConfigurationError, match=SAID):
        check(model, FAULTS[fault][0], drafts=drafts)


@pytest.mark.parametrize("drafts", [False, True])
def test_passes_of_fixed_shape_are_checked_as_well(drafts):
    """They are what a GPU replays; here they run uncaptured."""
    check(tiny_model("mistral_window"), partial(GraphTarget, drafts=drafts), drafts=drafts)

    class SeesAllKeys(GraphTarget):
        def static_layers(self, tokens, positions, static, *more):
            seen = replace(static, visible=torch.ones_like(static.visible))
            return super().static_layers(tokens, positions, seen, *more)

    with pytest.raises(ConfigurationError, match="logits of a chain differ"):
        check(tiny_model("mistral_window"), partial(SeesAllKeys, drafts=drafts), drafts=drafts)


def wrong_products(change):
    """``change(packed)`` gives layers of products in place of those that were packed."""
    return called_with(lambda m: [(m, "_specbench_packed", change(packed_model(m)))])


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
    "all rows see all": SEES_ALL,
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
    name = "Qwen2" if "bias" in fault else "Qwen3"
    with pytest.raises(ConfigurationError, match=rf"{SAID}.*packed"):
        check(build(name, 64, 0.4), OF_ONE_CALL[fault], packed=True)


def test_a_routers_near_tie_is_no_fault(monkeypatch):
    """In one row another expert was chosen; in a model without experts that row is a fault.

    So it is in a mixture where it is wrong in every text.
    """
    compute, off = self_check._our_rows, iter([])

    @torch.inference_mode()
    def with_another_expert(*args):
        rows = compute(*args)
        rows["tree"][2] += next(off)
        return rows

    monkeypatch.setattr(self_check, "_our_rows", with_another_expert)
    off = iter([1.0, 1.0, 0.0])
    check(build("Mixtral"))
    for name, by in (("Mixtral", [1.0] * 4), ("Llama", [1.0])):
        off = iter(by)
        with pytest.raises(ConfigurationError, match="logits of a tree differ by 1 "):
            check(build(name))


def test_our_own_nan_is_refused(monkeypatch):
    monkeypatch.setattr(
        self_check, "_our_rows", lambda *_: {"chain": torch.full((7, 48), torch.nan)}
    )
    with pytest.raises(ConfigurationError, match="differ by inf"):
        check(tiny_model("llama"))


# -- faults of the model itself, and what is not computed here -------------------------------------

REFUSED = {
    "Llama-4": "beyond 16 tokens attention is chunked",
    "StableLM": rf"{SAID} by .* layer 0 .*StableLmAttention",
    "Nemotron": rf"{SAID} by .* layer 0 .*NemotronAttention",
    "DeepSeek-V3.2": "choose the rows that they attend to by an indexer",
    "Phi-3, LongRoPE past its switch": r"beyond 40 tokens LongRoPE .* model\.context_length=28",
    "Llama, dynamic RoPE outgrown": "beyond 40 tokens dynamic RoPE",
    "GPT-J": "GPTJForCausalLM computes attention itself",
    "Mamba": "starts each pass of several rows from an empty state",
}


@pytest.mark.parametrize("name", quick_first(REFUSED, ("StableLM",)))
def test_features_that_are_not_computed_here_are_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=REFUSED[name]) as caught:
        tiny.checked_target(build(name, spread=0.4))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("spread", [0.02, 0.4])
@pytest.mark.parametrize("name", quick_first(list(MORE)[-2:], list(MORE)[-1:]))
def test_a_model_whose_own_passes_disagree_is_refused(name, spread):
    """Its spread had been taken for rounding, and four times as much had been allowed."""
    with pytest.raises(ConfigurationError, match=r"in transformers itself, passes .* look.* ahead"):
        check(build(name, spread=spread))


def test_attention_that_is_scaled_by_the_rows_of_a_pass_is_refused():
    """Llama-4 counts rows: in a tree they are no positions. Texts that stay below are right."""
    model = partial(build, "Llama-4, scaled by rows")
    with pytest.raises(ConfigurationError, match=r"logits of a tree differ .*Llama4"):
        check(model())
    lengths = check(model(), longest=40).lengths
    assert list(lengths.values()) == ["not reached by this run's texts"]
    with pytest.raises(ConfigurationError, match=r"beyond 64 tokens .* model\.context_length=52"):
        usable_context(model(), "model.id=tiny", LONGEST, NODES)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused():
    tokenizer = tiny_tokenizer()
    last, size = max((i, token) for token, i in tokenizer.get_vocab().items())[0], len(tokenizer)
    self_check.check_tokenizer(tiny_model("llama", vocab_size=size), tokenizer, "model.id=x")
    with pytest.raises(ConfigurationError, match=rf"1 tokens .* \(id {last}\)"):
        self_check.check_tokenizer(tiny_model("llama", vocab_size=last), tokenizer, "model.id=x")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    self_check.check_tokenizer(tiny_model("llama", vocab_size=size), tokenizer, "model.id=x")


# -- our attention ---------------------------------------------------------------------------------


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
            expected = torch.softmax(scores, 0) @ value[0, head // 2, seen]
            # The softmax is transformers', in float32.
            assert torch.allclose(out[0, i, head], expected, atol=1e-6, rtol=0)


@given(st.data())
def test_sinks_are_one_more_key_without_a_value(data):
    """Against the formula over whole matrices, in one piece and in several."""
    draw = partial(data.draw, st.integers(1, 6))
    batch, groups, kv_heads, rows = (draw() for _ in range(4))
    causal, hidden_share = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    keys = rows if causal else draw()
    query, key = heads(batch, groups * kv_heads, rows), heads(batch, kv_heads, keys)
    sinks = data.draw(st.sampled_from([0.0, 2.0, 8.0])) * torch.randn(groups * kv_heads).double()
    hidden = torch.rand(rows, keys) < hidden_share
    if causal:
        hidden = torch.ones(rows, keys).triu(1).bool()
    mask = hidden.double() * torch.finfo(torch.float64).min
    plan = AttentionPlan(mask=None if causal else mask[None, None], causal=causal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_PIECE", draw())
        out, _ = attend(torch.nn.Module(), query, key, key[..., :5], None, s_aux=sinks, plan=plan)
    whole = key.repeat_interleave(groups, 1)
    scores = (query @ whole.mT / 8**0.5 + mask).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    expected = (weights @ whole[..., :5]).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


def test_gemma_2_answers_as_transformers_does():
    assert equal_answers("Gemma-2, soft-capping") == 6


def test_attention_swallows_no_argument_that_it_does_not_know():
    q = heads(1, 2, 3)
    attend(torch.nn.Module(), q, q, q, None, position_ids=None, use_cache=True, s_aux=None)
    with pytest.raises(
        ConfigurationError, match=r"Linear .* position_bias \(a bias by distance\), tail"
    ):
        attend(torch.nn.Linear(1, 1), q, q, q, None, position_bias=torch.zeros(2), tail=3)


def test_layers_on_another_device_get_the_mask_there():
    """One copy a pass and device; ``meta`` stands in for a second device."""
    query = torch.zeros(1, 4, 3, 8, device="meta")
    key = torch.zeros(1, 2, 9, 8, device="meta")
    mask, near = torch.zeros(1, 1, 3, 9), torch.zeros(1, 1, 3, 9)
    plan = AttentionPlan(mask=mask, windowed={4: near})
    for window in (None, 4, None, 4):
        out, _ = attend(
            torch.nn.Identity(), query, key, key, None, sliding_window=window, plan=plan
        )
        assert out.shape == (1, 3, 4, 8)
    meta = torch.device("meta")
    assert list(plan.moved) == [(id(mask), meta), (id(near), meta)]
    assert plan.on(mask, meta) is plan.on(mask, meta)
    assert plan.on(mask, mask.device) is mask
