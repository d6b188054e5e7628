"""Hydra and Hydra++: heads that also read the drafted tokens, in sequence.

Paper: arXiv 2402.05109. Upstream: zankner/Hydra 3f39fbd. Hydra++ (``prefix-mlp``) puts a decoder
layer over the committed states first; plain Hydra (``mlp``) reads the last state as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, alone
from specbench.models.heads import checkpoint
from specbench.models.heads.compiled_head import MOST_ROWS, CompiledHead, compiled_head
from specbench.models.heads.decoder import DecoderLayer, joined, split
from specbench.models.heads.layer_shape import LayerShape, read_shape
from specbench.models.heads.row_cache import RowCache, Rows, joint_rows

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
_PREFIX = "prefix_embeding_layer"  # sic
# Persistent buffers and modules that were registered by accident; nothing reads them.
_UNREAD = (
    rf"{_PREFIX}\.(layers\.0\.self_attn\.rotary_emb\.inv_freq|embed_tokens\.weight)"
    r"|input_embed_fn\.weight"
)


class PrefixLayer(nn.Module):
    """A whole Llama layer over the committed states, with the final norm on its output."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.layer = DecoderLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class HydraHead(nn.Module):
    """One head: a block that narrows, one that is run several times, and an LM head with bias.

    Args:
        vocab: of the LM head; None where the target's is shared.
    """

    def __init__(self, depth: int, hidden: int, vocab: int | None, n_blocks: int) -> None:
        super().__init__()
        self._repeats = n_blocks - 1
        width = (depth + 2) * hidden
        self.first = nn.Linear(width, hidden)
        self.first_residual = nn.Linear(width, hidden)
        self.block = nn.Linear(hidden, hidden) if self._repeats else None
        self.lm_head = None if vocab is None else nn.Linear(hidden, vocab)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """What the LM head reads, ``[n, hidden]``."""
        x: torch.Tensor = nn.functional.silu(self.first(z)) + self.first_residual(z)
        for _ in range(self._repeats):
            assert self.block is not None
            x = x + nn.functional.silu(self.block(x))
        return x


