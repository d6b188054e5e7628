"""DFlash and DSpark: one pass over a block of mask tokens guesses all tokens of a draft.

Papers: arXiv 2602.06036, 2607.05147. Upstream: z-lab/dflash 44947fb (``dflash/model.py``) and
deepseek-ai/DeepSpec afdfa7c (``deepspec/modeling/dspark``).

A committed token gives one row of context, made of several of its states and read by all layers:
only its keys and values are kept. The rows of a block, the root and masks, see all context and each
other. DFlash's guess the token at their own position (the root's none), DSpark's the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import nn

from specbench.decoding.protocols import ModelWork, TargetEmbeddings, TargetInfo
from specbench.errors import ConfigurationError
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import DecoderLayer, TrainedHead, rotated, row_call
from specbench.models.heads.layer_shape import LayerShape, Size, checked, read_shape
from specbench.models.heads.row_cache import Rows

FILES = ("model.safetensors", "pytorch_model.bin")
_COPIES = r"embed_tokens\.weight|lm_head\.weight"  # of the target's, in DSpark's files


class BlockConfig(BaseModel):
    """What config.json says beside the layers' sizes, ``dflash_config`` included."""

    architectures: tuple[Literal["DFlashDraftModel", "Qwen3DSparkModel"]]
    block_size: Annotated[int, Field(strict=True, ge=2)]
    mask_token_id: Annotated[int, Field(strict=True, ge=0)]
    num_hidden_layers: Size
    # Layers whose outputs make a row of context; -1: the embedding.
    target_layer_ids: tuple[Annotated[int, Field(strict=True, ge=-1)], ...] = ()
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    markov_rank: Annotated[int, Field(strict=True, ge=0)] = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def infill(self) -> bool:
        return self.architectures[0] == "DFlashDraftModel"

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Numbers of the states as transformers counts them, 0 the embedding's."""
        return tuple(i + 1 for i in self.target_layer_ids)


