"""Checks a composed configuration: limits of values, combinations of keys, the method."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import os
import re
import traceback
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from specbench.config import schema
from specbench.config.hydra_errors import unknown_key
from specbench.config.removed import removed_key
from specbench.errors import ConfigurationError, first_line, nearest, requirement_text, unknown_name
from specbench.paths import PROJECT

# Below it, logits divided by the temperature are practically greedy, and soon overflow.
_LEAST_TEMPERATURE = 1e-9
_NOT_KNOBS = ("_target_", "label")  # keys of a method's node that are not fields of its class
# Packages of methods' classes: importing a module runs it, and a yaml must not choose any module.
_METHOD_PACKAGES = ("methods", "specbench")


def check_values(cfg: DictConfig) -> None:
    """Check all values: their limits, what excludes each other, and the method's knobs.

    Raises:
        ConfigurationError: with the key, what it must be and the nearest valid name.
    """
    for key, value in _leaves(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)):
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
            fields = dataclasses.fields(OmegaConf.get_type(parent))  # type: ignore[arg-type]
            names = [field.name for field in fields]
            raise unknown_key(prefix + ".".join(path), names) from None
        limit, value = requirement_text(error).replace("None", "null"), first["input"]
        close = nearest(str(value), re.findall(r"'([^']+)'", limit))
        hint = f" Did you mean {close!r}?" if close else ""
        key = prefix + ".".join(path)
        raise ConfigurationError(f"`{key}` must be {limit}, got {value!r}.{hint}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a plain configuration with its key, and every key as a value too."""
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
    """Refuse removed keys, and values that no file can hold or no formula takes."""
    if error := removed_key(key, value):
        raise error
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"`{key}` must be a finite number, got {value}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigurationError(f"`{key}` must fit into 64 bits.")
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        raise ConfigurationError(f"`{key}` must be text without NUL and surrogates, got {value!a}.")


def _combinations(cfg: DictConfig) -> Iterator[tuple[bool, str]]:
    """Yield combinations that are refused, in order of checking, with what to type instead."""
    runner, model, packed = cfg.runner.name, cfg.model, cfg.engine.packed
    yield (
        cfg.server is not None and runner != "serve",
        f"server={cfg.server and cfg.server.name} answers with runner=serve only. Type "
        "runner=serve, or leave server out.",
    )
    yield (
        cfg.record_layers is not None and not cfg.record,
        f"record_layers={cfg.record_layers} needs record=states: type it, or leave both out.",
    )
    yield (
        cfg.batch.size > 1 and runner != "offline",
        f"batch.size={cfg.batch.size} requires runner=offline; runner={runner} decodes one "
        "sequence at a time (servers: server.concurrency). Type batch.size=1 or runner=offline.",
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
        f"engine.weights={cfg.engine.weights} requires the packed float32 passes on a CPU. "
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


def check_method(method: Mapping[str, Any] | DictConfig) -> None:
    """Check a method's knobs against its class, before anything heavy happens.

    Raises:
        ConfigurationError: the class cannot be imported, the state scope is none, or a knob is
            unknown, missing or of the wrong type.
    """
    node: Any = method
    if isinstance(method, DictConfig):
        node = OmegaConf.to_container(method, resolve=True)
    if not isinstance(node, Mapping):
        raise ConfigurationError(
            f"method={node!r} is not the name of a file in conf/method. Type e.g. method=pld."
        )
    name = str(node.get("name", "?"))
    for key, value in node.items():
        _refuse_targets(f"method.{key!s}", value)
    if isinstance(node.get("label"), Mapping | list):
        raise ConfigurationError(f"`method.label` must be a text, got {node['label']!r}.")
    fields = _constructor_fields(str(node.get("_target_")), name)
    scopes = (*schema.STATE_SCOPES, schema.PAPER_SCOPE)
    if (scope := node.get("state_scope", schema.PAPER_SCOPE)) not in scopes:
        raise unknown_name("method.state_scope", str(scope), scopes)
    for key in (key for key in node if key not in _NOT_KNOBS):
        if key not in fields:
            close = nearest(str(key), fields)
            hint = f" Did you mean method.{close}?" if close else ""
            raise ConfigurationError(
                f"method={name} has no key {key!r}.{hint} Valid: {', '.join(sorted(fields))}."
            )
        if key != "state_scope":  # a class knows no ``paper``
            check_knob(name, key, node[key], fields[key][0])
    missing = [key for key, (_, required) in fields.items() if required and key not in node]
    if missing:
        raise ConfigurationError(
            f"method={name} lacks {', '.join(missing)}: add them to conf/method/{name}.yaml."
        )


def _refuse_targets(key: str, value: Any) -> None:
    """Refuse keys below a knob that would have any class or function called (``_target_``)."""
    if isinstance(value, Mapping):
        if call := next((name for name in map(str, value) if re.fullmatch("_.*_", name)), None):
            raise ConfigurationError(
                f"{key} holds {call!r}, which calls code by its name. Name a method instead: "
                "{method: NAME, <knob>: ...}."
            )
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        _refuse_targets(key, part)


def _constructor_fields(target: str, name: str) -> dict[str, tuple[Any, bool]]:
    """``{field: (annotation, required)}`` of the class at the dotted path ``target``."""
    module_name, _, class_name = target.rpartition(".")
    if module_name.partition(".")[0] not in _METHOD_PACKAGES:
        raise ConfigurationError(
            f"method={name}: _target_={target!r} must be a class of this project. A method's class "
            "lies in methods/NAME.py, and its yaml says methods.NAME.CLASS."
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
        if not isinstance(cls, type):
            raise AttributeError(f"{class_name!r} is not a class")
        hints = types_of(cls)
    except Exception as error:  # the file may be the user's own and unfinished
        raise ConfigurationError(
            f"method={name}: _target_ {target!r} in conf/method/{name}.yaml cannot be imported: "
            f"{_line_of_method(error)}{first_line(error)}"
        ) from error
    return {
        key: (hints.get(key, Any), parameter.default is inspect.Parameter.empty)
        for key, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _line_of_method(error: Exception) -> str:
    """Locate an import error in the project's methods: ``methods/x.py, line 2: ``."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((str(error.filename), error.lineno))
    for file, line in reversed(lines):
        if (path := Path(file)).is_relative_to(PROJECT / "methods"):
            return f"{path.relative_to(PROJECT)}, line {line}: "
    return ""


def types_of(cls: type) -> dict[str, Any]:
    """Return the annotations of a class's fields, with their limits."""
    return typing.get_type_hints(cls, include_extras=True)


def check_knob(name: str, key: str, value: Any, annotation: Any) -> None:
    """Check one knob of the method ``name`` against its type.

    Raises:
        ConfigurationError: its type is wrong, or its value beyond the type's limits.
    """
    try:
        _adapter(annotation).validate_python(value, strict=True)
    except (PydanticSchemaGenerationError, TypeError):
        return  # a type that yaml lacks takes everything
    except ValidationError as error:
        null = " or null" if type(None) in typing.get_args(annotation) else ""
        raise knob_error(name, key, value, requirement_text(error) + null) from None


def knob_error(name: str, key: str, value: Any, rule: str) -> ConfigurationError:
    """Make the error for a knob with a wrong value."""
    return ConfigurationError(f"`method.{key}` must be {rule} for method={name}, got {value!r}.")
