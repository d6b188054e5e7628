"""From yaml and command line to a checked configuration.

Hydra composes ``conf/``; ``specbench.config.schema`` types the shared groups; this module adds what
Hydra does not know: the choice of a ``pair`` file, the entries of ``compare``, the knobs of a
method against its class, values that must be one of a few, the run key, and error messages that say
what to type. Importing and composing must stay quick, so neither torch nor transformers is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf

from specbench import paths
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.schema import RUNNERS, RunConfig


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


def methods_that_need(what: str) -> list[str]:
    """Names of the methods whose ``needs`` has ``what`` set, under their own defaults.

    A union is left out: it needs what the methods need that it is made of.
    """
    folder = paths.CONF_DIR / "method"
    configs = [OmegaConf.load(folder / f"{name}.yaml") for name in option_names("method")]
    return [
        str(config.name)
        for config in configs
        if "drafters" not in config and getattr(get_class(config._target_)().needs, what)
    ]


def and_others(need: str, without: str, entries: Sequence[Any]) -> ListConfig:
    """Entries of ``compare``, and behind them all other methods that need the same.

    In yaml: ``compare: "${specbench.and_others:draft_model,${method.name},[sps,pearl]}"``: a field
    of `specbench.decoding.structs.Needs`, the run's own method, the entries that come first.
    """
    named = {entry["method"] if isinstance(entry, dict) else entry for entry in entries}
    others = [name for name in methods_that_need(need) if name not in named | {without}]
    return OmegaConf.create([*entries, *others])


# Importing this module is what makes the schema and the resolvers known to Hydra.
_store = ConfigStore.instance()
_store.store(name="_schema", node=RunConfig)
for _name, _keys in RUNNERS.items():
    _store.store(group="runner", name=f"_{_name}", node=_keys)
OmegaConf.register_new_resolver("specbench.pair", pair_name, replace=True)
OmegaConf.register_new_resolver("specbench.chosen", chosen, replace=True)
OmegaConf.register_new_resolver("specbench.and_others", and_others, replace=True)


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that ``python run.py <overrides>`` would get.

    Raises:
        ConfigurationError: Hydra or OmegaConf refused; the message says what to type.
    """
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


def typed(cfg: DictConfig) -> RunConfig:
    """The configuration as dataclasses, interpolations resolved: what a run works with."""
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, RunConfig)
    return config
