"""Medusa-1: residual blocks on one hidden state, each head guessing another offset.

Paper: arXiv 2401.10774. Upstream: FasterDecoding/Medusa e2a5d20. Two formats exist: heads with an
LM head each, and heads that share the target's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from specbench.decoding.protocols import ModelWork, TargetEmbeddings, TargetInfo
from specbench.errors import WeightsNotFound
from specbench.models.draft.loading import ID_MAP_FILE, read_id_map
from specbench.models.heads import checkpoint
from specbench.models.heads.decoder import ResidualBlock, TrainedHead, row_call

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class MedusaHeads(TrainedHead):
    """The heads of one checkpoint; they have no layers, and their feature is the last state.

    Args:
        n_blocks: times that a head's one residual block is run.
        own_lm_heads: whether each head has an LM head; else the target's is shared.
        ids: the target's ids that LM heads of their own have rows of; None: all.

    Attributes:
        heads: of each one its block as often as it is run, and its LM head.
    """

    def __init__(
        self,
        target: TargetEmbeddings,
        *,
        n_heads: int,
        n_blocks: int = 1,
        own_lm_heads: bool,
        ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__(target)
        vocab, size = target.embedding.shape
        self.target_ids = ids
        vocab = vocab if ids is None else len(ids)
        self.own_lm_heads, self._n_blocks = own_lm_heads, n_blocks
        self.heads: tuple[nn.ModuleList, ...] = ()
        for i in range(n_heads):
            head = nn.ModuleList([ResidualBlock(size)] * n_blocks)
            if own_lm_heads:
                head.append(nn.Linear(size, vocab, bias=False))
            self.add_module(str(i), head)
            self.heads += (head,)

    def forward(self, hidden: torch.Tensor, n_heads: int | None = None) -> torch.Tensor:
        """Guess the tokens after each row.

        Args:
            hidden: ``[n, hidden]`` the target's states after its final norm.
            n_heads: how many heads are run, from the first; None runs all.

        Returns:
            Logits ``[n, heads, vocab]``; head i guesses the token at offset i + 2 from the row's,
            since the next one is the target's own.
        """
        states = self.states(hidden, n_heads)
        if not self.own_lm_heads:
            return self.target.logits(torch.stack(states, dim=1))
        return torch.stack([h[-1](x) for h, x in zip(self.heads, states, strict=False)], dim=1)

    def guessing(self, hidden: torch.Tensor, n_heads: int) -> ModelWork[torch.Tensor]:
        """Run `forward` as a generator that yields its products."""
        heads = partial(self, n_heads=n_heads)
        logits: torch.Tensor = yield row_call(self.key("guess", n_heads), heads, hidden)
        return logits

    def states(self, hidden: torch.Tensor, n_heads: int | None = None) -> list[torch.Tensor]:
        """Compute what the LM heads of the first ``n_heads`` heads read, ``[n, hidden]`` each."""
        states = []
        for head in self.heads[:n_heads]:
            x = hidden
            for _ in range(self._n_blocks):
                x = head[0](x)
            states.append(x)
        return states


def load(folder: Path, target: TargetInfo, vocabulary: str | None = None) -> MedusaHeads:
    """Load the Medusa-1 heads in ``folder``, of either format.

    LM heads of their own may have few of the target's ids: those that a list beside them names, as
    a draft model's folder has one.

    Heads and blocks are counted from the keys: the published ``medusa_num_heads`` is 2 where the
    file has 5.

    Args:
        vocabulary: see `checkpoint.ends_of`; of heads with an LM head each it is not asked.

    Raises:
        WeightsNotFound: missing, damaged, not for this target, or a Medusa-2 model.
    """
    whole = any(folder.glob("pytorch_model*.bin")) or any(folder.glob("model*.safetensors"))
    if whole and not any((folder / name).is_file() for name in FILES):
        raise WeightsNotFound(
            f"{folder} holds a whole model and no {FILES[1]}: Medusa-2 trained the target too, so "
            "its output is another model's. Take a Medusa-1 head, such as "
            "FasterDecoding/medusa-vicuna-7b-v1.3."
        )
    stored = checkpoint.read(folder, FILES)
    n_heads = checkpoint.count(stored.tensors, r"(\d{1,2})\.")
    n_blocks = checkpoint.count(stored.tensors, r"0\.(\d{1,2})\.linear\.")
    if not n_heads or not n_blocks:
        raise stored.refuse("has no key 0.0.linear.weight: this is not a Medusa head. Take one.")
    own_lm_heads = any(f"{i}.{n_blocks}.weight" in stored.tensors for i in range(n_heads))
    ends, ids = checkpoint.ends_of(target, None if own_lm_heads else vocabulary)
    if own_lm_heads and (listed := read_id_map(folder)) is not None:
        ids = torch.from_numpy(listed).to(target.device)
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(ends.embedding):
            raise stored.refuse(
                f"comes with ids that the target lacks: see {ID_MAP_FILE} beside it."
            )
    with torch.device("meta"):
        heads = MedusaHeads(
            ends, n_heads=n_heads, n_blocks=n_blocks, own_lm_heads=own_lm_heads, ids=ids
        )
    checkpoint.fill(heads, stored, target)
    return heads
