"""DFlash and DSpark: one pass of a block of mask tokens guesses all tokens of a draft.

Papers: arXiv 2602.06036, 2607.05147. Upstream: z-lab/dflash 44947fb (``dflash/model.py``) and
deepseek-ai/DeepSpec afdfa7c (``deepspec/modeling/dspark``).

Each committed token gives one context row, a product of several of its states; every layer reads
the same row, so keys and values are all that is made of it. The rows of a block, the root and then
masks, see all context and each other. A row of DFlash guesses the token at its own position (the
root's guesses nothing), one of DSpark the token after it. DSpark's Markov head then corrects each
guess by the token before it, and its confidence head says how likely the target is to accept it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import nn

from specbench.decoding.protocols import ModelWork, TargetEmbeddings, TargetInfo, run_to_completion
from specbench.errors import ConfigurationError
from specbench.kernels.packed_linear import product_of
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import DecoderLayer, TrainedHead, rotated, row_call
from specbench.models.heads.layer_shape import LayerShape, Size, checked, read_shape
from specbench.models.heads.row_cache import Rows

log = logging.getLogger(__name__)

FILES = ("model.safetensors", "pytorch_model.bin")
LM_HEAD = "lm_head.weight"
_OPTIONAL = r"embed_tokens\.weight|lm_head\.weight"  # DSpark's copies of the target's
_Id = Annotated[int, Field(strict=True, ge=0)]


class BlockConfig(BaseModel):
    """What config.json says beside the layers' sizes, of either family."""

    architectures: tuple[Literal["DFlashDraftModel", "Qwen3DSparkModel"]]
    block_size: Annotated[int, Field(strict=True, ge=2, le=1024)]
    mask_token_id: _Id
    num_hidden_layers: Size
    num_target_layers: Size | None = None
    # The states that a context row is made of, by the layer that gives them; -1: the embedding.
    target_layer_ids: tuple[Annotated[int, Field(strict=True, ge=-1)], ...] = ()
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    markov_rank: _Id = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def infill(self) -> bool:
        """Whether a row guesses the token at its own position: DFlash's."""
        return self.architectures[0] == "DFlashDraftModel"


def read_config(config: Mapping[str, Any], where: str, n_layers: int) -> BlockConfig:
    """Read the configuration of a head for a target of ``n_layers`` layers.

    Args:
        where: config.json, for messages.

    Raises:
        ConfigurationError: it is of another kind, or for another target.
    """
    inner = config.get("dflash_config")
    read = checked(BlockConfig, {**config, **(inner if isinstance(inner, dict) else {})}, where)
    ids = read.target_layer_ids or default_ids(n_layers, read.num_hidden_layers)
    if read.num_target_layers not in (None, n_layers) or max(ids) >= n_layers - 1 or min(ids) < -1:
        raise ConfigurationError(
            f"{where} is for a target of {read.num_target_layers or 'more'} layers whose layers "
            f"{', '.join(map(str, ids))} it reads; this one has {n_layers}. Take the head of this "
            "target."
        )
    return read.model_copy(update={"target_layer_ids": ids})


