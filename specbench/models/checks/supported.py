"""What a model's configuration says that our passes lack: refused by name, before any pass.

What no configuration says, the self-check finds.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.errors import ConfigurationError

ELSE = "Take a model that decodes here, see docs/architectures.md."


def usable_context(model: PreTrainedModel, what: str, longest: int, nodes: int) -> int | None:
    """Tokens up to which our passes are the model's own; None: as many as it takes.

    Args:
        what: the model in the words of its user, e.g. ``model.id=FOLDER``.
        longest: tokens of the run's longest text; ``nodes``: of its largest draft tree.

    Raises:
        ConfigurationError: some layers keep something else than keys and values, or the run's texts
            go beyond a switch; names the feature.
    """
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise ConfigurationError(
            f"{what}: multi-head latent attention (kv_lora_rank) has keys and values of unequal "
            f"sizes, which this project's cache does not hold. {ELSE}"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    stateful = sorted(k for k in kinds if not k.endswith("attention") or k == "linear_attention")
    if stateful:
        raise ConfigurationError(
            f"{what}: layers of kind {', '.join(stateful)} keep a state, which cannot go back "
            f"where a draft is rejected. {ELSE}"
        )
    switches = _switches(config)
    if not switches:
        return None
    switch, feature = min(switches)
    usable = switch - nodes
    if longest > usable:
        raise ConfigurationError(
            f"{what}: beyond {switch} tokens {feature}. This run's texts may have {longest}, with "
            f"drafts of {nodes} nodes behind them: type model.context_length={max(usable, 1)}, or "
            "leave out long prompts."
        )
    return usable


def _switches(config: Any) -> list[tuple[int, str]]:
    """Lengths of text at which a model computes differently, and what changes there."""
    found = []
    rope = getattr(config, "rope_parameters", None) or {}
    for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = each.get("rope_type")
        begun = each.get("original_max_position_embeddings")
        begun = begun or getattr(config, "original_max_position_embeddings", None)
        if kind == "longrope" and begun:
            found.append((int(begun), "LongRoPE rotates all keys anew, cached ones too"))
        if kind == "dynamic":
            end = int(begun or config.max_position_embeddings)
            found.append((end, "dynamic RoPE rotates keys by the length of the text"))
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        found.append((int(config.attention_chunk_size), "attention is chunked, and our masks not"))
    return found


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Refuse a tokenizer with ids that the model has no embedding of.

    Raises:
        ConfigurationError: with the first such token.
    """
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    if beyond:
        i, token = beyond[0]
        raise ConfigurationError(
            f"{what}: the tokenizer has {len(beyond)} tokens that the model has no embedding of, "
            f"{token!r} (id {i}) the first of them: there are {rows}. Take the tokenizer that the "
            "model was trained with, or resize the model's embeddings and save it again."
        )
