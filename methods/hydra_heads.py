"""Hydra: Medusa's heads made to depend on each other, by reading the tokens drafted above.

Paper: "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", COLM 2024, arXiv 2402.05109.
Reference code studied: zankner/Hydra 3f39fbd (``hydra_model.py``, ``prefix_mlp_head.py``);
    Spec-Bench fd2c1cd.
Heads: ``specbench.models.heads.hydra_heads``: Hydra++, whose prefix layer reads the states of all
    committed tokens, and plain Hydra, which reads the last one.
A step: the prefix layer reads the rows committed since. Head d then guesses below the nodes of
    depth d (0 is the root) from the prefix, the root's embedding and those of the tokens on the
    node's path; nodes without children are not read. The tree is Medusa's, filled by parent.
Where ours differs, and why:
    - At a temperature the reference accepts tokens that are likely enough. Here the output is plain
      sampling's; ``verifier=typical`` (lossy, and labelled so) is that rule but for what
      ``specbench.decoding.verify.typical`` says.
    - The first draft comes after the prompt's pass, as for every method here.
Example: the paths (0), (1), (0, 0) and (1, 0); head 1 ranks a before b, and head 2 says c below a
    and e below b: the tree is a, b, "a c" and "b e".
State kept: none beyond the prefix layer's cache and unread states, for a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from specbench.arrays import IntArray
from specbench.config.schema import Text
from specbench.decoding.device import to_device
from specbench.decoding.protocols import ModelWork, TargetInfo
from specbench.decoding.structs import DraftContext
from specbench.draft_structures.head_tree import FixedTreeDrafter
from specbench.draft_structures.static_tree import require_heads
from specbench.models.heads import hydra_heads


@dataclass(kw_only=True, eq=False)
class Hydra(FixedTreeDrafter):
    """Hydra and Hydra++: Medusa's heads, each reading the tokens drafted before it."""

    reads_root: ClassVar[bool] = True

    name: str = "hydra"
    head: Text = "hydra"

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        require_heads(self._tree, len(self._head.hydra_mlp), context.heads[self.head])

    def _load(self, folder: Path, target: TargetInfo) -> hydra_heads.HydraHeads:
        return hydra_heads.load(folder, target, self.vocabulary)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return the tree's tokens, ``[n]``."""
        assert number is not None
        head, paths, tokens = self._head, number[:, None], []
        for level, (above, ranks, inner) in enumerate(self._plan[:levels]):
            logits = yield from head.guessing(feature, paths)
            best = logits.topk(self._n_ranks[level], dim=-1).indices
            tokens.append(head.to_target_ids(best[above, ranks]))
            paths = torch.cat([paths[above[inner]], tokens[-1][inner, None]], dim=1)
        return torch.cat(tokens)

    def _scoring_first(self, features: torch.Tensor, after: IntArray) -> ModelWork[torch.Tensor]:
        paths = to_device(after[:, None].copy(), self._device)
        return (yield from self._head.guessing(features, paths))
