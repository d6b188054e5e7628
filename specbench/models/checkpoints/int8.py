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
    kept = {name: w for name, w in network.state_dict().items() if name not in tied}
    network.config.save_pretrained(folder)
    save_file(rounded(kept), folder / FILE)


def rounded(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as they are kept: matrices as bytes, each with a ``.scale`` of its rows."""
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
    """What ``rounded`` was given, in float32; other tensors as they are.

    Raises:
        WeightsNotFound: a scale is missing, of another length, or some number is not finite.
    """
    _check_scales(stored, file)
    return {
        name: (value * stored[name + _SCALE][:, None] if value.dtype == torch.int8 else value)
        for name, value in stored.items()
        if not name.endswith(_SCALE)
    }


def load(folder: Path, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model that ``save`` wrote, on the CPU, with weights in ``dtype``.

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
        stored = load_file(folder / FILE)
    except (SafetensorError, OSError) as error:
        raise WeightsNotFound(f"{folder / FILE} is damaged: {error!r}. Fetch it again.") from error
    state = restored(stored, folder / FILE)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        raise WeightsNotFound(
            f"{folder / FILE} is not of the model that its config.json describes: "
            f"{first[0].strip()}"
        ) from error
    for name, weight in network.named_parameters():
        if not weight.isfinite().all():  # in the file it was: `restored` has looked
            raise WeightsNotFound(
                f"{folder / FILE} has numbers in {name} that are too large for {str(dtype)[6:]}. "
                "Type dtype=bfloat16 or dtype=float32 of this model."
            )
    return network


def _check_scales(stored: Mapping[str, torch.Tensor], file: Path) -> None:
    """Refuse numbers that no model has, and rows without a scale."""
    for name, value in stored.items():
        if value.dtype != torch.int8:
            # Eight-bit floats cannot be asked themselves.
            numbers = value.double() if value.element_size() == 1 else value
            if not numbers.isfinite().all():
                raise WeightsNotFound(f"{file} is damaged: {name} is not finite. Fetch it again.")
            continue
        scale = stored.get(name + _SCALE)
        if scale is None:
            raise WeightsNotFound(f"{file} lacks {name}{_SCALE}. Fetch it again.")
        if value.dim() != 2:
            raise WeightsNotFound(
                f"{file} is damaged: {name} are bytes of {value.dim()} dimensions, and only "
                "matrices are kept as bytes. Fetch it again."
            )
        if scale.shape != value.shape[:1]:
            raise WeightsNotFound(
                f"{file} is damaged: {name}{_SCALE} has {scale.numel()} numbers for "
                f"{len(value)} rows. Fetch it again."
            )
