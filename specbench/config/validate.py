"""What types alone do not check: ranges, names out of a few, keys that go together."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specbench import paths
from specbench.config import schema
from specbench.config.compose import option_names, pair_name
from specbench.config.dataset_schema import ORDERS, PARTS, SPECIAL_TOKENS
from specbench.config.draft import check_device, draft_weights
from specbench.config.hydra_errors import unknown_key
from specbench.config.knobs import check_method
from specbench.config.removed import removed_key
from specbench.errors import ConfigurationError, unknown_name

_ONE_OF: Mapping[str, Sequence[str | None]] = {
    "model.dtype": schema.DTYPES,
    "model.template": schema.TEMPLATES,
    "model.attention": schema.ATTENTIONS,
    "model.device_map": (None, *schema.DEVICE_MAPS),
    "pair.draft.dtype": (None, *schema.DTYPES),
    "batch.budget": schema.BATCH_BUDGETS,
    "engine.name": schema.ENGINES,
    "engine.weights": schema.WEIGHTS,
    "engine.draft_weights": schema.DRAFT_WEIGHTS,
    "dataset.sample": ("head", "stratified"),
    "dataset.part": PARTS,
    "dataset.order": ORDERS,
    "dataset.dialogue": ("ar", "own"),
    "dataset.special_tokens": SPECIAL_TOKENS,
    "engine.overlap": schema.OVERLAP_MODES,
    "verifier.name": schema.VERIFIERS,
    "budgets": schema.BUDGETS,
    "state_scope": (*schema.STATE_SCOPES, schema.PAPER_SCOPE),
    "resume": ("auto", "force"),
    "estimator": schema.ESTIMATORS,
    "logger.mode": (None, "online", "offline", "disabled"),
}


_AT_LEAST: Mapping[str, float] = {
    "repeats": 1,
    "batch.size": 1,
    "seed": 0,
    "pair.draft.random.seed": 0,
    "runner.passes": 1,
    "measure.warmup": 0,
    "measure.reruns": 0,
    "measure.rerun_share": 0,
    "measure.rerun_minutes": 0,
    "measure.disturbed.steal": 0,
    "measure.disturbed.others": 0,
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

# Below it, logits divided by the temperature are as good as greedy, and soon no numbers any more.
_LEAST_TEMPERATURE = 1e-9

# Each is walked through block by block, and a list of all blocks is kept.
_MOST_REPEATS = 100_000

_FOLDERS = ("output_dir", "data_dir", "cache_dir", "paths.root", "paths.results", "paths.cache")
_NAMES = ("model.id", "model.path", "dataset.path", "pair.draft.id", "pair.draft.path")
_PLACES = (*_FOLDERS, *_NAMES, "runner.traces", "runner.surface", "runner.recordings")


def check_values(cfg: DictConfig) -> None:
    """Check what types alone do not: ranges, names that must be one of a few, and the method.

    Raises:
        ConfigurationError: with the key, what is valid and the nearest valid name.
    """
    _check_keys(cfg)
    for key, value in _leaves(OmegaConf.to_container(cfg, resolve=True)):
        _check_leaf(key, value)
    for key in _PLACES:
        if OmegaConf.select(cfg, key) == "":
            kind = "FOLDER" if key in _FOLDERS else "PLACE"
            raise ConfigurationError(f"{key} is empty: type {key}={kind}, or leave it out.")
    for key, valid in _ONE_OF.items():
        value = OmegaConf.select(cfg, key)
        if value not in valid:
            names = ["null" if name is None else name for name in valid]
            raise unknown_name(f"value of {key}:", str(value), names)
    for key, least in _AT_LEAST.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and value < least:
            raise ConfigurationError(f"{key}={value} is out of range: it must be at least {least}.")
    if cfg.record not in (False, schema.RECORD_STATES):
        raise unknown_name("value of record:", str(cfg.record), ("false", schema.RECORD_STATES))
    if cfg.record_layers is not None and not cfg.record:
        raise ConfigurationError(
            f"record_layers={cfg.record_layers} says which hidden states are recorded, and "
            f"record=false records none. Type record={schema.RECORD_STATES}."
        )
    if cfg.repeats > _MOST_REPEATS:
        raise ConfigurationError(
            f"repeats={cfg.repeats} is out of range: it must be at most {_MOST_REPEATS}."
        )
    _check_batch(cfg)
    _check_pin(cfg)
    _check_weights(cfg)
    _check_model(cfg)
    _check_sampling(cfg)
    forms = tuple(map(str, cfg.dataset.prompts)) or ("default",)
    if cfg.dataset.prompt_form not in forms:
        raise unknown_name("value of dataset.prompt_form:", cfg.dataset.prompt_form, forms)
    _check_pair(cfg)
    check_method(cfg.method)


def _check_keys(node: DictConfig, prefix: str = "") -> None:
    """Refuse keys that ``+key=`` brought into a group whose keys are known: nobody reads them."""
    kind = OmegaConf.get_type(node)
    if prefix == "logger.":
        known = {
            str(k) for k in OmegaConf.load(paths.CONF_DIR / "logger" / f"{_logger(node)}.yaml")
        }
    elif dataclasses.is_dataclass(kind):
        known = {field.name for field in dataclasses.fields(kind)}
    else:
        return  # a method's knobs are checked against its class; the rest is open
    for key in map(str, node):
        if key not in known:
            raise unknown_key(prefix + key, known)
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _check_keys(node[key], f"{prefix}{key}.")


def _logger(node: DictConfig) -> str:
    name, valid = str(node.get("name")), option_names("logger")
    if name not in valid:
        raise unknown_name("logger", name, valid)
    return name


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a plain configuration with its key, and every key as a value of its own."""
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
    """Refuse what went, what no file can hold and what no formula takes."""
    if gone := removed_key(key, value):
        raise gone
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{key}={value} is out of range: it must be a finite number.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigurationError(f"{key} is out of range: it must fit into 64 bits.")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{key}={value!a} is not valid text: {error.reason}."
            ) from None
        if "\0" in value:
            raise ConfigurationError(f"{key}={value!r} has a NUL character in it: leave it out.")


