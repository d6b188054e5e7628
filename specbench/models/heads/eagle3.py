"""EAGLE-3: states of three target layers, one decoder layer, an LM head and vocabulary of its own.

Paper: arXiv 2503.01840. Upstream: SafeAILab/EAGLE main cb7e084; files of sgl-project/SpecForge and
vllm-project/speculators are read too.

Ids of layers are places in the list of hidden states that transformers returns: 0 the embeddings, i
the input of layer i. Other tools number the same states by the layer whose output they are, one
lower, and a configuration does not say which it means. One off costs most of the accepted tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbench.decoding.protocols import ModelWork, TargetEmbeddings
from specbench.decoding.structs import AFTER_FINAL_NORM
from specbench.errors import ConfigurationError
from specbench.models.heads import checkpoint
from specbench.models.heads.compiled_head import CompiledHead, compiled_head
from specbench.models.heads.decoder import Attention, DecoderLayer, FeatureHead, GatedMLP, row_call
from specbench.models.heads.layer_shape import LayerShape, read_shape, read_size
from specbench.models.heads.row_cache import Rows

log = logging.getLogger(__name__)

FILES = ("model.safetensors", "pytorch_model.bin")
# What the loader reads itself, and a buffer that old files keep.
_OPTIONAL = r"embed_tokens\.weight|d2t|t2d|(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq"
_CLEARLY = 0.1  # more of the tokens agree than with the ids given


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head, whichever dialect its file is in."""

    shape: LayerShape
    draft_vocab_size: int
    target_hidden_size: int
    # Numbers of the target's states (0 the embeddings, i the output of layer i - 1); None where
    # the configuration is silent.
    layer_ids: tuple[int, ...] | None = None
    joins_states: bool = True  # else the feature is one state after the final norm, and no ``fc``
    n_layers: int = 1
    first_layer: str = "midlayer"  # its name in the file
    norm_before_fc: bool = False  # one norm over all states
    fc_norm: bool = False  # a norm for each state
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the next feature is the normed output

    @property
    def n_states(self) -> int:
        """States that are joined into a feature."""
        if not self.joins_states:
            return 1
        return 3 if self.layer_ids is None else len(self.layer_ids)


