"""Translates Hydra's and OmegaConf's composition errors into messages a user can act on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from specbench.config.removed import removed_key
from specbench.config.schema import RUNNERS, SERVERS
from specbench.errors import ConfigurationError, message_line, nearest, unknown_name
from specbench.paths import CONF_DIR

_QUOTING = (
    "Lists and mappings need quotes in a shell, e.g. 'compare=[pld]' or "
    "'compare=[{method: cacheback, table: dynamic, label: no_frozen}]'."
)

_OVER_NULL = (
    "OmegaConf cannot do that. Put the key into your own yaml, as conf/dataset/mbpp.yaml does with "
    "hub and rows, and type dataset=NAME."
)

# Messages that Hydra and OmegaConf raise as built-in exceptions.
_BUILTIN_ERRORS = {
    "Config group override must be": "A group cannot be null on the command line: type its "
    "option `none` (pair=none, logger=none), or leave it out with ~GROUP.",
    "Invalid plugin": "Type a launcher or sweeper by its name, e.g. hydra/launcher=submitit_local.",
    "Unexpected type for root": f"An override sets a key below a value that is null. {_OVER_NULL}",
}

_PLUGINS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}

_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}

_LISTED = ("method", "compare")  # keys that one run has several of

# Keys that another command has, or that no group has by that name.
_MEANT = {"prompts": "dataset.path", "file": "dataset.path", "path": "dataset.path"}


def translate_hydra_error(error: BaseException) -> ConfigurationError | None:
    """Translate a composition error, with what to type; None where ``error`` is not one."""
    if isinstance(error, ConfigurationError):
        return error
    for beginning, advice in _BUILTIN_ERRORS.items():
        if str(error).startswith(beginning):
            return ConfigurationError(f"{_first_line(error)}. {advice}")
    null = re.search(r"full_key: (\S+)\s+reference_type=Optional", str(error))
    if isinstance(error, AttributeError) and null:
        return ConfigurationError(f"{null[1]} is null here. {_OVER_NULL}")
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__  # type: ignore[assignment]
    for link in reversed(links):  # the deepest knows the key, the outer ones only wrap it
        if isinstance(link, MissingConfigException):
            return _missing_option(link)
        if isinstance(link, OverrideParseException):
            return _no_override(link)
        if isinstance(link, ConfigKeyError | ConfigAttributeError):
            return _unknown_key(link)
        if isinstance(link, ValidationError):
            return _wrong_type(link)
        if isinstance(link, MissingMandatoryValue):
            return ConfigurationError(f"no value for {link.full_key}: type {link.full_key}=VALUE.")
    return _other(links[0])


def _missing_option(error: MissingConfigException) -> ConfigurationError:
    missing = error.missing_cfg_file or ""
    group, _, name = missing.removesuffix(".yaml").rpartition("/")
    options = [option for option in error.options or () if not option.startswith("_")]
    if not group or not options:
        return ConfigurationError(_first_line(error))
    if group == "hydra/launcher" and name in _PLUGINS:
        return ConfigurationError(
            f"{group}={name} comes with a plugin. Type: pip install -e '.[{_PLUGINS[name]}]'"
        )
    return removed_key(group, name) or unknown_name(group, name, options)


def _no_override(error: OverrideParseException) -> ConfigurationError:
    """Refuse a word that is not ``key=value``: a verb, group or option by itself, or bad syntax."""
    word = str(error.override)
    key, given, value = word.partition("=")
    if given and not value.isascii() and value.isprintable():
        return ConfigurationError(f"`{key}` must be quoted if not ASCII: type '{key}=\"{value}\"'.")
    if "=" in word or not re.fullmatch(r"[\w.-]+", word):
        return ConfigurationError(
            f"{word!r} cannot be read as key=value: {_first_line(error)}. {_QUOTING}"
        )
    groups = sorted({path.parent.name for path in CONF_DIR.glob("*/*.yaml")})
    typed = {"advise": "advise prompts=FILE", **{group: f"{group}=NAME" for group in groups}}
    for group in ("method", "model", "dataset", "experiment"):
        for path in (CONF_DIR / group).glob("[!_]*.yaml"):
            typed.setdefault(path.stem, f"{group}={path.stem}")
    close = nearest(word, typed)
    hint = f"Did you mean {typed[close]!r}?" if close else "`python run.py --help` says what is."
    return ConfigurationError(f"{word!r} is neither a command nor key=value. {hint}")


def _unknown_key(error: ConfigKeyError | ConfigAttributeError) -> ConfigurationError:
    parent, key = error.parent_node, error.full_key or str(error.key)
    valid = [str(k) for k in parent] if isinstance(parent, DictConfig) else []
    if "." not in key and not removed_key(key) and not get_close_matches(key, valid, 1, 0.75):
        below = {full.rpartition(".")[2]: full for full in _keys(OmegaConf.to_container(parent))}
        close = get_close_matches(key, below, 1, 0.75)
        if meant := _MEANT.get(key) or (below[close[0]] if close else None):
            return ConfigurationError(f"unknown key {key!r}. Did you mean {meant!r}?")
    return unknown_key(key, valid)


def _keys(plain: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys below the groups of a configuration, and below every kind of server."""
    for server in () if prefix else SERVERS.values():
        yield from (f"server.{field.name}" for field in dataclasses.fields(server))
    for key, value in plain.items():
        if prefix:
            yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def unknown_key(key: str, valid: Iterable[str]) -> ConfigurationError:
    """Make the ConfigurationError for an unknown key; ``valid``: the keys that exist."""
    if error := removed_key(key):
        return error
    prefix, _, last = key.rpartition(".")
    names = [k for k in valid if not k.startswith("_") and k != "hydra"]
    close = nearest(last, names)
    full = f"{prefix}.{close}" if prefix else close
    owners = [f"runner={name}" for name, keys in RUNNERS.items() if hasattr(keys(), last)]
    if prefix == "runner" and owners:
        return ConfigurationError(f"unknown key {key!r}. It is a key of {' and '.join(owners)}.")
    where = f" of {prefix}" if prefix else ""
    hint = f"Did you mean {full!r}?" if close else f"Valid keys{where}: {', '.join(sorted(names))}."
    return ConfigurationError(f"unknown key {key!r}. {hint}")


def _wrong_type(error: ValidationError) -> ConfigurationError:
    key = error.full_key or str(error.key or "?")
    kind = re.search(r"(?:could not be converted to|is not a valid) (\w+)", str(error))
    hint = f" It must be {_KINDS[kind[1]]}." if kind and kind[1] in _KINDS else ""
    if "list" in _first_line(error).lower() or isinstance(error.parent_node, ListConfig):
        hint = f" Type a list: '{key}=[a,b]'."
    return ConfigurationError(f"{key} has a value of the wrong type: {_first_line(error)}.{hint}")


def _other(error: BaseException) -> ConfigurationError:
    text = _first_line(error)
    if several := re.match(r"Ambiguous value for argument '([\w.]+)=(.*)'", text):
        key, values = several.groups()
        together = f"'compare=[{values}]' for one run with all, or " if key in _LISTED else ""
        return ConfigurationError(
            f"{key}={values} has several values. Type {together}-m after run.py for a run with "
            "each."
        )
    group = re.search(r"Could not override '([^']+)'", text)
    if group and "." not in group[1]:
        return ConfigurationError(f"{text} `python run.py --help` lists the groups.")
    return ConfigurationError(f"{text} ({_QUOTING})" if "override" in text.lower() else text)


def _first_line(error: BaseException) -> str:
    return message_line(error).rstrip(".") or type(error).__name__
