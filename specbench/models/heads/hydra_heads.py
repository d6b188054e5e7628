"""Hydra and Hydra++: heads that also read the drafted tokens, in sequence.

Paper: arXiv 2402.05109. Upstream: zankner/Hydra 3f39fbd. Hydra++ (``prefix-mlp``) puts a decoder
layer over the committed states first; plain Hydra (``mlp``) reads the last state as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel
from torch import nn

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, TargetInfo
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import DecoderLayer, ResidualBlock, TrainedHead, split
from specbench.models.heads.layer_shape import LayerShape, checked, read_shape
from specbench.models.heads.row_cache import Rows

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
# Persistent buffers and modules that were registered by accident; nothing reads them.
_UNREAD = (
    r"prefix_embeding_layer\.(layers\.0\.self_attn\.rotary_emb\.inv_freq|embed_tokens\.weight)"
    r"|input_embed_fn\.weight"
)


class _Config(BaseModel):
    hydra_head_arch: Literal["mlp", "prefix-mlp"]
    hydra_num_layers: int
    grounded_heads: Literal[True] = True
    hidden_state_offset: Literal[0] = 0


class PrefixLayer(nn.Module):
    """A whole Llama layer over the committed states, with the final norm on its output."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class NarrowingBlock(nn.Module):
    """A head's first block: from the state and the tokens of a path to one state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.res_connection = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nn.functional.silu(self.linear(x)) + self.res_connection(x)
        return out


class HydraHeads(TrainedHead):
    """The heads of one checkpoint, whose feature is what all heads of a draft read.

    Args:
        prefix: the shape of Hydra++'s prefix layer; None for plain Hydra, which has no layers.
        own_lm_heads: whether each head has an LM head; else the target's is shared, as Medusa's
            second format has it. No published checkpoint does: they are large where the vocabulary
            is and the target is not.
    """

    def __init__(
        self,
        target: TargetEmbeddings,
        *,
        n_heads: int,
        n_blocks: int,
        prefix: LayerShape | None,
        own_lm_heads: bool = True,
    ) -> None:
        super().__init__(target, prefix)
        vocab, size = target.embedding.shape
        self.prefix_embeding_layer = None  # sic
        if prefix is not None:
            self.prefix_embeding_layer = PrefixLayer(prefix)
            self.layers = tuple(self.prefix_embeding_layer.layers)
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for depth in range(n_heads):
            blocks: list[nn.Module] = [NarrowingBlock((depth + 2) * size, size)]
            blocks += [ResidualBlock(size)] * (n_blocks - 1)  # one that is run several times
            lm_head: nn.Module = nn.Linear(size, vocab)
            # With a prefix layer each module follows a dropout module, which takes a number.
            if prefix is not None:
                blocks = [part for block in blocks for part in (nn.Identity(), block)]
                lm_head = nn.Sequential(nn.Identity(), lm_head)
            self.hydra_mlp.append(nn.Sequential(*blocks))
            if own_lm_heads:
                self.hydra_lm_head.append(lm_head)

    def _embedded(self, ids: torch.Tensor) -> None:
        """Return None: the prefix layer reads only states."""

    def _read(self, tokens: object, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        out: torch.Tensor = self.layers[0](features, rows)
        return out

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        assert self.prefix_embeding_layer is not None
        prefix: torch.Tensor = self.prefix_embeding_layer.norm(states)
        return prefix

    def guessing(self, prefix: torch.Tensor, paths: torch.Tensor) -> ModelWork[torch.Tensor]:
        """Run `forward` as a generator that yields its products."""
        shared = self.key("guess", paths.shape[1])
        logits: torch.Tensor = yield ModelCall(shared, (prefix, paths), self._guess)
        return logits

    def _guess(self, calls: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Sequence[torch.Tensor]:
        if len(calls) == 1:
            return [self(*calls[0])]
        # Rows of each text read its own prefix.
        prefixes = torch.cat([prefix.expand(len(paths), -1) for prefix, paths in calls])
        logits: torch.Tensor = self(prefixes, torch.cat([paths for _, paths in calls]))
        return split(logits, [len(paths) for _, paths in calls])

    def forward(self, prefix: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """Guess the tokens after nodes of one depth.

        Args:
            prefix: ``[1, hidden]`` the last feature of `catch_up`, or ``[n, hidden]`` of several.
            paths: ``[n, d + 1]`` ids from the root down to each node of depth d; ``[1, 1]`` is the
                root, for which head 0 guesses.

        Returns:
            Logits ``[n, vocab]`` of head d.
        """
        states = self.states(prefix, paths)
        lm_head = self.hydra_lm_head[paths.shape[1] - 1] if self.hydra_lm_head else None
        logits: torch.Tensor = (lm_head or self.target.logits)(states)
        return logits

    def states(self, prefix: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """Compute from `forward`'s arguments what the LM head reads, ``[n, hidden]``."""
        n, read = paths.shape
        tokens = self.target.embedding[paths].reshape(n, -1)
        states: torch.Tensor = self.hydra_mlp[read - 1](
            torch.cat([prefix.expand(n, -1), tokens], dim=1)
        )
        return states


def load(folder: Path, target: TargetInfo, vocabulary: str | None = None) -> HydraHeads:
    """Load the Hydra heads in ``folder``; the prefix layer is a layer of the target's kind.

    Args:
        vocabulary: see `checkpoint.ends_of`; of heads with an LM head each it is not asked.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target.
        ConfigurationError: config.json, or the target's layers, are of a kind that is not read
            here.
    """
    stored = checkpoint.read(folder, FILES)
    config = checked(_Config, stored.config, str(folder / "config.json"))
    n_heads = checkpoint.count(stored.tensors, r"hydra_mlp\.(\d{1,2})\.")
    if not n_heads or config.hydra_num_layers < 1:
        raise stored.refuse(
            f"has {n_heads} heads (keys hydra_mlp.0…) of hydra_num_layers="
            f"{config.hydra_num_layers} blocks: this is not a Hydra head. Take one, with its own "
            "config.json."
        )
    # One more than the file has is enough to be told which is missing.
    most = 1 + checkpoint.count(stored.tensors, r"hydra_mlp\.0\.(\d{1,2})\.")
    prefixed = config.hydra_head_arch == "prefix-mlp"
    prefix = read_shape(target.config, "the target") if prefixed else None
    own_lm_heads = any(key.startswith("hydra_lm_head.") for key in stored.tensors)
    ends, ids = checkpoint.ends_of(target, vocabulary)
    with torch.device("meta"):
        hydra = HydraHeads(
            ends,
            n_heads=n_heads,
            n_blocks=min(config.hydra_num_layers, most),
            prefix=prefix,
            own_lm_heads=own_lm_heads,
        )
    checkpoint.fill(hydra, stored, target, ignored=_UNREAD)
    hydra.target_ids = None if own_lm_heads else ids
    return hydra
