"""The target's LM head over some of its ids, for heads that share it.

A small target's LM head is a fifth of its weights, and a head's layer is far less: most of a draft
would go into logits of ids that hardly ever occur.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specbench.decoding.protocols import TargetEmbeddings, TargetInfo
from specbench.errors import ConfigurationError, WeightsNotFound
from specbench.models.draft.loading import ID_MAP_FILE, read_id_map
from specbench.paths import PROJECT


class ShortList:
    """The ends of a target (``TargetEmbeddings``), with logits of ``ids [n]`` alone, in order."""

    def __init__(self, target: TargetEmbeddings, ids: torch.Tensor) -> None:
        bias = target.lm_head_bias
        self.embedding = target.embedding
        self.lm_head = target.lm_head[ids]
        self.lm_head_bias = None if bias is None else bias[ids]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` of states ``[..., hidden]`` after the final norm."""
        return torch.nn.functional.linear(states, self.lm_head, self.lm_head_bias)


def ends_of(
    target: TargetInfo, vocabulary: str | None
) -> tuple[TargetEmbeddings, torch.Tensor | None]:
    """A target's ends, and the ids that its logits are of; None for all.

    Args:
        vocabulary: ``method.vocabulary``: a folder with the list of a draft model's ids.

    Raises:
        WeightsNotFound: there is no such list.
        ConfigurationError: it is damaged, or of another vocabulary.
    """
    if vocabulary is None:
        return target.embeddings, None
    folder = Path(vocabulary).expanduser()
    folder = folder if folder.is_dir() else PROJECT / folder
    found = read_id_map(folder)
    if found is None:
        raise WeightsNotFound(
            f"method.vocabulary={vocabulary}: there is no {ID_MAP_FILE} in that folder. Name a "
            "draft model's folder that has one, or type method.vocabulary=null for all ids."
        )
    ids = torch.from_numpy(found[found >= 0]).to(target.device)
    if not len(ids) or int(ids.max()) >= target.vocab_size:
        raise ConfigurationError(
            f"method.vocabulary={vocabulary} lists ids of another vocabulary than the target's "
            f"{target.vocab_size}. Type method.vocabulary=null for all ids."
        )
    return ShortList(target.embeddings, ids), ids
