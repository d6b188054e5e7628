"""Files of quantised weights: dequantised while they are loaded, or refused.

A dequantised model is a plain one in all that follows, but its passes read more bytes than its
file has, which speedups depend on.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specbench.config.schema import ModelConfig
from specbench.errors import ConfigurationError
from specbench.kernels.weight_forms import is_plain
from specbench.models.checkpoints import weights
from specbench.system.bandwidth import streamed_bytes

GGUF = "gguf"
# Of transformers' methods those that it can undo at load (5.23), on a GPU when it is told to.
_DEQUANTISED = (GGUF, "fp8", "mxfp8", "mxfp4", "compressed-tensors")


def method_of(config: PreTrainedConfig) -> str | None:
    """Read transformers' name of the method that weights are quantised by; None: they are not."""
    fields: Any = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    kind = (fields if isinstance(fields, dict) else vars(fields)).get("quant_method")
    return str(getattr(kind, "value", kind))


def dequantise_at_load(model: ModelConfig, config: PreTrainedConfig) -> bool:
    """Ask in ``config`` for plain weights; False if the files hold such.

    Raises:
        ConfigurationError: transformers has no way to undo this method.
    """
    method = method_of(config)
    if method is None:
        return False
    _refuse_unless(method in _DEQUANTISED, model, method)
    settings: Any = config
    settings.quantization_config = {**settings.quantization_config, "dequantize": True}
    # An older key of compressed-tensors; False says the same.
    settings.quantization_config.pop("run_compressed", None)
    return True


def make_plain(
    model: ModelConfig, network: PreTrainedModel, method: str, dtype: torch.dtype
) -> str:
    """Convert dequantised weights to ``dtype`` and give a note for whoever reads the numbers.

    Transformers leaves those that were never quantised, and some others, in the file's dtype.

    Raises:
        ConfigurationError: some weights stayed packed.
    """
    _refuse_unless(is_plain(network), model, method)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    exceptions = network._get_dtype_plan(dtype)  # parts of names, as "norm"
    for name, weight in network.named_parameters():
        exempt = [kind for part, kind in exceptions.items() if part in name]
        weight.data = weight.data.to(exempt[0] if exempt else dtype)
    return (
        f"the weights come from a file in {method} and were dequantised to "
        f"{str(dtype).removeprefix('torch.')}: a pass reads {streamed_bytes(network) / 2**20:,.1f} "
        "MiB, not the file's bytes. Where an engine reads the file as it is, plain decoding costs "
        "less, and drafts gain less."
    )


def _refuse_unless(plain: bool, model: ModelConfig, method: str) -> None:
    if not plain:
        raise ConfigurationError(
            f"{weights.key_of(model)}={model.id}: its weights are quantised ({method}), and no "
            "engine here runs such layers. Name the model that it was made from, or type "
            f"{weights.remedy_of(model)}."
        )
