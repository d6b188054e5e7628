"""EAGLE-1 and EAGLE-2: one decoder layer that goes on in the target's own states.

Papers: arXiv 2401.15077, 2406.16858. Upstream: SafeAILab/EAGLE, branch v1 4a9cf3a and main cb7e084.
The weights of both are the same; they differ in the tree that a method grows.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

from specbench.decoding.protocols import TargetEmbeddings, TargetInfo
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import DecoderLayer, TrainedHead
from specbench.models.heads.layer_shape import LayerShape, read_shape
from specbench.models.heads.row_cache import Rows

log = logging.getLogger(__name__)

FILES = ("model.safetensors", "pytorch_model.bin")
# A copy of the target's embedding, and a buffer that old files keep.
_OPTIONAL = r"embed_tokens\.weight|layers\.0\.self_attn\.rotary_emb\.inv_freq"


class EagleHead(TrainedHead):
    """The head of one checkpoint. It has no norm before the attention or after the layer.

    Args:
        bias: whether the layer that joins embedding and feature has one.
    """

    def __init__(self, target: TargetEmbeddings, shape: LayerShape, *, bias: bool = True) -> None:
        super().__init__(target, shape)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])

    @property
    def join(self) -> nn.Module:
        return self.fc

    def _read(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        out: torch.Tensor = self.layers[0](self.fc(torch.cat([tokens, features], dim=-1)), rows)
        return out


def load(folder: Path, target: TargetInfo, vocabulary: str | None = None) -> EagleHead:
    """Load the EAGLE-1 or EAGLE-2 head in ``folder``.

    Args:
        vocabulary: see `checkpoint.ends_of`.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target; names the keys.
        ConfigurationError: the layer that config.json describes is not read here.
    """
    stored = checkpoint.read(folder, FILES)
    shape = read_shape(stored.config, str(folder / "config.json"), qkv_bias_alone=True)
    ends, ids = checkpoint.ends_of(target, vocabulary)
    hidden = ends.embedding.shape[1]
    if shape.hidden_size != hidden:
        raise stored.refuse(
            f"is for targets of hidden_size {shape.hidden_size}; this one has "
            f"{hidden}. Take the head of this target."
        )
    with torch.device("meta"):
        # A configuration without the key means true: the code that trained the heads has it so.
        head = EagleHead(ends, shape, bias=bool(stored.config.get("bias", True)))
    checkpoint.fill(head, stored, target, ignored=_OPTIONAL)
    head.embedding = checkpoint.own_embedding(stored, target, hidden)
    head.target_ids = ids
    log.info("%s: EAGLE with rope_theta %g", folder, shape.rope_theta)
    return head
