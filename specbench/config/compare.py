"""The entries of ``compare``, and methods that are made of other methods."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from specbench import paths
from specbench.config.compose import PART_KNOBS, compose, has_yaml, option_names
from specbench.config.draft import draft_weights
from specbench.config.knobs import check_method
from specbench.config.removed import removed_key
from specbench.config.schema import PAPER_SCOPE, PUBLISHED, TUNED, TYPED
from specbench.errors import ConfigurationError, unknown_name


class NamedMethod(NamedTuple):
    """A method in a list of others: its name, or ``{method: name, <knob>: ...}``."""

    name: str
    knobs: dict[str, Any]

    @staticmethod
    def parse(entry: Any, place: str, refusal: str) -> NamedMethod:
        """The method that an entry of ``place`` names.

        Raises:
            ConfigurationError: the entry names none, which ``refusal`` says; or an unknown one.
        """
        if isinstance(entry, DictConfig):
            entry = OmegaConf.to_container(entry, resolve=True)
        name = entry.get("method") if isinstance(entry, Mapping) else entry
        if not isinstance(name, str):
            raise ConfigurationError(refusal)
        if not (paths.CONF_DIR / "method" / f"{name}.yaml").is_file():
            options = option_names("method")
            raise removed_key("method", name) or unknown_name(f"method in {place}", name, options)
        knobs = {str(k): entry[k] for k in entry if k != "method"} if name is not entry else {}
        return NamedMethod(name, knobs)


def is_part(value: Any) -> bool:
    """Whether a knob's value names a method with knobs of its own."""
    return isinstance(value, Mapping) and "method" in value


def compose_entry(cfg: DictConfig, entry: Any) -> DictConfig:
    """The run's configuration with ``method`` and ``pair`` of one entry of ``compare``.

    The method's yaml and its ``pair`` file for the run's model are composed afresh, so an entry
    starts from that method's defaults, not from the run's ``method.*`` overrides; under
    ``pair=none``, and for weights of the user's own, without the ``pair`` file, as the run itself;
    under ``budgets=published`` with the knobs of its yaml and what that file says beside them.
    Then the entry's own knobs are set. A draft model and heads that were chosen for the run hold
    for all its entries. So does the verifier, unless the entry names its own (``verifier``).

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
    composed = _with_pair(name, cfg)
    valid = [str(key) for key in composed.method if str(key) not in ("_target_", "name")]
    verifier = knobs.pop("verifier", None)
    for key in knobs:
        if key not in valid:
            where = f"key in the compare entry for {name}:"
            gone = removed_key(f"method.{key}")
            raise gone or unknown_name(where, key, [*valid, "verifier"])
    result = cfg.copy()
    OmegaConf.set_struct(result, False)
    if verifier is not None:
        result.verifier = _verifier(cfg, name, verifier)
    published = cfg.budgets == PUBLISHED
    own = _published(name, composed, composed.pair.keeps) if published else composed.method
    # A part that is named anew is not mixed with the one before.
    anew = {key: None for key, value in knobs.items() if is_part(value)}
    result.method = OmegaConf.merge(own, anew, knobs)
    result.compare = []  # others' knobs may refer to the run's method
    chosen = next((c for c in (cfg, composed) if draft_weights(c.pair.draft, cfg.model)), composed)
    result.pair = OmegaConf.merge(composed.pair, {"draft": chosen.pair.draft})
    result.pair.heads = {**composed.pair.heads, **cfg.pair.heads}
    OmegaConf.set_struct(result, True)
    check_method(result.method)
    return result


def _verifier(cfg: DictConfig, method: str, name: Any) -> DictConfig:
    """The ``verifier`` group's node that an entry of ``compare`` names."""
    if name not in (valid := option_names("verifier")):
        raise unknown_name(f"verifier in the compare entry for {method}:", str(name), valid)
    alone = cfg.batch.size == 1 and cfg.runner.name == "offline"
    if not alone or cfg.generation.temperature == 0 or name == "greedy":
        raise ConfigurationError(
            f"verifier={name} in the compare entry for {method}: entries have verifiers of their "
            "own where texts are sampled (not with greedy), one at a time. Type "
            "generation=sampling batch.size=1 runner=offline, or leave it out."
        )
    return cast(DictConfig, _composed((f"verifier={name}",), paths.CONF_DIR).verifier)


