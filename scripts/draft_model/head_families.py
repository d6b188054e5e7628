"""The heads that are trained: how each starts, what it guesses from, and its published file.

Where a linear map can guess the next feature, a head starts as the best such map (least squares),
and the rest of it at zero: on few texts that is most of what it will know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from scripts.draft_model.folder import HeadFile
from scripts.draft_model.head_lesson import (
    Batch,
    File,
    Guess,
    Guesses,
    Pupil,
    UnrolledCache,
    least_squares,
)
from specbench.decoding.protocols import TargetEmbeddings
from specbench.models.heads import hydra_heads
from specbench.models.heads.decoder import FeatureHead
from specbench.models.heads.eagle import EagleHead
from specbench.models.heads.eagle3 import Eagle3Head, read_config
from specbench.models.heads.layer_shape import read_shape
from specbench.models.heads.medusa import MedusaHeads
from specbench.models.heads.row_cache import RowCache

HEADS = 4  # of Medusa and Hydra
HYDRA_BLOCKS = 4
_NOISE = 0.1  # on EAGLE-1's features, of their standard deviation; uniform
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Teacher:
    """What of the target a head is made with.

    Attributes:
        config: the target's config.json.
        common: ids by falling frequency in the texts.
        sample: some batches of the texts to start from.
    """

    ends: TargetEmbeddings
    config: Mapping[str, Any]
    common: torch.Tensor
    sample: list[Batch]

    def pupil(self, head: nn.Module, guess: Guess, file: File, **others: Any) -> Pupil:
        """A pupil that says all ids by the target's LM head, where ``others`` name no other."""
        every = torch.arange(len(self.common))
        return Pupil(
            head, guess, file, **{"lm_head": self.ends.lm_head, "head_ids": every} | others
        )


def make(name: str, teacher: Teacher, layers: tuple[int, ...], vocab: int) -> Pupil:
    """The head of that name, untrained; EAGLE-3 reads ``layers`` and says ``vocab`` ids."""
    match name:
        case "eagle":
            return _eagle(teacher)
        case "medusa":
            return _medusa(teacher)
        case "hydra":
            return _hydra(teacher)
    return _eagle3(teacher, layers, vocab)


def _unroll(head: FeatureHead, batch: Batch, states: torch.Tensor, steps: int) -> Guesses:
    """The features that a head guesses for steps one after the other."""
    head.cache = cast(RowCache, UnrolledCache(batch, head.shape))
    rows = batch.rows_for(0)
    out = head.catch_up(batch.tokens[batch.ahead(1)], states)[rows]
    guesses = [out]
    for step in range(1, steps):
        before, rows = rows, batch.rows_for(step)
        above = out[torch.searchsorted(before, rows)]
        out = head.extend(batch.tokens[rows + 1 + step], above, rows)
        guesses.append(out)
    head.cache = None
    return guesses


def _layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the target's config.json what describes a layer like its own."""
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    names += ("rms_norm_eps", "vocab_size", "hidden_act", "max_position_embeddings", "rope_theta")
    nested = config.get("rope_parameters") or {}
    flat = {**config, **{k: v for k, v in nested.items() if k in names}}
    return {"model_type": "llama"} | {k: flat[k] for k in names if flat.get(k) is not None}


@torch.no_grad()
def _quiet(*modules: nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)


def _set(linear: nn.Linear, pairs: Pairs) -> None:
    """Make a layer the best linear guess of the pairs' second from their first."""
    weight, bias = least_squares(pairs)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.copy_(bias)


def _length(teacher: Teacher) -> float:
    """The mean root of the mean square of the target's states."""
    return float(
        torch.cat([batch.states[:, -1].pow(2).mean(-1).sqrt() for batch in teacher.sample]).mean()
    )


def _eagle(teacher: Teacher) -> Pupil:
    config = _layer(teacher.config)
    head = EagleHead(teacher.ends, read_shape(config, "the target", bias_key="qkv_bias"))

    def pairs() -> Pairs:
        for batch in teacher.sample:
            rows = batch.rows_for(0)
            tokens = teacher.ends.embedding[batch.tokens[rows + 1]]
            features = batch.states[:, -1]
            yield torch.cat([tokens, features[rows]], dim=1), features[rows + 1]

    layer: Any = head.layers[0]
    _set(head.fc, pairs())
    _quiet(layer.self_attn.o_proj, layer.mlp.down_proj)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> Guesses:
        features = batch.states[:, -1]
        if noise is not None:
            drawn = torch.rand(features.shape, generator=noise) * 2 - 1
            features = features + _NOISE * float(features.std()) * drawn
        return _unroll(head, batch, features, steps)

    named = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True}
    return teacher.pupil(
        head,
        guess,
        lambda: ("model.safetensors", dict(head.state_dict()), config | named),
        feature_loss=True,
    )


