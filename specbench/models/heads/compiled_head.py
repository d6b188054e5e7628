"""The decoder layers of a trained head in one compiled call, where their products are in panels.

A head of one layer takes as long for some fifty calls in Python and torch as for its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specbench.kernels import pass_kernels
from specbench.kernels.compiled_call import CompiledCall
from specbench.kernels.compiled_pass import linears_of_layer
from specbench.kernels.packed_linear import PackedLinear, Product
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.heads.row_cache import Rows

MOST_ROWS = 64  # of a text: a prompt goes through torch's layers


class CompiledHead(CompiledCall):
    """A head's layers: over features, or over embedding and feature side by side.

    Args:
        layers: `DecoderLayer`s; a first one without ``input_layernorm`` of weights reads its state
            as it is, and one with ``hidden_norm`` reads the embedding, too.
        join: makes the first layer's state of embedding and feature; None: it is the feature.
        keys: rows of its own text's cache; other texts may have more.
    """

    def __init__(
        self, layers: Sequence[Any], shape: LayerShape, join: PackedLinear | None, keys: int
    ) -> None:
        attention = layers[0].self_attn
        super().__init__(
            pass_kernels.compiled("head"),
            len(layers),
            hidden=shape.hidden_size,
            inner=shape.intermediate_size,
            heads=shape.n_heads,
            kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            numbers=[shape.rms_norm_eps, shape.rms_norm_eps, shape.head_dim**-0.5],
        )
        self._table[:] = [self._layer(layer) for layer in layers]
        self._joins = join is not None
        if join is not None:
            words = slice(pass_kernels.JOIN, pass_kernels.JOIN_BIAS + 1)
            self._words[words] = self._product(join.product)
        self._beside = attention.q_proj.in_features != shape.hidden_size
        self._reserve(MOST_ROWS, keys)

    def _layer(self, layer: Any) -> list[int]:
        own = [getattr(layer.self_attn, name) for name in ("q_norm", "k_norm")]
        first = layer.input_layernorm
        beside = first.weight if hasattr(layer, "hidden_norm") else None
        before = layer.hidden_norm if hasattr(layer, "hidden_norm") else first
        return self._layer_words(
            getattr(before, "weight", None),
            layer.post_attention_layernorm.weight,
            _products(layer),
            [getattr(norm, "weight", None) for norm in own],
            beside,
        )

    def run(
        self, features: torch.Tensor, rows: Rows, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[rows, hidden]`` behind the layers.

        Args:
            features: ``[rows, hidden]``.
            tokens: ``[rows, hidden]`` embeddings, for layers that read them.
        """
        n, words = len(rows), self._words
        # The rows may be of several texts, each with a cache of its own size.
        keys = max(segment.keys for segment in rows.segments)
        if n > self._rows or keys > self._keys:
            self._reserve(max(n, self._rows), max(keys, self._keys))
        if self._joins:
            assert tokens is not None
            joined = torch.cat([tokens, features], dim=-1)
            states = torch.empty_like(tokens)
        else:
            states = features.clone(memory_format=torch.contiguous_format)
            joined = torch.empty(n, 2 * self._hidden) if self._beside else states
        beside = states if tokens is None else tokens.contiguous()
        words[pass_kernels.JOINED] = joined.data_ptr()
        words[pass_kernels.BESIDE] = beside.data_ptr()
        self._call(states, rows.cos, rows.sin, rows.segments)
        return states


def _products(layer: Any) -> list[Product]:
    """The layer's products, packed once: each text, and a cache that grows, make their own call.

    A linear that stands alone is packed already.
    """
    if "packed_products" not in vars(layer):
        groups = linears_of_layer(layer)
        layer.packed_products = [
            group[0].product if len(group) == 1 else Product.of(group) for group in groups
        ]
    packed: list[Product] = layer.packed_products
    return packed


def compiled_head(
    layers: Sequence[Any], shape: LayerShape, join: Any, keys: int
) -> CompiledHead | None:
    """The call; None where a product is not packed in panels, or a layer looks through a window."""
    linears = [part for layer in layers for group in linears_of_layer(layer) for part in group]
    linears += [] if join is None else [join]
    if shape.window is not None or not all(isinstance(part, PackedLinear) for part in linears):
        return None
    return CompiledHead(layers, shape, join, keys)
