"""The entries of ``compare``, and methods that are made of other methods."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from specbench import paths
from specbench.config.compose import has_yaml, option_names, pair_name
from specbench.config.removed import removed_key
from specbench.config.schema import (
    PAPER_SCOPE,
    PUBLISHED,
    TUNED,
    TYPED,
    PairConfig,
    RunConfig,
    VerifierConfig,
    draft_weights,
)
from specbench.config.validate import check_method
from specbench.errors import ConfigurationError, unknown_name

PART_KNOBS = ("auxiliary", "drafter", "drafters")  # knobs of a method that name others


class NamedMethod(NamedTuple):
    """A method in a list of others: its name, or ``{method: name, <knob>: ...}``."""

    name: str
    knobs: dict[str, Any]

    @staticmethod
    def parse(entry: Any, source: str, refusal: str) -> NamedMethod:
        """Parse an entry of ``source``; ``refusal`` is the error message without a method.

        Raises:
            ConfigurationError: the entry names no method, or an unknown one.
        """
        if isinstance(entry, DictConfig):
            entry = OmegaConf.to_container(entry, resolve=True)
        node = entry if isinstance(entry, Mapping) else {"method": entry}
        knobs = {str(key): value for key, value in node.items()}
        name = knobs.pop("method", None)
        if not isinstance(name, str):
            raise ConfigurationError(refusal)
        if name not in (options := option_names("method")):
            raise removed_key("method", name) or unknown_name(f"method in {source}", name, options)
        return NamedMethod(name, knobs)


def is_part(value: Any) -> bool:
    """Tell whether a knob's value is a method with knobs."""
    return isinstance(value, Mapping) and "method" in value


def _choices(name: str, cfg: DictConfig) -> tuple[Any, Any, Any]:
    """Read a method's published and tuned nodes and its ``pair`` node, before overrides.

    No ``pair`` file applies under ``pair=none`` or to the user's own weights.
    """
    model = str(cfg.model.name)
    file = pair_name(name, model)
    if cfg.pair.left_out or not has_yaml(model) or file not in option_names("pair"):
        file = "none"
    published = _read("method", name, paths.CONF_DIR).method
    pair_file = _read("pair", file, paths.CONF_DIR)
    pair: Any = OmegaConf.merge(PairConfig, pair_file.get("pair", {}))
    tuned = pair_file.get("method", {})
    retained = {key: tuned[key] for key in pair.keeps}
    return OmegaConf.merge(published, retained), OmegaConf.merge(published, tuned), pair


@functools.cache
def _read(group: str, name: str, conf_dir: Path) -> DictConfig:
    """Merge a file of ``conf`` over its ``defaults``, with its keys where Hydra would place them.

    An experiment asks for dozens of methods; Hydra would compose a whole run for each.
    """
    file = conf_dir / group / f"{name}.yaml"
    node = cast(DictConfig, OmegaConf.load(file))
    order = [str(default) for default in node.pop("defaults", [])]
    node.pop("search", None)
    if not file.read_text(encoding="utf-8").startswith("# @package _global_"):
        node = OmegaConf.create({group: node})
    others = (_read(group, text.partition("@")[0], conf_dir) for text in order if text != "_self_")
    return cast(DictConfig, OmegaConf.merge(*others, node))


def compose_entry(cfg: DictConfig, entry: Any) -> DictConfig:
    """Compose the run's configuration with ``method`` and ``pair`` of one entry of ``compare``.

    An entry starts from its method's yaml and that method's ``pair`` file for the run's model, not
    from the run's ``method.*`` overrides; under ``budgets=published`` without the tuned knobs.
    Then the entry's knobs are set. A draft model and heads that were chosen for the run apply to
    all its entries. So does the verifier, unless the entry names another (``verifier``).

    Args:
        cfg: the run's configuration, which is left as it is.
        entry: a method's name, or ``{method: name, label: ..., <knob>: ...}``.

    Raises:
        ConfigurationError: an unknown method, knob or verifier.
    """
    name, knobs = NamedMethod.parse(
        entry,
        "compare",
        f"compare entry {entry!r} must be a method's name or a mapping with one. Type e.g. "
        "'compare=[pld]' or 'compare=[{method: cacheback, table: dynamic, label: no_frozen}]'.",
    )
    published, tuned, pair = _choices(name, cfg)
    verifier = knobs.pop("verifier", None)
    valid = [str(key) for key in tuned if str(key) not in ("_target_", "name")]
    for key in knobs:
        if key not in valid:
            raise removed_key(f"method.{key}") or unknown_name(
                f"key in the compare entry for {name}:", key, [*valid, "verifier"]
            )
    result = cfg.copy()
    OmegaConf.set_struct(result, False)
    if verifier is not None:
        result.verifier = _verifier(cfg, name, verifier)
    # A part that the entry replaces is not merged with the previous one.
    cleared = {key: None for key, value in knobs.items() if is_part(value)}
    base = published if cfg.budgets == PUBLISHED else tuned
    result.method = OmegaConf.merge(base, cleared, knobs)
    result.compare = []  # others' knobs may refer to the run's method
    draft = cfg.pair.draft if draft_weights(cfg.pair.draft, cfg.model) else pair.draft
    heads = {**pair.heads, **cfg.pair.heads}
    result.pair = OmegaConf.merge(pair, {"draft": draft, "heads": heads})
    OmegaConf.set_struct(result, True)
    check_method(result.method)
    return result


