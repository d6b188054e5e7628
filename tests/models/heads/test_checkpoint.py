"""Head checkpoints: every key is accounted for, and each trap of the published files is known."""

import math
import re

import numpy as np
import pytest
import torch

from specbench.errors import ConfigurationError, WeightsNotFound
from specbench.models.checkpoints import int8
from specbench.models.heads import checkpoint
from specbench.models.heads.layer_shape import read_shape
from tests.models.heads import parity, tiny_heads
from tests.models.heads.parity import LOADERS, load, saved


def drop(key):
    return lambda config, tensors: tensors.pop(key)


def put(**values):
    return lambda config, tensors: tensors.update(values)


def edit(**changes):
    return lambda config, tensors: config.update(changes)


def put_in_layer(**changes):
    return lambda config, tensors: config["transformer_layer_config"].update(changes)


def changed(key, change):
    return lambda config, tensors: tensors.update({key: change(tensors[key])})


def refused(folder, family, message, target=None, **options):
    """A folder is refused by name, with exit code 2 and what to do."""
    with pytest.raises(ConfigurationError, match=message) as raised:
        load(folder, family, target, **options)
    assert raised.value.exit_code == 2
    assert re.search(r"\b(Take|Fetch|Type|Save|Remove) ", str(raised.value))


OPTIONAL = r"input_embed_fn|prefix_embeding_layer.embed|.*inv_freq|d2t|t2d"


@pytest.mark.parametrize("family", LOADERS)
def test_each_key_must_be_there_and_no_other(tmp_path, family):
    make, name, _ = LOADERS[family]
    config, tensors = make()
    keys = [key for key in tensors if not re.match(OPTIONAL, key)]
    for key in keys:
        rest = {k: v for k, v in tensors.items() if k != key}
        tiny_heads.save(tmp_path, config, rest, name)
        refused(tmp_path, family, re.escape(key))
    others = {"norm.bias", "layers.7.mlp.up_proj.weight", *(f"{key}.x" for key in keys)}
    others |= {key.replace("weight", "bias") for key in keys} - set(keys)
    for key in sorted(others)[::3]:
        more = tensors | {key: torch.zeros(tiny_heads.HIDDEN)}
        tiny_heads.save(tmp_path, config, more, name)
        refused(tmp_path, family, re.escape(key))


def first(number):
    """This one in the place of the tensor's first."""

    def change(weight):
        weight = weight.clone()
        weight.view(-1)[0] = number
        return weight

    return change


