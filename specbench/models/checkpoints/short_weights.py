"""Weights in fewer bytes than float32 (``engine.weights=stored``), which a CPU's passes read.

No value changes: the bundled model's float32 weights were made of blocks of a GGUF file, and passes
read the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specbench.config.schema import FLOAT32_WEIGHTS, ModelConfig
from specbench.errors import ConfigurationError
from specbench.kernels import panel_kernels
from specbench.kernels.panel_kernels import QUANTS
from specbench.kernels.weight_forms import note_form
from specbench.models.checkpoints import bundled, weights

_EVERY = 64


def shorten(network: PreTrainedModel, kind: str, model: ModelConfig) -> str | None:
    """Let the linears of ``network`` be read in the form that ``engine.weights`` names.

    Gives its name, None for float32.

    Raises:
        ConfigurationError: the passes of this model or machine read no other form than float32.
    """
    if kind == FLOAT32_WEIGHTS:
        return None
    why = ""
    if network.device.type != "cpu":
        why = f"is for passes on a CPU, and the model is on {network.device}"
    elif not panel_kernels.available():
        why = "needs products of this project's own, and this build of torch has another OpenMP"
    elif not weights.is_bundled(model):
        why = f"reads the blocks of a GGUF file, and model={model.name} (id {model.id}) has none"
    elif not _note_blocks(
        network, bundled.find_gguf(str(model.gguf_package), str(model.gguf_file))
    ):
        why = f"found no blocks of Q8_0 or Q4_1 in {model.gguf_file} that are those of the model"
    if why:
        raise ConfigurationError(f"engine.weights={kind} {why}. Type engine.weights=float32.")
    return kind


def _note_blocks(network: PreTrainedModel, path: Path) -> int:
    """Note the file's blocks on the weights made of them; return how many there are.

    None, where some linear's values are not those of its blocks.
    """
    import gguf

    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config: Any = network.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    embedding = network.get_input_embeddings().weight
    noted = 0
    for name, linear in network.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        module_name = "model.embed_tokens" if linear.weight is embedding else name
        tensor = tensors.get(f"{names.get_name(module_name)}.weight")
        if tensor is None or tensor.tensor_type not in kinds:
            continue
        blocks = torch.from_numpy(tensor.data.copy())
        blocks = blocks.unflatten(1, (linear.in_features // QUANTS, -1))
        for ordered in _orders(blocks, config):
            # All rows for their order, and some from end to end: all at once would take seconds.
            first, some = (
                torch.from_numpy(gguf.quants.dequantize(part.numpy(), tensor.tensor_type))
                for part in (ordered[:, 0], ordered[::_EVERY].flatten(1))
            )
            if torch.equal(first, linear.weight[:, : first.shape[1]]) and torch.equal(
                some, linear.weight[::_EVERY]
            ):
                note_form(linear.weight, ordered)
                noted += 1
                break
        else:
            return 0
    return noted


def _orders(blocks: torch.Tensor, config: Any) -> Iterator[torch.Tensor]:
    """Yield ``blocks [out, ..]`` in the orders that rows can have: the file's, and two halves'.

    GGUF files have the two numbers that a rotation turns side by side, transformers half a head
    apart.
    """
    yield blocks
    for heads in (config.num_attention_heads, config.num_key_value_heads):
        if len(blocks) % (2 * heads) == 0:
            halves = blocks.unflatten(0, (heads, -1, 2)).transpose(1, 2)
            yield halves.flatten(0, 2).contiguous()
