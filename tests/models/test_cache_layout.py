"""What a cache holds follows from a pass of the model, and every operation moves all of it."""

import pytest
import torch

from specbench.models.cache_layout import LayerLayout, read_layout
from specbench.models.kv_cache import KVCache
from tests.conftest import tiny_model
from tests.models.test_architectures import build

CPU = torch.device("cpu")
# Unequal keys and values, more heads, nothing, and again what there was.
SIZES = [((1, 6), (1, 2)), ((2, 4), (2, 4)), (), ((2, 4), (2, 6))]


def test_a_usual_layout_is_the_configurations():
    model = tiny_model("llama")
    layer = LayerLayout.uniform(CPU, model.config.num_key_value_heads, model.config.head_dim)
    assert read_layout(model) == [layer] * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "filled"), [("Qwen3-Next", [0, 2]), ("Gemma-3n", [2, 2, 0, 0])])
def test_layers_that_keep_a_state_or_read_anothers_keys_have_no_rows(name, filled):
    assert [len(layer.rows) for layer in read_layout(build(name))] == filled


def written(cache, rows, batch=1):
    """Write rows that differ in every number, as a pass does, and give them by layer."""
    new = [[torch.randn(batch, heads, rows, size) for heads, size in both] for both in SIZES]
    for i, both in enumerate(new):
        if both:
            cache.update(*both, i)
    return [part for both in new for part in both]


def test_keys_and_values_of_unequal_layers_move_together():
    first, other = (
        KVCache([LayerLayout(CPU, both) for both in SIZES], batch=3, max_len=24, dtype=torch.float)
        for _ in range(2)
    )
    assert first.nbytes == 3 * 24 * 4 * (6 + 2 + 8 + 8 + 8 + 12)
    with pytest.raises(ValueError, match="too many values"):
        _ = first.storage
    text, path = written(first, 3), torch.tensor([0, 2, 5])
    first.commit(None, 3)
    tree = written(first, 6)
    first.commit(path, 3)
    first.broadcast()
    rows = written(first, 2, batch=3)
    first.commit_row(1, 2)
    other.copy_text(first)
    for cache in (first, other):
        stored = [part[..., : cache.length, :] for both in cache._layers for part in both]
        for got, *parts in zip(stored, text, tree, rows, strict=True):
            expected = torch.cat([parts[0], parts[1][:, :, path], parts[2][1:2]], 2)
            assert torch.equal(got, expected.expand_as(got))
    other.move(torch.tensor([0]), torch.tensor([2]))
    assert all(torch.equal(p[0, :, 0], p[0, :, 2]) for both in other._layers for p in both)
