"""The knobs of a method: the fields of its class, checked before anything is loaded."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specbench.config.schema import PAPER_SCOPE, STATE_SCOPES
from specbench.errors import ConfigurationError, nearest, unknown_name

# Keys of a method node that are not fields of its class.
_NOT_KNOBS = frozenset({"_target_", "label"})

# Where a method's class may lie: to import a module is to run it, and a yaml must not choose which.
_OWN_PACKAGES = ("methods", "specbench")

# What stands in yaml for a value of each type.
_YAML_TYPES: dict[Any, tuple[type, ...]] = {
    **{kind: (kind,) for kind in (bool, int, str, list, dict)},
    float: (int, float),
    tuple: (list,),
}


def check_method(method: Mapping[str, Any] | DictConfig) -> None:
    """Check a method's knobs against its class, before anything heavy happens.

    Raises:
        ConfigurationError: the class cannot be imported, the state scope is none, or a knob is
            unknown, missing or of the wrong type.
    """
    given = (
        OmegaConf.to_container(method, resolve=True) if isinstance(method, DictConfig) else method
    )
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"method={given!r} is not the name of a file in conf/method. Type e.g. method=pld."
        )
    name = given.get("name", "?")
    for key, value in given.items():
        _refuse_targets(f"method.{key!s}", value)
    if isinstance(given.get("label"), Mapping | list):
        raise ConfigurationError(f"method.label={given['label']!r} must be a text.")
    fields = _constructor_fields(str(given.get("_target_")), str(name))
    scope = given.get("state_scope", PAPER_SCOPE)
    if scope not in (*STATE_SCOPES, PAPER_SCOPE):
        raise unknown_name("method.state_scope", str(scope), (*STATE_SCOPES, PAPER_SCOPE))
    for key, value in given.items():
        if key in _NOT_KNOBS:
            continue
        if key not in fields:
            close = nearest(str(key), fields)
            hint = f" Did you mean method.{close}?" if close else ""
            raise ConfigurationError(
                f"method={name} has no key {key!r}.{hint} Valid: {', '.join(sorted(fields))}."
            )
        annotation = fields[key][0]
        if not _fits(value, annotation):
            raise ConfigurationError(
                f"method.{key}={value!r} is of the wrong type for method={name}: it must be "
                f"{_describe(annotation)}."
            )
    missing = [key for key, (_, required) in fields.items() if required and key not in given]
    if missing:
        raise ConfigurationError(
            f"method={name} lacks {', '.join(missing)}: add them to conf/method/{name}.yaml."
        )


def _refuse_targets(key: str, value: Any) -> None:
    """Refuse keys below a knob that would have any class or function called (``_target_``)."""
    if isinstance(value, Mapping):
        for name in value:
            if str(name).startswith("_") and str(name).endswith("_"):
                raise ConfigurationError(
                    f"{key} holds {name!r}, which calls code by its name. Name a method instead: "
                    "{method: NAME, <knob>: ...}."
                )
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            _refuse_targets(key, part)


def _constructor_fields(target: str, name: str) -> dict[str, tuple[Any, bool]]:
    """``{field: (annotation, required)}`` of the class at the dotted path ``target``."""
    module_name, _, class_name = target.rpartition(".")
    if module_name.partition(".")[0] not in _OWN_PACKAGES:
        raise ConfigurationError(
            f"method={name}: _target_={target!r} must be a class of this project. A method's class "
            "lies in methods/NAME.py, and its yaml says methods.NAME.CLASS."
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
        if not isinstance(cls, type):
            raise AttributeError(f"{class_name!r} is not a class")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"method={name}: _target_ {target!r} in conf/method/{name}.yaml cannot be imported "
            f"({error})."
        ) from error
    parameters = inspect.signature(cls).parameters
    hints = typing.get_type_hints(cls)
    return {
        key: (hints.get(key, Any), parameter.default is inspect.Parameter.empty)
        for key, parameter in parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a yaml value can stand for ``annotation``; unknown annotations take everything."""
    kind = typing.get_origin(annotation) or annotation
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(annotation))
    if kind is typing.Literal:
        return value in typing.get_args(annotation)
    if kind in (None, type(None)):
        return value is None
    if kind not in _YAML_TYPES:
        return True
    # Python takes True for a number, yaml does not.
    return isinstance(value, _YAML_TYPES[kind]) and (kind is bool or not isinstance(value, bool))


def _describe(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if isinstance(annotation, type) and annotation in names:
        return names[annotation]
    if annotation in (None, type(None)):
        return "null"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in parts)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, parts))
    return "a list" if origin in (list, tuple) else str(annotation)
