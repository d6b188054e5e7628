"""What a cache holds follows from a pass of the model, and every operation moves all of it."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.models.cache_layout import LayerLayout, read_layout
from specbench.models.kv_cache import KVCache
from tests.conftest import tiny_model
from tests.models.test_architectures import build

CPU = torch.device("cpu")
# Unequal keys and values, more heads, nothing, and again what there was.
UNEQUAL = [
    LayerLayout(CPU, ((1, 6), (1, 2))),
    LayerLayout.uniform(CPU, 2, 4),
    LayerLayout(CPU),
    LayerLayout(CPU, ((2, 4), (2, 6))),
]
MAX_LEN = 24


def test_a_usual_layout_is_the_configurations():
    model = tiny_model("llama")
    config = model.config
    layer = LayerLayout.uniform(CPU, config.num_key_value_heads, config.head_dim)
    assert read_layout(model) == [layer] * config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "filled"), [("Qwen3-Next", [0, 2]), ("Gemma-3n", [2, 2, 0, 0])])
def test_layers_that_keep_a_state_or_read_anothers_keys_have_no_rows(name, filled):
    assert [len(layer.rows) for layer in read_layout(build(name))] == filled


def written(cache: KVCache, rows: int, batch: int = 1) -> None:
    """Write rows that differ in every number, as a pass does."""
    for i, layer in enumerate(UNEQUAL):
        if layer.rows:
            cache.update(*(torch.randn(batch, heads, rows, size) for heads, size in layer.rows), i)


def read(cache: KVCache) -> list[torch.Tensor]:
    """List the committed rows of keys and values by layer."""
    return [rows[..., : cache.length, :].clone() for layer in cache._layers for rows in layer]


@given(st.data())
def test_keys_and_values_of_unequal_layers_move_together(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    cache = KVCache(UNEQUAL, batch=1, max_len=MAX_LEN, dtype=torch.float32)
    per_token = sum(heads * size for layer in UNEQUAL for heads, size in layer.rows)
    assert cache.nbytes == MAX_LEN * per_token * 4
    with pytest.raises(ValueError, match="too many values"):
        _ = cache.storage
    written(cache, 3)
    cache.commit(None, 3)
    before = read(cache)
    written(cache, 6)
    path = sorted(data.draw(st.sets(st.integers(1, 5))))
    rows = torch.tensor([0, *path])
    kept = [part[..., rows + 3, :].clone() for layer in cache._layers for part in layer]
    cache.commit(rows, len(rows))
    expected = [torch.cat(parts, -2) for parts in zip(before, kept, strict=True)]
    same = partial(torch.testing.assert_close, atol=0, rtol=0)
    same(read(cache), expected)
    other = KVCache(UNEQUAL, batch=1, max_len=MAX_LEN, dtype=torch.float32)
    other.copy_text(cache)
    same(read(other), expected)
    cache.move(torch.tensor([0]), torch.tensor([2]))
    same([part[..., 0, :] for part in read(cache)], [part[..., 2, :] for part in expected])


def test_rows_of_a_batch_layout_take_over_unequal_layers():
    cache = KVCache(UNEQUAL, batch=3, max_len=MAX_LEN, dtype=torch.float32)
    written(cache, 4)
    cache.commit(None, 4)
    cache.broadcast()
    written(cache, 2, batch=3)
    second = [part[1, :, 4:6].clone() for layer in cache._layers for part in layer]
    cache.commit_row(1, 2)
    for part, rows in zip(read(cache), second, strict=True):
        assert all(torch.equal(row, part[0]) for row in part)
        assert torch.equal(part[0, :, 4:6], rows)
