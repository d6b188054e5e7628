"""The decoder layer that heads have, its own small KV cache, and what EAGLE's heads do with both.

Heads of several texts that have their weights in common read the rows of all in one pass.

A pass is one of two: new committed rows behind the ones there are, or nodes of the draft tree that
is being grown. Committed rows have the target's true states, nodes the head's own guesses, so a
node's keys are never kept: the next committed rows drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, alone
from specbench.decoding.tree import visibility
from specbench.kernels.attention import AttentionPlan, attend
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.kv_cache import KVCache, TextCaches


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass: where they stand and what they see."""

    cache: KVCache | TextCaches
    cos: torch.Tensor  # [rows, head_dim]
    sin: torch.Tensor
    plan: AttentionPlan
    parents: torch.Tensor | None  # [rows] of nodes; None: committed rows

    def __len__(self) -> int:
        return len(self.cos)


def joint_rows(texts: Sequence[Rows]) -> Rows:
    """The rows of several texts behind each other; each text's own cache keeps its rows."""
    if len(texts) == 1:
        return texts[0]
    counts = [len(rows) for rows in texts]
    caches = [rows.cache for rows in texts if isinstance(rows.cache, KVCache)]
    plan = AttentionPlan(texts=tuple((len(rows), rows.plan) for rows in texts))
    cos, sin = (torch.cat(tables) for tables in zip(*((r.cos, r.sin) for r in texts), strict=True))
    return Rows(TextCaches(caches, counts), cos, sin, plan, None)


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


class RowCache:
    """Keys and values of a head's layers.

    Entry j has position j. A node of level l (1 below the root) has position ``length + l - 1``
    and sees the committed rows, its ancestors and itself.

    Args:
        layers: decoder layers of the head.
        max_len: committed rows at most.
        max_nodes: nodes held at once at most.
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        layers: int = 1,
        max_len: int,
        max_nodes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        with torch.inference_mode(False):  # it may be written to outside of that mode, too
            self._cache = KVCache(
                [device] * layers,
                batch=1,
                kv_heads=shape.n_kv_heads,
                max_len=max_len + max_nodes,
                head_dim=shape.head_dim,
                dtype=dtype,
            )
        self._max_len, self._max_nodes = max_len, max_nodes
        self._window, self._dtype, self._device = shape.window, dtype, device
        frequencies, factor = shape.inverse_frequencies()
        positions = torch.arange(max_len + max_nodes, dtype=torch.float64)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self._cos = (angles.cos() * factor).to(device, dtype)
        self._sin = (angles.sin() * factor).to(device, dtype)
        self._positions = torch.arange(max_len + max_nodes, device=device)
        self._parents = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def length(self) -> int:
        """Committed rows."""
        return self._cache.length

    def drop_nodes(self) -> None:
        self._cache.retained = 0
        self._parents = self._parents[:0]

    def truncate(self, length: int) -> None:
        """Forget the nodes, and the committed rows from ``length`` on."""
        self.drop_nodes()
        self._cache.truncate(length)

    def committed_rows(self, n: int) -> Rows:
        """A pass over the next ``n`` committed rows; nodes that are held are dropped.

        Raises:
            ValueError: there is no room for them.
        """
        self.drop_nodes()
        start = self.length
        if start + n > self._max_len:
            raise ValueError(f"{start + n} rows exceed the {self._max_len} reserved")
        if n == 1 and self._window is None:  # it sees all
            cos, sin = (table[start : start + 1] for table in (self._cos, self._sin))
            return Rows(self._cache, cos, sin, AttentionPlan(), None)
        positions = self._positions[start : start + n]
        return self._rows(positions, self._positions[: start + n] <= positions[:, None])

    def node_rows(self, parents: torch.Tensor) -> Rows:
        """A pass over nodes below ``parents [n]``, numbers of held nodes; -1 is the root.

        Nodes are numbered as they come.

        Raises:
            ValueError: more nodes than reserved, or a parent that is not held (seen on a CPU).
        """
        held = len(self._parents)
        if held + len(parents) > self._max_nodes:
            more = f"{held + len(parents)} nodes exceed the {self._max_nodes} reserved"
            raise ValueError(more)
        if not parents.is_cuda and ((parents >= held) | (parents < -1)).any():
            raise ValueError("a node's parent was not read before it")
        tree, depths = visibility(torch.cat([self._parents, parents]))
        positions = self.length + depths[1:] - 1
        committed = torch.ones(len(parents), self.length, dtype=torch.bool, device=self._device)
        visible = torch.cat([committed, tree[held + 1 :, 1:]], dim=1)
        keys = torch.cat([self._positions[: self.length], positions])
        return self._rows(positions[held:], visible, parents, keys)

    def _rows(
        self,
        positions: torch.Tensor,
        visible: torch.Tensor,
        parents: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> Rows:
        """``visible [rows, keys]``; ``keys [keys]``: their positions where they do not count up."""
        if self._window is not None:
            keys = self._positions[: visible.shape[1]] if keys is None else keys
            visible = visible & (positions[:, None] - keys < self._window)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        plan = AttentionPlan(mask=mask[None, None])
        return Rows(self._cache, self._cos[positions], self._sin[positions], plan, parents)

    def keep(self, rows: Rows) -> None:
        """After the pass: commit its rows, or hold its nodes for the ones below them."""
        if rows.parents is None:
            self._cache.commit(None, len(rows))
        else:
            self._cache.retain(len(rows))
            self._parents = torch.cat([self._parents, rows.parents])


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

    A class gives ``layers``, `_read` and ``logits``.

    Attributes:
        embedding: where it is not the target's.
        target_ids: ``[own vocab]`` the target's id of each of the head's own; None where they
            agree.
    """

    target: TargetEmbeddings
    embedding: torch.Tensor | None
    target_ids: torch.Tensor | None
    cache: RowCache | None
    layers: nn.ModuleList

    def __init__(self, target: TargetEmbeddings, shape: LayerShape) -> None:
        super().__init__()
        # Past nn.Module's setter: a target that is a module must not become a part of its head.
        object.__setattr__(self, "target", target)
        self.shape = shape
        self.embedding = self.target_ids = self.cache = None

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
        ids, features = (joined(parts) for parts in list(zip(*asked, strict=True))[:2])
        tokens = (self.target.embedding if self.embedding is None else self.embedding)[ids]
        out = self._read(tokens, features, joint_rows([rows for _, _, rows, _ in asked]))
        for _, _, rows, cache in asked:
            cache.keep(rows)
        return split(out, [len(rows) for _, _, rows, _ in asked])

    def _read(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """``[n, hidden]`` the layers' output."""
        raise NotImplementedError
