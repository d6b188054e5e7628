"""EAGLE-3: states of three target layers, one decoder layer, an LM head and vocabulary of its own.

Paper: arXiv 2503.01840. Upstream: SafeAILab/EAGLE main cb7e084; files of sgl-project/SpecForge and
vllm-project/speculators are read too.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

from specbench.decoding.protocols import TargetEmbeddings
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import Attention, DecoderLayer, FeatureHead, GatedMLP, Rows
from specbench.models.heads.eagle3_config import Eagle3Config, read_config
from specbench.models.heads.layer_shape import LayerShape

log = logging.getLogger(__name__)

FILES = ("model.safetensors", "pytorch_model.bin")
# What the loader reads itself, and a buffer that old files keep.
_OPTIONAL = r"embed_tokens\.weight|d2t|t2d|(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq"


class JoiningLayer(nn.Module):
    """A decoder layer whose attention reads embedding and feature side by side, each normed."""

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self._norm_before_residual = norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(shape, 2 * size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(shape)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        joined = torch.cat([self.input_layernorm(tokens), normed], dim=-1)
        x = residual + self.self_attn(joined, rows)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(FeatureHead):
    """The head of one checkpoint."""

    def __init__(self, target: TargetEmbeddings, config: Eagle3Config) -> None:
        super().__init__(target, config.shape)
        shape, joined = config.shape, config.n_states * config.target_hidden_size
        self.config = config
        self._joined = joined
        self.fc = nn.Linear(joined, shape.hidden_size, bias=False) if config.joins_states else None
        eps = shape.rms_norm_eps
        self.input_norm = nn.RMSNorm(joined, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(config.target_hidden_size, eps=eps)
            for _ in range(config.n_states if config.fc_norm else 0)
        )
        self.layers = nn.ModuleList(
            [JoiningLayer(shape, norm_before_residual=config.norm_before_residual)]
            + [DecoderLayer(shape, layer=i) for i in range(1, config.n_layers)]
        )
        self.norm = nn.RMSNorm(shape.hidden_size, eps=eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)

    def _feature(self, states: torch.Tensor) -> torch.Tensor:
        """As the base has it; the norms here touch no guess."""
        if states.shape[-1] != self._joined:
            raise ValueError(f"states are {states.shape[-1]} wide; the head joins {self._joined}")
        if self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        feature: torch.Tensor = self.fc(states)
        return feature

    def _read(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        first, *others = self.layers
        out: torch.Tensor = first(tokens, features, rows)
        for layer in others:
            out = layer(out, rows)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """``[..., draft vocab]`` of guessed features, over the head's own ids."""
        normed = features if self.config.norm_output else self.norm(features)
        logits: torch.Tensor = self.lm_head(normed)
        return logits


def load(
    folder: Path,
    target: TargetEmbeddings,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rope_theta: float | None = None,
    layer_ids: tuple[int, ...] | None = None,
) -> Eagle3Head:
    """The EAGLE-3 head in ``folder``, of either dialect.

    Args:
        rope_theta, layer_ids: instead of the configuration's; see `layer_ids.check`.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target; names the keys.
        ConfigurationError: what config.json describes is not read here.
    """
    found = checkpoint.read(folder, FILES)
    where = str(folder / "config.json")
    keys = frozenset(found.tensors)
    config = read_config(found.config, keys, where, rope_theta=rope_theta, layer_ids=layer_ids)
    vocab, hidden = target.embedding.shape
    if config.target_hidden_size != hidden:
        raise found.refuse(
            f"is for targets of hidden_size {config.target_hidden_size}; this one has "
            f"{hidden}. Take the head of this target."
        )
    with torch.device("meta"):
        head = Eagle3Head(target, config)
    names = {
        name.replace("layers.0.", f"{config.first_layer}.", 1): name for name in head.state_dict()
    }
    checkpoint.fill(head, names, found, dtype=dtype, device=device, ignored=_OPTIONAL)
    head.embedding = checkpoint.own_embedding(found, target, dtype=dtype, device=device)
    width = hidden if head.embedding is None else head.embedding.shape[1]
    if width != config.shape.hidden_size:
        raise found.refuse(
            f"has no embed_tokens.weight of width {config.shape.hidden_size}, and the target's "
            f"embedding has {width}. Take the head's whole file."
        )
    ids = _target_ids(found, config.draft_vocab_size, vocab)
    head.target_ids = None if ids is None else ids.to(device)
    said = config.layer_ids or "not named"
    log.info("%s: EAGLE-3 with rope_theta %g, layer ids %s", folder, config.shape.rope_theta, said)
    return head


def _target_ids(found: checkpoint.Checkpoint, draft_vocab: int, vocab: int) -> torch.Tensor | None:
    """``[draft vocab]``; None where the ids agree. ``d2t`` holds offsets, not ids."""
    offsets, known = found.tensors.get("d2t"), found.tensors.get("t2d")
    if offsets is None and known is None and draft_vocab == vocab:
        return None
    if offsets is not None:
        ids = torch.arange(len(offsets)) + offsets.long()
    elif known is not None:
        ids = known.bool().nonzero()[:, 0]
    else:
        raise found.refuse(
            f"has {draft_vocab} of the target's {vocab} ids and neither d2t nor t2d to tell which. "
            "Take the head's whole file."
        )
    valid = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
    if known is not None and len(known) == vocab and valid:
        valid = bool(known.bool()[ids].all()) and int(known.sum()) == len(ids)
    if not valid or len(ids) != draft_vocab:
        raise found.refuse(
            f"has d2t and t2d that do not name {draft_vocab} ids below the target's {vocab}: "
            "d2t[i] is what is added to the head's id i. Take the head of this target."
        )
    return None if torch.equal(ids, torch.arange(vocab)) else ids
