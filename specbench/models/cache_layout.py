"""What a model's layers cache, read from one pass of two rows through transformers' own cache.

A configuration's names are not enough: layers differ in heads and sizes (Gemma-4, MiMo-V2), cache
compressed latents instead of keys and values (DeepSeek) or nothing (Gemma-3n, layers that keep a
state), and one decoder layer may fill two layers of the cache (LongCat).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from specbench.errors import ConfigurationError
from specbench.kernels.architectures import ELSE

_IDS = [[1, 2]]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Sizes of what one layer of transformers' cache holds.

    Attributes:
        rows: heads and their size of keys, and of values, which grow with the text; empty: the
            layer has none.
        state_bytes: of a state, which does not grow.
    """

    device: torch.device
    rows: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0

    @classmethod
    def uniform(cls, device: torch.device, kv_heads: int, head_dim: int) -> LayerLayout:
        """Describe a layer of usual attention."""
        return cls(device, ((kv_heads, head_dim), (kv_heads, head_dim)))


@torch.inference_mode()
def read_layout(model: PreTrainedModel) -> list[LayerLayout]:
    """Run a pass of two rows and describe each layer of the cache that it filled; untimed.

    Raises:
        ConfigurationError: an indexer has a cache besides.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(_IDS, device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    model(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True,
        logits_to_keep=1,
    )  # fmt: skip
    if any(getattr(layer, "is_indexer_initialized", False) for layer in cache.layers):
        raise ConfigurationError(
            "an indexer chooses the rows that layers attend to, and this project has no cache for "
            f"it. {ELSE}"
        )
    return [_layer_layout(layer, model.device) for layer in cache.layers]


def _layer_layout(layer: Any, device: torch.device) -> LayerLayout:
    rows = [getattr(layer, name, None) for name in ("keys", "values")]
    filled = [row for row in rows if row is not None]
    sizes = tuple((row.shape[1], row.shape[3]) for row in filled)
    states = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    held = [state for of_kind in states for state in of_kind.values() if state is not None]
    return LayerLayout(
        (filled or held)[0].device if filled or held else device,
        sizes,
        sum(state.numel() * state.element_size() for state in held),
    )
