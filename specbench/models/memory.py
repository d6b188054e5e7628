"""How much memory a run will take, from its configuration alone: an estimate, without torch.

    weights of target and draft + keys and values of a whole context + what graphs keep + OVERHEAD

Keys and values are held twice where the eager baseline runs beside graphs. Graphs keep the logits
of each shape of pass. OVERHEAD is for CUDA itself, libraries' work space, and a prompt's pass.
"""

from __future__ import annotations

import re
from typing import Any

OVERHEAD = 2 * 2**30
# What is read of a model's ``shape_config``, as its config.json has it.
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
_LONGEST_TEXT = 4096
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_CAPTURED_ROWS = 479  # of all shapes of pass together, for one number of keys
_FEWEST_KEYS = 256  # shapes are captured for these, and for each doubling


def run_bytes(cfg: Any) -> int:
    """Bytes on the device for a composed configuration, whose model has a ``shape_config``."""
    model, shape = cfg.model, cfg.model.shape_config
    item = _item(model)
    text = min(model.context_length or _LONGEST_TEXT, _LONGEST_TEXT)
    draft = (cfg.pair.draft.id if cfg.pair and cfg.pair.draft else None) or ""
    parts = [
        weight_bytes(model) * (2 if cfg.runner.name == "hf" else 1),
        text_bytes(model) * (1 if cfg.engine.name == "eager" else 2),
        item * _named_parameters(draft),
        OVERHEAD,
    ]
    if cfg.engine.name != "eager":
        key_sizes = max(1, (text // _FEWEST_KEYS).bit_length()) + 1
        parts.append(_CAPTURED_ROWS * shape["vocab_size"] * item * key_sizes)
    return sum(map(int, parts))


def weight_bytes(model: Any) -> int:
    """Of a model with a ``shape_config``, in its dtype."""
    return _item(model) * _parameters(model.shape_config)


def file_bytes(model: Any) -> int:
    """Of such a model's files on the hub, which hold two bytes a weight."""
    return 2 * _parameters(model.shape_config)


def text_bytes(model: Any) -> int:
    """Keys and values of its whole context, or of 4,096 tokens where that is longer."""
    kv_heads, size = _heads(model.shape_config)
    text = min(model.context_length or _LONGEST_TEXT, _LONGEST_TEXT)
    layers = model.shape_config["num_hidden_layers"]
    return int(2 * layers * kv_heads * size * _item(model) * text)


def _item(model: Any) -> int:
    return _BYTES.get(str(model.dtype), 4)


def _heads(shape: Any) -> tuple[int, int]:
    """Key heads, and the size of a head."""
    heads = shape["num_attention_heads"]
    size = shape.get("head_dim") or shape["hidden_size"] // heads
    return shape.get("num_key_value_heads") or heads, size


def _parameters(shape: Any) -> int:
    """Of a decoder in Llama's shape, without norms and biases."""
    wide, (kv_heads, size) = shape["hidden_size"], _heads(shape)
    attention = wide * size * 2 * (shape["num_attention_heads"] + kv_heads)
    layer = attention + 3 * wide * shape["intermediate_size"]
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return int(shape["num_hidden_layers"] * layer + tables * shape["vocab_size"] * wide)


def _named_parameters(name: str) -> int:
    """Parameters that a model's name tells, as ``1.1B`` or ``68m``; 0 where it tells none."""
    told = re.search(r"(\d+(?:\.\d+)?)\s?([bm])(?![a-z])", name.lower())
    return int(float(told[1]) * {"b": 1e9, "m": 1e6}[told[2]]) if told else 0
