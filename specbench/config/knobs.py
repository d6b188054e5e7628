"""The knobs of a method: the fields of its class, checked before anything is loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import traceback
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from specbench.config.schema import PAPER_SCOPE, STATE_SCOPES
from specbench.errors import ConfigurationError, first_line, nearest, unknown_name, what_it_must_be
from specbench.paths import PROJECT

# Keys of a method node that are not fields of its class.
_NOT_KNOBS = ("_target_", "label")

# Where a method's class may lie: to import a module is to run it, and a yaml must not choose which.
_OWN_PACKAGES = ("methods", "specbench")


def check_method(method: Mapping[str, Any] | DictConfig) -> None:
    """Check a method's knobs against its class, before anything heavy happens.

    Raises:
        ConfigurationError: the class cannot be imported, the state scope is none, or a knob is
            unknown, missing or of the wrong type.
    """
    given: Any = method
    if isinstance(method, DictConfig):
        given = OmegaConf.to_container(method, resolve=True)
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"method={given!r} is not the name of a file in conf/method. Type e.g. method=pld."
        )
    name = str(given.get("name", "?"))
    for key, value in given.items():
        _refuse_targets(f"method.{key!s}", value)
    if isinstance(given.get("label"), Mapping | list):
        raise ConfigurationError(f"`method.label` must be a text, got {given['label']!r}.")
    fields = _constructor_fields(str(given.get("_target_")), name)
    scopes = (*STATE_SCOPES, PAPER_SCOPE)
    if (scope := given.get("state_scope", PAPER_SCOPE)) not in scopes:
        raise unknown_name("method.state_scope", str(scope), scopes)
    for key, value in given.items():
        if key in _NOT_KNOBS:
            continue
        if key not in fields:
            close = nearest(str(key), fields)
            hint = f" Did you mean method.{close}?" if close else ""
            raise ConfigurationError(
                f"method={name} has no key {key!r}.{hint} Valid: {', '.join(sorted(fields))}."
            )
        if wanted := _refusal(value, fields[key][0]):
            raise ConfigurationError(
                f"`method.{key}` must be {wanted} for method={name}, got {value!r}."
            )
    missing = [key for key, (_, required) in fields.items() if required and key not in given]
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
    if module_name.partition(".")[0] not in _OWN_PACKAGES:
        raise ConfigurationError(
            f"method={name}: _target_={target!r} must be a class of this project. A method's class "
            "lies in methods/NAME.py, and its yaml says methods.NAME.CLASS."
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
        if not isinstance(cls, type):
            raise AttributeError(f"{class_name!r} is not a class")
        hints = typing.get_type_hints(cls)
    except Exception as error:  # the file may be the user's own and unfinished
        raise ConfigurationError(
            f"method={name}: _target_ {target!r} in conf/method/{name}.yaml cannot be imported: "
            f"{_place(error)}{first_line(error)}"
        ) from error
    return {
        key: (hints.get(key, Any), parameter.default is inspect.Parameter.empty)
        for key, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _place(error: Exception) -> str:
    """Where one of the project's methods could not be run: ``methods/x.py, line 2: ``."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((str(error.filename), error.lineno))
    for file, line in reversed(lines):
        if (path := Path(file)).is_relative_to(PROJECT / "methods"):
            return f"{path.relative_to(PROJECT)}, line {line}: "
    return ""


def _refusal(value: Any, annotation: Any) -> str:
    """What a yaml value must be to stand for ``annotation``; "" where it can."""
    try:
        # Through JSON, where a list may stand for a tuple as in yaml, and 1 but not true for 1.0.
        _schema(annotation).validate_json(json.dumps(value, default=str), strict=True)
    except PydanticSchemaGenerationError:
        return ""  # a type that yaml does not know takes everything
    except ValidationError as error:
        null = " or null" if type(None) in typing.get_args(annotation) else ""
        return what_it_must_be(error) + null
    return ""


@functools.cache
def _schema(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)
