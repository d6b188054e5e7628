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


def config(hidden, inner, heads, kv=None, **others):
    """Without key heads where the published configuration lacks them."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return sizes | ({} if kv is None else {"num_key_value_heads": kv}) | others


def medusa(ends, _):
    return MedusaHeads(ends, n_heads=5, own_lm_heads=True)


def hydra(ends, config):
    return HydraHeads(ends, n_heads=4, n_blocks=4, prefix=read_shape(config, "config.json"))


def eagle(ends, config):
    shape = read_shape(config, "config.json", qkv_bias_alone=True)
    return EagleHead(ends, shape, bias=config.get("bias", True))


def eagle3(ends, config):
    more = {"draft_vocab_size": 32000, "num_hidden_layers": 40}
    return Eagle3Head(ends, read_config(config | more, frozenset(), "config.json"))


VICUNA_7B = config(4096, 11008, 32)
VICUNA_33B = config(6656, 17920, 52)
QWEN2_7B = config(3584, 18944, 28, 28, qkv_bias=True, rope_theta=1e6)


@pytest.mark.parametrize(
    ("make", "published", "expected"),
    [
        (medusa, VICUNA_7B, 739_266_560),
        (medusa, VICUNA_33B, 1_286_504_960),
        (hydra, VICUNA_7B, 1_061_336_064 + 202_387_456),
        (hydra, config(576, 1536, 9, 3), 84_479_744 + 3_540_672),  # grouped heads of a small target
        (eagle, VICUNA_7B, 235_937_792),
        (eagle, VICUNA_33B | {"num_key_value_heads": 13}, 557_200_384),  # fewer than its target
        (eagle, config(8192, 28672, 64, 8), 989_872_128),  # Llama-2-70B
        (eagle, config(4096, 14336, 32, 8, bias=False), 251_662_336),  # Llama-3-8B
        (eagle, QWEN2_7B, 280_774_144),
        (eagle3, config(4096, 14336, 32, 8, vocab_size=128256), 424_689_664),  # Llama-3.1-8B
        (eagle3, config(5120, 13824, 40, 40, vocab_size=32000), 638_341_120),  # Vicuna-13B
    ],
)
def test_parameters_of_published_heads(make, published, expected):
    ends = SimpleNamespace(embedding=torch.empty(32000, published["hidden_size"], device="meta"))
    with torch.device("meta"):
        head = make(ends, published)
    assert sum(p.numel() for p in head.parameters()) == expected
