"""Which of the target's states a head reads, and whether others suit it better."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from specbench.decoding.structs import AFTER_FINAL_NORM
from specbench.models.heads import checkpoint, dflash, eagle3

log = logging.getLogger(__name__)

_CLEARLY = 0.1  # more of the tokens agree than with the ids given


def ids_read_by(folder: Path, n_layers: int) -> tuple[int, ...]:
    """Read from config.json the ids of the states that a head of any kind reads.

    Raises:
        WeightsNotFound: it is damaged.
        ConfigurationError: it is an EAGLE-3, DFlash or DSpark head's, of a kind that is not read
            here.
    """
    config, where = checkpoint.read_json(folder), str(folder / "config.json")
    if {"dflash_config", "markov_rank"} & set(config):
        return dflash.state_ids(dflash.read_config(config, where, n_layers))
    if not {"draft_vocab_size", "speculators_model_type", "eagle_config"} & set(config):
        return (AFTER_FINAL_NORM,)
    head = eagle3.read_config(config, frozenset(), where)
    if not head.joins_states:
        return (AFTER_FINAL_NORM,)
    return head.layer_ids or eagle3.default_ids(n_layers)


@torch.no_grad()
def checked_ids(
    head: eagle3.Eagle3Head | dflash.BlockHead,
    states: Sequence[torch.Tensor],
    ids: torch.Tensor,
    layers: Sequence[int],
) -> tuple[int, ...]:
    """Give the best of ``layers`` and their neighbors by one; warn where it is clearly a neighbor.

    The best one has the head guess the largest share of a text from the target's true states. The
    head's cache is empty afterwards.

    Args:
        states: all hidden states ``[n, hidden]`` of the text, embeddings first.
        ids: ``[n]`` its tokens, at least 3; best an answer of the target itself.
        layers: which states the head gets.
    """
    given = tuple(layers)
    shares: dict[tuple[int, ...], float] = {}
    for chosen in (tuple(i + by for i in given) for by in (0, -1, 1)):
        # The last state comes after the final norm, so no layer reads it.
        if min(chosen) >= 0 and max(chosen) < len(states) - 1:
            head.cache.truncate(0)
            shares[chosen] = head.agreement(ids, torch.cat([states[i] for i in chosen], dim=-1))
    head.cache.truncate(0)
    best = max(shares, key=shares.__getitem__, default=given)
    if given in shares and shares[best] >= shares[given] + _CLEARLY:
        log.warning(
            "the head agrees with the target on %.0f %% of a text with layer ids %s, on %.0f %% "
            "with %s: pass layer_ids=%s",
            *(100 * shares[given], list(given), 100 * shares[best], list(best), list(best)),
        )
    return best
