"""From yaml and command line to a composed configuration.

Hydra composes ``conf/`` over the types of ``specbench.config.schema``. This module adds what Hydra
does not know: the choice of a ``pair`` file, and the names of weights that are not a yaml's.
Importing and composing must stay quick, so neither torch nor transformers is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench import paths
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.schema import LOGGERS, PUBLISHED, RUNNERS, SERVERS, ModelConfig, RunConfig
from specbench.errors import ConfigurationError, unknown_name

_PAIR = re.compile(r"[+~]{0,2}pair(=|$)")  # a choice of the group, as it is typed


def option_names(group: str) -> list[str]:
    """List the choices of a config group in ``conf/``, without the parts (``_name``)."""
    return sorted(p.stem for p in (paths.CONF_DIR / group).glob("[!_]*.yaml"))


def pair_name(method: str, model: str) -> str:
    """Name the ``pair`` file, if there or not: ``<method>_<model>``, else ``draft_<model>``."""
    specific, shared = f"{method}_{model}", f"draft_{model}"
    names = option_names("pair")
    return shared if specific not in names and shared in names else specific


def chosen(name: str, values: Mapping[str, Any], default: Any = None) -> Any:
    """Return the value for a name, else ``default``: for values that differ between sweep jobs.

    In yaml: ``limit: "${specbench.chosen:${dataset.name},{gsm8k: 100}}"``.
    """
    return values.get(name, default)


def case_order(state_scope: str, shuffle: int | None) -> str:
    """Return ``dataset.order`` where it is not typed.

    Where methods keep state across cases, the data set's order is part of the measurement; and a
    shuffle is an order that the user chose.
    """
    return "interleaved" if shuffle is None and state_scope in ("turn", "prompt") else "file"


# Importing this module is what makes the schema and the resolvers known to Hydra.
_store = ConfigStore.instance()
_store.store(name="_schema", node=RunConfig)
for _group, _nodes in (("runner", RUNNERS), ("server", SERVERS), ("logger", LOGGERS)):
    for _name, _keys in _nodes.items():
        _store.store(group=_group, name=f"_{_name}", node=_keys)
for _name, _resolver in (("chosen", chosen), ("case_order", case_order), ("pair", pair_name)):
    OmegaConf.register_new_resolver(f"specbench.{_name}", _resolver, replace=True)


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration that ``python run.py <overrides>`` would get.

    Raises:
        ConfigurationError: Hydra or OmegaConf refused; the message says what to type.
    """
    return with_custom_model(_composed(overrides), overrides)


def _composed(overrides: Sequence[str]) -> DictConfig:
    try:
        if GlobalHydra.instance().is_initialized():
            cfg = hydra_compose("config", overrides=list(overrides))
        else:
            with initialize_config_dir(str(paths.CONF_DIR), version_base="1.3"):
                cfg = hydra_compose("config", overrides=list(overrides))
    except Exception as error:
        translated = translate_hydra_error(error)
        if translated is None:
            raise
        raise translated from error
    return _without_search(cfg)


def with_custom_model(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Name the model after its weights where those are not the yaml's.

    Records carry ``model.name``, and papers' claims and ``pair`` files go by it: another folder or
    hub id (``model.id``, ``model.path``) is another model. It is named by the last part of that id,
    and no ``pair`` file is chosen for it. Under ``budgets=published`` the knobs that a ``pair``
    file tuned are reset.

    Args:
        cfg: as Hydra composed it.
        overrides: the overrides it was composed of; a ``pair`` among them stays.

    Raises:
        ConfigurationError: both ``model.id`` and ``model.path`` name weights; a ``pair`` or
            ``local`` file that was typed does not exist; or a method or data set was typed under
            the name of another.
    """
    _check_overrides(overrides)
    cfg = _without_search(cfg)
    others = [text for text in overrides if not _PAIR.match(text)]
    if cfg.budgets == PUBLISHED and not cfg.pair.left_out:
        retained = {key: cfg.method[key] for key in cfg.pair.keeps}
        cfg.method = OmegaConf.merge(_composed([*others, "pair=none"]).method, retained)
    model = cfg.model
    if not has_yaml(model.name):
        return cfg  # it is named by its weights already
    weights = str(model.id if model.path is None else paths.typed_path(model.path).absolute())
    file = OmegaConf.load(paths.CONF_DIR / "model" / f"{model.name}.yaml")
    if weights == file.id:
        return cfg
    if model.path is not None and model.id != file.id:
        raise ConfigurationError(
            f"model.path={model.path} and model.id={model.id} both name weights. Leave one out."
        )
    pair = pair_name(str(cfg.method.name), str(model.name))
    if len(others) == len(overrides) and pair in option_names("pair"):
        cfg = _composed([*overrides, "pair=none"])
    cfg.model.id, cfg.model.name, cfg.model.embedded = weights, weights_name(weights), False
    return cfg


def _without_search(cfg: DictConfig) -> DictConfig:
    """Remove the method's search space, which only `scripts/tune.py` reads."""
    with open_dict(cfg):
        cfg.method.pop("search", None)
    return cfg


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that Hydra accepts but that would have no or another effect."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        # Hydra ignores a missing file of an optional group, also where its name was typed.
        plain = key in ("pair", "local") and re.fullmatch(r"[\w.-]*", value)
        if plain and value not in (names := option_names(key)):
            raise unknown_name(key, value, names)
        # Records would name it as something else.
        if key == "method.name" or (key == "dataset.name" and value in option_names("dataset")):
            label = ", or method.label=LABEL for a name in tables" if key == "method.name" else ""
            raise ConfigurationError(
                f"{text} would give records the name of something else. Type "
                f"{key.removesuffix('.name')}={value}{label}."
            )


def has_yaml(model: str) -> bool:
    """Tell whether ``model=NAME`` is a choice, and not a name made from weights."""
    return (paths.CONF_DIR / "model" / f"{model}.yaml").is_file()


def weights_name(weights: str) -> str:
    """Return the last part of a folder's path or hub id; more of it where a yaml has that name."""
    if weights.startswith((".", "~")):
        weights = os.path.abspath(paths.typed_path(weights))
    parts = [paths.file_name(part) for part in Path(weights).parts if part != os.sep] or ["root"]
    names = ("_".join(parts[-n:]) for n in range(1, len(parts) + 1))
    return next((name for name in names if not has_yaml(name)), f"own_{parts[-1]}")


def build_model(model: ModelConfig) -> str:
    """Return the ``--model`` of a building command: a yaml's name, or the weights' path or id."""
    return model.name if has_yaml(model.name) else model.id


def model_override(recorded: Mapping[str, Any]) -> str:
    """Format the override that selects the model of a recorded configuration."""
    name = str(recorded["name"])
    return f"model={name}" if has_yaml(name) else f"model.id={recorded['id']}"


def to_config(cfg: DictConfig) -> RunConfig:
    """Convert a configuration to dataclasses, with interpolations resolved."""
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, RunConfig)
    return config
