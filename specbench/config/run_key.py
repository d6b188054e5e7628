"""The part of a configuration that may change a number, and the key made of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specbench import paths
from specbench.config.compose import option_names
from specbench.config.schema import ASIDE, SERVERS, BatchConfig, RunConfig


def run_identity(cfg: DictConfig) -> dict[str, Any]:
    """Select the part of a configuration that may change a number, as plain values.

    These are the keys that the configuration's types do not mark `ASIDE`.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    identity = _identifying(RunConfig, plain)
    for group in ("runner", "server"):
        if isinstance(node := cfg.get(group), DictConfig):
            identity[group] = _identifying(OmegaConf.get_type(node), plain[group])
    method, pair = identity["method"], identity["pair"]
    if server := method.get("server"):
        method["server"] = _identifying(SERVERS[server["name"]], server)
    used = _texts(method, identity["compare"])
    heads = {name: folder for name, folder in pair.pop("heads").items() if name in used}
    if heads:
        pair["heads"] = heads
    _name_trees(method)
    _name_trees(identity["compare"])
    if identity["batch"]["size"] == BatchConfig.size:
        del identity["batch"]["budget"]  # it says nothing of one text
    return identity


def _identifying(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Select the values of a group whose fields are not marked `ASIDE`."""
    selected = {}
    for key, hint in typing.get_type_hints(kind, include_extras=True).items():
        types = (hint, *typing.get_args(hint))  # of a field that may be null: its own and null's
        aside = any(ASIDE in getattr(part, "__metadata__", ()) for part in types)
        if key not in values or aside:
            continue
        value = values[key]
        group = next((part for part in types if type(part) is type and is_dataclass(part)), None)
        selected[key] = _identifying(group, value) if group and isinstance(value, dict) else value
    return selected


def _name_trees(node: Any) -> None:
    """Add a hash of its content to the name of a file in ``method.tree``, which may be edited."""
    for part in _nodes(node):
        tree = part.get("tree") if isinstance(part, dict) else None
        if isinstance(tree, str) and tree.endswith(".json"):
            with contextlib.suppress(OSError):  # what cannot be read is refused by the method
                digest = hashlib.sha256(paths.typed_file(tree).read_bytes()).hexdigest()
                part["tree"] = f"{tree} ({digest[:8]})"


def _nodes(node: Any) -> Iterator[Any]:
    """Yield a plain value and all values inside it."""
    yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _nodes(part)


def _texts(*nodes: Any) -> set[str]:
    """Collect the texts in the nodes, and in the files of the methods that they name."""
    texts: set[str] = set()
    waiting = list(nodes)
    while waiting:
        new = {node for node in _nodes(waiting.pop()) if isinstance(node, str)} - texts
        texts |= new
        for method in new & {*option_names("method")}:
            file = paths.CONF_DIR / "method" / f"{method}.yaml"
            waiting.append(OmegaConf.to_container(OmegaConf.load(file)))
    return texts


def run_key(cfg: DictConfig) -> str:
    """Hash ``run_identity(cfg)`` to eight hex digits; stable over machines and key order."""
    return key_of(run_identity(cfg))


def key_of(value: object) -> str:
    """Hash a JSON value to eight hex digits: the run key of a result of `run_identity`."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
