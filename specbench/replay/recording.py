"""What a run keeps for replays besides its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.structs import DraftTree
from specbench.models.scores import Scores
from specbench.models.target import Target


@dataclass(frozen=True, slots=True)
class Recording:
    """What a target says along one greedy output.

    Attributes:
        candidates: ``[n_new, top]`` the likeliest ids at each position, the chosen one first
            whatever the last bit of its logit says in a pass of another shape.
        states: ``[n_prompt + n_new - 1, hidden]`` by number, of all tokens but the last.
    """

    candidates: IntArray
    states: Mapping[int, torch.Tensor]


@torch.inference_mode()
def record_output(
    target: Target, prompt: IntArray, output: IntArray, top: int, layers: tuple[int, ...] = ()
) -> Recording:
    """The likeliest ids and the hidden states of an output, by passes over the output itself.

    Args:
        target: the model; its cache is overwritten.
        prompt: ``[n_prompt]`` ids.
        output: ``[n_new]`` the greedy output.
        top: ids wanted at each position.
        layers: hidden states wanted, see ``Needs.hidden_layers``.
    """
    logits: list[torch.Tensor] = []
    states: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def keep(scores: Scores, own: torch.Tensor) -> None:
        # A captured pass writes over what the one before said.
        logits.append(own.clone())
        for layer, rows in (scores.hidden or {}).items():
            states[layer].append(rows.clone())

    scores = target.prefill(prompt, hidden_layers=layers)
    keep(scores, scores.logits[-1:])
    chunk = target.max_nodes  # 0 where ar alone is run: a token a pass
    for start in range(0, len(output) - 1, chunk + 1):
        tokens = output[start : min(start + chunk + 1, len(output) - 1)]
        tree = DraftTree.chain(tokens[1:])
        scores = target.forward(int(tokens[0]), tree, hidden_layers=layers)
        keep(scores, scores.logits)
        target.commit(tree, np.arange(len(tree)))
    joined = torch.cat(logits).float()
    chosen = torch.from_numpy(output).to(joined.device)
    joined = joined.scatter(1, chosen[:, None], torch.inf)
    best = joined.topk(min(top, joined.shape[1])).indices
    return Recording(
        best.cpu().numpy(), {layer: torch.cat(rows).cpu() for layer, rows in states.items()}
    )
