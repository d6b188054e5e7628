"""From yaml and command line to a checked configuration.

Hydra composes ``conf/``; ``specbench.schema`` types the shared groups; this module adds what Hydra
does not know: the choice of a ``pair`` file, the entries of ``compare``, the knobs of a method
against its class, values that must be one of a few, the run key, and error messages that say what
to type. Importing and composing must stay quick, so neither torch nor transformers is imported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specbench import models
from specbench.errors import ConfigurationError, unknown_name
from specbench.hydra_errors import translate_hydra_error
from specbench.knobs import check_method
from specbench.schema import ATTENTIONS, DTYPES, TEMPLATES, VERIFIERS, RunConfig

__all__ = [
    "CONF_DIR",
    "check_method",
    "check_values",
    "compose",
    "compose_entry",
    "identity",
    "option_names",
    "run_key",
    "translate_hydra_error",
]

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"

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
    "shard",
    "hydra",
    "model.cache_dir",
    "model.source",
    "measure.exclusive",
    "engine.eager_baseline",  # only adds a label; a folder keeps the labels it began with
    "dataset.source",
    "dataset.fetch",
    "runner.traces",  # their hashes are part of it
    "runner.surface",
    "runner.recordings",
)

_ONE_OF: Mapping[str, Sequence[str | None]] = {
    "model.dtype": DTYPES,
    "model.template": TEMPLATES,
    "model.attention": ATTENTIONS,
    "pair.draft.dtype": (None, *DTYPES),
    "dataset.sample": ("head", "stratified"),
    "dataset.dialogue": ("ar", "own"),
    "engine.overlap": ("auto", "serial", "thread", "stream"),
    "verifier.name": VERIFIERS,
    "resume": ("auto", "force"),
    "estimator": ("paired", "specbench"),
}

_AT_LEAST: Mapping[str, float] = {
    "repeats": 1,
    "runner.passes": 1,
    "measure.warmup": 0,
    "measure.reruns": 0,
    "measure.rerun_share": 0,
    "measure.disturbed.steal": 0,
    "measure.disturbed.waiting": 0,
    "measure.disturbed.slowdown": 1,
    "measure.disturbed.shortest_s": 0,
    "generation.max_new_tokens": 1,
    "generation.temperature": 0,
    "generation.top_k": 0,
    "dataset.limit": 1,
    "model.context_length": 2,
    "engine.packed.memory_gb": 0,
    "runner.hf.num_assistant_tokens": 1,
    "runner.hf.confidence": 0,
    "runner.hf.prompt_lookup_num_tokens": 1,
    "runner.hf.max_matching_ngram_size": 1,
}


def option_names(group: str) -> list[str]:
    """The choices of a config group in ``conf/``, without the parts (``_name``)."""
    return sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml") if not p.stem.startswith("_"))


def pair_name(method: str, model: str) -> str:
    """The ``pair`` file of a method and a model, which may not exist.

    It is ``<method>_<model>``, unless only ``draft_<model>`` exists.
    """
    own, shared = f"{method}_{model}", f"draft_{model}"
    folder = CONF_DIR / "pair"
    if not (folder / f"{own}.yaml").is_file() and (folder / f"{shared}.yaml").is_file():
        return shared
    return own


def chosen(name: str, values: Mapping[str, Any]) -> Any:
    """The value of a name, None where it has none: what differs from job to job of a sweep.

    In yaml: ``limit: "${specbench.chosen:${dataset.name},{gsm8k: 100}}"``.
    """
    return values.get(name)


# Importing this module is what makes the schema and the resolvers known to Hydra.
ConfigStore.instance().store(name="_schema", node=RunConfig)
OmegaConf.register_new_resolver("specbench.pair", pair_name, replace=True)
OmegaConf.register_new_resolver("specbench.chosen", chosen, replace=True)


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that ``python run.py <overrides>`` would get.

    Raises:
        ConfigurationError: Hydra or OmegaConf refused; the message says what to type.
    """
    try:
        if GlobalHydra.instance().is_initialized():
            return hydra_compose("config", overrides=list(overrides))
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides))
    except Exception as error:
        known = translate_hydra_error(error)
        if known is None:
            raise
        raise known from error


