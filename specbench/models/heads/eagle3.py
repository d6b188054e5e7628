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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import nn

from specbench.decoding.protocols import ModelWork, TargetEmbeddings, TargetInfo
from specbench.decoding.structs import AFTER_FINAL_NORM
from specbench.errors import ConfigurationError
from specbench.models.heads import checkpoint, dflash
from specbench.models.heads.decoder import DecoderLayer, TrainedHead, row_call
from specbench.models.heads.layer_shape import LayerShape, Size, checked, read_shape
from specbench.models.heads.row_cache import Rows

log = logging.getLogger(__name__)

FILES = ("model.safetensors", "pytorch_model.bin")
# What the loader reads itself, and a buffer that old files keep.
_OPTIONAL = r"embed_tokens\.weight|d2t|t2d|(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq"
_CLEARLY = 0.1  # more of the tokens agree than with the ids given


class _States(BaseModel):
    eagle_aux_hidden_state_layer_ids: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    use_aux_hidden_state: bool = True


class _Config(_States):
    """Either dialect's keys; in the authors' the states may be named in ``eagle_config``."""

    speculators_model_type: Literal["eagle3"] | None = None
    transformer_layer_config: dict[str, Any] = {}
    eagle_config: _States = _States()
    target_hidden_size: Size | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = True
    norm_output: bool = False


class _Sizes(BaseModel):
    draft_vocab_size: Size
    num_hidden_layers: Size = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head, whichever dialect its file is in."""

    shape: LayerShape
    draft_vocab_size: int
    target_hidden_size: int
    # Numbers of the target's states (0 the embeddings, i the output of layer i - 1); () where the
    # configuration is silent.
    layer_ids: tuple[int, ...] = ()
    joins_states: bool = True  # else the feature is one state after the final norm, and no ``fc``
    n_layers: int | None = None  # None: the authors' dialect, with one that is called midlayer
    norm_before_fc: bool = False  # one norm over all states
    fc_norm: bool = False  # a norm for each state
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the next feature is the normed output

    @property
    def n_states(self) -> int:
        """States that are joined into a feature."""
        return (len(self.layer_ids) or 3) if self.joins_states else 1


def read_config(
    config: Mapping[str, Any],
    keys: frozenset[str],
    where: str,
    *,
    layer_ids: tuple[int, ...] = (),
) -> Eagle3Config:
    """Read the configuration of a head whose file has ``keys``, in either dialect.

    Args:
        where: config.json, for messages.
        layer_ids: instead of the configuration's.

    Raises:
        ConfigurationError: sizes are missing, or what it describes is not read here.
    """
    read = checked(_Config, config, where)
    theirs, layer = read.speculators_model_type is not None, config
    if theirs:
        layer = {"model_type": "qwen3", **read.transformer_layer_config}
        where = f"{where}, transformer_layer_config"
        if layer["model_type"] not in ("llama", "qwen3"):
            raise ConfigurationError(
                f"{where}: `model_type` must be 'llama' or 'qwen3', got {layer['model_type']!r}. "
                "Take another head."
            )
        if config.get("norm_before_residual") is None:
            log.warning("%s: norm_before_residual is missing; taken as true, as vLLM does", where)
    shape = read_shape(layer, where)
    vocab = config.get("draft_vocab_size") or layer.get("vocab_size")
    sizes = checked(_Sizes, {**layer, "draft_vocab_size": vocab}, where)
    states = _States() if theirs else read.eagle_config
    named = states.eagle_aux_hidden_state_layer_ids or read.eagle_aux_hidden_state_layer_ids
    # Of the authors' files no more is read: one says 40 layers, and their ``norm_output`` means
    # that a norm precedes the LM head, as it always does.
    depth = checkpoint.count(keys, r"layers\.(\d{1,2})\.")
    return Eagle3Config(
        shape=shape,
        draft_vocab_size=sizes.draft_vocab_size,
        target_hidden_size=read.target_hidden_size or shape.hidden_size,
        layer_ids=layer_ids or named,
        joins_states=states.use_aux_hidden_state,
        # One more than the file has is enough to be told which is missing.
        n_layers=min(sizes.num_hidden_layers, 1 + depth) if theirs else None,
        norm_before_fc=theirs and read.norm_before_fc,
        fc_norm=read.fc_norm if theirs else any(key.startswith("fc_norm.") for key in keys),
        norm_before_residual=theirs and read.norm_before_residual,
        norm_output=theirs and read.norm_output,
    )


class JoiningLayer(DecoderLayer):
    """A decoder layer whose attention reads embedding and feature side by side, each normed."""

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool) -> None:
        super().__init__(shape, width=2 * shape.hidden_size)
        self._norm_before_residual = norm_before_residual
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(  # type: ignore[override]  # embeddings [n, hidden], too
        self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        read = torch.cat([self.input_layernorm(tokens), normed], dim=-1)
        return self._onward(residual, read, rows)


class Eagle3Head(TrainedHead):
    """The head of one checkpoint."""

    def __init__(self, target: TargetEmbeddings, config: Eagle3Config) -> None:
        super().__init__(target, config.shape)
        shape, self._width = config.shape, config.n_states * config.target_hidden_size
        self.config = config
        self.compilable = not config.norm_before_residual
        if config.joins_states:
            self.fc = nn.Linear(self._width, shape.hidden_size, bias=False)
        eps = shape.rms_norm_eps
        self.input_norm = nn.RMSNorm(self._width, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(config.target_hidden_size, eps=eps)
            for _ in range(config.n_states if config.fc_norm else 0)
        )
        first = JoiningLayer(shape, norm_before_residual=config.norm_before_residual)
        if config.n_layers is None:
            self.midlayer = first
            self.layers = (first,)
        else:
            others = [DecoderLayer(shape, layer=i) for i in range(1, config.n_layers)]
            self.layers = nn.ModuleList([first, *others])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)

    def _featuring(self, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Join the states as the base does; the norms here touch no guess."""
        if states.shape[-1] != self._width:
            raise ValueError(f"states are {states.shape[-1]} wide; the head joins {self._width}")
        if not self.config.joins_states:
            return states
        feature: torch.Tensor = yield row_call(self.key("feature"), self._feature, states)
        return feature

    def _feature(self, states: torch.Tensor) -> torch.Tensor:
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
        return out

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states) if self.config.norm_output else states

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[..., draft vocab]`` of guessed features, over the head's own ids."""
        normed = features if self.config.norm_output else self.norm(features)
        logits: torch.Tensor = self.lm_head(normed)
        return logits


