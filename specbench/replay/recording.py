"""What a run keeps for replays besides its outputs."""

from __future__ import annotations

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.structs import DraftTree
from specbench.models.target import Target


@torch.inference_mode()
def top_candidates(target: Target, prompt: IntArray, output: IntArray, top: int) -> IntArray:
    """The likeliest ids at each position of an output, by passes over the output itself.

    Args:
        target: the model; its cache is overwritten.
        prompt: ``[n_prompt]`` ids.
        output: ``[n_new]`` the greedy output.
        top: ids wanted.

    Returns:
        ``[n_new, top]`` ids, the likeliest first. The chosen one comes first whatever the last bit
        of its logit says in a pass of another shape.
    """
    parts = [target.prefill(prompt).logits[-1:]]
    chunk = target.max_nodes  # 0 where ar alone is run: a token a pass
    for start in range(0, len(output) - 1, chunk + 1):
        tokens = output[start : min(start + chunk + 1, len(output) - 1)]
        tree = DraftTree.chain(tokens[1:])
        # A captured pass writes its logits over those of the one before.
        parts.append(target.forward(int(tokens[0]), tree).logits.clone())
        target.commit(tree, np.arange(len(tree)))
    logits = torch.cat(parts).float()
    chosen = torch.from_numpy(output).to(logits.device)
    logits = logits.scatter(1, chosen[:, None], torch.inf)
    return logits.topk(min(top, logits.shape[1])).indices.cpu().numpy()
