"""What an EAGLE-3 configuration says, in the authors' dialect and in that of ``speculators``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import ConfigurationError
from specbench.models.heads.layer_shape import LayerShape, read_shape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head, whichever dialect its file is in."""

    shape: LayerShape
    draft_vocab_size: int
    target_hidden_size: int
    # Numbers of the target's states (0 the embeddings, i the output of layer i - 1); None where
    # the configuration is silent.
    layer_ids: tuple[int, ...] | None = None
    joins_states: bool = True  # else the feature is one state after the final norm, and no ``fc``
    n_layers: int = 1
    first_layer: str = "midlayer"  # its name in the file
    norm_before_fc: bool = False  # one norm over all states
    fc_norm: bool = False  # a norm for each state
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the next feature is the normed output

    @property
    def n_states(self) -> int:
        """States that are joined into a feature."""
        if not self.joins_states:
            return 1
        return 3 if self.layer_ids is None else len(self.layer_ids)


def read_config(
    config: Mapping[str, Any],
    keys: frozenset[str],
    where: str,
    *,
    rope_theta: float | None,
    layer_ids: tuple[int, ...] | None,
) -> Eagle3Config:
    """The configuration of a head whose file has ``keys``.

    Args:
        where: config.json, for messages.
        rope_theta: instead of the configuration's.
        layer_ids: instead of the configuration's.

    Raises:
        ConfigurationError: sizes are missing, or what it describes is not read here.
    """
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigurationError(f"{where}: speculators_model_type is {kind!r}, not eagle3.")
    read = _authors if kind is None else _speculators
    return read(config, keys, where, rope_theta, layer_ids)


def _authors(
    config: Mapping[str, Any],
    keys: frozenset[str],
    where: str,
    rope_theta: float | None,
    layer_ids: tuple[int, ...] | None,
) -> Eagle3Config:
    """SafeAILab's files and SpecForge's. ``num_hidden_layers`` is not read: one file says 40.

    ``norm_output`` only means here that a norm stands before the LM head, as it always does.
    """
    shape = read_shape(config, where, rope_theta=rope_theta)
    nested = config.get("eagle_config") or {}
    return Eagle3Config(
        shape=shape,
        draft_vocab_size=_draft_vocab(config, where, config.get("vocab_size")),
        target_hidden_size=int(config.get("target_hidden_size") or shape.hidden_size),
        layer_ids=layer_ids or _ids(nested) or _ids(config),
        joins_states=nested.get("use_aux_hidden_state", True) is not False,
        fc_norm=any(key.startswith("fc_norm.") for key in keys),
    )


def _speculators(
    config: Mapping[str, Any],
    keys: frozenset[str],
    where: str,
    rope_theta: float | None,
    layer_ids: tuple[int, ...] | None,
) -> Eagle3Config:
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigurationError(
            f"{where}: transformer_layer_config is {layer!r}, not the table of a layer."
        )
    layer = {"model_type": "qwen3", **layer}
    if layer["model_type"] not in ("llama", "qwen3"):
        raise ConfigurationError(
            f"{where}: transformer_layer_config.model_type is {layer['model_type']!r}; only "
            "llama and qwen3 can be read."
        )
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise ConfigurationError(f"{where}: norm_before_fc and fc_norm exclude each other.")
    residual = config.get("norm_before_residual")
    if residual is None:
        log.warning("%s: norm_before_residual is missing; taken as true, as vLLM does", where)
    shape = read_shape(layer, f"{where}, transformer_layer_config", rope_theta=rope_theta)
    return Eagle3Config(
        shape=shape,
        draft_vocab_size=_draft_vocab(config, where, layer.get("vocab_size")),
        target_hidden_size=int(config.get("target_hidden_size") or shape.hidden_size),
        layer_ids=layer_ids or _ids(config),
        n_layers=int(layer.get("num_hidden_layers", 1)),
        first_layer="layers.0",
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_before_residual=residual is not False,
        norm_output=bool(config.get("norm_output", False)),
    )


def _ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(i) for i in ids) if ids else None


def _draft_vocab(config: Mapping[str, Any], where: str, vocab: Any) -> int:
    size = config.get("draft_vocab_size") or vocab
    if not isinstance(size, int) or size < 1:
        raise ConfigurationError(f"{where}: draft_vocab_size is {size!r}, not a size.")
    return size
