"""What a head in training is told, and what it is worth on texts that it has not learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scripts.draft_model.head_families import Pupil
from scripts.draft_model.head_lesson import Batch, accepted, pack
from scripts.draft_model.texts import Texts

HELD_STEPS = 4  # of the chain that held-out texts are drafted with
_DECAY = 0.8  # of a later step's loss, as EAGLE-3 has it


def loss_of(
    pupil: Pupil,
    batch: Batch,
    steps: int,
    *,
    others: torch.Tensor,
    noise: torch.Generator | None = None,
) -> torch.Tensor:
    """Cross-entropy to the target's distribution, summed over a row's guesses.

    A softmax over all ids would cost several times as much as the head itself: it goes over what
    the target may say somewhere in the batch, and ``others``, ids of the target.
    """
    known = pupil.own_ids[batch.ids]
    chosen = torch.cat([known[batch.asked].flatten(), pupil.own_ids[others]]).unique()
    chosen = chosen[chosen >= 0]
    place = torch.full((len(pupil.lm_head) + 1,), -1)  # one more for the -1 of an unknown id
    place[chosen] = torch.arange(len(chosen))
    weights = pupil.lm_head[chosen]
    total = torch.zeros(())
    for step, states in enumerate(pupil.guess(batch, steps, noise)):
        rows = batch.rows_for(step)
        learnable = known[rows + 1 + step, 0] >= 0
        rows, states = rows[learnable], states[learnable]
        if not len(rows):
            continue
        ids = place[known[rows + 1 + step]]
        probs = batch.probs[rows + 1 + step] * (ids >= 0)
        logprobs = (states @ weights.T).log_softmax(-1)
        said = logprobs.gather(1, ids.clamp(min=0))
        loss = -(probs / probs.sum(-1, keepdim=True) * said).sum(-1).mean()
        total = total + _DECAY**step * loss
        if pupil.feature_loss and step == 0:
            truth = batch.states[:, -1]
            spread = truth.std()
            total = total + torch.nn.functional.smooth_l1_loss(
                states / spread, truth[rows + 1] / spread
            )
    return total


@torch.no_grad()
def held_out(pupil: Pupil, texts: Texts, chosen: list[int], layers: list[int]) -> dict[str, Any]:
    """What the head is worth on greedy answers that it has not learned.

    Returns:
        ``top1``: by place in the draft, the share of rows whose first guess is the target's, of
        those where all guesses before were right; ``chain_mat``: MAT of chains.
    """
    right_by_step = np.zeros(HELD_STEPS)
    asked_by_step = np.zeros(HELD_STEPS)
    tokens = passes = 0
    for i in chosen:
        batch = pack(texts, [i], layers)
        right = np.zeros((len(batch), HELD_STEPS), dtype=bool)
        alive = np.ones(len(batch), dtype=bool)
        for step, states in enumerate(pupil.guess(batch, HELD_STEPS, None)):
            rows = batch.rows_for(step)
            guessed = (states @ pupil.lm_head.T).argmax(-1)
            said = pupil.own_ids[batch.ids[rows + 1 + step, 0]]
            right[rows, step] = (guessed == said).numpy()
            counted = rows[torch.from_numpy(alive[rows])].numpy()
            asked_by_step[step] += len(counted)
            right_by_step[step] += right[counted, step].sum()
            alive &= right[:, step]
        new, steps = accepted(right, int(texts.prompts[i]), HELD_STEPS)
        tokens, passes = tokens + new, passes + steps
    shares = right_by_step / asked_by_step.clip(min=1)
    return {
        "top1": [round(float(x), 4) for x in shares],
        "chain_mat": round(tokens / max(passes, 1), 3),
    }
