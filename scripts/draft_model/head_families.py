"""The heads that are trained: how each starts, what it guesses from, and its published file.

Where a linear map can guess the next feature, a head starts as the best such map (least squares),
and the rest of it at zero: on few texts that is most of what it will know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from scripts.draft_model.head_lesson import Batch, UnrolledCache, least_squares
from specbench.decoding.protocols import TargetEmbeddings
from specbench.models.heads import eagle, eagle3, hydra_heads, medusa
from specbench.models.heads.decoder import RowCache
from specbench.models.heads.eagle3_config import read_config
from specbench.models.heads.layer_shape import LayerShape, read_shape

HEADS = 4  # of Medusa and Hydra
HYDRA_BLOCKS = 4
_NOISE = 0.1  # on EAGLE-1's features, of their standard deviation; uniform


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


@dataclass(frozen=True)
class Pupil:
    """A head in training.

    Attributes:
        guess: what its LM head reads, for each of some steps ``[rows, hidden]`` of the rows that a
            batch asks for; noise is drawn where a generator is given.
        lm_head: ``[ids, hidden]``.
        own_ids: ``[vocab]`` the place in it of each of the target's ids; -1 where it has none.
        feature_loss: whether its first guess should be the target's next state itself.
        file: name, tensors and config.json of the published format.
    """

    head: nn.Module
    guess: Callable[[Batch, int, torch.Generator | None], list[torch.Tensor]]
    lm_head: torch.Tensor
    own_ids: torch.Tensor
    file: Callable[[], tuple[str, dict[str, torch.Tensor], dict[str, Any]]]
    feature_loss: bool = False


def _unroll(
    head: eagle.Eagle | eagle3.Eagle3,
    shape: LayerShape,
    batch: Batch,
    states: torch.Tensor,
    steps: int,
) -> list[torch.Tensor]:
    """The features that a head guesses for steps one after the other."""
    head.cache = cast(RowCache, UnrolledCache(batch, shape))
    rows = batch.rows_for(0)
    out = head.catch_up(batch.tokens[batch.ahead(1)], states)[rows]
    found = [out]
    for step in range(1, steps):
        before, rows = rows, batch.rows_for(step)
        above = out[torch.searchsorted(before, rows)]
        out = head.extend(batch.tokens[rows + 1 + step], above, rows)
        found.append(out)
    head.cache = None
    return found


def _layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the target's config.json what describes a layer like its own."""
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    names += ("rms_norm_eps", "vocab_size", "hidden_act", "max_position_embeddings", "rope_theta")
    kept = {name: config[name] for name in names if config.get(name) is not None}
    nested = config.get("rope_parameters") or {}
    return kept | {k: nested[k] for k in ("rope_theta",) if k in nested}


def _quiet(*linears: nn.Module) -> None:
    for linear in linears:
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)


def make_eagle(teacher: Teacher) -> Pupil:
    config = {"model_type": "llama", **_layer(teacher.config)}
    shape = read_shape(config, "the target", bias_key="qkv_bias")
    head = eagle.Eagle(teacher.ends, shape)

    def pairs() -> Any:
        for batch in teacher.sample:
            rows = batch.rows_for(0)
            tokens = teacher.ends.embedding[batch.tokens[rows + 1]]
            features = batch.states[:, -1]
            yield torch.cat([tokens, features[rows]], dim=1), features[rows + 1]

    layer: Any = head.layers[0]
    with torch.no_grad():
        weight, bias = least_squares(pairs())
        head.fc.weight.copy_(weight)
        assert head.fc.bias is not None
        head.fc.bias.copy_(bias)
        _quiet(layer.self_attn.o_proj, layer.mlp.down_proj)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> list[torch.Tensor]:
        features = batch.states[:, -1]
        if noise is not None:
            drawn = torch.rand(features.shape, generator=noise) * 2 - 1
            features = features + _NOISE * float(features.std()) * drawn
        return _unroll(head, shape, batch, features, steps)

    def file() -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
        named = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True}
        return "model.safetensors", dict(head.state_dict()), config | named

    return Pupil(
        head,
        guess,
        teacher.ends.lm_head,
        torch.arange(len(teacher.common)),
        file,
        feature_loss=True,
    )