def read_config(
    config: Mapping[str, Any],
    keys: frozenset[str],
    where: str,
    *,
    rope_theta: float | None = None,
    layer_ids: tuple[int, ...] | None = None,
) -> Eagle3Config:
    """The configuration of a head whose file has ``keys``, in either dialect.

    Args:
        where: config.json, for messages.
        rope_theta, layer_ids: instead of the configuration's.

    Raises:
        ConfigurationError: sizes are missing, or what it describes is not read here.
    """
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigurationError(
            f"{where}: speculators_model_type is {kind!r}, not eagle3. Take an EAGLE-3 head."
        )
    # The authors' files and SpecForge's nest little. Their ``num_hidden_layers`` is not read: one
    # file says 40. Their ``norm_output`` only means that a norm stands before the LM head, as it
    # always does.
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ConfigurationError(
            f"{where}: eagle_config is {nested!r}, not a table. Take the head's own config.json."
        )
    layer: Any = config
    place = where
    if kind is not None:
        nested, layer = {}, config.get("transformer_layer_config")
        place = f"{where}, transformer_layer_config"
        if not isinstance(layer, dict):
            raise ConfigurationError(
                f"{where}: transformer_layer_config is {layer!r}, not the table of a layer. "
                "Take the head's own config.json."
            )
        layer = {"model_type": "qwen3", **layer}
        if layer["model_type"] not in ("llama", "qwen3"):
            raise ConfigurationError(
                f"{where}: transformer_layer_config.model_type is {layer['model_type']!r}; only "
                "llama and qwen3 can be read. Take another head."
            )
        if config.get("norm_before_fc") and config.get("fc_norm"):
            raise ConfigurationError(
                f"{where}: norm_before_fc and fc_norm exclude each other. Take the head's own "
                "config.json."
            )
        if config.get("norm_before_residual") is None:
            log.warning("%s: norm_before_residual is missing; taken as true, as vLLM does", where)
    shape = read_shape(layer, place, rope_theta=rope_theta)
    vocab = config.get("draft_vocab_size") or layer.get("vocab_size")
    vocab = read_size({"draft_vocab_size": vocab}, "draft_vocab_size", where)
    named = "eagle_aux_hidden_state_layer_ids"
    ids = layer_ids or nested.get(named) or config.get(named) or ()
    whole = isinstance(ids, list | tuple) and all(type(i) is int and i >= 0 for i in ids)
    if not whole:
        raise ConfigurationError(
            f"{where}: {named} is {ids!r}, not a list of layers. Type method.layer_ids=[...]."
        )
    head = Eagle3Config(
        shape=shape,
        draft_vocab_size=vocab,
        target_hidden_size=read_size(config, "target_hidden_size", where, shape.hidden_size),
        layer_ids=tuple(ids) or None,
        joins_states=nested.get("use_aux_hidden_state", True) is not False,
        fc_norm=any(key.startswith("fc_norm.") for key in keys),
    )
    if kind is None:
        return head
    return replace(
        head,
        # One more than the file has is enough to be told which is missing.
        n_layers=min(
            read_size(layer, "num_hidden_layers", place, 1),
            1 + checkpoint.count(keys, r"layers\.(\d{1,2})\."),
        ),
        first_layer="layers.0",
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_before_residual=config.get("norm_before_residual") is not False,
        norm_output=bool(config.get("norm_output", False)),
    )


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

    def _featuring(self, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """As the base has it; the norms here touch no guess."""
        if states.shape[-1] != self._joined:
            raise ValueError(f"states are {states.shape[-1]} wide; the head joins {self._joined}")
        if self.fc is None:
            return states
        feature: torch.Tensor = yield row_call(self._key("feature"), self._feature, states)
        return feature

    def _feature(self, states: torch.Tensor) -> torch.Tensor:
        assert self.fc is not None
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
        return self._behind(out)

    def _in_one_call(self, keys: int) -> CompiledHead | None:
        if self.config.norm_before_residual:
            return None
        return compiled_head(list(self.layers), self.shape, None, keys)

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states) if self.config.norm_output else states

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
        rope_theta, layer_ids: instead of the configuration's; see `checked_ids`.

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
    checkpoint.fill(head, names, found, target, dtype=dtype, device=device, ignored=_OPTIONAL)
    width = config.shape.hidden_size
    head.embedding = checkpoint.own_embedding(found, target, width, dtype=dtype, device=device)
    if head.embedding is None and width != hidden:
        raise found.refuse(
            f"has no embed_tokens.weight of width {width}, and the target's embedding has "
            f"{hidden}. Take the head's whole file."
        )
    ids = _target_ids(found, config.draft_vocab_size, vocab)
    head.target_ids = None if ids is None else ids.to(device)
    said = config.layer_ids or "not named"
    log.info("%s: EAGLE-3 with rope_theta %g, layer ids %s", folder, config.shape.rope_theta, said)
    return head


