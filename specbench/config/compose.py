"""From yaml and command line to a checked configuration.

Hydra composes ``conf/``; ``specbench.config.schema`` types the shared groups; this module adds what
Hydra does not know: the choice of a ``pair`` file, the entries of ``compare``, the knobs of a
method against its class, values that must be one of a few, the run key, and error messages that say
what to type. Importing and composing must stay quick, so neither torch nor transformers is
imported.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from specbench import paths
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.schema import PUBLISHED, RUNNERS, ModelConfig, RunConfig
from specbench.config.server_schema import SERVERS
from specbench.errors import ConfigurationError, unknown_name

log = logging.getLogger(__name__)

PART_KNOBS = ("auxiliary", "drafter", "drafters")  # knobs of a method that name others
_PAIR = re.compile(r"[+~]{0,2}pair(=|$)")  # a choice of the group, as it is typed


def option_names(group: str) -> list[str]:
    """The choices of a config group in ``conf/``, without the parts (``_name``)."""
    return sorted(
        p.stem for p in (paths.CONF_DIR / group).glob("*.yaml") if not p.stem.startswith("_")
    )


def pair_name(method: str, model: str) -> str:
    """The ``pair`` file, which may be missing: ``<method>_<model>``, else ``draft_<model>``."""
    own, shared = f"{method}_{model}", f"draft_{model}"
    folder = paths.CONF_DIR / "pair"
    if not (folder / f"{own}.yaml").is_file() and (folder / f"{shared}.yaml").is_file():
        return shared
    return own


def chosen(name: str, values: Mapping[str, Any], default: Any = None) -> Any:
    """The value of a name, ``default`` where it has none: what differs from job to job of a sweep.

    In yaml: ``limit: "${specbench.chosen:${dataset.name},{gsm8k: 100}}"``.
    """
    return values.get(name, default)


def case_order(state_scope: str, shuffle: int | None) -> str:
    """``dataset.order`` where it is not typed.

    Where the run's methods keep what they learnt from case to case, the data set's order is part of
    what is measured; and a shuffle is an order that was asked for.
    """
    return "interleaved" if shuffle is None and state_scope in ("turn", "prompt") else "file"


def methods_that_need(what: str) -> list[str]:
    """Names of the methods whose ``needs`` has ``what`` set, under their own defaults.

    Methods made of others are left out: they need what those need.
    """
    folder = paths.CONF_DIR / "method"
    configs = [OmegaConf.load(folder / f"{name}.yaml") for name in option_names("method")]
    alone = [c for c in configs if not any(OmegaConf.select(c, knob) for knob in PART_KNOBS)]
    return [str(c.name) for c in alone if getattr(get_class(c._target_)().needs, what)]


def and_others(need: str, without: str, entries: Sequence[Any]) -> ListConfig:
    """Entries of ``compare``, and behind them all other methods that need the same.

    In yaml: ``compare: "${specbench.and_others:draft_model,${method.name},[sps,pearl]}"``: a field
    of `specbench.decoding.structs.Needs`, the run's own method, the entries that come first.
    """
    named = {entry["method"] if isinstance(entry, dict) else entry for entry in entries}
    others = [name for name in methods_that_need(need) if name not in named | {without}]
    return OmegaConf.create([*entries, *others])


def with_heads(heads: Mapping[str, str], entries: Sequence[Any]) -> ListConfig:
    """Entries of ``compare``, less those whose trained head this model has not; a warning says so.

    In yaml: ``compare: "${specbench.with_heads:${pair.heads},[pld,medusa,eagle2]}"``. A head that
    only the hub has stays: its weights are asked for like a model's.
    """
    kept = []
    for entry in entries:
        name = entry if isinstance(entry, str) else str(entry["method"])
        knobs = {} if isinstance(entry, str) else entry
        own = OmegaConf.load(paths.CONF_DIR / "method" / f"{name}.yaml")
        default = OmegaConf.select(own, "head") or OmegaConf.select(own, "auxiliary.head")
        head = knobs.get("head", default)
        place = heads.get(head, head) if head else None
        if place is None or _may_be_had(str(place)):
            kept.append(entry)
        else:
            _warn_of_missing(name, str(place))
    return OmegaConf.create(kept)


def _may_be_had(place: str) -> bool:
    """Whether a head is a folder that is there, or a hub id."""
    if Path(place).expanduser().is_dir() or (paths.PROJECT / place).is_dir():
        return True
    root = place.partition("/")[0]
    return "/" in place and root not in ("", ".", "..", "~") and not (paths.PROJECT / root).is_dir()


@functools.cache  # a configuration is resolved several times
def _warn_of_missing(method: str, place: str) -> None:
    log.warning("%s is left out: there is no trained head %s for this model", method, place)


# Importing this module is what makes the schema and the resolvers known to Hydra.
_store = ConfigStore.instance()
_store.store(name="_schema", node=RunConfig)
for _group, _nodes in (("runner", RUNNERS), ("server", SERVERS)):
    for _name, _keys in _nodes.items():
        _store.store(group=_group, name=f"_{_name}", node=_keys)
OmegaConf.register_new_resolver("specbench.pair", pair_name, replace=True)
OmegaConf.register_new_resolver("specbench.chosen", chosen, replace=True)
OmegaConf.register_new_resolver("specbench.case_order", case_order, replace=True)
OmegaConf.register_new_resolver("specbench.and_others", and_others, replace=True)
OmegaConf.register_new_resolver("specbench.with_heads", with_heads, replace=True)


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that ``python run.py <overrides>`` would get.

    Raises:
        ConfigurationError: Hydra or OmegaConf refused; the message says what to type.
    """
    return with_own_model(_composed(overrides), overrides)


