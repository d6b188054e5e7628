"""The decoder layer that heads have, and what EAGLE's heads do with it.

Heads of several texts that have their weights in common read the rows of all in one pass.

What their passes read and see is in ``row_cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, alone
from specbench.kernels.attention import attend
from specbench.models.heads.compiled_head import MOST_ROWS, CompiledHead
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.heads.row_cache import RowCache, Rows, joint_rows


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Behind each other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Of `joined` rows each one's own."""
    return [rows] if len(counts) == 1 else rows.split(list(counts))


def row_call(
    shared: Hashable, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> ModelCall:
    """Asks for ``function`` of ``rows [n, ...]``, which it takes row by row."""

    def answer(asked: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return split(function(joined(asked)), [len(one) for one in asked])

    return ModelCall(shared, rows, answer)


class Attention(nn.Module):
    """Grouped-query attention with rotated keys over inputs of ``width``."""

    def __init__(self, shape: LayerShape, width: int, layer: int = 0) -> None:
        super().__init__()
        self._layer, self._size = layer, shape.head_dim
        queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.o_bias)
        if shape.head_norms:
            self.q_norm: nn.Module = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
            self.k_norm: nn.Module = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        n = len(x)
        query = self.q_norm(self.q_proj(x).view(n, -1, self._size)).transpose(0, 1)
        key = self.k_norm(self.k_proj(x).view(n, -1, self._size)).transpose(0, 1)
        value = self.v_proj(x).view(n, -1, self._size).transpose(0, 1)
        keys, values = rows.cache.update(_rotated(key, rows)[None], value[None], self._layer)
        out, _ = attend(self, _rotated(query, rows)[None], keys, values, None, plan=rows.plan)
        projected: torch.Tensor = self.o_proj(out.reshape(n, -1))
        return projected


def _rotated(x: torch.Tensor, rows: Rows) -> torch.Tensor:
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
    """A Llama or Qwen3 layer; EAGLE-1's has no norm before its attention."""

    def __init__(self, shape: LayerShape, *, input_norm: bool = True, layer: int = 0) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm: nn.Module = nn.Identity()
        if input_norm:
            self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(shape, size, layer)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rows)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class FeatureHead(nn.Module):
    """Base of heads that go on in features: EAGLE-1 to EAGLE-3.

    Entry j pairs the feature of token j (made of the target's states, or the head's own output of
    the entry before) with the embedding of token j + 1; its output is the feature of token j + 1.

    A class gives ``layers``, `_read` and ``logits``, and in `_in_one_call` what runs its layers.

    Attributes:
        embedding: where it is not the target's.
        target_ids: ``[own vocab]`` the target's id of each of the head's own; None where they
            agree.
    """

    target: TargetEmbeddings
    embedding: torch.Tensor | None
    target_ids: torch.Tensor | None
    cache: RowCache | None
    compiled: CompiledHead | None  # runs the layers for a few rows
    layers: nn.ModuleList

    def __init__(self, target: TargetEmbeddings, shape: LayerShape) -> None:
        super().__init__()
        # Past nn.Module's setter: a target that is a module must not become a part of its head.
        object.__setattr__(self, "target", target)
        self.shape = shape
        self.embedding = self.target_ids = self.cache = self.compiled = None

    def reserve(self, max_len: int, max_nodes: int) -> None:
        """Make the cache, for texts and trees of these sizes; what it held is lost."""
        weight = next(self.parameters())
        self.cache = RowCache(
            self.shape,
            layers=len(self.layers),
            max_len=max_len,
            max_nodes=max_nodes,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.compiled = self._in_one_call(self.cache.rows)
        self.cache.few = 0 if self.compiled is None else MOST_ROWS

    def catch_up(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Read the rows committed since the last call; guessed nodes are dropped.

        Args:
            ids: ``[n]`` the target's id of the token *after* each row, the last one the root of
                the next draft.
            states: ``[n, width]`` the target's states of the rows. EAGLE-1: after its final norm.
                EAGLE-3: of its layers, side by side from the lowest up.

        Returns:
            ``[n, hidden]`` guessed features; the last one leads to the tree's first level.

        Raises:
            ValueError: states of another width, or more rows than reserved.
        """
        return alone(self.catching_up(ids, states))

    def catching_up(self, ids: torch.Tensor, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """`catch_up`, its passes handed out."""
        assert self.cache is not None, "reserve() comes first"
        features = yield from self._featuring(states)
        rows = self.cache.committed_rows(len(ids))
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
        return alone(self.extending(ids, features, parents))

    def extending(
        self, ids: torch.Tensor, features: torch.Tensor, parents: torch.Tensor
    ) -> ModelWork[torch.Tensor]:
        """`extend`, its pass handed out."""
        assert self.cache is not None, "reserve() comes first"
        out: torch.Tensor = yield self._call(ids, features, self.cache.node_rows(parents))
        return out

    def scoring(self, features: torch.Tensor) -> ModelWork[torch.Tensor]:
        """`logits` of features ``[n, hidden]``, its product handed out."""
        logits: torch.Tensor = yield row_call(self._key("logits"), self.logits, features)
        return logits

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.target_ids is None else self.target_ids[ids]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """``[..., own vocab]`` of guessed features."""
        raise NotImplementedError

    def _featuring(self, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """What the layer reads in place of a guessed feature."""
        yield from ()
        return states

    def _key(self, what: str) -> Hashable:
        return what, id(self.layers)  # twins have it in common

    def _call(self, ids: torch.Tensor, features: torch.Tensor, rows: Rows) -> ModelCall:
        assert self.cache is not None
        return ModelCall(self._key("layers"), (ids, features, rows, self.cache), self._run)

    def _run(
        self, asked: Sequence[tuple[torch.Tensor, torch.Tensor, Rows, RowCache]]
    ) -> Sequence[torch.Tensor]:
        if len({bool(rows.segments) for _, _, rows, _ in asked}) == 2:
            return [self._run([one])[0] for one in asked]
        ids, features = (joined(parts) for parts in list(zip(*asked, strict=True))[:2])
        tokens = (self.target.embedding if self.embedding is None else self.embedding)[ids]
        together = joint_rows([rows for _, _, rows, _ in asked])
        if together.segments and self.compiled is not None:
            out = self._behind(self.compiled.run(features, together, tokens))
        else:
            out = self._read(tokens, features, together)
        for _, _, rows, cache in asked:
            cache.keep(rows)
        return split(out, [len(rows) for _, _, rows, _ in asked])

    def _read(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """``[n, hidden]`` the features that the layers guess."""
        raise NotImplementedError

    def _in_one_call(self, keys: int) -> CompiledHead | None:
        """What runs the layers in one call, over texts of ``keys`` rows; None: nothing does."""
        return None

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        """The features, of ``states [n, hidden]`` behind the layers."""
        return states