def _check_batch(cfg: DictConfig) -> None:
    """Texts are decoded in lock-step by this project's own loop on a loaded model."""
    size, runner = cfg.batch.size, cfg.runner.name
    if size > 1 and runner != "offline":
        other = "Servers have server.concurrency. " if runner == "serve" else ""
        raise ConfigurationError(
            f"batch.size={size} is of runner=offline, and runner={runner} decodes one text at a "
            f"time. {other}Type batch.size=1, or runner=offline to decode a batch live."
        )


def _check_pin(cfg: DictConfig) -> None:
    """Threads are pinned where the system can and where this project computes."""
    if not cfg.measure.pin:
        return
    reason = {
        "serve": "with runner=serve servers compute",
        "replay": "runner=replay runs no model",
    }.get(cfg.runner.name)
    if reason is None and not hasattr(os, "sched_getaffinity"):
        reason = "this system cannot"
    if reason is not None:
        raise ConfigurationError(
            f"measure.pin=true keeps each compute thread of the run on one CPU, and {reason}. "
            "Leave it out."
        )


def _check_weights(cfg: DictConfig) -> None:
    """Shorter weights are of this project's own float32 products on a CPU."""
    kind, runner = cfg.engine.weights, cfg.runner.name
    if kind == schema.FLOAT32_WEIGHTS:
        return
    typed = f"engine.weights={kind}"
    if cfg.model.dtype != "float32":
        raise ConfigurationError(
            f"{typed} is how float32 passes on a CPU read their weights, and model.dtype="
            f"{cfg.model.dtype} has other passes. Type model.dtype=float32, or leave {typed} out."
        )
    if str(cfg.model.device).startswith("cuda") or cfg.model.device_map:
        raise ConfigurationError(
            f"{typed} is for passes on a CPU. Type model.device=cpu model.device_map=null, or "
            "model.dtype=bfloat16 for half the bytes on a GPU."
        )
    if not schema.packed_bytes(cfg.engine.packed):
        raise ConfigurationError(
            f"{typed} is a form of packed weights, and engine.packed leaves none packed. Type "
            "engine.packed.enabled=true and engine.packed.memory_gb=4, or leave it out."
        )
    if runner == "serve":
        raise ConfigurationError(
            f"{typed} is of this project's own passes, and with runner=serve servers compute. "
            "Leave it out."
        )


def _check_model(cfg: DictConfig) -> None:
    """Weights or an architecture must be named: ``model=local`` brings neither."""
    model = cfg.model
    if model.device != "auto":
        check_device("model.device", model.device, "model.device=auto, cpu or cuda:0")
    draft_weights(cfg.pair.draft, model)
    if model.shape and not model.shape_config:
        raise ConfigurationError(
            f"model={model.name} with model.shape=true needs model.shape_config, which its "
            "yaml does not have. Type a model that has it, e.g. model=smollm2_135m."
        )
    if model.name == "local":
        raise ConfigurationError(
            "model=local needs the folder of your weights: type model.path=FOLDER."
        )


def _check_sampling(cfg: DictConfig) -> None:
    """The distribution of the next token, and a verifier that goes with it."""
    temperature, verifier = cfg.generation.temperature, cfg.verifier
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ConfigurationError(
            f"generation.temperature={temperature} is out of range: it must be 0 or at least "
            f"{_LEAST_TEMPERATURE:g}."
        )
    if temperature != 0 and verifier.name == "greedy":
        raise ConfigurationError(
            f"generation.temperature={temperature} asks for sampling, but verifier=greedy accepts "
            "what greedy decoding emits. Type verifier=rejection, or generation.temperature=0."
        )
    if verifier.name == "typical" and temperature == 0:
        raise ConfigurationError(
            "verifier=typical accepts by probability, but generation.temperature=0 leaves only "
            "the most likely token. Type verifier=greedy, or generation.temperature=0.7."
        )
    typical = ("verifier.epsilon", "verifier.delta") if verifier.name == "typical" else ()
    for key in ("generation.top_p", *typical):
        value = OmegaConf.select(cfg, key)
        if value is None or not 0 < value <= 1:
            raise ConfigurationError(
                f"{key}={value} is out of range: it must be above 0 and at most 1."
            )


def _check_pair(cfg: DictConfig) -> None:
    """A pair file may be missing where it is the default, not where somebody typed its name."""
    if not HydraConfig.initialized():
        return
    choices = HydraConfig.get().runtime.choices
    chosen = choices.get("pair")
    default = pair_name(str(choices.get("method")), str(choices.get("model")))
    if chosen not in (None, default) and not (paths.CONF_DIR / "pair" / f"{chosen}.yaml").is_file():
        raise unknown_name("pair", str(chosen), option_names("pair"))
