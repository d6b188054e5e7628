"""How much memory a run will take, from its configuration alone: an estimate, without torch.

    weights of target and draft + keys and values of a whole context + OVERHEAD

OVERHEAD is for the graphs, what their passes keep (logits of a few hundred rows), and work space.
"""

from __future__ import annotations

import re
from typing import Any

OVERHEAD = 3 * 2**30
_LONGEST_TEXT = 4096
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def run_bytes(cfg: Any) -> int:
    """Bytes on the device for a composed configuration, whose model has a ``shape_config``."""
    model, shape = cfg.model, cfg.model.shape_config
    item = _BYTES[model.dtype]
    weights = item * _parameters(shape) * (2 if cfg.runner.name == "hf" else 1)
    text = min(model.context_length or _LONGEST_TEXT, _LONGEST_TEXT)
    kv_heads, size = _heads(shape)
    cached = 2 * shape.num_hidden_layers * kv_heads * size * item * text
    draft = (cfg.pair.draft.id if cfg.pair and cfg.pair.draft else None) or ""
    return int(weights + cached + item * _named_parameters(draft) + OVERHEAD)


def _heads(shape: Any) -> tuple[int, int]:
    """Key heads, and the size of a head."""
    heads = shape.num_attention_heads
    size = shape.get("head_dim") or shape.hidden_size // heads
    return shape.get("num_key_value_heads") or heads, size


def _parameters(shape: Any) -> int:
    """Of a decoder in Llama's shape, without norms and biases."""
    wide, (kv_heads, size) = shape.hidden_size, _heads(shape)
    attention = wide * size * 2 * (shape.num_attention_heads + kv_heads)
    layer = attention + 3 * wide * shape.intermediate_size
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return int(shape.num_hidden_layers * layer + tables * shape.vocab_size * wide)


def _named_parameters(name: str) -> int:
    """Parameters that a model's name tells, as ``1.1B`` or ``68m``; 0 where it tells none."""
    told = re.search(r"(\d+(?:\.\d+)?)\s?([bm])(?![a-z])", name.lower())
    return int(float(told[1]) * {"b": 1e9, "m": 1e6}[told[2]]) if told else 0
