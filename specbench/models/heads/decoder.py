"""What trained heads are made of: decoder layers, and the base that runs them.

Heads that share weights read the rows of several sequences in one pass. A head of
one layer takes as long for some fifty calls in Python and torch as for its products, so where these
are in panels a pass of few rows is one compiled call.

What passes read and see is in ``row_cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, run_to_completion
from specbench.kernels import pass_kernels
from specbench.kernels.attention import attend
from specbench.kernels.compiled_call import CompiledCall
from specbench.kernels.compiled_pass import linears_of_layer
from specbench.kernels.fused_pass import FusedLayer, Products
from specbench.kernels.packed_linear import PackedLinear, Product
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.heads.row_cache import RowCache, Rows, joint_rows

MOST_ROWS = 64  # of a text in a compiled call: a prompt goes through torch's layers


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split `joined` rows again."""
    return [rows] if len(counts) == 1 else rows.split(list(counts))


def row_call(
    shared: Hashable, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> ModelCall:
    """Ask for ``function`` of ``rows [n, ...]``, which it maps row by row."""

    def answer(requests: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return split(function(joined(requests)), [len(part) for part in requests])

    return ModelCall(shared, rows, answer)


class ResidualBlock(nn.Module):
    """A linear through SiLU, added to its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class Attention(nn.Module):
    """Grouped-query attention with rotated keys over inputs of ``width``."""

    def __init__(self, shape: LayerShape, width: int, layer: int) -> None:
        super().__init__()
        self._layer, self._size, self.sliding_window = layer, shape.head_dim, shape.window
        queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.o_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if shape.head_norms:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        n = len(x)
        query = self.q_norm(self.q_proj(x).view(n, -1, self._size)).transpose(0, 1)
        key, value = (part.transpose(0, 1) for part in self.keys_and_values(x))
        keys, values = rows.update(rotated(key, rows)[None], value[None], self._layer)
        query, window = rotated(query, rows)[None], self.sliding_window
        out, _ = attend(self, query, keys, values, None, sliding_window=window, plan=rows.plan)
        projected: torch.Tensor = self.o_proj(out.reshape(n, -1))
        return projected

    def keys_and_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys, not rotated yet, and values of rows, ``[n, kv_heads, head_dim]`` each."""
        n = len(x)
        key = self.k_norm(self.k_proj(x).view(n, -1, self._size))
        return key, self.v_proj(x).view(n, -1, self._size)


def rotated(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rotate queries or keys ``[heads, n, head_dim]`` by the positions of ``rows``."""
    first, second = x.chunk(2, dim=-1)
    return x * rows.cos + torch.cat([-second, first], dim=-1) * rows.sin


class GatedMLP(nn.Module):
    """Llama's: up, gated by SiLU, and down."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        down: torch.Tensor = self.down_proj(gated)
        return down


class DecoderLayer(nn.Module):
    """A Llama or Qwen3 layer; EAGLE-1's has no norm before its attention.

    Args:
        width: that attention reads; 0: the state alone.
    """

    def __init__(
        self, shape: LayerShape, *, input_norm: bool = True, layer: int = 0, width: int = 0
    ) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm: nn.Module = nn.RMSNorm(size, eps=eps) if input_norm else nn.Identity()
        self.self_attn = Attention(shape, width or size, layer)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        return self._onward(x, self.input_layernorm(x), rows)

    def _onward(self, residual: torch.Tensor, read: torch.Tensor, rows: Rows) -> torch.Tensor:
        if rows.plan.static is not None:
            return self._fused(residual, read, rows)
        x = residual + self.self_attn(read, rows)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def stacked(self) -> tuple[FusedLayer, Products]:
        """Stack the weights for passes that are recorded, once: they move."""
        if "fused_layer" not in vars(self):
            self.fused_layer = FusedLayer.from_module(self), Products()
        return self.fused_layer

    def _fused(self, residual: torch.Tensor, read: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Run a pass that is recorded, in few kernels."""
        layer, product = self.stacked()
        turned = rows.cos[None], rows.sin[None]
        cached = rows.whole(self.self_attn._layer)
        total, added = layer.run(residual[None], read[None], turned, cached, rows.plan, product)
        return (total + added)[0]


class CompiledHead(CompiledCall):
    """A head's layers: over features, or over embedding and feature side by side.

    Args:
        layers: `DecoderLayer`s; a first one without ``input_layernorm`` of weights reads its state
            as it is, and one with ``hidden_norm`` reads the embedding, too.
        join: makes the first layer's state of embedding and feature; None: it is the feature.
        keys: rows of its own cache; those of other sequences may have more.
    """

    def __init__(
        self, layers: Sequence[Any], shape: LayerShape, join: PackedLinear | None, keys: int
    ) -> None:
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
            join_fields = slice(pass_kernels.JOIN, pass_kernels.JOIN_BIAS + 1)
            self._fields[join_fields] = self._product(join.product)
        self._beside = layers[0].self_attn.q_proj.in_features != shape.hidden_size
        self._reserve(MOST_ROWS, keys)

    def _layer(self, layer: Any) -> list[int]:
        # Packed once, because each sequence, and a cache that grows, make a new call. A single
        # linear is packed already.
        if "packed_products" not in vars(layer):
            layer.packed_products = [
                group[0].product if len(group) == 1 else Product.from_linears(group)
                for group in linears_of_layer(layer)
            ]
        attention, first = layer.self_attn, layer.input_layernorm
        beside = first.weight if hasattr(layer, "hidden_norm") else None
        return self._layer_fields(
            getattr(getattr(layer, "hidden_norm", first), "weight", None),
            layer.post_attention_layernorm.weight,
            layer.packed_products,
            [getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm)],
            beside,
        )

    def run(self, features: torch.Tensor, rows: Rows, tokens: torch.Tensor | None) -> torch.Tensor:
        """Run the layers over features and embeddings; ``[rows, hidden]``."""
        n, fields = len(rows), self._fields
        # The rows may belong to several sequences, whose caches differ in size.
        keys = max(segment.keys for segment in rows.segments)
        if n > self._rows or keys > self._keys:
            self._reserve(max(n, self._rows), max(keys, self._keys))
        if self._joins:
            assert tokens is not None
            both = torch.cat([tokens, features], dim=-1)
            states = torch.empty_like(tokens)
        else:
            states = features.clone(memory_format=torch.contiguous_format)
            both = torch.empty(n, 2 * self._hidden) if self._beside else states
        beside = states if tokens is None else tokens.contiguous()
        fields[pass_kernels.JOINED] = both.data_ptr()
        fields[pass_kernels.BESIDE] = beside.data_ptr()
        self._call(states, rows.cos, rows.sin, rows.segments)
        return states


class TrainedHead(nn.Module):
    """Base of trained heads: they read the target's states, and guess from features.

    A head without ``layers`` has the states themselves as features, and no cache. Of one with
    layers entry j of the cache pairs the state of token j (or the head's own feature of the entry
    before) with the embedding of token j + 1; its output is the feature of token j + 1.

    A class with layers gives `_read`, and what of `_featuring`, `_embedded`, `_behind`, `join` and
    `compilable` differs.

    Attributes:
        shape: of its layers.
        embedding: where it is not the target's.
        target_ids: ``[own vocab]`` the target's id of each of the head's own; None where they
            agree.
        cache: of this text; there is none before `reserve`.
    """

    target: TargetEmbeddings
    shape: LayerShape
    embedding: torch.Tensor | None
    target_ids: torch.Tensor | None
    cache: RowCache
    layers: nn.ModuleList | tuple[nn.Module, ...]
    compilable = True

    def __init__(self, target: TargetEmbeddings, shape: LayerShape | None = None) -> None:
        super().__init__()
        # Past nn.Module's setter: a target that is a module must not become a part of its head.
        object.__setattr__(self, "target", target)
        self.layers = ()
        if shape is not None:
            self.shape = shape
        self.embedding = self.target_ids = None
        self.compiled: CompiledHead | None = None  # runs the layers for a few rows

    @property
    def join(self) -> nn.Module | None:
        """The module that joins embedding and feature before the layers."""
        return None

    def reserve(self, max_len: int, max_nodes: int = 0) -> None:
        """Make the cache, for texts and trees of these sizes; what it held is lost."""
        if not self.layers:
            return
        weight = next(self.parameters())
        self.cache = RowCache(
            self.shape,
            layers=len(self.layers),
            max_len=max_len,
            max_nodes=max_nodes,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.compiled = None
        if not self.compilable:
            return
        join: Any = self.join
        groups = [group for layer in self.layers for group in linears_of_layer(layer)]
        groups += [] if join is None else [[join]]
        packed = all(isinstance(linear, PackedLinear) for group in groups for linear in group)
        if packed and self.shape.window is None:
            self.compiled = CompiledHead(list(self.layers), self.shape, join, self.cache.rows)
            self.cache.few = MOST_ROWS

    def catch_up(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Read the rows committed since the last call; guessed nodes are dropped.

        Args:
            ids: ``[n]`` the target's id of the token *after* each row, the last one the root of
                the next draft.
            states: ``[n, width]`` the target's states of the rows, after its final norm. EAGLE-3:
                of its layers, side by side from the lowest up.

        Returns:
            ``[n, hidden]`` guessed features; the last one leads to the tree's first level.

        Raises:
            ValueError: states of another width, or more rows than reserved.
        """
        return run_to_completion(self.catching_up(ids, states))

    def catching_up(self, ids: torch.Tensor, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Run `catch_up` as a generator that yields its passes."""
        if not self.layers:
            return states
        features = yield from self._featuring(states)
        rows = self.cache.committed_rows(len(states))
        out: torch.Tensor = yield self._call(ids, features, rows)
        return out

    def extend(
        self, ids: torch.Tensor, features: torch.Tensor, parents: torch.Tensor
    ) -> torch.Tensor:
        """Read nodes of the draft tree.

        Args:
            ids: ``[n]`` the target's ids of their tokens.
            features: ``[n, hidden]`` the guessed feature of each one's parent.
            parents: ``[n]`` numbers of nodes read before, in the order they were read; -1 is the
                root.

        Returns:
            ``[n, hidden]`` the guessed features of the nodes.
        """
        return run_to_completion(self.extending(ids, features, parents))

    def extending(
        self, ids: torch.Tensor, features: torch.Tensor, parents: torch.Tensor
    ) -> ModelWork[torch.Tensor]:
        """Run `extend` as a generator that yields its pass."""
        out: torch.Tensor = yield self._call(ids, features, self.cache.node_rows(parents))
        return out

    def step(self, ids: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Compute features ``[n, hidden]`` after ``rows``, by a compiled call or layer by layer.

        A graph records the latter.
        """
        tokens = self._embedded(ids)
        if rows.segments and self.compiled is not None:
            return self._behind(self.compiled.run(features, rows, tokens))
        return self._behind(self._read(tokens, features, rows))

    def scoring(self, features: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Run `logits` of features ``[n, hidden]`` as a generator that yields its product."""
        logits: torch.Tensor = yield row_call(self.key("logits"), self.logits, features)
        return logits

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.target_ids is None else self.target_ids[ids]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[..., head's vocab]`` of guessed features, here after a final norm."""
        return self.target.logits(features)

    def key(self, *parts: Hashable) -> Hashable:
        """Key the calls that can share a pass; copies of a head share its modules."""
        return *parts, id(self._modules)

    def _featuring(self, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Make from true states what the layer reads in place of a guessed feature."""
        yield from ()
        return states

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Look up what the layers read of ids, ``[n, hidden]``."""
        return (self.target.embedding if self.embedding is None else self.embedding)[ids]

    def _call(self, ids: torch.Tensor, features: torch.Tensor, rows: Rows) -> ModelCall:
        return ModelCall(self.key("layers"), (ids, features, rows, self.cache), self._answer)

    def _answer(
        self, requests: Sequence[tuple[torch.Tensor, torch.Tensor, Rows, RowCache]]
    ) -> Sequence[torch.Tensor]:
        if len({bool(rows.segments) for _, _, rows, _ in requests}) == 2:
            return [self._answer([request])[0] for request in requests]
        ids, features, rows, caches = zip(*requests, strict=True)
        out = self.step(joined(ids), joined(features), joint_rows(rows))
        for cache, text_rows in zip(caches, rows, strict=True):
            cache.keep(text_rows)
        return split(out, [len(text_rows) for text_rows in rows])

    def _read(self, tokens: Any, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Run the layers; ``[n, hidden]``."""
        raise NotImplementedError

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        """Make features of ``states [n, hidden]`` after the layers."""
        return states