def _composed(overrides: Sequence[str]) -> DictConfig:
    try:
        if GlobalHydra.instance().is_initialized():
            return hydra_compose("config", overrides=list(overrides))
        with initialize_config_dir(str(paths.CONF_DIR), version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides))
    except Exception as error:
        known = translate_hydra_error(error)
        if known is None:
            raise
        raise known from error


def with_own_model(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration; weights that are not the yaml's get a name of their own.

    Records carry ``model.name``, and papers' claims and ``pair`` files go by it: another folder or
    hub id (``model.id``, ``model.path``) is another model. It is called by the last part of that
    id, and no ``pair`` file is chosen for it by itself.

    Args:
        cfg: as Hydra composed it.
        overrides: what that was composed of; a ``pair`` among them stays.

    Raises:
        ConfigurationError: both ``model.id`` and ``model.path`` name weights; or a ``pair`` or
            ``local`` file that was typed does not exist.
    """
    _check_optional(overrides)
    _refuse_other_names(overrides)
    cfg = _with_budgets(_without_search(cfg), overrides)
    path = cfg.model.path
    place = str(cfg.model.id if path is None else paths.typed_path(path).absolute())
    if not has_yaml(cfg.model.name):
        return cfg  # it has a name of its own
    file = OmegaConf.load(paths.CONF_DIR / "model" / f"{cfg.model.name}.yaml")
    if place == file.id:
        return cfg
    if path is not None and cfg.model.id != file.id:
        raise ConfigurationError(
            f"model.path={path} and model.id={cfg.model.id} both name weights. Leave one out."
        )
    pair = pair_name(str(cfg.method.name), str(cfg.model.name))
    chosen = any(_PAIR.match(text) for text in overrides)
    if not chosen and (paths.CONF_DIR / "pair" / f"{pair}.yaml").is_file():
        cfg = _without_search(_composed([*overrides, "pair=none"]))
    cfg.model.id, cfg.model.name, cfg.model.embedded = place, own_name(place), False
    return cfg


def _with_budgets(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration; under ``budgets=published`` without tuned knobs of its ``pair`` file."""
    if cfg.budgets == PUBLISHED and not cfg.pair.left_out:
        others = [text for text in overrides if not _PAIR.match(text)]
        node = _without_search(_composed([*others, "pair=none"])).method
        cfg.method = OmegaConf.merge(node, {key: cfg.method[key] for key in cfg.pair.keeps})
    return cfg


def _without_search(cfg: DictConfig) -> DictConfig:
    """The configuration without the method's search space, which is `scripts/tune.py`'s alone."""
    with open_dict(cfg):
        cfg.method.pop("search", None)
    return cfg


def _refuse_other_names(overrides: Sequence[str]) -> None:
    """A method or data set under another one's name would stand in records as that other one."""
    for text in overrides:
        typed = re.fullmatch(r"\+{0,2}(method|dataset)\.name=(.*)", text)
        if typed and (typed[1] == "method" or typed[2] in option_names("dataset")):
            label = ", or method.label=LABEL for a name in tables" if typed[1] == "method" else ""
            raise ConfigurationError(
                f"{text} would give records the name of something else. Type "
                f"{typed[1]}={typed[2]}{label}."
            )


def _check_optional(overrides: Sequence[str]) -> None:
    """Hydra passes over a missing file of an optional group, also where its name was typed."""
    for text in overrides:
        typed = re.fullmatch(r"\+{0,2}(pair|local)=([\w.-]*)", text)
        if typed and typed[2] not in (names := option_names(typed[1])):
            raise unknown_name(typed[1], typed[2], names)


def has_yaml(model: str) -> bool:
    """Whether ``model=NAME`` is a choice, and not the own name of some weights."""
    return (paths.CONF_DIR / "model" / f"{model}.yaml").is_file()


def own_name(place: str) -> str:
    """The last part of a folder's path or of a hub id; more of it where a yaml has that name."""
    if place.startswith((".", "~")):
        place = os.path.abspath(paths.typed_path(place))
    named = [part for part in Path(place).parts if part != os.sep] or ["root"]
    parts = [paths.file_name(part) for part in named]
    names = ("_".join(parts[-n:]) for n in range(1, len(parts) + 1))
    return next((name for name in names if not has_yaml(name)), f"own_{parts[-1]}")


def build_model(model: ModelConfig) -> str:
    """What ``--model`` of a building command takes: a yaml's name, or the weights' place."""
    return model.name if has_yaml(model.name) else model.id


def model_words(recorded: Mapping[str, Any]) -> str:
    """What to type for the model of a recorded configuration."""
    name = str(recorded["name"])
    return f"model={name}" if has_yaml(name) else f"model.id={recorded['id']}"


def typed(cfg: DictConfig) -> RunConfig:
    """The configuration as dataclasses, interpolations resolved: what a run works with."""
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, RunConfig)
    return config
