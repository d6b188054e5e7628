"""Weights kept as bytes, one scale a row: a small model that fits into a repository.

Only the file is small. What is loaded from it has the precision that was asked for, and runs like
any other model. Matrices are rounded to 255 steps of their row's largest magnitude; vectors (the
norms' weights) are few and stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specbench.errors import WeightsNotFound

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "int8.safetensors"
_SCALE = ".scale"


def save(network: PreTrainedModel, folder: Path) -> None:
    """Write ``config.json`` and the weights of a model; a tied head is not written twice."""
    from safetensors.torch import save_file

    tied = {"lm_head.weight"} if network.config.tie_word_embeddings else set()
    untied = {name: w for name, w in network.state_dict().items() if name not in tied}
    network.config.save_pretrained(folder)
    save_file(rounded(untied), folder / FILE)


def rounded(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round weights as they are kept: matrices to bytes, each with a ``.scale`` of its rows."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        values = weight.detach().cpu()
        if values.is_floating_point():
            values = values.float()
            if values.dim() == 2:
                scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                tensors[name + _SCALE] = scale[:, 0]
                values = (values / scale).round().to(torch.int8)
        tensors[name] = values.contiguous()
    return tensors


def restored(stored: Mapping[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """Give what ``rounded`` was given, in float32; other tensors as they are.

    Raises:
        WeightsNotFound: a scale is missing, of another length, or some number is not finite.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, value in stored.items():
        if value.dtype != torch.int8:
            # Eight-bit floats cannot be asked themselves.
            numbers = value.double() if value.element_size() == 1 else value
            if not numbers.isfinite().all():
                raise _damaged(file, f"{name} is not finite")
            if not name.endswith(_SCALE):
                weights[name] = value
            continue
        scale = stored.get(name + _SCALE)
        if scale is None:
            raise _damaged(file, f"it lacks {name}{_SCALE}")
        if value.dim() != 2 or scale.shape != value.shape[:1]:
            raise _damaged(
                file,
                f"{name} is of bytes {tuple(value.shape)} with {scale.numel()} scales, where only "
                "matrices are kept as bytes, with a scale a row",
            )
        weights[name] = value * scale[:, None]
    return weights


def _damaged(file: Path, why: str) -> WeightsNotFound:
    return WeightsNotFound(f"{file} is damaged: {why}. Fetch it again.")


def load(folder: Path, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Load the model that ``save`` wrote, on the CPU, with weights in ``dtype``.

    Raises:
        WeightsNotFound: the file is damaged, not of this configuration, or overflows in ``dtype``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    network: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention
    )
    try:
        state = restored(load_file(folder / FILE), folder / FILE)
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        network.load_state_dict(state)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise _damaged(folder / FILE, " ".join(str(error).split())) from error
    for name, weight in network.named_parameters():
        if not weight.isfinite().all():  # in the file it was: `restored` has looked
            raise WeightsNotFound(
                f"{folder / FILE} has numbers in {name} that are too large for {str(dtype)[6:]}. "
                "Type dtype=bfloat16 or dtype=float32 of this model."
            )
    return network