def load(folder: Path, target: TargetInfo, layer_ids: tuple[int, ...] = ()) -> Eagle3Head:
    """Load the EAGLE-3 head in ``folder``, of either dialect.

    Args:
        layer_ids: instead of the configuration's; see `checked_ids`.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target; names the keys.
        ConfigurationError: what config.json describes is not read here.
    """
    stored = checkpoint.read(folder, FILES)
    keys, where = frozenset(stored.tensors), str(folder / "config.json")
    config = read_config(stored.config, keys, where, layer_ids=layer_ids)
    ends = target.embeddings
    vocab, hidden = ends.embedding.shape
    if config.target_hidden_size != hidden:
        raise stored.refuse(
            f"is for targets of hidden_size {config.target_hidden_size}; this one has "
            f"{hidden}. Take the head of this target."
        )
    with torch.device("meta"):
        head = Eagle3Head(ends, config)
    checkpoint.fill(head, stored, target, ignored=_OPTIONAL)
    head.embedding = checkpoint.own_embedding(stored, target, config.shape.hidden_size)
    ids = _target_ids(stored, config.draft_vocab_size, vocab)
    head.target_ids = None if ids is None else ids.to(target.device)
    log.info(
        "%s: EAGLE-3 with rope_theta %g, layer ids %s",
        folder,
        config.shape.rope_theta,
        config.layer_ids or "not named",
    )
    return head