def make_eagle3(teacher: Teacher, layers: tuple[int, ...], vocab: int) -> Pupil:
    ids = teacher.common[:vocab].sort().values
    config = {
        "model_type": "llama",
        **_layer(teacher.config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    read = read_config(config, frozenset(), "the head", rope_theta=None, layer_ids=None)
    head = eagle3.Eagle3(teacher.ends, read)
    head.target_ids = ids

    def joined(batch: Batch) -> torch.Tensor:
        return batch.states[:, :-1].flatten(1)

    def pairs() -> Any:
        for batch in teacher.sample:
            # The first token's states are thousands of times as large as all others.
            rows = batch.rows_for(0)
            rows = rows[batch.places[rows] > 0]
            yield joined(batch)[rows], batch.states[rows + 1, -1]

    layer: Any = head.layers[0]
    assert head.fc is not None
    with torch.no_grad():
        weight, _ = least_squares(pairs())
        head.fc.weight.copy_(weight)
        head.lm_head.weight.copy_(teacher.ends.lm_head[ids])
        head.lm_head.weight.requires_grad_(False)  # the target's rows, and good as they are
        spread = torch.cat([batch.states[:, -1].pow(2).mean(-1).sqrt() for batch in teacher.sample])
        head.norm.weight.fill_(float(spread.mean()))
        _quiet(layer.self_attn.o_proj, layer.mlp.down_proj)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> list[torch.Tensor]:
        found = _unroll(head, read.shape, batch, joined(batch), steps)
        return [head.norm(out) for out in found]

    def file() -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {k.replace("layers.0.", "midlayer.", 1): v for k, v in head.state_dict().items()}
        known = torch.zeros(len(teacher.common), dtype=torch.bool)
        known[ids] = True
        offsets = {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        return "model.safetensors", tensors | offsets, config

    own = torch.full((len(teacher.common),), -1)
    own[ids] = torch.arange(len(ids))
    return Pupil(head, guess, head.lm_head.weight, own, file)


def make_medusa(teacher: Teacher) -> Pupil:
    heads = medusa.Medusa(teacher.ends, n_heads=HEADS, own_lm_heads=False)
    _quiet(*heads.blocks)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> list[torch.Tensor]:
        every = heads.states(batch.states[:, -1])[:steps]
        return [states[batch.rows_for(step)] for step, states in enumerate(every)]

    def file() -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {}
        for name, value in heads.state_dict().items():
            _, number, part = name.split(".")
            tensors[f"{number}.0.linear.{part}"] = value
        config = {"version": "2", "medusa_num_heads": HEADS, "medusa_num_layers": 1}
        return "medusa_lm_head.safetensors", tensors, config

    return Pupil(heads, guess, teacher.ends.lm_head, torch.arange(len(teacher.common)), file)


def make_hydra(teacher: Teacher) -> Pupil:
    shape = read_shape(teacher.config, "the target")
    heads = hydra_heads.Hydra(
        teacher.ends, n_heads=HEADS, n_blocks=HYDRA_BLOCKS, prefix=shape, own_lm_heads=False
    )
    prefix: Any = heads.prefix

    def paths(batch: Batch, rows: torch.Tensor, step: int) -> torch.Tensor:
        ahead = [batch.tokens[batch.ahead(1 + i)][rows] for i in range(step + 1)]
        return torch.stack(ahead, dim=1)

    def pairs(step: int) -> Any:
        for batch in teacher.sample:
            rows, features = batch.rows_for(step), batch.states[:, -1]
            tokens = teacher.ends.embedding[paths(batch, rows, step)].flatten(1)
            yield torch.cat([features[rows], tokens], dim=1), features[rows + 1 + step]

    with torch.no_grad():
        states = torch.cat([batch.states[:, -1] for batch in teacher.sample])
        _quiet(prefix.layer.self_attn.o_proj, prefix.layer.mlp.down_proj)
        # The norm behind the layer gives states back as they are, but for their length.
        prefix.norm.weight.fill_(float(states.pow(2).mean(-1).sqrt().mean()))
        for step, head in enumerate(cast(Any, heads.heads)):
            weight, bias = least_squares(pairs(step))
            head.first_residual.weight.copy_(weight)
            head.first_residual.bias.copy_(bias)
            _quiet(head.first, head.block)

    def guess(batch: Batch, steps: int, noise: torch.Generator | None) -> list[torch.Tensor]:
        rows = UnrolledCache(batch, shape).committed_rows(len(batch))
        read = prefix.norm(prefix.layer(batch.states[:, -1], rows))
        asked = [batch.rows_for(step) for step in range(min(steps, HEADS))]
        return [heads.states(read[r], paths(batch, r, i)) for i, r in enumerate(asked)]

    def file() -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
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

    return Pupil(heads, guess, teacher.ends.lm_head, torch.arange(len(teacher.common)), file)


def makers(layers: tuple[int, ...], vocab: int) -> dict[str, Callable[[Teacher], Pupil]]:
    """How each head is made; EAGLE-3 reads ``layers`` and says ``vocab`` ids."""
    return {
        "eagle": make_eagle,
        "medusa": make_medusa,
        "eagle3": partial(make_eagle3, layers=layers, vocab=vocab),
        "hydra": make_hydra,
    }
