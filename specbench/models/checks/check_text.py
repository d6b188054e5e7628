"""The text of the self-check: a prompt, and a chain and a tree behind its last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from specbench.arrays import IntArray
from specbench.kernels.architectures import scaled_every, window_sizes

_PROMPT, _CHAIN = 16, 6  # tokens
# Most nodes have an earlier one that they must not see, and depths do not follow the order.
PARENTS: IntArray = np.array([-1, -1, 0, 1, 1, 2, 4, 3], dtype=np.int64)
ROWS = 1 + len(PARENTS)
# The last row's number in its pass, less what it may be at most by its depth: a step in what
# positions do shall lie between both.
_BEFORE_STEP = 5
# Work of one prompt's pass, so that the text outgrows a window or reaches a step. It is read up to
# five times: some three seconds on two cores.
FLOPS = {"cpu": 5e10, "cuda": 2e14}


@dataclass(frozen=True, slots=True)
class CheckText:
    """A prompt, and behind its last token, the root, a chain and a tree."""

    prompt: IntArray
    root: int
    chain: IntArray  # [_CHAIN]
    nodes: IntArray  # [len(PARENTS)]


def make_text(
    model: PreTrainedModel, longest: int, seed: int = 0
) -> tuple[CheckText, dict[str, str]]:
    """Random ids; as many as windows and steps of position need, where that is cheap."""
    per_token = 2 * sum(p.numel() for p in model.parameters())
    cheap = int(FLOPS.get(model.device.type, 0) / per_token)
    length, lengths = max(1, min(_PROMPT, longest - ROWS)), {}
    for window in window_sizes(model):
        wanted = min(window + max(window // 2, ROWS), longest - ROWS)
        if wanted <= window:
            said = "not reached by this run's texts"
        elif wanted > max(cheap, length):
            said = "not outgrown: the check would take too long"
        else:
            said, length = "outgrown", max(length, wanted)
        lengths[f"window of {window}"] = said
    for step in scaled_every(model):
        wanted = -(-(length + _BEFORE_STEP) // step) * step - _BEFORE_STEP
        if wanted >= longest:
            said = "not reached by this run's texts"
        elif wanted > max(cheap, length):
            said = "not reached: the check would take too long"
        else:
            said, length = "reached", max(length, wanted)
        lengths[f"attention scaled anew every {step}"] = said
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    vocab = min(int(table.weight.shape[0]) for table in tables)
    # Special tokens, and ids that stand for images, are at the ends of vocabularies.
    ids = np.random.default_rng(seed).integers(vocab // 16, vocab // 2 + 1, length + _CHAIN + ROWS)
    prompt, root, chain, nodes = np.split(ids, np.cumsum([length, 1, _CHAIN]))
    return CheckText(prompt, int(root[0]), chain, nodes), lengths


def path_to(node: int) -> list[int]:
    """Nodes from below the root down to ``node``."""
    return [*path_to(int(PARENTS[node])), node] if node >= 0 else []
