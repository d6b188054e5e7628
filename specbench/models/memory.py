"""How much memory a run takes, estimated from its configuration, and whether there is room.

    weights of target and draft + keys and values of a whole context + what graphs keep + OVERHEAD

Keys and values are held twice if the eager baseline runs next to graphs. Graphs keep the logits
of each shape of pass. OVERHEAD is for CUDA itself, libraries' work space, and a prompt's pass.

A download of hours, or a load of minutes, is not begun where its end is known; a model whose shape
no configuration tells is not asked about.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.schema import ModelConfig, RunConfig
from specbench.errors import ConfigurationError
from specbench.models.checkpoints import weights
from specbench.system import host_memory as host

if TYPE_CHECKING:
    import torch

OVERHEAD = 2 * 2**30
# What is read of a model's ``shape_config``, as its config.json has it.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
_LONGEST_TEXT = 4096
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_CAPTURED_ROWS = 479  # of all shapes of pass together, for one number of keys
_FEWEST_KEYS = 256  # shapes are captured for these, and for each doubling


def run_bytes(cfg: Any) -> int:
    """Estimate bytes on the device for a configuration whose model has a ``shape_config``."""
    model, graphs = cfg.model, cfg.engine.name != "eager"
    item, text = _BYTES.get(str(model.dtype), 4), _text(model)
    draft = (cfg.pair.draft.id if cfg.pair and cfg.pair.draft else None) or ""
    total = item * _parameters(model.shape_config) * (2 if cfg.runner.name == "hf" else 1)
    total += _text_bytes(model) * (2 if graphs else 1)
    total += item * _named_parameters(draft) + OVERHEAD
    if graphs:
        key_sizes = max(1, (text // _FEWEST_KEYS).bit_length()) + 1
        total += _CAPTURED_ROWS * model.shape_config["vocab_size"] * item * key_sizes
    return int(total)


def _text(model: Any) -> int:
    return min(model.context_length or _LONGEST_TEXT, _LONGEST_TEXT)


def _text_bytes(model: Any) -> int:
    """Estimate keys and values of its whole context, of 4,096 tokens at most."""
    kv_heads, size = _heads(shape := model.shape_config)
    # Of latents the cache holds one compressed vector, and what is rotated.
    latents = shape["qk_rope_head_dim"] + rank if (rank := shape.get("kv_lora_rank")) else 0
    numbers = shape["num_hidden_layers"] * (latents or 2 * kv_heads * size)
    return int(numbers * _BYTES.get(str(model.dtype), 4) * _text(model))


def _heads(shape: Any) -> tuple[int, int]:
    """Read the number of key heads, and the size of a head."""
    heads = shape["num_attention_heads"]
    size = shape.get("head_dim") or shape["hidden_size"] // heads
    return shape.get("num_key_value_heads") or heads, size


def _parameters(shape: Any) -> int:
    """Count the parameters of a decoder in Llama's shape, without norms and biases."""
    wide, (kv_heads, size) = shape["hidden_size"], _heads(shape)
    attention = wide * size * 2 * (shape["num_attention_heads"] + kv_heads)
    layer = attention + 3 * wide * _gated(shape)
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return int(shape["num_hidden_layers"] * layer + tables * shape["vocab_size"] * wide)


def _gated(shape: Any) -> int:
    """Count the rows of a layer's gated products, of all its experts together."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((shape[key] for key in keys if shape.get(key)), 0)
    size = shape.get("moe_intermediate_size") or shape["intermediate_size"]
    return int(experts * size or shape["intermediate_size"])


def _named_parameters(name: str) -> int:
    """Read the parameters from a model's name, as ``1.1B`` or ``68m``; 0 if it has none."""
    match = re.search(r"(\d+(?:\.\d+)?)\s?([bm])(?![a-z])", name.lower())
    return int(float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]]) if match else 0


def check_room(config: RunConfig | ModelConfig, device: torch.device) -> None:
    """Refuse a model for which disk, host or GPU have no room.

    Raises:
        ConfigurationError: says what it takes, what is free, and what to type.
    """
    model = weights.model_node(config)
    shape = _shape(model)
    if shape is None:
        return
    model = copy.copy(model)
    model.shape_config = shape
    on_gpu, size = device.type == "cuda", _BYTES.get(str(model.dtype), 4) * _parameters(shape)
    if not model.shape and not weights.at_hand(model):
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        disk = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        other = weights.remedy_of(model)
        remedy = f"Make room, set HF_HOME to a folder on another disk, or type {other}."
        # Files on the hub hold two bytes a weight.
        _refuse(model, 2 * _parameters(shape), shutil.disk_usage(disk).free, f"in {cache}", remedy)
    smaller = "Type model.dtype=bfloat16 if it is not, a smaller model, or model.device_map=auto"
    if not on_gpu:
        held = size + _text_bytes(model)
        remedy = f"{smaller} where there are GPUs."
        _refuse(model, held, host.free_bytes(), "of this machine's memory", remedy)
        return
    if not model.shape and not model.device_map:
        remedy = f"{smaller}, which loads onto GPUs layer by layer."
        where = "of this machine's memory on its way to the GPU"
        _refuse(model, size, host.free_bytes(), where, remedy)
    if hasattr(config, "runner"):
        import torch

        whole: Any = copy.copy(config)
        whole.model = model
        gpus = [device]
        if model.device_map:
            gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        free = sum(torch.cuda.mem_get_info(n)[0] + torch.cuda.memory_reserved(n) for n in gpus)
        where = f"of the memory of {len(gpus)} GPUs" if len(gpus) > 1 else "of the GPU's memory"
        remedy = (
            "nvidia-smi shows who holds the rest. Type engine=eager, which keeps no graphs, "
            "model.dtype=bfloat16 if it is not, model.device_map=auto to spread it over several "
            "GPUs, or a smaller model."
        )
        _refuse(model, run_bytes(whole), free, where, remedy)


def _refuse(model: ModelConfig, required: int, free: int, where: str, remedy: str) -> None:
    if required > free:
        raise ConfigurationError(
            f"model={model.name} in {model.dtype} takes about {required / 2**30:.1f} GiB {where}, "
            f"and {free / 2**30:.1f} GiB are free. {remedy}"
        )


def _shape(model: ModelConfig) -> dict[str, Any] | None:
    """Read the shape from a folder's config.json, which the yaml may not describe."""
    folder = weights.local_folder(model)
    shape: Any = getattr(model, "shape_config", None)  # a draft's has none
    if folder is not None and not model.shape:
        try:
            shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # said elsewhere
            return None
    complete = isinstance(shape, Mapping) and all(isinstance(shape.get(k), int) for k in _SIZES)
    return dict(shape) if complete else None
