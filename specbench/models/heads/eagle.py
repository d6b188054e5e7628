"""EAGLE-1 and EAGLE-2: one decoder layer that goes on in the target's own states.

Papers: arXiv 2401.15077, 2406.16858. Upstream: SafeAILab/EAGLE, branch v1 4a9cf3a and main cb7e084.
The weights of both are the same; they differ in the tree that a method grows.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

from specbench.decoding.protocols import TargetEmbeddings
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import DecoderLayer, RowCache, Rows
from specbench.models.heads.layer_shape import LayerShape, read_shape

log = logging.getLogger(__name__)

FILES = ("model.safetensors", "pytorch_model.bin")
# A copy of the target's embedding, and a buffer that old files keep.
_OPTIONAL = r"embed_tokens\.weight|layers\.0\.self_attn\.rotary_emb\.inv_freq"


class Eagle(nn.Module):
    """The head of one checkpoint.

    Entry j pairs the feature of token j (the target's state after its final norm, or the head's own
    output of the entry before) with the embedding of token j + 1, and its output is the feature of
    token j + 1. No norm stands before the attention or behind the layer.

    Args:
        bias: whether the layer that joins embedding and feature has one.
    """

    target: TargetEmbeddings
    embedding: torch.Tensor | None  # where it is not the target's
    cache: RowCache | None

    def __init__(self, target: TargetEmbeddings, shape: LayerShape, *, bias: bool = True) -> None:
        super().__init__()
        object.__setattr__(self, "target", target)  # no part of the head, see Medusa
        self.shape = shape
        self.embedding = self.cache = None
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])

    def reserve(self, max_len: int, max_nodes: int) -> None:
        """Make the cache, for texts and trees of these sizes; what it held is lost."""
        weight = self.fc.weight
        self.cache = RowCache(
            self.shape,
            max_len=max_len,
            max_nodes=max_nodes,
            dtype=weight.dtype,
            device=weight.device,
        )

    def catch_up(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Read the rows committed since the last call; guessed nodes are dropped.

        Args:
            ids: ``[n]`` the token *after* each row, the last one the root of the next draft.
            features: ``[n, hidden]`` the target's states of the rows, after its final norm.

        Returns:
            ``[n, hidden]`` guessed features; the last one leads to the tree's first level.
        """
        assert self.cache is not None, "reserve() comes first"
        return self._run(ids, features, self.cache.committed_rows(len(ids)))

    def extend(
        self, ids: torch.Tensor, features: torch.Tensor, parents: torch.Tensor
    ) -> torch.Tensor:
        """Read nodes of the draft tree.

        Args:
            ids: ``[n]`` their tokens.
            features: ``[n, hidden]`` the guessed feature of each one's parent.
            parents: ``[n]`` numbers of nodes read before, in the order they were read; -1 is the
                root.

        Returns:
            ``[n, hidden]`` the guessed features of the nodes.
        """
        assert self.cache is not None, "reserve() comes first"
        return self._run(ids, features, self.cache.node_rows(parents))

    def _run(self, ids: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        assert self.cache is not None
        tokens = (self.target.embedding if self.embedding is None else self.embedding)[ids]
        out: torch.Tensor = self.layers[0](self.fc(torch.cat([tokens, features], dim=-1)), rows)
        self.cache.keep(rows)
        return out

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """``[..., vocab]`` of guessed features: they are states behind the final norm already."""
        return self.target.logits(features)


def load(
    folder: Path,
    target: TargetEmbeddings,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rope_theta: float | None = None,
) -> Eagle:
    """The EAGLE-1 or EAGLE-2 head in ``folder``.

    Args:
        rope_theta: instead of the configuration's; EAGLE-1's own code takes 10000 whatever that
            says.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target; names the keys.
        ConfigurationError: the layer that config.json describes is not read here.
    """
    found = checkpoint.read(folder, FILES)
    where = str(folder / "config.json")
    shape = read_shape(found.config, where, rope_theta=rope_theta, bias_key="qkv_bias")
    hidden = target.embedding.shape[1]
    if shape.hidden_size != hidden:
        raise found.refuse(
            f"is for targets of hidden_size {shape.hidden_size}; this one has "
            f"{hidden}. Take the head of this target."
        )
    with torch.device("meta"):
        # A configuration without the key means true: the code that trained the heads has it so.
        head = Eagle(target, shape, bias=bool(found.config.get("bias", True)))
    names = {name: name for name in head.state_dict()}
    checkpoint.fill(head, names, found, dtype=dtype, device=device, ignored=_OPTIONAL)
    head.embedding = checkpoint.own_embedding(found, target, dtype=dtype, device=device)
    log.info("%s: EAGLE with rope_theta %g", folder, shape.rope_theta)
    return head