def _verifier(cfg: DictConfig, method: str, name: Any) -> Any:
    """Read the ``verifier`` group's node that an entry of ``compare`` names."""
    if name not in (valid := option_names("verifier")):
        raise unknown_name(f"verifier in the compare entry for {method}:", str(name), valid)
    supported = cfg.batch.size == 1 and cfg.runner.name == "offline"
    if not supported or cfg.generation.temperature == 0 or name == "greedy":
        raise ConfigurationError(
            f"verifier={name} in the compare entry for {method}: an entry can set a verifier "
            "only where sequences are sampled (not by greedy), one at a time. Type "
            "generation=sampling batch.size=1 runner=offline, or leave it out."
        )
    node = _read("verifier", name, paths.CONF_DIR).verifier
    return OmegaConf.merge(VerifierConfig, node)


def budget_of(cfg: DictConfig) -> str:
    """Tell the origin of the method's knobs, by their values.

    ``published``: they are its yaml's; ``tuned``: the ``pair`` file's for this model; ``typed``:
    anything else, set by hand in the command or an experiment.
    """
    published, tuned, _ = map(_knobs, _choices(str(cfg.method.name), cfg))
    typed = _knobs(cfg.method)
    return PUBLISHED if typed == published else TUNED if typed == tuned else TYPED


def _knobs(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node)
    return {k: v for k, v in plain.items() if k not in ("label", "state_scope")}


def with_parts(method: Mapping[str, Any], inside: tuple[str, ...] = ()) -> dict[str, Any]:
    """Replace the names of other methods in a method's knobs by their nodes.

    Instantiating the result builds the parts too; methods themselves never import each other.
    A part is a name, or ``{method: name, <knob>: ...}``. Its other values are its yaml's: a budget
    that a ``pair`` file sets for the method alone says nothing about its share of a common tree.
    It keeps its state as long as the whole; its scope ``paper`` becomes the paper's. ``inside``:
    the methods around this one.

    Raises:
        ConfigurationError: an unknown method, one that contains itself, or a part with a state
            scope of its own.
    """
    inside, node = (*inside, str(method["name"])), dict(method)
    if node.get("state_scope") == PAPER_SCOPE:
        node["state_scope"] = node.get("paper_scope", "prompt")
    for knob in PART_KNOBS:
        value = node.get(knob)
        if isinstance(value, list):
            node[knob] = [_part(entry, node, inside) for entry in value]
        elif value is not None:
            node[knob] = _part(value, node, inside)
    return node


def _part(value: Any, whole: Mapping[str, Any], inside: tuple[str, ...]) -> dict[str, Any]:
    name, knobs = NamedMethod.parse(
        value,
        f"method={inside[-1]}",
        f"method={inside[-1]}: {value!r} must be a method. Write a method's name, or "
        "{method: NAME, <knob>: ...}.",
    )
    if name in inside:
        raise ConfigurationError(f"method={inside[0]}: {name!r} would contain itself.")
    if "state_scope" in knobs:
        raise ConfigurationError(
            f"state_scope={knobs['state_scope']} of {name!r} in method={inside[-1]}: a part keeps "
            "what it learnt as long as the whole. Leave it out, or type method.state_scope=..."
        )
    if "state_scope" in whole:
        knobs["state_scope"] = whole["state_scope"]
    return method_node(name, knobs, inside)


def method_node(
    name: str, knobs: Mapping[str, Any], inside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Make a method's node from its yaml, with these knobs set and its parts' nodes.

    Args:
        inside: see `with_parts`.

    Raises:
        ConfigurationError: an unknown knob or a value of another type; see `with_parts` for parts.
    """
    run = {"state_scope": RunConfig.state_scope}
    whole: Any = OmegaConf.merge(run, _read("method", name, paths.CONF_DIR))
    node: Any = OmegaConf.to_container(whole.method, resolve=True)
    node.pop("label", None)
    node |= knobs
    check_method(node)
    return with_parts(node, inside)