def budget_of(cfg: DictConfig) -> str:
    """Where the knobs of the configuration's method come from, by their values.

    ``published``: they are its yaml's; ``tuned``: the ``pair`` file's for this model; ``typed``:
    anything else, set by hand in the command or an experiment.
    """
    name = str(cfg.method.name)
    composed, own = _with_pair(name, cfg), _knobs(cfg.method)
    if own == _knobs(_published(name, composed, cfg.pair.keeps)):
        return PUBLISHED
    return TUNED if own == _knobs(composed.method) else TYPED


def _knobs(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node)
    return {k: v for k, v in plain.items() if k not in ("label", "state_scope", "search")}


def _with_pair(name: str, cfg: DictConfig) -> DictConfig:
    """A method by itself, composed with its ``pair`` file where one holds in this run."""
    model = str(cfg.model.name)
    if cfg.pair.left_out or not has_yaml(model):
        return _with_no_pair(name)
    return _composed((f"method={name}", f"model={model}"), paths.CONF_DIR)


def _with_no_pair(name: str) -> DictConfig:
    return _composed((f"method={name}", "pair=none"), paths.CONF_DIR)


def _published(name: str, composed: DictConfig, keeps: Sequence[str]) -> DictConfig:
    """The method's node without the tuned knobs of its ``pair`` file."""
    kept = {key: composed.method[key] for key in keeps if key in composed.method}
    return cast(DictConfig, OmegaConf.merge(_with_no_pair(name).method, kept))


def with_parts(method: Mapping[str, Any], inside: tuple[str, ...] = ()) -> dict[str, Any]:
    """A method's node with the names of other methods in its knobs replaced by their nodes.

    Instantiating the result builds the parts too; methods themselves never import each other.
    A part is a name, or ``{method: name, <knob>: ...}``. It has its yaml's own values otherwise: a
    budget that a ``pair`` file sets for a method running alone says nothing about its share of a
    common tree, and keeps what it learnt as long as the whole. ``state_scope: paper`` becomes the
    paper's. ``inside`` names the methods around this one.

    Raises:
        ConfigurationError: an unknown method, one that contains itself, or a part with a state
            scope of its own.
    """
    inside = (*inside, str(method["name"]))
    node = dict(method)
    if node.get("state_scope") == PAPER_SCOPE:
        node["state_scope"] = node.get("paper_scope", "prompt")
    kept = {key: node[key] for key in ("state_scope",) if key in node}

    def parts(value: Any) -> Any:
        if value is None:
            return None
        return [part(entry) for entry in value] if isinstance(value, list) else part(value)

    def part(value: Any) -> dict[str, Any]:
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
                f"state_scope={knobs['state_scope']} of {name!r} in method={inside[-1]}: a part "
                "keeps what it learnt as long as the whole. Leave it out, or type "
                "method.state_scope=..."
            )
        return method_node(name, knobs | kept, "pair=none", inside=inside)

    return {k: parts(v) if k in PART_KNOBS else v for k, v in node.items()}


def method_node(
    name: str, knobs: Mapping[str, Any], *overrides: str, inside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A method's node of its yaml's values, these knobs instead of some, and its parts' nodes.

    Args:
        overrides: of the rest of the configuration, e.g. ``pair=none``.
        inside: see `with_parts`.

    Raises:
        ConfigurationError: an unknown knob or a value of another type; see `with_parts` for parts.
    """
    composed = _composed((f"method={name}", *overrides), paths.CONF_DIR)
    node: Any = OmegaConf.to_container(composed.method, resolve=True)
    node.pop("label", None)
    node |= knobs
    check_method(node)
    return with_parts(node, inside)


@functools.cache
def _composed(overrides: tuple[str, ...], conf_dir: Path) -> DictConfig:
    """A configuration; an experiment asks for the same one many times."""
    return compose(overrides)
