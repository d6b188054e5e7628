"""A model's embedding and LM head, to read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


class Embeddings:
    """``specbench.decoding.protocols.TargetEmbeddings`` of a model, packed or not."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def _lm_head(self) -> Any:
        return self._model.get_output_embeddings()  # asked each time: packing replaces the module

    @property
    def embedding(self) -> torch.Tensor:
        weight: Any = self._model.get_input_embeddings().weight
        return weight.detach()  # type: ignore[no-any-return]

    @property
    def lm_head(self) -> torch.Tensor:
        return self._lm_head.weight.detach()  # type: ignore[no-any-return]

    @property
    def lm_head_bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = self._lm_head.bias
        return None if bias is None else bias.detach()

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._lm_head(states)  # type: ignore[no-any-return]
