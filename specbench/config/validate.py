"""What a composed configuration must be: limits of values, keys that go together, the method."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from specbench.config import schema
from specbench.config.hydra_errors import unknown_key
from specbench.config.knobs import check_method
from specbench.config.removed import removed_key
from specbench.errors import ConfigurationError, nearest, unknown_name, what_it_must_be

# Below it, logits divided by the temperature are as good as greedy, and soon no numbers any more.
_LEAST_TEMPERATURE = 1e-9


def check_values(cfg: DictConfig) -> None:
    """Check all values: their limits, what excludes each other, and the method's knobs.

    Raises:
        ConfigurationError: with the key, what it must be and the nearest valid name.
    """
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for key, value in _leaves(plain):
        _check_leaf(key, value)
    check_limits(cfg, schema.RunConfig)
    for group in ("runner", "server", "logger"):
        if isinstance(node := cfg[group], DictConfig):
            check_limits(node, OmegaConf.get_type(node), f"{group}.")
    for refused, message in _combinations(cfg):
        if refused:
            raise ConfigurationError(message)
    forms = tuple(map(str, cfg.dataset.prompts)) or ("default",)
    if cfg.dataset.prompt_form not in forms:
        raise unknown_name("value of dataset.prompt_form:", cfg.dataset.prompt_form, forms)
    check_method(cfg.method)


def check_limits(node: DictConfig, kind: Any, prefix: str = "") -> None:
    """Check a group's keys and values against the fields of its dataclass.

    Args:
        kind: the dataclass.
        prefix: the group's key with a dot, for messages.

    Raises:
        ConfigurationError: a key is unknown, or a value beyond its limits.
    """
    try:
        _adapter(kind).validate_python(OmegaConf.to_container(node, resolve=True))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if first["type"] == "unexpected_keyword_argument":
            parent = OmegaConf.select(node, ".".join(path[:-1])) if path[1:] else node
            owner: Any = OmegaConf.get_type(parent)
            known = [field.name for field in dataclasses.fields(owner)]
            raise unknown_key(prefix + ".".join(path), known) from None
        wanted, value = what_it_must_be(error).replace("None", "null"), first["input"]
        close = nearest(str(value), re.findall(r"'([^']+)'", wanted))
        hint = f" Did you mean {close!r}?" if close else ""
        raise ConfigurationError(
            f"`{prefix}{'.'.join(path)}` must be {wanted}, got {value!r}.{hint}"
        ) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a plain configuration with its key, and every key as a value of its own."""
    if isinstance(node, dict):
        for name, value in node.items():
            full = f"{key}.{name}" if key else str(name)
            yield full, str(name)
            yield from _leaves(value, full)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{key}[{i}]")
    else:
        yield key, node


def _check_leaf(key: str, value: Any) -> None:
    """Refuse what went, what no file can hold and what no formula takes."""
    if gone := removed_key(key, value):
        raise gone
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"`{key}` must be a finite number, got {value}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigurationError(f"`{key}` must fit into 64 bits.")
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        raise ConfigurationError(f"`{key}` must be text without NUL and surrogates, got {value!a}.")


def _combinations(cfg: DictConfig) -> Iterator[tuple[bool, str]]:
    """What excludes each other, in the order in which it is refused, and what to type instead."""
    runner, model, packed = cfg.runner.name, cfg.model, cfg.engine.packed
    yield (
        cfg.record_layers is not None and not cfg.record,
        f"record_layers={cfg.record_layers} needs record=states: type it, or leave both out.",
    )
    yield (
        cfg.batch.size > 1 and runner != "offline",
        f"batch.size={cfg.batch.size} is of runner=offline, and runner={runner} decodes one text "
        "at a time (servers have server.concurrency). Type batch.size=1 or runner=offline.",
    )
    yield (
        cfg.measure.pin and (runner in ("serve", "replay") or not hasattr(os, "sched_getaffinity")),
        f"measure.pin=true has no compute threads to pin with runner={runner} on this system. "
        "Leave it out.",
    )
    gpu = str(model.device).startswith("cuda") or model.device_map is not None
    passes = model.dtype != "float32" or gpu or not schema.packed_bytes(packed) or runner == "serve"
    yield (
        cfg.engine.weights != schema.FLOAT32_WEIGHTS and passes,
        f"engine.weights={cfg.engine.weights} is of this project's packed float32 passes on a CPU. "
        "Type model.dtype=float32 model.device=cpu model.device_map=null "
        "engine.packed.enabled=true engine.packed.memory_gb=4 runner=offline, or leave it out.",
    )
    random = cfg.pair.draft.random or schema.RandomDraftConfig()
    yield (
        random.hidden % (2 * random.heads) != 0,
        f"`pair.draft.random.hidden` must be an even multiple of pair.draft.random.heads="
        f"{random.heads}, got {random.hidden}.",
    )
    yield (
        model.shape and not model.shape_config,
        f"model={model.name} has no model.shape_config, which model.shape=true needs. Type a model "
        "that has it, e.g. model=smollm2_135m.",
    )
    yield (
        model.name == "local",
        "model=local needs the folder of your weights: type model.path=FOLDER.",
    )
    temperature, verifier = cfg.generation.temperature, cfg.verifier
    yield (
        0 < temperature < _LEAST_TEMPERATURE,
        f"`generation.temperature` must be 0 or at least {_LEAST_TEMPERATURE:g}, got "
        f"{temperature}.",
    )
    yield (
        temperature != 0 and verifier.name == "greedy",
        f"verifier=greedy accepts what greedy decoding emits, and generation.temperature="
        f"{temperature} asks for sampling. Type verifier=rejection, or generation.temperature=0.",
    )
    yield (
        verifier.name == "typical"
        and (temperature == 0 or None in (verifier.epsilon, verifier.delta)),
        "verifier=typical judges samples by two numbers. Type generation.temperature=0.7 "
        "verifier.epsilon=0.09 verifier.delta=0.3, or verifier=auto.",
    )