def _target_ids(found: checkpoint.Checkpoint, draft_vocab: int, vocab: int) -> torch.Tensor | None:
    """``[draft vocab]``; None where the ids agree. ``d2t`` holds offsets, not ids."""
    offsets = _whole_numbers(found, "d2t", draft_vocab)
    known = _whole_numbers(found, "t2d", vocab)
    if offsets is None and known is None and draft_vocab == vocab:
        return None
    if offsets is not None:
        ids = torch.arange(len(offsets)) + offsets
        if known is None and draft_vocab < vocab and not offsets.any():
            raise found.refuse(
                f"has a d2t of zeros alone, which names the target's first {draft_vocab} ids, and "
                "no t2d to confirm it: it was likely never filled. Take the head's whole file."
            )
    elif known is not None:
        ids = known.nonzero()[:, 0]
    else:
        raise found.refuse(
            f"has {draft_vocab} of the target's {vocab} ids and neither d2t nor t2d to tell which. "
            "Take the head's whole file."
        )
    valid = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
    if known is not None and valid:
        valid = bool(known[ids].all()) and int(known.count_nonzero()) == len(ids)
    if not valid or len(ids) != draft_vocab:
        raise found.refuse(
            f"has d2t and t2d that do not name {draft_vocab} ids below the target's {vocab}: "
            "d2t[i] is what is added to the head's id i. Take the head of this target."
        )
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _whole_numbers(found: checkpoint.Checkpoint, key: str, size: int) -> torch.Tensor | None:
    """``[size]`` int64 of ``d2t`` or ``t2d``; None where the file has none."""
    tensor = found.tensors.get(key)
    if tensor is None:
        return None
    real = tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized
    if real or tensor.is_meta or tensor.layout != torch.strided or tensor.shape != (size,):
        raise found.refuse(
            f"has {key} as {list(tensor.shape)} of {str(tensor.dtype)[6:]}, where the vocabularies "
            f"of config.json and the target ask for {size} whole numbers. Take the head of this "
            "target, with its own config.json."
        )
    return tensor.long()


def default_ids(n_layers: int) -> tuple[int, ...]:
    """The ids that the authors' code takes for a target of ``n_layers`` layers."""
    return (2, n_layers // 2, n_layers - 3)


def ids_read_by(folder: Path, n_layers: int) -> tuple[int, ...]:
    """The ids of the states that a head of any kind reads, by its config.json.

    Raises:
        WeightsNotFound: it is damaged.
        ConfigurationError: it is an EAGLE-3 head's, of a kind that is not read here.
    """
    config = checkpoint.read_json(folder)
    if not {"draft_vocab_size", "speculators_model_type", "eagle_config"} & set(config):
        return (AFTER_FINAL_NORM,)
    head = read_config(config, frozenset(), str(folder / "config.json"))
    if not head.joins_states:
        return (AFTER_FINAL_NORM,)
    return head.layer_ids or default_ids(n_layers)


@torch.no_grad()
def agreement(
    head: Eagle3Head, states: Sequence[torch.Tensor], ids: torch.Tensor, layers: Sequence[int]
) -> float:
    """Share of a text's tokens that the head guesses from the target's true states.

    The head's cache is emptied before and after.

    Args:
        states: all hidden states ``[n, hidden]`` of the text, embeddings first.
        ids: ``[n]`` its tokens, at least 3; best an answer of the target itself.
        layers: which states the head gets.
    """
    assert head.cache is not None, "reserve() comes first"
    head.cache.truncate(0)
    joined = torch.cat([states[i] for i in layers], dim=-1)
    features = head.catch_up(ids[1:-1], joined[:-2])
    head.cache.truncate(0)
    guessed = head.to_target_ids(head.logits(features).argmax(-1))
    return float((guessed == ids[2:]).double().mean())


def checked_ids(
    head: Eagle3Head, states: Sequence[torch.Tensor], ids: torch.Tensor, layers: Sequence[int]
) -> tuple[int, ...]:
    """The best of ``layers`` and their neighbors by one; warns where it is clearly a neighbor.

    Arguments are those of `agreement`.
    """
    shifted = [tuple(i + by for i in layers) for by in (0, -1, 1)]
    # The last state is behind the final norm, so it is no layer's input.
    possible = [c for c in shifted if min(c) >= 0 and max(c) < len(states) - 1]
    if not possible:
        return tuple(layers)
    shares = {each: agreement(head, states, ids, each) for each in possible}
    best = max(possible, key=lambda each: shares[each])
    given = tuple(layers)
    if given in shares and shares[best] >= shares[given] + _CLEARLY:
        log.warning(
            "the head agrees with the target on %.0f %% of a text with layer ids %s, on %.0f %% "
            "with %s: pass layer_ids=%s",
            *(100 * shares[given], list(given), 100 * shares[best], list(best), list(best)),
        )
    return best