EMBEDDING, FC, EYES = "embed_tokens.weight", "fc.weight", torch.eye(tiny_heads.VOCAB)
ROWS = {n: torch.ones(n, tiny_heads.HIDDEN) for n in (29, 30, 31)}
IDS = "name 11 ids below the target's 30"
# Weights, also of an embedding of the head's own.
REFUSED = [
    ("hydra", changed("hydra_mlp.0.5.linear.bias", lambda w: w + 1),
     r"hydra_mlp\.0\.[35]\.linear\.bias as another"),
    ("eagle", put(**{EMBEDDING: ROWS[29]}), r"embed_tokens\.weight as \[29, 12\].*\[30, 12\]"),
    ("eagle", put(**{EMBEDDING: EYES}), r"embed_tokens\.weight as \[30, 30\]"),
    ("eagle", put(**{EMBEDDING: first(torch.nan)(ROWS[30])}), r"embed_tokens\.weight is not fin"),
    ("eagle", put(**{EMBEDDING: ROWS[30].long()}), r"embed_tokens\.weight as torch\.int64"),
    ("eagle3", put(**{EMBEDDING: ROWS[31]}), r"embed_tokens\.weight as \[31, 12\]"),
    ("eagle", changed(FC, first(torch.nan)), r"fc\.weight is not finite"),
    ("medusa", changed("0.0.linear.bias", first(torch.inf)), r"0\.0\.linear\.bias is not finite"),
    ("eagle", changed(FC, first(1e5)), r"up to 1e\+05 in fc\.weight.*float16.*model\.dtype="),
    ("eagle", put(**{EMBEDDING: first(1e5)(ROWS[30])}), r"embed_tokens\.weight, too large"),
    ("hydra", changed("hydra_mlp.0.1.linear.weight", torch.Tensor.to_sparse), "torch.sparse_coo"),
    ("eagle", changed(FC, lambda w: w.to("meta")), r"fc\.weight as .*meta"),
    ("medusa", put(**{"999999999.0.linear.weight": ROWS[30]}), r"999999999\."),
]  # fmt: skip
REFUSED += [
    (family, changed(key, lambda w, dtype=dtype: w.to(dtype)), f"{re.escape(key)} as {dtype}")
    for family, key in (("eagle", FC), ("medusa", "0.1.weight"))
    for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
]
# Two vocabularies.
REFUSED += [
    ("eagle3", changed("d2t", lambda w: w + 0.5), r"d2t as \[11\] of float.*11 whole"),
    ("eagle3", changed("d2t", torch.Tensor.cfloat), r"d2t as \[11\] of complex64"),
    ("eagle3", changed("d2t", lambda w: w[:9].clone()), r"d2t as \[9\]"),
    ("eagle3", changed("d2t", lambda w: w[None].clone()), r"d2t as \[1, 11\]"),
    ("eagle3", changed("d2t", lambda w: w + 2**62), IDS),
    ("eagle3", changed("d2t", torch.zeros_like), IDS),
    ("eagle3", lambda c, t: t.update(d2t=t["t2d"].nonzero()[:, 0]), "added to the head's id"),
    ("eagle3", lambda c, t: (t.pop("t2d"), t["d2t"].zero_()), IDS),
    ("eagle3", changed("t2d", lambda w: w[:20].clone()), r"t2d as \[20\] of bool.*30 whole"),
    ("eagle3", changed("t2d", torch.zeros_like), IDS),
    ("speculators", changed("t2d", torch.Tensor.half), r"t2d as \[30\] of float16"),
]
# What config.json says; a size must not make modules without end.
REFUSED += [
    (family, edit(**{key: value}), f"`{key}` must be .*, got {re.escape(repr(value))}")
    for family, key, values in (
        ("eagle", "rope_theta", ("abc", [1], -1, math.nan, math.inf)),
        ("eagle", "rms_norm_eps", ("abc", 0)),
        ("eagle", "rope_scaling", ("abc",)),
        ("eagle", "hidden_size", (True,)),
        ("eagle", "intermediate_size", (10**15,)),
        ("eagle", "num_attention_heads", (4.0, 0)),
        ("eagle", "sliding_window", ("abc", 0)),
        ("eagle", "hidden_act", ("gelu",)),
        ("hydra", "hydra_head_arch", ("cross-attention",)),
        ("hydra", "grounded_heads", (False,)),
        ("hydra", "hidden_state_offset", (1,)),
        ("eagle3", "target_hidden_size", ("abc",)),
        ("eagle3", "draft_vocab_size", (True,)),
        ("eagle3", "eagle_config", ("abc",)),
        ("eagle3", "eagle_aux_hidden_state_layer_ids", ("abc",)),
        ("speculators", "speculators_model_type", ("eagle",)),
    )
    for value in values
]
REFUSED += [
    ("eagle", edit(bias=False), r"Unexpected.*fc\.bias"),
    ("eagle", edit(head_dim=5), "head_dim"),
    ("eagle", edit(num_key_value_heads=3), "cannot share 3"),
    ("eagle", edit(rope_parameters={"rope_theta": 9}), "rope_theta.*9.*500"),
    ("eagle", edit(rope_parameters={"rope_theta": {}}), r"rope_parameters\.rope_theta"),
    ("eagle", edit(rope_scaling={"type": "dynamic", "factor": 2.0}), "'yarn', got 'dynamic'"),
    ("eagle", edit(rope_scaling={"type": "linear", "factor": 0}), "gives no positions"),
    ("eagle", edit(rope_scaling={"type": "linear", "factor": "4"}), "gives no positions"),
    ("eagle", edit(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "gives no positions"),
    ("eagle3", edit(eagle_aux_hidden_state_layer_ids=[1, -2, 3]), "layer_ids.*-2"),
    ("eagle3", edit(eagle_aux_hidden_state_layer_ids=[1, 2]), r"mismatch for fc\.weight"),
    ("speculators", edit(transformer_layer_config=None), "transformer_layer_config.*hidden_size"),
    ("speculators", edit(transformer_layer_config={"model_type": "gemma"}), "'qwen3', got 'gemma'"),
    ("speculators", put_in_layer(num_hidden_layers="abc"), "num_hidden_layers.*'abc'"),
    ("speculators", put_in_layer(num_hidden_layers=10**6), r"Missing.*layers\.1\.input_layer"),
    ("hydra", edit(hydra_num_layers=None), "hydra_num_layers"),
    ("hydra", edit(hydra_num_layers=0), "hydra_num_layers"),
    ("hydra", edit(hydra_num_layers=10**9), r"Missing.*hydra_mlp\.0\.7\.linear"),
]


@pytest.mark.parametrize(
    ("family", "change", "message"), REFUSED, ids=[f"{c[0]}-{c[2]}" for c in REFUSED]
)
def test_what_is_not_read_here_is_named_with_what_to_do(tmp_path, family, change, message):
    make, name, _ = LOADERS[family]
    config, tensors = make()
    change(config, tensors)
    # torch's format keeps what safetensors cannot.
    name = "pytorch_model.bin" if name == "model.safetensors" else name
    tiny_heads.save(tmp_path, config, tensors, name)
    refused(tmp_path, family, message, dtype=torch.float16)


@pytest.mark.parametrize("family", LOADERS)
def test_a_head_of_another_target_is_refused(tmp_path, family):
    head = load(saved(tmp_path, family), family)
    assert not head.training and not any(p.requires_grad for p in head.parameters())
    refused(tmp_path, family, "this target", tiny_heads.target(hidden=16))
    if family == "eagle3":
        refused(tmp_path, family, r"t2d as \[30\].*20 whole", tiny_heads.target(vocab=20))


class Unsafe:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_a_damaged_folder_is_refused(tmp_path, family):
    name = LOADERS[family][1]
    with pytest.raises(WeightsNotFound, match=r"config\.json cannot be read.*model\.safetensors"):
        load(tmp_path / "none", family)
    saved(tmp_path, family)
    (tmp_path / name).write_bytes(b"no weights")
    with pytest.raises(WeightsNotFound, match=f"{name} is damaged"):
        load(tmp_path, family)
    if family == "eagle":
        torch.save({"fc.weight": Unsafe()}, tmp_path / name)
        with pytest.raises(WeightsNotFound, match="more than weights"):
            load(tmp_path, family)
        torch.save([1, 2], tmp_path / name)
        with pytest.raises(WeightsNotFound, match="does not hold named tensors"):
            load(tmp_path, family)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(WeightsNotFound, match=r"config\.json"):
            load(tmp_path, family)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_byte_that_was_lost_is_no_crash(tmp_path, zipped):
    """What torch raises depends on the byte."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    file = tmp_path / "pytorch_model.bin"
    torch.save({FC: ROWS[29]}, file, _use_new_zipfile_serialization=zipped)
    whole, random = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for position in random.integers(len(whole), size=40):
        file.write_bytes(whole[:position] + random.bytes(1) + whole[position + 1 :])
        try:
            checkpoint.read(tmp_path, [file.name])
        except WeightsNotFound as error:
            assert "Fetch it again" in str(error)
            refused += 1
    assert refused


# -- Medusa and Hydra ------------------------------------------------------------------------------


def test_medusa_heads_are_counted_not_believed(tmp_path):
    assert len(load(saved(tmp_path, "medusa"), "medusa").heads) == 5  # config.json says 2


def test_medusa_2_is_refused(tmp_path):
    tiny_heads.save(tmp_path, {}, {}, "pytorch_model-00001-of-00002.bin")
    with pytest.raises(WeightsNotFound, match="Medusa-2 trained the target too"):
        load(tmp_path, "medusa")


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3"])
def test_matrices_kept_as_bytes_are_read(tmp_path, family):
    make, name, _ = LOADERS[family]
    config, tensors = make()
    name = name.replace("pytorch_model.bin", "model.safetensors").replace(".pt", ".safetensors")
    tiny_heads.save(tmp_path, config, int8.rounded(tensors), name)
    ours = load(tmp_path, family)
    whole = load(saved(tmp_path / "whole", family), family)
    for key, weight in whole.state_dict().items():
        half_a_step = weight.abs().amax(-1, keepdim=True) / 254
        assert ((ours.state_dict()[key] - weight).abs() <= half_a_step + 1e-6).all(), key


# -- EAGLE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["eagle", "eagle3", "speculators"])
def test_an_embedding_is_used_where_it_is_no_copy_of_the_targets(tmp_path, family, caplog):
    copy = {"embed_tokens.weight": tiny_heads.target().embedding.half().double()}
    assert load(saved(tmp_path, family, put(**copy)), family).embedding is None
    assert not caplog.records
    table = torch.randn(tiny_heads.VOCAB, tiny_heads.HIDDEN, dtype=torch.float64)
    head = load(saved(tmp_path, family, put(**{"embed_tokens.weight": table})), family)
    parity.close(head.embedding, table)
    assert "its own is used" in caplog.text
    width = tiny_heads.HIDDEN * (1 if family == "eagle" else 3)
    states = torch.randn(2, width, dtype=torch.float64)
    outs = []
    for target in (tiny_heads.target(), tiny_heads.Ends(table, tiny_heads.target().head)):
        head = load(tmp_path, family, target)
        head.reserve(4, 1)
        outs.append(head.catch_up(torch.tensor([3, 4]), states))
    parity.close(*outs)


def test_a_head_wider_than_its_target_needs_its_own_embedding(tmp_path):
    small = tiny_heads.target(hidden=8)

    def widen(config, tensors):
        config["target_hidden_size"] = 8
        tensors["fc.weight"] = tensors["fc.weight"][:, :24]

    saved(tmp_path, "eagle3", widen)
    with pytest.raises(WeightsNotFound, match=r"embed_tokens\.weight as nothing.*\[30, 12\]"):
        load(tmp_path, "eagle3", small)

    def whole(config, tensors):
        widen(config, tensors)
        tensors["embed_tokens.weight"] = torch.ones(tiny_heads.VOCAB, 12)

    head = load(saved(tmp_path, "eagle3", whole), "eagle3", small)
    head.reserve(4, 1)
    assert head.catch_up(torch.tensor([1]), torch.ones(1, 24).double()).shape == (1, 12)


def test_one_of_d2t_and_t2d_is_enough_and_none_for_one_vocabulary(tmp_path):
    draft_ids = torch.arange(tiny_heads.DRAFT_VOCAB)
    ids = tiny_heads.draft_vocabulary()["t2d"].nonzero()[:, 0]
    for other in ("d2t", "t2d"):
        head = load(saved(tmp_path, "eagle3", drop(other)), "eagle3")
        assert torch.equal(head.to_target_ids(draft_ids), ids)
    saved(tmp_path, "eagle3", lambda config, tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    refused(tmp_path, "eagle3", IDS)
    head = load(tmp_path, "eagle3", tiny_heads.target(vocab=tiny_heads.DRAFT_VOCAB))
    assert torch.equal(head.to_target_ids(draft_ids), draft_ids)


def test_layer_ids_stand_where_either_dialect_puts_them(tmp_path):
    def nested(config, tensors):
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}

    folder = saved(tmp_path / "a", "eagle3", nested)
    assert load(folder, "eagle3").config.layer_ids == (1, 4, 9)
    assert load(folder, "eagle3", layer_ids=(2, 5, 10)).config.layer_ids == (2, 5, 10)
    assert load(saved(tmp_path / "b", "eagle3"), "eagle3").config.layer_ids == ()
    assert load(saved(tmp_path / "c", "speculators"), "speculators").config.layer_ids == (2, 5, 7)


def test_a_head_of_one_state_has_no_fc(tmp_path):
    def single(config, tensors):
        config["eagle_config"] = {"use_aux_hidden_state": False}
        del tensors["fc.weight"]

    head = load(saved(tmp_path, "eagle3", single), "eagle3")
    head.reserve(4, 1)
    state = torch.randn(1, tiny_heads.HIDDEN, dtype=torch.float64)
    assert head.catch_up(torch.tensor([1]), state).shape == state.shape


def test_a_residual_that_is_not_named_is_taken_as_normed(tmp_path, caplog):
    head = load(saved(tmp_path, "speculators", lambda c, t: c.pop("norm_before_residual")),
                "speculators")  # fmt: skip
    assert head.config.norm_before_residual
    assert "norm_before_residual is missing" in caplog.text


# -- the layer's configuration ---------------------------------------------------------------------


def layer(**changes):
    config = {**tiny_heads.LAYER, **changes}
    return {key: value for key, value in config.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": "absent"}, 10000.0),
        ({}, 500.0),
        ({"rope_theta": "absent", "rope_parameters": {"rope_theta": 7e5}}, 7e5),
        ({"rope_theta": "absent", "rope_scaling": {"rope_theta": 3e4}}, 3e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500}}, 500.0),
    ],
)
def test_theta_stands_in_three_places_or_nowhere(changes, theta):
    assert read_shape(layer(**changes), "config.json").rope_theta == theta


def test_key_heads_default_to_the_heads_and_head_dim_to_their_share():
    shape = read_shape(layer(num_key_value_heads="absent", head_dim="absent", hidden_size=16), "c")
    assert (shape.n_kv_heads, shape.head_dim) == (4, 4)


def test_scaled_positions_are_transformers_own():
    linear = read_shape(layer(rope_scaling={"type": "linear", "factor": 4.0}), "config.json")
    plain = read_shape(layer(), "config.json")
    scaled, factor = linear.inverse_frequencies()
    torch.testing.assert_close(scaled * 4, plain.inverse_frequencies()[0], rtol=1e-6, atol=0)
    assert factor == 1.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    mixed, _ = read_shape(layer(rope_scaling=llama3), "config.json").inverse_frequencies()
    ratio = mixed / plain.inverse_frequencies()[0]
    assert float(ratio[0]) == pytest.approx(1.0)
    assert float(ratio[-1]) == pytest.approx(1 / 8)
