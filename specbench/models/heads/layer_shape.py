"""The sizes of a head's decoder layer, read from its own configuration and never the target's.

Published configurations leave out what the authors' code ignores, and say some of it in three
places: every default here is the one that the head was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specbench.errors import ConfigurationError, first_line

DEFAULT_THETA = 10000.0  # also of heads whose target has another
_FIXED = ("linear", "llama3", "yarn")  # scalings that no text's length moves
_LARGEST = 2**20  # of a size; no layer is made of a larger one
_OWN = "Take the head's own config.json."


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One Llama or Qwen3 layer."""

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None  # transformers' ``rope_parameters``
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False  # Qwen3's norms of each head's query and key
    window: int | None = None  # tokens that attention looks back

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """``[head_dim / 2]`` float64 radians per position, and the factor on cosine and sine."""
        if self.rope_scaling is None:
            halves = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
            return self.rope_theta ** (-halves / self.head_dim), 1.0
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        begun = int(self.rope_scaling.get("original_max_position_embeddings") or 2048)
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.n_heads,
            head_dim=self.head_dim,
            max_position_embeddings=int(begun * float(self.rope_scaling.get("factor", 1)) + 1),
            rope_parameters={**self.rope_scaling, "rope_theta": self.rope_theta},
        )
        scaled = ROPE_INIT_FUNCTIONS[self.rope_scaling["rope_type"]](config, None)
        return scaled[0].double(), float(scaled[1])


def read_shape(
    config: Mapping[str, Any],
    where: str,
    *,
    rope_theta: float | None = None,
    bias_key: str = "attention_bias",
) -> LayerShape:
    """The layer that ``config`` describes.

    Args:
        where: the file, for messages.
        rope_theta: instead of the configuration's, which some authors' code ignores.
        bias_key: what says that queries, keys and values have biases.

    Raises:
        ConfigurationError: a size is missing or makes no layer, or the layer is of another kind.
    """
    hidden = read_size(config, "hidden_size", where)
    heads = read_size(config, "num_attention_heads", where)
    # Older configurations leave it out; every head then has its own keys, whatever the target has.
    kv_heads = read_size(config, "num_key_value_heads", where, heads)
    head_dim = read_size(config, "head_dim", where, hidden // heads)
    if heads % kv_heads or head_dim % 2 or heads * head_dim > _LARGEST:
        raise ConfigurationError(
            f"{where}: {heads} heads of {head_dim} cannot share {kv_heads} key heads "
            f"(num_attention_heads, head_dim, num_key_value_heads). {_OWN}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigurationError(
            f"{where}: hidden_act is {activation!r}; only silu can be read. Take a head with silu."
        )
    theta, scaling = _rope(config, where)
    qwen3 = config.get("model_type") == "qwen3"
    window = None
    windowed = config.get("use_sliding_window", not qwen3) is not False
    if windowed and config.get("sliding_window") is not None:
        window = read_size(config, "sliding_window", where)
    attention_bias = bool(config.get("attention_bias", False))
    shape = LayerShape(
        hidden_size=hidden,
        intermediate_size=read_size(config, "intermediate_size", where),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        rope_theta=theta if rope_theta is None else rope_theta,
        rope_scaling=scaling,
        qkv_bias=bool(config.get(bias_key, False)),
        o_bias=attention_bias and bias_key == "attention_bias",
        head_norms=qwen3,
        window=window,
    )
    _check_positions(shape, where)
    return shape


def read_size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number above 0; ``default`` where the key is missing or null.

    Raises:
        ConfigurationError: it is something else.
    """
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise ConfigurationError(f"{where}: {key} is {value!r}, not a size. {_OWN}")
    return value


def _positive(value: Any, key: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{where}: {key} is {value!r}, not a number above 0. {_OWN}")
    return number


def _check_positions(shape: LayerShape, where: str) -> None:
    """Refuse a scaling that lacks a value, before a text is half read.

    Raises:
        ConfigurationError: no finite angle comes out.
    """
    try:
        frequencies, factor = shape.inverse_frequencies()
        reason = "" if frequencies.isfinite().all() and math.isfinite(factor) else "not finite"
    except Exception as error:  # what transformers raises depends on the value and the scaling
        reason = first_line(error)
    if reason:
        raise ConfigurationError(
            f"{where}: rope_theta={shape.rope_theta:g} with rope_scaling={shape.rope_scaling} "
            f"gives no positions ({reason}). {_OWN}"
        )


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, Mapping[str, Any] | None]:
    """Theta and scaling; theta may stand in three places, which must agree."""
    thetas: dict[str, float] = {}
    scaling: Mapping[str, Any] | None = None
    for place in ("rope_parameters", "rope_scaling"):
        nested = config.get(place)
        if not nested:
            continue
        if not isinstance(nested, dict):
            raise ConfigurationError(f"{where}: {place} is {nested!r}, not a table. {_OWN}")
        if nested.get("rope_theta") is not None:
            key = f"{place}.rope_theta"
            thetas[key] = _positive(nested["rope_theta"], key, where)
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind in _FIXED:
            scaling = {**nested, "rope_type": kind}
        elif kind != "default":
            raise ConfigurationError(
                f"{where}: {place} is of type {kind!r}, and only {', '.join(_FIXED)} can be "
                "read: the others change with the length of the text. Take another "
                "head."
            )
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = _positive(config["rope_theta"], "rope_theta", where)
    if len(set(thetas.values())) > 1:
        said = ", ".join(f"{key}={value:g}" for key, value in thetas.items())
        raise ConfigurationError(
            f"{where} contradicts itself: {said}. Remove what the head was not trained with."
        )
    return next(iter(thetas.values()), DEFAULT_THETA), scaling