def compose_entry(cfg: DictConfig, entry: Any) -> DictConfig:
    """The configuration of one entry of ``compare`` beside the run's own.

    The method's yaml and its ``pair`` file for the run's model are composed afresh, so an entry
    starts from that method's defaults, not from the run's ``method.*`` overrides (under
    ``pair=none`` without its ``pair`` file, as the run itself); then the entry's own knobs are
    set. A draft model that was chosen for the run holds for all its entries.

    Args:
        cfg: the run's configuration.
        entry: a method's name, or ``{method: name, label: ..., <knob>: ...}``.

    Returns:
        ``cfg`` with ``method`` and ``pair`` replaced; ``cfg`` itself is left as it is.

    Raises:
        ConfigurationError: an unknown method or knob.
    """
    if isinstance(entry, DictConfig):
        entry = OmegaConf.to_container(entry, resolve=True)
    if isinstance(entry, str):
        entry = {"method": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("method"), str):
        raise ConfigurationError(
            f"compare entry {entry!r} is neither a method's name nor a mapping with one. Type e.g. "
            "'compare=[pld]' or 'compare=[{method: cacheback, table: dynamic, label: no_frozen}]'."
        )
    name = entry["method"]
    if not (CONF_DIR / "method" / f"{name}.yaml").is_file():
        raise unknown_name("method in compare", name, option_names("method"))
    composed = _method_defaults(name, _model_choice(cfg), bool(cfg.pair.tuned), CONF_DIR)
    knobs = {key: value for key, value in entry.items() if key != "method"}
    valid = [str(key) for key in composed.method if str(key) not in ("_target_", "name")]
    for key in knobs:
        if key not in valid:
            raise unknown_name(f"key in the compare entry for {name}:", str(key), valid)
    result = cfg.copy()
    OmegaConf.set_struct(result, False)
    result.method = OmegaConf.merge(composed.method, knobs)
    chosen = next(
        (c for c in (cfg, composed) if models.draft_node(c.pair.draft, cfg.model)), composed
    )
    result.pair = OmegaConf.merge(composed.pair, {"draft": chosen.pair.draft})
    OmegaConf.set_struct(result, True)
    check_method(result.method)
    return result


@functools.lru_cache(maxsize=64)
def _method_defaults(method: str, model: str, tuned: bool, conf_dir: Path) -> DictConfig:
    """A method's configuration for a model; an experiment asks for the same one many times."""
    return compose([f"method={method}", f"model={model}", *([] if tuned else ["pair=none"])])


def _model_choice(cfg: DictConfig) -> str:
    if (CONF_DIR / "model" / f"{cfg.model.name}.yaml").is_file():
        return str(cfg.model.name)
    if HydraConfig.initialized():
        return str(HydraConfig.get().runtime.choices["model"])
    raise unknown_name("model", str(cfg.model.name), option_names("model"))


PART_KNOBS = ("auxiliary", "drafters")  # knobs that name other methods


def with_parts(method: Mapping[str, Any], inside: tuple[str, ...] = ()) -> dict[str, Any]:
    """A method's node with the names of other methods in its knobs replaced by their nodes.

    Instantiating the result builds the parts too; methods themselves never import each other.
    A part is a name, or ``{method: name, <knob>: ...}``. It has its yaml's own values otherwise: a
    budget that a ``pair`` file sets for a method running alone says nothing about its share of a
    common tree.

    Args:
        method: a method's node, as plain containers.
        inside: names of the methods around this one.

    Raises:
        ConfigurationError: an unknown method, or one that contains itself.
    """
    inside = (*inside, str(method["name"]))

    def part(value: Any) -> Any:
        if isinstance(value, list):
            return [part(entry) for entry in value]
        knobs: dict[str, Any] = {}
        if isinstance(value, Mapping) and isinstance(value.get("method"), str):
            knobs = {str(k): v for k, v in value.items() if k != "method"}
            value = value["method"]
        if not isinstance(value, str):
            return value
        if value in inside:
            raise ConfigurationError(f"method={inside[0]}: {value!r} would contain itself.")
        if not (CONF_DIR / "method" / f"{value}.yaml").is_file():
            raise unknown_name(f"method in method={inside[-1]}", value, option_names("method"))
        node = OmegaConf.to_container(_part_defaults(value, CONF_DIR).method, resolve=True)
        assert isinstance(node, dict)
        node.pop("label", None)
        part_node: dict[str, Any] = {str(k): v for k, v in node.items()} | knobs
        check_method(part_node)
        return with_parts(part_node, inside)

    return {k: part(v) if k in PART_KNOBS else v for k, v in method.items()}