class HydraHeads(nn.Module):
    """The heads of one checkpoint.

    Args:
        prefix: the shape of Hydra++'s prefix layer; None for plain Hydra.
        own_lm_heads: whether each head has an LM head; else the target's is shared, as Medusa's
            second format has it. No published checkpoint does: they are large where the vocabulary
            is and the target is not.
    """

    target: TargetEmbeddings
    cache: RowCache | None
    compiled: CompiledHead | None  # runs the prefix layer for a few rows

    def __init__(
        self,
        target: TargetEmbeddings,
        *,
        n_heads: int,
        n_blocks: int,
        prefix: LayerShape | None,
        own_lm_heads: bool = True,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "target", target)  # no part of the head, see MedusaHeads
        self.cache = self.compiled = None
        self._shape = prefix
        self.prefix = None if prefix is None else PrefixLayer(prefix)
        vocab, size = target.embedding.shape
        self.heads = nn.ModuleList(
            HydraHead(depth, size, vocab if own_lm_heads else None, n_blocks)
            for depth in range(n_heads)
        )

    def reserve(self, max_len: int) -> None:
        """Make the prefix layer's cache, for texts of ``max_len`` tokens; what it held is lost."""
        if self._shape is not None:
            weight = next(self.parameters())
            self.cache = RowCache(
                self._shape, max_len=max_len, max_nodes=0, dtype=weight.dtype, device=weight.device
            )
            assert self.prefix is not None
            self.compiled = compiled_head([self.prefix.layer], self._shape, None, self.cache.rows)
            self.cache.few = 0 if self.compiled is None else MOST_ROWS

    def catch_up(self, states: torch.Tensor) -> torch.Tensor:
        """Read the rows committed since the last call: a prompt, or the root and accepted nodes.

        Args:
            states: ``[n, hidden]`` the target's states after its final norm.

        Returns:
            ``[hidden]`` what all heads of the next draft read.
        """
        return alone(self.catching_up(states))

    def catching_up(self, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        """`catch_up`, its pass handed out."""
        if self.prefix is None:
            return states[-1]
        assert self.cache is not None, "reserve() comes first"
        asked = (states, self.cache.committed_rows(len(states)), self.cache)
        out: torch.Tensor = yield ModelCall(("prefix", id(self.heads)), asked, self._run_prefix)
        return out

    def _run_prefix(
        self, asked: Sequence[tuple[torch.Tensor, Rows, RowCache]]
    ) -> Sequence[torch.Tensor]:
        assert self.prefix is not None
        if len({bool(rows.segments) for _, rows, _ in asked}) == 2:
            return [self._run_prefix([one])[0] for one in asked]
        rows = joint_rows([rows for _, rows, _ in asked])
        states = joined([states for states, _, _ in asked])
        if rows.segments and self.compiled is not None:
            out = self.compiled.run(states, rows)
        else:
            out = self.prefix.layer(states, rows)
        for _, own, cache in asked:
            cache.keep(own)
        ends = np.cumsum([len(own) for _, own, _ in asked]) - 1
        last: torch.Tensor = self.prefix.norm(out[ends.tolist()])
        found: list[torch.Tensor] = list(last)
        return found

    def read_fixed(self, states: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """`catch_up` on `FixedRows`, of the first ``count [1]`` of ``states``: ``[1, hidden]``."""
        assert self.prefix is not None and self.cache is not None
        out = self.prefix.layer(states, self.cache.committed_rows(len(states)))
        last: torch.Tensor = self.prefix.norm(out.index_select(0, count - 1))
        return last

    def guessing(self, prefix: torch.Tensor, paths: torch.Tensor) -> ModelWork[torch.Tensor]:
        """`forward`, its products handed out."""
        shared = ("guess", id(self.heads), paths.shape[1])
        logits: torch.Tensor = yield ModelCall(shared, (prefix, paths), self._guess)
        return logits

    def _guess(self, asked: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Sequence[torch.Tensor]:
        if len(asked) == 1:
            return [self(*asked[0])]
        # Rows of each text read its own prefix.
        prefixes = torch.cat([prefix.expand(len(paths), -1) for prefix, paths in asked])
        logits: torch.Tensor = self(prefixes, torch.cat([paths for _, paths in asked]))
        return split(logits, [len(paths) for _, paths in asked])

    def forward(self, prefix: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """Guesses behind nodes of one depth.

        Args:
            prefix: ``[hidden]`` of `catch_up`, or ``[n, hidden]`` of several.
            paths: ``[n, d + 1]`` ids from the root down to each node of depth d; ``[1, 1]`` is the
                root, for which head 0 guesses.

        Returns:
            Logits ``[n, vocab]`` of head d.
        """
        states = self.states(prefix, paths)
        head: Any = self.heads[paths.shape[1] - 1]
        logits: torch.Tensor = (head.lm_head or self.target.logits)(states)
        return logits

    def states(self, prefix: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """What the LM head reads, ``[n, hidden]``; ``prefix`` may be ``[n, hidden]`` too."""
        n, read = paths.shape
        tokens = self.target.embedding[paths].reshape(n, -1)
        states: torch.Tensor = self.heads[read - 1](
            torch.cat([prefix.expand(n, -1), tokens], dim=1)
        )
        return states


def load(
    folder: Path,
    target: TargetEmbeddings,
    target_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> HydraHeads:
    """The Hydra heads in ``folder``.

    Args:
        target_config: the target's config.json: the prefix layer is a layer of its kind.

    Raises:
        WeightsNotFound: missing, damaged, or not for this target.
        ConfigurationError: the target's layers are of a kind that is not read here.
    """
    found = checkpoint.read(folder, FILES)
    arch = found.config.get("hydra_head_arch")
    if arch not in ("mlp", "prefix-mlp"):
        raise found.refuse(
            f"has hydra_head_arch {arch!r} in its config.json; only mlp and prefix-mlp can be "
            "read. Take another head."
        )
    for key, wanted in (("grounded_heads", True), ("hidden_state_offset", 0)):
        if found.config.get(key, wanted) != wanted:
            raise found.refuse(
                f"has {key}={found.config[key]!r} in its config.json; only {wanted!r} can be read. "
                "Take another head."
            )
    n_heads = checkpoint.count(found.tensors, r"hydra_mlp\.(\d{1,2})\.")
    n_blocks = found.config.get("hydra_num_layers")
    if not n_heads or type(n_blocks) is not int or n_blocks < 1:
        raise found.refuse(
            f"has {n_heads} heads (keys hydra_mlp.0…) of hydra_num_layers={n_blocks!r} blocks: "
            "this is not a Hydra head. Take one, with its own config.json."
        )
    # One more than the file has is enough to be told which is missing.
    n_blocks = min(n_blocks, 1 + checkpoint.count(found.tensors, r"hydra_mlp\.0\.(\d{1,2})\."))
    own = any(key.startswith("hydra_lm_head.") for key in found.tensors)
    prefix = read_shape(target_config, "the target") if arch == "prefix-mlp" else None
    with torch.device("meta"):
        hydra = HydraHeads(
            target, n_heads=n_heads, n_blocks=n_blocks, prefix=prefix, own_lm_heads=own
        )
    names = key_names(hydra, n_blocks)
    checkpoint.fill(hydra, names, found, target, dtype=dtype, device=device, ignored=_UNREAD)
    return hydra


def key_names(hydra: HydraHeads, n_blocks: int) -> dict[str, str]:
    """The module's name of each key of a file.

    With a prefix layer each block stands behind a dropout module, which takes a number of its own.
    Blocks from the second on are one module under several names.
    """
    dropout = hydra.prefix is not None
    numbers = [2 * block + 1 if dropout else block for block in range(n_blocks)]
    names: dict[str, str] = {}
    for i, head in enumerate(hydra.heads):
        for part in ("weight", "bias"):
            key = f"hydra_mlp.{i}.{numbers[0]}"
            names[f"{key}.linear.{part}"] = f"heads.{i}.first.{part}"
            names[f"{key}.res_connection.{part}"] = f"heads.{i}.first_residual.{part}"
            for number in numbers[1:]:
                names[f"hydra_mlp.{i}.{number}.linear.{part}"] = f"heads.{i}.block.{part}"
            if head.lm_head is not None:
                key = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
                names[f"{key}.{part}"] = f"heads.{i}.lm_head.{part}"
    for name in hydra.state_dict():
        if name.startswith("prefix.layer."):
            names[name.replace("prefix.layer", f"{_PREFIX}.layers.0")] = name
        elif name.startswith("prefix.norm."):
            names[name.replace("prefix", _PREFIX)] = name
    return names
