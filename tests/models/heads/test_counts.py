"""The published checkpoints have as many parameters as their configurations say here.

Everything is on the meta device: shapes without weights.
"""

from types import SimpleNamespace

import pytest
import torch

from specbench.models.heads.decoder import DecoderLayer
from specbench.models.heads.eagle import Eagle
from specbench.models.heads.eagle3 import Eagle3
from specbench.models.heads.eagle3_config import read_config
from specbench.models.heads.hydra_heads import Hydra
from specbench.models.heads.layer_shape import read_shape
from specbench.models.heads.medusa import Medusa

# hidden, intermediate, heads, key heads (None: the configuration lacks them)
VICUNA_7B = (4096, 11008, 32, None)
VICUNA_13B = (5120, 13824, 40, None)
VICUNA_33B = (6656, 17920, 52, None)


def config(hidden, inner, heads, kv, **others):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return sizes | ({} if kv is None else {"num_key_value_heads": kv}) | others


def millions(module):
    return round(sum(p.numel() for p in module.parameters()) / 1e6, 2)


def ends(hidden, vocab=32000):
    return SimpleNamespace(embedding=torch.empty(vocab, hidden, device="meta"))


@pytest.mark.parametrize(("hidden", "expected"), [(4096, 739.27), (5120, 950.30), (6656, 1286.50)])
def test_medusa(hidden, expected):
    with torch.device("meta"):
        assert millions(Medusa(ends(hidden), n_heads=5, own_lm_heads=True)) == expected


def test_medusa_with_the_targets_lm_head():
    with torch.device("meta"):
        assert millions(Medusa(ends(576), n_heads=4, own_lm_heads=False)) == 1.33


@pytest.mark.parametrize(
    ("sizes", "heads", "prefix"),
    [
        (VICUNA_7B, 1061.34, 202.39),
        (VICUNA_13B, 1494.41, 317.21),
        (VICUNA_33B, 2269.85, 535.06),
    ],
)
def test_hydra(sizes, heads, prefix):
    shape = read_shape(config(*sizes), "config.json")
    with torch.device("meta"):
        hydra = Hydra(ends(sizes[0]), n_heads=4, n_blocks=4, prefix=shape)
    assert millions(hydra.heads) == heads
    assert millions(hydra.prefix) == prefix


@pytest.mark.parametrize(
    ("sizes", "others", "expected"),
    [
        (VICUNA_7B, {}, 235.94),
        (VICUNA_13B, {}, 369.63),
        # The head has fewer key heads than its target.
        ((6656, 17920, 52, 13), {}, 557.20),
        ((8192, 28672, 64, 8), {}, 989.87),  # Llama-2-70B
        ((4096, 14336, 32, 8), {"bias": False, "rope_theta": 500000}, 251.66),  # Llama-3-8B
        ((4096, 14336, 32, 32), {}, 276.83),  # Mixtral
        ((3584, 18944, 28, 28), {"qkv_bias": True, "rope_theta": 1e6}, 280.77),  # Qwen2-7B
        ((576, 1536, 9, 3), {}, 4.20),  # SmolLM2-135M
    ],
)
def test_eagle(sizes, others, expected):
    read = config(*sizes, **others)
    shape = read_shape(read, "config.json", bias_key="qkv_bias")
    with torch.device("meta"):
        head = Eagle(ends(sizes[0]), shape, bias=read.get("bias", True))
    assert millions(head) == expected


@pytest.mark.parametrize(
    ("sizes", "vocab", "others", "expected"),
    [
        ((4096, 14336, 32, 8), 128256, {}, 424.69),  # Llama-3.1-8B
        ((5120, 13824, 40, 40), 32000, {"num_hidden_layers": 40}, 638.34),  # Vicuna-13B
        ((8192, 28672, 64, 8), 128256, {}, 1403.03),  # Llama-3.3-70B
    ],
)
def test_eagle3(sizes, vocab, others, expected):
    read = config(*sizes, vocab_size=vocab, draft_vocab_size=32000, **others)
    described = read_config(read, frozenset(), "config.json", rope_theta=None, layer_ids=None)
    with torch.device("meta"):
        head = Eagle3(ends(sizes[0], vocab), described)
    assert millions(head) == expected


def test_prefix_layer_of_a_small_target_has_its_grouped_heads():
    shape = read_shape(config(576, 1536, 9, 3), "config.json")
    with torch.device("meta"):
        layer = DecoderLayer(shape)
    assert sum(p.numel() for p in layer.parameters()) == 3_540_096