@functools.lru_cache(maxsize=64)
def _part_defaults(method: str, conf_dir: Path) -> DictConfig:
    return compose([f"method={method}", "pair=none"])


def check_values(cfg: DictConfig) -> None:
    """Check what types alone do not: ranges, names that must be one of a few, and the method.

    Raises:
        ConfigurationError: with the key, what is valid and the nearest valid name.
    """
    for key, valid in _ONE_OF.items():
        value = OmegaConf.select(cfg, key)
        if value not in valid:
            names = ["null" if name is None else name for name in valid]
            raise unknown_name(f"value of {key}:", str(value), names)
    for key, least in _AT_LEAST.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and value < least:
            raise ConfigurationError(f"{key}={value} is out of range: it must be at least {least}.")
    _check_sampling(cfg)
    if cfg.dataset.prompts and cfg.dataset.prompt_form not in cfg.dataset.prompts:
        raise unknown_name(
            "value of dataset.prompt_form:", cfg.dataset.prompt_form, map(str, cfg.dataset.prompts)
        )
    _check_pair(cfg)
    check_method(cfg.method)


def _check_sampling(cfg: DictConfig) -> None:
    """The law of the next token, and a verifier that goes with it."""
    temperature, verifier = cfg.generation.temperature, cfg.verifier
    if not math.isfinite(temperature):
        raise ConfigurationError(
            f"generation.temperature={temperature} is out of range: it must be finite."
        )
    if not 0 < cfg.generation.top_p <= 1:
        raise ConfigurationError(
            f"generation.top_p={cfg.generation.top_p} is out of range: above 0, at most 1."
        )
    if temperature != 0 and verifier.name == "greedy":
        raise ConfigurationError(
            f"generation.temperature={temperature} asks for sampling, but verifier=greedy accepts "
            "what greedy decoding emits. Type verifier=rejection, or generation.temperature=0."
        )
    if verifier.name == "typical":
        if temperature == 0:
            raise ConfigurationError(
                "verifier=typical accepts by probability, but generation.temperature=0 leaves only "
                "the most likely token. Type verifier=greedy, or generation.temperature=0.7."
            )
        for key in ("epsilon", "delta"):
            if not (verifier[key] is not None and 0 < verifier[key] <= 1):
                raise ConfigurationError(
                    f"verifier.{key}={verifier[key]} is out of range: above 0, at most 1."
                )


def _check_pair(cfg: DictConfig) -> None:
    """A pair file may be missing where it is the default, not where somebody typed its name."""
    if not HydraConfig.initialized():
        return
    choices = HydraConfig.get().runtime.choices
    chosen = choices.get("pair")
    default = pair_name(str(choices.get("method")), str(choices.get("model")))
    if chosen not in (None, default) and not (CONF_DIR / "pair" / f"{chosen}.yaml").is_file():
        raise unknown_name("pair", str(chosen), option_names("pair"))


def identity(cfg: DictConfig) -> dict[str, Any]:
    """The part of a configuration that may move a number, resolved to plain values."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    for key in _NOT_IDENTITY:
        node: Any = plain
        *parents, last = key.split(".")
        for parent in parents:
            node = node.get(parent) or {}
        node.pop(last, None)
    return {str(key): value for key, value in plain.items()}


def run_key(cfg: DictConfig) -> str:
    """Eight hex digits that stand for ``identity(cfg)``; stable over machines and key order."""
    text = json.dumps(identity(cfg), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
