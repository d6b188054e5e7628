"""Quantised weights: dequantised while they are loaded, else refused or run as they are packed.

A dequantised model is used like any other, but its passes read more bytes than its file has, and
speedups depend on that. A packed model (``model.allow_packed``) keeps its own layers, but embedding
and LM head must be plain, because drafters read them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specbench.config.schema import ModelConfig
from specbench.errors import ConfigurationError
from specbench.kernels.weight_forms import is_quantised
from specbench.models.checkpoints import weights
from specbench.system.bandwidth import streamed_bytes

GGUF = "gguf"
# Methods that transformers (5.23) can undo at load, some of them only when it is told to.
_DEQUANTISED = (GGUF, "fp8", "mxfp8", "mxfp4", "compressed-tensors")


def method_of(config: PreTrainedConfig) -> str | None:
    """Read transformers' name of the method that weights are quantised by; None: they are not."""
    fields: Any = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    kind = (fields if isinstance(fields, dict) else vars(fields)).get("quant_method")
    return str(getattr(kind, "value", kind))


def dequantise_at_load(model: ModelConfig, config: PreTrainedConfig) -> bool:
    """Ask in ``config`` for plain weights; False if they are, or are allowed to stay packed.

    Raises:
        ConfigurationError: transformers cannot undo their method.
    """
    method, settings = method_of(config), getattr(config, "quantization_config", None)
    if method in _DEQUANTISED:
        # Without an older key of compressed-tensors, which says the contrary.
        items = dict(settings or {}).items()
        plain = {key: value for key, value in items if key != "run_compressed"}
        config.quantization_config = plain | {"dequantize": True}
    elif method:
        _check_allowed(model, method)
    return method in _DEQUANTISED


def settle(model: ModelConfig, network: PreTrainedModel, dtype: torch.dtype, method: str) -> str:
    """Bring dequantised weights to ``dtype``, or check packed ones; return a note for readers.

    Transformers leaves what was never quantised, and some other weights, in the file's dtype.

    Raises:
        ConfigurationError: see `check_packed`.
    """
    if method in _DEQUANTISED and hasattr(network.config, "quantization_config"):
        del network.config.quantization_config  # of GGUF it stays, whatever became of its weights
    if is_quantised(network):
        return check_packed(model, network, method)
    exceptions = network._get_dtype_plan(dtype)  # by parts of names, as "norm"
    for name, weight in network.named_parameters():
        exempt = [kind for part, kind in exceptions.items() if part in name]
        weight.data = weight.data.to(exempt[0] if exempt else dtype)
    return (
        f"the weights come from a file in {method} and were dequantised to "
        f"{str(dtype).removeprefix('torch.')}: a pass reads {streamed_bytes(network) / 2**20:,.1f} "
        "MiB, not the file's bytes. Where an engine reads the file as it is, plain decoding costs "
        "less, and drafts gain less."
    )


def check_packed(model: ModelConfig, network: PreTrainedModel, method: str = "packed") -> str:
    """Refuse packed weights that are not allowed, or that a drafter has to read; return a note.

    Raises:
        ConfigurationError: ``model.allow_packed`` is false, or LM head or embedding is packed.
    """
    _check_allowed(model, method)
    ends = {"LM head": network.get_output_embeddings(), "embedding": network.get_input_embeddings()}
    for name, module in ends.items():
        if not hasattr(module, "weight") or is_quantised(module):
            raise ConfigurationError(
                f"{weights.key_of(model)}={model.id}: its {name} is packed ({method}), and "
                "drafters read it as a matrix. Name a file with a plain one, or the original model."
            )
    return (
        f"products run on packed weights ({method}) in layers of another package; passes in one "
        "call and CUDA graphs are off."
    )


def _check_allowed(model: ModelConfig, method: str) -> None:
    if not model.allow_packed:
        raise ConfigurationError(
            f"{weights.key_of(model)}={model.id}: its weights are quantised ({method}), and no "
            "engine here runs such layers. Name the model that it was made from, or type "
            f"{weights.remedy_of(model)}. model.allow_packed=true runs the layers that their "
            "package makes."
        )
