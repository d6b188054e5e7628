"""The part of a configuration that may move a number, and the key made of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specbench import paths
from specbench.config.compose import option_names
from specbench.config.schema import BatchConfig

# Keys that say where files lie or how a run is started, and cannot move a number. ``shard`` cuts
# one run into parts that belong together.
_NOT_IDENTITY = (
    "output_dir",
    "data_dir",
    "cache_dir",
    "paths",
    "logger",
    "fresh",
    "resume",
    "strict",
    "add",
    "shard",
    "hydra",
    "model.cache_dir",
    "model.path",  # where it is given, it is the id
    "model.source",
    "measure.exclusive",
    "engine.eager_baseline",  # only adds a label; a folder keeps the labels it began with
    "dataset.source",
    "dataset.fetch",
    "runner.traces",  # their hashes are part of it
    "runner.surface",
    "runner.recordings",
    *(
        f"{where}.{key}"
        for where in ("server", "method.server")
        for key in (
            *("timeout_s", "answer_mb", "retries", "retry_wait_s", "api_key_env"),
            *("limit_ttft_s", "limit_tpot_s"),  # they judge, and move no time
        )
    ),
)


def run_identity(cfg: DictConfig) -> dict[str, Any]:
    """The part of a configuration that may move a number, resolved to plain values."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    for key in _NOT_IDENTITY:
        node: Any = plain
        *parents, last = key.split(".")
        for parent in parents:
            node = node.get(parent) or {}
        node.pop(last, None)
    plain["pair"].pop("keeps", None)  # what they do is in the method's knobs
    heads = plain["pair"].pop("heads", {})
    used = _words(plain["method"], plain["compare"])
    if kept := {name: place for name, place in heads.items() if name in used}:
        plain["pair"]["heads"] = kept
    _name_trees(plain["method"])
    _name_trees(plain["compare"])
    if plain["batch"]["size"] == BatchConfig.size:
        del plain["batch"]["budget"]  # it says nothing of one text
    return {str(key): value for key, value in plain.items()}


def _name_trees(node: Any) -> None:
    """Add what it holds to the name of a file in ``method.tree``: such files are edited."""
    if isinstance(node, dict):
        tree = node.get("tree")
        if isinstance(tree, str) and tree.endswith(".json"):
            with contextlib.suppress(OSError):  # what cannot be read is refused by the method
                held = hashlib.sha256(paths.typed_file(tree).read_bytes()).hexdigest()
                node["tree"] = f"{tree} ({held[:8]})"
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _name_trees(part)


def _words(*nodes: Any) -> set[str]:
    """Texts in the nodes, and in the files of the methods that they name."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
        elif isinstance(node, str) and node not in found:
            found.add(node)
            if node in option_names("method"):
                file = paths.CONF_DIR / "method" / f"{node}.yaml"
                waiting.append(OmegaConf.to_container(OmegaConf.load(file)))
    return found


def run_key(cfg: DictConfig) -> str:
    """Eight hex digits that stand for ``run_identity(cfg)``; stable over machines and key order."""
    return key_of(run_identity(cfg))


def key_of(what: object) -> str:
    """Eight hexadecimal digits for a value of JSON: the run key of what `run_identity` gave."""
    text = json.dumps(what, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