def default_ids(n_target: int, n_layers: int) -> tuple[int, ...]:
    """List the layers that DFlash's authors read with a head of ``n_layers``: evenly spread."""
    if n_layers == 1:
        return (n_target // 2,)
    return tuple(round(1 + i * (n_target - 4) / (n_layers - 1)) for i in range(n_layers))


def state_ids(config: BlockConfig) -> tuple[int, ...]:
    """List the numbers of the target's states that a head reads; 0 is the embeddings."""
    return tuple(i + 1 for i in config.target_layer_ids)


class MarkovHead(nn.Module):
    """Corrects a guess by the token before it, as a product of low rank.

    Args:
        kind: ``vanilla``: the token alone; ``gated``: by the guess's state, too; ``rnn``: by the
            tokens before it, too.
    """

    def __init__(self, kind: str, *, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self._kind, self._rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, ids: torch.Tensor, states: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute what ``markov_w2`` turns into additions to logits.

        Args:
            ids: ``[n]`` the token before each guess.
            states: ``[n, hidden]`` what each guess is made of.
            memory: ``[n, rank]`` of the guess before; None at the first.

        Returns:
            ``[n, rank]``, and the memory for the next guess.
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
    """The head of one checkpoint.

    Attributes:
        layer_ids: numbers of the target's states that it reads (0 the embeddings).
        block_size: rows of a block.
        n_guesses: of a whole block.
        lm_head: where it is not the target's.
    """

    def __init__(self, target: TargetEmbeddings, shape: LayerShape, config: BlockConfig) -> None:
        # A window is a layer's own, where its type says so.
        super().__init__(target, replace(shape, window=None))
        size, eps, n_ids = shape.hidden_size, shape.rms_norm_eps, len(config.target_layer_ids)
        self.config = config
        self.lm_head: nn.Module | None = None
        self.layer_ids = state_ids(config)
        self.block_size = config.block_size
        kinds = (*config.layer_types, *["full_attention"] * config.num_hidden_layers)
        shapes = [
            shape if kind == "sliding_attention" else self.shape
            for kind in kinds[: config.num_hidden_layers]
        ]
        self._windows = {layer.window for layer in shapes if layer.window is not None}
        self.compilable = not self._windows
        self.fc = nn.Linear(n_ids * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(DecoderLayer(s, layer=i) for i, s in enumerate(shapes))
        self.norm = nn.RMSNorm(size, eps=eps)
        rank, vocab = config.markov_rank, target.lm_head.shape[0]
        self.markov_head = self.confidence_head = None
        if rank:
            kind = config.markov_head_type
            self.markov_head = MarkovHead(kind, vocab=vocab, rank=rank, hidden=size)
        if config.enable_confidence_head:
            width = size + (rank if config.confidence_head_with_markov else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    def guesses(self, rows: int) -> int:
        """Count the guesses of a block of ``rows``."""
        return rows - self.config.infill

    def catching_up(self, ids: torch.Tensor, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Read context rows; their tokens do not matter. A block reads the cache alone.

        Raises:
            ValueError: states of another width, or more rows than reserved.
        """
        width = len(self.layer_ids) * self.shape.hidden_size
        if states.shape[-1] != width:
            raise ValueError(f"states are {states.shape[-1]} wide; the head joins {width}")
        rows = self.cache.committed_rows(len(states), attended=False)
        layer: Any
        if rows.plan.static is not None:  # else weights would move after they were recorded here
            for layer in self.layers:
                layer.stacked()
        context = yield row_call(self.key("context"), self._context, states)
        for i, (keys, values) in enumerate(context.permute(1, 2, 3, 0, 4)):
            rows.update(rotated(keys, rows)[None], values[None], i)
        self.cache.keep(rows)
        return states[:, : self.shape.hidden_size]  # in place of a feature

    def _context(self, states: torch.Tensor) -> torch.Tensor:
        """Compute keys, not rotated, and values, ``[n, layers, 2, kv_heads, head_dim]``."""
        context = self.hidden_norm(self.fc(states))
        layers: list[Any] = list(self.layers)
        return torch.stack(
            [torch.stack(layer.self_attn.keys_and_values(context), 1) for layer in layers], 1
        )

    def guessing(self, root: torch.Tensor, rows: int) -> ModelWork[torch.Tensor]:
        """Run a block as a generator that yields its pass.

        Args:
            root: ``[1]`` id of the last committed token, whose state is not read yet.
            rows: of the block, ``block_size`` at most in training.

        Returns:
            ``[guesses, hidden]`` normed states of the guesses for the positions after the root.
        """
        ids = torch.cat([root, root.new_full((rows - 1,), self.config.mask_token_id)])
        table = self.target.embedding if self.embedding is None else self.embedding
        out: torch.Tensor
        out = yield self._call(ids, table[ids], self.cache.block_rows(rows, self._windows))
        return out[int(self.config.infill) :]

    def _embedded(self, ids: torch.Tensor) -> None:
        """Return None: the layers read embeddings in place of features."""

    def _read(self, tokens: object, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        for layer in self.layers:
            features = layer(features, rows)
        return features

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(states)
        return normed

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[..., vocab]`` of guesses, before the Markov head."""
        product = self.target.logits if self.lm_head is None else self.lm_head
        logits: torch.Tensor = product(features)
        return logits

    def log_confidence(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute the log-probability ``[n]`` that each guess is accepted if those before it are.

        Args:
            states: ``[n, hidden]`` of the guesses.
            ids: ``[n]`` the token before each.
        """
        assert self.confidence_head is not None
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            states = torch.cat([states, self.markov_head.markov_w1(ids)], -1)
        logits: torch.Tensor = self.confidence_head["proj"](states)[:, 0]
        return nn.functional.logsigmoid(logits.double())

    def agreement(self, ids: torch.Tensor, states: torch.Tensor) -> float:
        """Compute the share of a text's tokens that blocks guess from its true states.

        Args:
            ids: ``[n]``, at least 3.
            states: ``[n, width]``.
        """
        n_right = n_read = 0
        for root in range(1, len(ids), self.guesses(self.block_size)):
            self.catch_up(ids[n_read:root], states[n_read:root])
            n_read = root
            block = run_to_completion(self.guessing(ids[root : root + 1], self.block_size))
            guesses = self.logits(block).argmax(-1)
            after = ids[root + 1 :][: len(guesses)]
            n_right += int((guesses[: len(after)] == after).sum())
        return n_right / (len(ids) - 2)


def load(folder: Path, target: TargetInfo, layer_ids: tuple[int, ...] = ()) -> BlockHead:
    """Load the DFlash or DSpark head in ``folder``.

    Args:
        layer_ids: instead of the configuration's, numbered as `BlockHead.layer_ids` is.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target; names the keys.
        ConfigurationError: what config.json describes is not read here.
    """
    stored = checkpoint.read(folder, FILES)
    where, ends = str(folder / "config.json"), target.embeddings
    config = read_config(stored.config, where, target.n_layers)
    # One more than the file has is enough to be told which is missing.
    depth = 1 + checkpoint.count(stored.tensors, r"layers\.(\d{1,2})\.")
    config.num_hidden_layers = min(config.num_hidden_layers, depth)
    if layer_ids:
        config.target_layer_ids = tuple(i - 1 for i in layer_ids)
    shape = read_shape({**stored.config, "model_type": "qwen3"}, where)
    hidden = ends.embedding.shape[1]
    if shape.hidden_size != hidden or config.mask_token_id >= len(ends.embedding):
        raise stored.refuse(
            f"is for targets of hidden_size {shape.hidden_size} with an id "
            f"{config.mask_token_id}; this one has {hidden} and {len(ends.embedding)} ids. Take "
            "the head of this target."
        )
    with torch.device("meta"):
        head = BlockHead(ends, shape, config)
    checkpoint.fill(head, stored, target, ignored=_OPTIONAL)
    head.embedding = checkpoint.own_embedding(stored, target, hidden)
    weight = checkpoint.own_copy(stored, target, LM_HEAD, ends.lm_head)
    head.lm_head = None if weight is None else product_of(weight, None, ends.packed)
    log.info("%s: block of %d, layer ids %s", folder, head.block_size, head.layer_ids)
    return head
