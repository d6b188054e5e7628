"""The sizes of a head's decoder layer, read from its own configuration and never the target's.

Published configurations leave out what the authors' code ignores, and say some of it in three
places: every default here is the one that the head was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from specbench.errors import ConfigurationError, first_line, requirement_text

Size = Annotated[int, Field(strict=True, ge=1, le=2**20)]
_Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_Read = TypeVar("_Read", bound=BaseModel)
_OWN = "Take the head's own config.json."


class _Rope(BaseModel):
    """The rotary embedding; only scalings that do not depend on a sequence's length."""

    model_config = ConfigDict(extra="allow")
    rope_theta: _Positive | None = None
    rope_type: Annotated[
        Literal["default", "linear", "llama3", "yarn"],
        Field(validation_alias=AliasChoices("rope_type", "type")),
    ] = "default"


class _Layer(BaseModel):
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    # Older configurations leave it out; every head then has its own keys, whatever the target has.
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: _Positive = 1e-6
    rope_theta: _Positive | None = None
    rope_parameters: _Rope = _Rope()
    rope_scaling: _Rope = _Rope()
    sliding_window: Size | None = None
    use_sliding_window: bool | None = None
    attention_bias: bool = False
    qkv_bias: bool = False
    model_type: str = ""


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

    @property
    def cached_rows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their size of a row's keys, and of its values."""
        return ((self.n_kv_heads, self.head_dim),) * 2

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """Compute float64 radians per position ``[head_dim / 2]``, and the tables' factor."""
        if self.rope_scaling is None:
            halves = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
            return self.rope_theta ** (-halves / self.head_dim), 1.0
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        length = int(self.rope_scaling.get("original_max_position_embeddings") or 2048)
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.n_heads,
            head_dim=self.head_dim,
            max_position_embeddings=int(length * float(self.rope_scaling.get("factor", 1)) + 1),
            rope_parameters={**self.rope_scaling, "rope_theta": self.rope_theta},
        )
        scaled = ROPE_INIT_FUNCTIONS[self.rope_scaling["rope_type"]](config, None)
        return scaled[0].double(), float(scaled[1])


def checked(kind: type[_Read], config: Mapping[str, Any], where: str) -> _Read:
    """Read the keys of ``kind`` from a configuration; one of null counts as missing.

    Args:
        where: the file, for messages.

    Raises:
        ConfigurationError: a key is missing or has another kind of value.
    """
    try:
        return kind.model_validate({k: v for k, v in config.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise ConfigurationError(
            f"{where}: `{key}` must be {requirement_text(error)}, got {got}. {_OWN}"
        ) from None


def read_shape(
    config: Mapping[str, Any], where: str, *, qkv_bias_alone: bool = False
) -> LayerShape:
    """Read the layer that ``config`` describes.

    Args:
        where: the file, for messages.
        qkv_bias_alone: whether ``qkv_bias`` says that queries, keys and values have biases; else
            ``attention_bias`` says it of them and of the output.

    Raises:
        ConfigurationError: a size is missing or makes no layer, or the layer is of another kind.
    """
    layer = checked(_Layer, config, where)
    hidden, heads = layer.hidden_size, layer.num_attention_heads
    kv_heads = layer.num_key_value_heads or heads
    head_dim = layer.head_dim or hidden // heads
    if heads % kv_heads or head_dim % 2 or not 1 <= heads * head_dim <= 2**20:
        raise ConfigurationError(
            f"{where}: {heads} heads of {head_dim} cannot share {kv_heads} key heads "
            f"(num_attention_heads, head_dim, num_key_value_heads). {_OWN}"
        )
    ropes = (layer, layer.rope_parameters, layer.rope_scaling)
    thetas = {rope.rope_theta for rope in ropes if rope.rope_theta is not None}
    if len(thetas) > 1:
        raise ConfigurationError(
            f"{where}: rope_theta must be one number, got {', '.join(map(str, sorted(thetas)))} "
            "in several places. Remove what the head was not trained with."
        )
    scalings = [rope.model_dump() for rope in ropes[1:] if rope.rope_type != "default"]
    qwen3 = layer.model_type == "qwen3"
    windowed = layer.use_sliding_window if layer.use_sliding_window is not None else not qwen3
    shape = LayerShape(
        hidden_size=hidden,
        intermediate_size=layer.intermediate_size,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=next(iter(thetas), 10000.0),  # also of heads whose target has another
        rope_scaling=scalings[-1] if scalings else None,
        qkv_bias=layer.qkv_bias if qkv_bias_alone else layer.attention_bias,
        o_bias=layer.attention_bias and not qkv_bias_alone,
        head_norms=qwen3,
        window=layer.sliding_window if windowed else None,
    )
    try:  # before a text is half read
        frequencies, factor = shape.inverse_frequencies()
        reason = "" if frequencies.isfinite().all() and math.isfinite(factor) else "not finite"
    except Exception as error:  # what transformers raises depends on the value and the scaling
        reason = first_line(error)
    if reason:
        raise ConfigurationError(
            f"{where}: rope_theta={shape.rope_theta:g} with rope_scaling={shape.rope_scaling} "
            f"gives no positions ({reason}). {_OWN}"
        )
    return shape