def _eagle3(teacher: Teacher, layers: tuple[int, ...], vocab: int) -> Pupil:
    ids = teacher.common[:vocab].sort().values
    config = _layer(teacher.config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    read = read_config(config, frozenset(), "the head")
    head = Eagle3Head(teacher.ends, read)
    head.target_ids = ids

    def joined(batch: Batch) -> torch.Tensor:
        return batch.states[:, :-1].flatten(1)

    def pairs() -> Pairs:
        for batch in teacher.sample:
            # The first token's states are thousands of times as large as all others.
            rows = batch.rows_for(0)
            rows = rows[batch.places[rows] > 0]
            yield joined(batch)[rows], batch.states[rows + 1, -1]

    layer: Any = head.layers[0]
    assert head.fc is not None
    _set(head.fc, pairs())
    with torch.no_grad():
        head.lm_head.weight.copy_(teacher.ends.lm_head[ids])
        head.lm_head.weight.requires_grad_(False)  # the target's rows, and good as they are
        head.norm.weight.fill_(_length(teacher))
    _quiet(layer.self_attn.o_proj, layer.mlp.down_proj)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> Guesses:
        return [head.norm(out) for out in _unroll(head, batch, joined(batch), steps)]

    head_ids = torch.full((len(teacher.common),), -1)
    head_ids[ids] = torch.arange(len(ids))

    def file() -> HeadFile:
        tensors = {k.replace("layers.0.", "midlayer.", 1): v for k, v in head.state_dict().items()}
        offsets = {"d2t": ids - torch.arange(len(ids)), "t2d": head_ids >= 0}
        return "model.safetensors", tensors | offsets, config

    return teacher.pupil(head, guess, file, lm_head=head.lm_head.weight, head_ids=head_ids)


def _medusa(teacher: Teacher) -> Pupil:
    heads = MedusaHeads(teacher.ends, n_heads=HEADS, own_lm_heads=False)
    _quiet(*heads.blocks)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> Guesses:
        every = heads.states(batch.states[:, -1])[:steps]
        return [states[batch.rows_for(step)] for step, states in enumerate(every)]

    def file() -> HeadFile:
        tensors = {}
        for name, value in heads.state_dict().items():
            _, number, part = name.split(".")
            tensors[f"{number}.0.linear.{part}"] = value
        config = {"version": "2", "medusa_num_heads": HEADS, "medusa_num_layers": 1}
        return "medusa_lm_head.safetensors", tensors, config

    return teacher.pupil(heads, guess, file)


def _hydra(teacher: Teacher) -> Pupil:
    shape = read_shape(teacher.config, "the target")
    heads = hydra_heads.HydraHeads(
        teacher.ends, n_heads=HEADS, n_blocks=HYDRA_BLOCKS, prefix=shape, own_lm_heads=False
    )
    prefix: Any = heads.prefix

    def paths(batch: Batch, rows: torch.Tensor, step: int) -> torch.Tensor:
        ahead = [batch.tokens[batch.ahead(1 + i)][rows] for i in range(step + 1)]
        return torch.stack(ahead, dim=1)

    def pairs(step: int) -> Pairs:
        for batch in teacher.sample:
            rows, features = batch.rows_for(step), batch.states[:, -1]
            tokens = teacher.ends.embedding[paths(batch, rows, step)].flatten(1)
            yield torch.cat([features[rows], tokens], dim=1), features[rows + 1 + step]

    _quiet(prefix.layer.self_attn.o_proj, prefix.layer.mlp.down_proj)
    # The norm behind the layer gives states back as they are, but for their length.
    nn.init.constant_(prefix.norm.weight, _length(teacher))
    for step, head in enumerate(cast(Any, heads.heads)):
        _set(head.first_residual, pairs(step))
        _quiet(head.first, head.block)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> Guesses:
        rows = UnrolledCache(batch, shape).committed_rows(len(batch))
        read = prefix.norm(prefix.layer(batch.states[:, -1], rows))
        asked = [batch.rows_for(step) for step in range(min(steps, HEADS))]
        return [heads.states(read[r], paths(batch, r, i)) for i, r in enumerate(asked)]

    def file() -> HeadFile:
        state = heads.state_dict()
        names = hydra_heads.key_names(heads, HYDRA_BLOCKS)
        config = {
            "hydra_num_heads": HEADS,
            "hydra_num_layers": HYDRA_BLOCKS,
            "hydra_head_arch": "prefix-mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }
        tensors = {key: state[name].clone() for key, name in names.items()}
        return "hydra_lm_head.safetensors", tensors, config

    return teacher.pupil(heads, guess, file)
