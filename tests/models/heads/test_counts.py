"""The published checkpoints have as many parameters as their configurations say here.

Everything is on the meta device: shapes without weights. The numbers are sums over the keys of the
files, added up by hand; they round to the published sizes.
"""

from types import SimpleNamespace

import pytest
import torch

from specbench.models.heads.eagle import EagleHead
from specbench.models.heads.eagle3 import Eagle3Head, read_config
from specbench.models.heads.hydra_heads import HydraHeads
from specbench.models.heads.layer_shape import read_shape
from specbench.models.heads.medusa import MedusaHeads

# hidden, intermediate, heads, key heads (None: the configuration lacks them)
VICUNA_7B = (4096, 11008, 32, None)
VICUNA_13B = (5120, 13824, 40, None)
VICUNA_33B = (6656, 17920, 52, None)


def config(hidden, inner, heads, kv, **others):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return sizes | ({} if kv is None else {"num_key_value_heads": kv}) | others


def count(module):
    return sum(p.numel() for p in module.parameters())


def ends(hidden, vocab=32000):
    return SimpleNamespace(embedding=torch.empty(vocab, hidden, device="meta"))


@pytest.mark.parametrize(
    ("hidden", "n_heads", "own", "expected"),
    [
        (4096, 5, True, 739_266_560),
        (5120, 5, True, 950_297_600),
        (6656, 5, True, 1_286_504_960),
        (576, 4, False, 4 * (576**2 + 576)),
    ],
)
def test_medusa(hidden, n_heads, own, expected):
    with torch.device("meta"):
        heads = MedusaHeads(ends(hidden), n_heads=n_heads, own_lm_heads=own)
    assert count(heads) == expected


@pytest.mark.parametrize(
    ("sizes", "heads", "prefix"),
    [
        (VICUNA_7B, 1_061_336_064, 202_387_456),
        (VICUNA_13B, 1_494_410_240, 317_209_600),
        (VICUNA_33B, 2_269_850_624, 535_055_872),
        ((576, 1536, 9, 3), 84_479_744, 3_540_672),  # a small target's, with its grouped heads
    ],
)
def test_hydra(sizes, heads, prefix):
    shape = read_shape(config(*sizes), "config.json")
    with torch.device("meta"):
        hydra = HydraHeads(ends(sizes[0]), n_heads=4, n_blocks=4, prefix=shape)
    assert count(hydra.hydra_mlp) + count(hydra.hydra_lm_head) == heads
    assert count(hydra.prefix_embeding_layer) == prefix


@pytest.mark.parametrize(
    ("sizes", "others", "expected"),
    [
        (VICUNA_7B, {}, 235_937_792),
        (VICUNA_13B, {}, 369_633_280),
        # The head has fewer key heads than its target.
        ((6656, 17920, 52, 13), {}, 557_200_384),
        ((8192, 28672, 64, 8), {}, 989_872_128),  # Llama-2-70B
        ((4096, 14336, 32, 8), {"bias": False, "rope_theta": 500000}, 251_662_336),  # Llama-3-8B
        ((4096, 14336, 32, 32), {}, 276_832_256),  # Mixtral
        ((3584, 18944, 28, 28), {"qkv_bias": True, "rope_theta": 1e6}, 280_774_144),  # Qwen2-7B
        ((576, 1536, 9, 3), {}, 4_203_648),  # SmolLM2-135M
    ],
)
def test_eagle(sizes, others, expected):
    read = config(*sizes, **others)
    shape = read_shape(read, "config.json", qkv_bias_alone=True)
    with torch.device("meta"):
        head = EagleHead(ends(sizes[0]), shape, bias=read.get("bias", True))
    assert count(head) == expected


@pytest.mark.parametrize(
    ("sizes", "vocab", "others", "expected"),
    [
        ((4096, 14336, 32, 8), 128256, {}, 424_689_664),  # Llama-3.1-8B
        ((5120, 13824, 40, 40), 32000, {"num_hidden_layers": 40}, 638_341_120),  # Vicuna-13B
        ((8192, 28672, 64, 8), 128256, {}, 1_403_027_456),  # Llama-3.3-70B
    ],
)
def test_eagle3(sizes, vocab, others, expected):
    read = config(*sizes, vocab_size=vocab, draft_vocab_size=32000, **others)
    described = read_config(read, frozenset(), "config.json")
    with torch.device("meta"):
        head = Eagle3Head(ends(sizes[0], vocab), described)
    assert count(head) == expected
