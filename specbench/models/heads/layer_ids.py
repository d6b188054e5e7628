"""Which target layers an EAGLE-3 head reads, and a check that it was not trained on the next ones.

Ids are places in the list of hidden states that transformers returns: 0 the embeddings, i the input
of layer i. Other tools number the same states by the layer whose output they are, one lower, and a
configuration does not say which it means. One off costs most of the accepted tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from specbench.decoding.structs import AFTER_FINAL_NORM
from specbench.errors import WeightsNotFound, first_line
from specbench.models.heads.eagle3 import Eagle3Head
from specbench.models.heads.eagle3_config import read_config

log = logging.getLogger(__name__)

_CLEARLY = 0.1  # more of the tokens agree than with the ids given


def default_ids(n_layers: int) -> tuple[int, ...]:
    """The ids that the authors' code takes for a target of ``n_layers`` layers."""
    return (2, n_layers // 2, n_layers - 3)


def read_by(folder: Path, n_layers: int) -> tuple[int, ...]:
    """The ids of the states that a head of any kind reads, by its config.json.

    Raises:
        WeightsNotFound: it is damaged.
        ConfigurationError: it is an EAGLE-3 head's, of a kind that is not read here.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsNotFound(f"{file} cannot be read: {first_line(error)}.") from error
    if not {"draft_vocab_size", "speculators_model_type", "eagle_config"} & set(config):
        return (AFTER_FINAL_NORM,)
    head = read_config(config, frozenset(), str(file), rope_theta=None, layer_ids=None)
    if not head.joins_states:
        return (AFTER_FINAL_NORM,)
    return head.layer_ids or default_ids(n_layers)


@torch.no_grad()
def agreement(
    head: Eagle3Head, states: Sequence[torch.Tensor], ids: torch.Tensor, layers: Sequence[int]
) -> float:
    """Share of a text's tokens that the head guesses from the target's true states.

    The head's cache is emptied before and after.

    Args:
        states: all hidden states ``[n, hidden]`` of the text, embeddings first.
        ids: ``[n]`` its tokens, at least 3; best an answer of the target itself.
        layers: which states the head gets.
    """
    assert head.cache is not None, "reserve() comes first"
    head.cache.truncate(0)
    joined = torch.cat([states[i] for i in layers], dim=-1)
    features = head.catch_up(ids[1:-1], joined[:-2])
    head.cache.truncate(0)
    guessed = head.to_target_ids(head.logits(features).argmax(-1))
    return float((guessed == ids[2:]).double().mean())


def check(
    head: Eagle3Head, states: Sequence[torch.Tensor], ids: torch.Tensor, layers: Sequence[int]
) -> tuple[int, ...]:
    """The best of ``layers`` and their neighbors by one; warns where it is clearly a neighbor.

    Arguments are those of `agreement`.
    """
    shifted = [tuple(i + by for i in layers) for by in (0, -1, 1)]
    # The last state is behind the final norm, so it is no layer's input.
    possible = [c for c in shifted if min(c) >= 0 and max(c) < len(states) - 1]
    if not possible:
        return tuple(layers)
    shares = {each: agreement(head, states, ids, each) for each in possible}
    best = max(possible, key=lambda each: shares[each])
    given = tuple(layers)
    if given in shares and shares[best] >= shares[given] + _CLEARLY:
        log.warning(
            "the head agrees with the target on %.0f %% of a text with layer ids %s, on %.0f %% "
            "with %s: pass layer_ids=%s",
            *(100 * shares[given], list(given), 100 * shares[best], list(best), list(best)),
        )
    return best
