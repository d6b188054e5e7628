"""MTP: a model's own layers, trained to predict further ahead, draft for it.

Paper: "DeepSeek-V3 Technical Report", arXiv 2412.19437, sections 2.2 and 5.4.3.
Reference code studied: huggingface/transformers 5.23, ``generate(use_mtp=True)``: ``MtpModel`` and
    ``MTPCandidateGenerator``; for more tokens than layers, vLLM, which runs the layer again.
Head: ``specbench.models.heads.mtp``; its folder is the target's own checkpoint.
A step: layer 0 joins the target's state of each row committed since with the next token's
    embedding, and its output gives the first token. Of several layers each reads the one before
    and the token drafted there, and all drafts are a chain. A single layer goes on as EAGLE's
    does: it reads its own output and the token drafted; ``top_k`` above 1 grows EAGLE-2's tree.
Where ours differs, and why:
    - At a temperature transformers draws its drafts. Here the likeliest tokens are drafted at any
      temperature, so a draft depends on the context alone and the output is plain sampling's.
    - The first draft comes after the prompt's pass, as for every method here.
Checked: drafts identical to transformers' in 2,526 of 2,526 steps (GLM-4.5, 1 to 3 layers) and
    1,317 of 1,317 (DeepSeek-V3, 1 to 3) with random weights; ``tests/methods/test_mtp.py``.
Example: the root is b after a; from a's state and b's embedding the layer guesses c, the draft.
State kept: none beyond the layers' cache and unread states, for a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specbench.config.schema import Count, Positive, Text
from specbench.decoding.protocols import ModelWork, TargetInfo
from specbench.decoding.structs import DraftContext
from specbench.draft_structures.head_tree import DynamicTreeDrafter
from specbench.errors import ConfigurationError
from specbench.models.heads import mtp


@dataclass(kw_only=True, eq=False)
class Mtp(DynamicTreeDrafter):
    """MTP: a model's own layers, which predict further ahead, draft.

    Raises:
        ConfigurationError: a tree, or a longer chain than layers, is asked of several layers.
    """

    name: str = "mtp"
    head: Text = "mtp"
    total: Positive = 2
    depth: Count = 0
    top_k: Positive = 1

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        self._graph_tokens = 0  # a layer of experts chooses its weights on the host
        n_layers = len(self._head.layers)
        if n_layers > 1 and (self.top_k > 1 or self.depth >= n_layers):
            raise ConfigurationError(
                f"{n_layers} MTP layers draft a chain of at most {n_layers} tokens, got "
                f"method.top_k={self.top_k} and method.depth={self.depth}. Type method.top_k=1 "
                f"method.depth={n_layers - 1} method.total={n_layers + 1}."
            )

    def _load(self, folder: Path, target: TargetInfo) -> mtp.MtpHead:
        return mtp.load(folder, target)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        if len(self._head.layers) > 1:
            return self._head.drafted
        return (yield from super()._growing(feature, levels, number))