def _target_ids(stored: checkpoint.Checkpoint, draft_vocab: int, vocab: int) -> torch.Tensor | None:
    """Read ``[draft vocab]``; None if the ids agree. ``d2t`` holds offsets, not ids."""
    tensors, remedy = stored.tensors, "Take the head of this target, with its own config.json."
    for key, size in (("d2t", draft_vocab), ("t2d", vocab)):
        tensor = tensors.get(key, torch.zeros(size, dtype=torch.int64))
        if tensor.is_floating_point() or tensor.is_complex() or tensor.shape != (size,):
            raise stored.refuse(
                f"has {key} as {list(tensor.shape)} of {str(tensor.dtype)[6:]}, where config.json "
                f"and the target ask for {size} whole numbers. {remedy}"
            )
    offsets, draftable = tensors.get("d2t"), tensors.get("t2d")
    everything = torch.arange(vocab)
    if offsets is not None:
        ids = torch.arange(draft_vocab) + offsets.long()
        # Zeros alone name the first ids; where no t2d confirms it they were likely never filled.
        valid = draftable is not None or draft_vocab == vocab or bool(offsets.any())
    else:
        ids = everything if draftable is None else draftable.nonzero()[:, 0]
        valid = True
    valid &= len(ids) == draft_vocab == len(ids.unique())
    valid &= bool(((ids >= 0) & (ids < vocab)).all())
    if valid and draftable is not None:
        valid = bool(draftable[ids].all()) and int(draftable.count_nonzero()) == draft_vocab
    if not valid:
        raise stored.refuse(
            f"must have d2t or t2d that name {draft_vocab} ids below the target's {vocab}, each "
            f"once: d2t[i] is what is added to the head's id i. {remedy}"
        )
    return None if torch.equal(ids, everything) else ids


def default_ids(n_layers: int) -> tuple[int, ...]:
    """List the ids that the authors' code takes for a target of ``n_layers`` layers."""
    return (2, n_layers // 2, n_layers - 3)


def ids_read_by(folder: Path, n_layers: int) -> tuple[int, ...]:
    """Read from config.json the ids of the states that a head of any kind reads.

    Raises:
        WeightsNotFound: it is damaged.
        ConfigurationError: it is an EAGLE-3 or DFlash head's, of a kind that is not read here.
    """
    config = checkpoint.read_json(folder)
    if {"dflash_config", "markov_rank"} & set(config):
        return dflash.read_config(config, str(folder / "config.json"), n_layers).layer_ids
    if not {"draft_vocab_size", "speculators_model_type", "eagle_config"} & set(config):
        return (AFTER_FINAL_NORM,)
    head = read_config(config, frozenset(), str(folder / "config.json"))
    return (head.layer_ids or default_ids(n_layers)) if head.joins_states else (AFTER_FINAL_NORM,)


@torch.no_grad()
def checked_ids(
    head: Eagle3Head, states: Sequence[torch.Tensor], ids: torch.Tensor, layers: Sequence[int]
) -> tuple[int, ...]:
    """Give the best of ``layers`` and their neighbors by one; warn where it is clearly a neighbor.

    The best one has the head guess the largest share of a text from the target's true states. The
    head's cache is empty afterwards.

    Args:
        states: all hidden states ``[n, hidden]`` of the text, embeddings first.
        ids: ``[n]`` its tokens, at least 3; best an answer of the target itself.
        layers: which states the head gets.
    """
    given = tuple(layers)
    shares: dict[tuple[int, ...], float] = {}
    for chosen in (tuple(i + by for i in given) for by in (0, -1, 1)):
        # The last state comes after the final norm, so no layer reads it.
        if min(chosen) >= 0 and max(chosen) < len(states) - 1:
            head.cache.truncate(0)
            side_by_side = torch.cat([states[i] for i in chosen], dim=-1)
            guesses = head.logits(head.catch_up(ids[1:-1], side_by_side[:-2])).argmax(-1)
            shares[chosen] = float((head.to_target_ids(guesses) == ids[2:]).double().mean())
    head.cache.truncate(0)
    best = max(shares, key=shares.__getitem__, default=given)
    if given in shares and shares[best] >= shares[given] + _CLEARLY:
        log.warning(
            "the head agrees with the target on %.0f %% of a text with layer ids %s, on %.0f %% "
            "with %s: pass layer_ids=%s",
            *(100 * shares[given], list(given), 100 * shares[best], list(best), list(best)),
        )
    return best