def read_config(config: Mapping[str, Any], where: str, n_layers: int) -> BlockConfig:
    """Read config.json of a head for a target of ``n_layers``; ``where`` is for messages.

    Raises:
        ConfigurationError: it is of another kind, or of a target with other layers.
    """
    inner = config.get("dflash_config")
    read = checked(BlockConfig, {**config, **(inner if isinstance(inner, dict) else {})}, where)
    if not read.target_layer_ids:  # the authors' rule
        n = read.num_hidden_layers
        ids = [round(1 + i * (n_layers - 4) / (n - 1)) for i in range(n)] if n > 1 else []
        read.target_layer_ids = tuple(ids) or (n_layers // 2,)
    theirs, last = config.get("num_target_layers", n_layers), max(read.target_layer_ids)
    if theirs != n_layers or last + 1 >= n_layers:  # the last layer's states come normed
        raise ConfigurationError(
            f"{where}: a head of a target with {theirs} layers that reads layer {last}; this one "
            f"has {n_layers}. Take the head of this target."
        )
    return read


class MarkovHead(nn.Module):
    """Corrects guesses by the token before: ``gated`` by the state too, ``rnn`` by all before."""

    def __init__(self, kind: str, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self._kind = kind
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, ids: torch.Tensor, states: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``[n, rank]``, which ``markov_w2`` makes additions to logits of, and the memory.

        ``ids [n]`` are the tokens before the guesses of ``states [n, hidden]``.
        """
        token = self.markov_w1(ids)
        if self._kind == "vanilla":
            return token, None
        if self._kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([states, token], -1))) * token, None
        memory = torch.zeros_like(token) if memory is None else memory
        gate, candidate, out = self.joint_proj(torch.cat([memory, token, states], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * memory + (1 - gate) * torch.tanh(candidate)


class BlockHead(TrainedHead):
    """The head of one checkpoint."""

    def __init__(self, target: TargetEmbeddings, shape: LayerShape, config: BlockConfig) -> None:
        super().__init__(target, replace(shape, window=None))  # a layer's type says if it has one
        size, rank, types = shape.hidden_size, config.markov_rank, config.layer_types
        shapes = [
            shape if types[i : i + 1] == ("sliding_attention",) else self.shape
            for i in range(config.num_hidden_layers)
        ]
        self.config = config
        self._windows = {layer.window for layer in shapes if layer.window}
        self.compilable = not self._windows
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=shape.rms_norm_eps)
        self.norm = nn.RMSNorm(size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(s, layer=i) for i, s in enumerate(shapes))
        self._decoders: list[Any] = list(self.layers)
        self.markov_head = self.confidence_head = None
        if rank:
            self.markov_head = MarkovHead(config.markov_head_type, len(target.lm_head), rank, size)
        if config.enable_confidence_head:
            width = size + rank * config.confidence_head_with_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    def catching_up(self, ids: torch.Tensor, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Read rows of context, whose tokens do not matter; blocks read the cache alone."""
        rows = self.cache.committed_rows(len(states), attended=False)
        if rows.plan.static is not None:  # else weights would move after they were recorded here
            for layer in self._decoders:
                layer.stacked()
        context = yield row_call(self.key("context"), self._context, states)
        for i, (keys, values) in enumerate(context.permute(1, 2, 3, 0, 4)):
            rows.update(rotated(keys, rows)[None], values[None], i)
        self.cache.keep(rows)
        return states[:, : self.shape.hidden_size]  # in place of features

    def _context(self, states: torch.Tensor) -> torch.Tensor:
        """Compute keys, not rotated, and values, ``[n, layers, 2, kv_heads, head_dim]``."""
        context = self.hidden_norm(self.fc(states))
        both = [layer.self_attn.keys_and_values(context) for layer in self._decoders]
        return torch.stack([torch.stack(part, 1) for part in both], 1)

    def guessing(self, root: torch.Tensor, n: int) -> ModelWork[torch.Tensor]:
        """Run a block of ``n`` rows below ``root [1]``; gives ``[guesses, hidden]``, normed."""
        ids = torch.cat([root, root.new_full((n - 1,), self.config.mask_token_id)])
        tokens: Any = self._embedded(ids)
        out = yield self._call(ids, tokens, self.cache.block_rows(n, self._windows))
        states: torch.Tensor = out[int(self.config.infill) :]
        return states

    def _read(self, tokens: object, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        for layer in self.layers:
            features = layer(features, rows)
        return features

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(states)
        return normed

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[..., vocab]`` of guesses, before the Markov head."""
        return self.target.logits(features)

    def log_confidence(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute log-probabilities ``[n]`` that guesses are accepted after ``ids [n]``."""
        assert self.confidence_head is not None
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            states = torch.cat([states, self.markov_head.markov_w1(ids)], -1)
        return nn.functional.logsigmoid(self.confidence_head["proj"](states)[:, 0].double())


def load(folder: Path, target: TargetInfo) -> BlockHead:
    """Load the DFlash or DSpark head in ``folder``, next to the target's LM head.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target; names the keys.
        ConfigurationError: what config.json describes is not read here.
    """
    stored, where = checkpoint.read(folder, FILES), str(folder / "config.json")
    config = read_config(stored.config, where, target.n_layers)
    # One more than the file has is enough to be told which is missing.
    depth = 1 + checkpoint.count(stored.tensors, r"layers\.(\d{1,2})\.")
    config.num_hidden_layers = min(config.num_hidden_layers, depth)
    shape = read_shape({**stored.config, "model_type": "qwen3"}, where)
    ends = target.embeddings
    vocab, hidden = ends.embedding.shape
    if shape.hidden_size != hidden or config.mask_token_id >= vocab:
        raise stored.refuse(
            f"is for targets of hidden_size {shape.hidden_size} with an id {config.mask_token_id}; "
            f"this one has {hidden} and {vocab} ids. Take the head of this target."
        )
    with torch.device("meta"):
        head = BlockHead(ends, shape, config)
    checkpoint.fill(head, stored, target, ignored=_COPIES)
    head.embedding = checkpoint.own_embedding(stored, target, hidden)
    return head
