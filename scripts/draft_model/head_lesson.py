"""What a head is taught: the target's states to read, its next tokens to say, and the loss.

Texts are packed one behind the other. The head's own inference code reads them through
``UnrolledCache``, which stands in for its KV cache and lets gradients through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from scripts.draft_model.folder import HELD_STEPS, HeadFile
from scripts.draft_model.learning import Score
from scripts.draft_model.score import steps_of
from scripts.draft_model.texts import Texts, is_answer
from specbench.kernels.attention import AttentionPlan
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.heads.row_cache import Rows

CHOICES = 8  # of the target's likeliest next tokens: what a head is taught to say
_DECAY = 0.8  # of a later step's loss, as EAGLE-3 has it


@dataclass(frozen=True)
class Batch:
    """Some texts, packed.

    Attributes:
        tokens: ``[n]``.
        states: ``[n, layers, hidden]`` float32 of the target, the last one after its final norm.
        places: ``[n]`` place of each token in its text.
        last: ``[n]`` row of the last token of its text.
        ids: ``[n, CHOICES]`` the target's likeliest next tokens.
        probs: ``[n, CHOICES]`` float32; rows sum to one.
        asked: ``[n]`` bool, whether the next token is one to learn.
        going_on: ``[n]`` bool, whether guesses after the first are asked for too.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor
    asked: torch.Tensor
    going_on: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def ahead(self, by: int) -> torch.Tensor:
        """``[n]`` the row ``by`` tokens later, the text's last one where there are fewer."""
        return torch.minimum(torch.arange(len(self)) + by, self.last)

    def rows_for(self, step: int) -> torch.Tensor:
        """Rows whose guesses up to this step (offset ``step + 2``) are all asked for."""
        rows = torch.arange(len(self))
        kept = rows + 1 + step <= self.last
        for i in range(step + 1):
            kept &= self.asked[(rows + 1 + i).clamp(max=len(self) - 1)]
        return (kept & self.going_on if step else kept).nonzero()[:, 0]


Guesses = list[torch.Tensor]
Guess = Callable[[Batch, int, torch.Generator | None], Guesses]
File = Callable[[], HeadFile]


@dataclass(frozen=True)
class Pupil:
    """A head in training.

    Attributes:
        guess: what its LM head reads, for each of some steps ``[rows, hidden]`` of the rows that a
            batch asks for; noise is drawn where a generator is given.
        file: name, tensors and config.json of the published format.
        lm_head: ``[ids, hidden]``.
        head_ids: ``[vocab]`` the place in it of each of the target's ids; -1 where it has none.
        feature_loss: whether its first guess should be the target's next state itself.
    """

    head: nn.Module
    guess: Guess
    file: File
    lm_head: torch.Tensor
    head_ids: torch.Tensor
    feature_loss: bool = False


def pack(
    texts: Texts,
    chosen: Sequence[int],
    layers: Sequence[int],
    *,
    prompt_share: float = 0.0,
    chain_share: float = 1.0,
    generator: torch.Generator | None = None,
) -> Batch:
    """The chosen texts as a batch.

    Args:
        layers: which of ``texts.states`` the head reads, the final one last.
        prompt_share: share of a prompt's positions that are learned too, drawn by ``generator``.
        chain_share: share of the rows that are asked for more than one guess, drawn likewise.
    """
    assert texts.states is not None
    spans = [(int(texts.starts[i]), int(texts.starts[i + 1])) for i in chosen]
    source = torch.cat([torch.arange(a, b) for a, b in spans])
    lengths = torch.tensor([b - a for a, b in spans])
    ends = lengths.cumsum(0)
    last = torch.repeat_interleave(ends - 1, lengths)
    places = torch.cat([torch.arange(int(n)) for n in lengths])
    prompts = torch.repeat_interleave(texts.prompts[torch.tensor(chosen)], lengths)
    # The last token of a prompt is where the answer's first is said.
    asked = places >= prompts - 1
    if prompt_share:
        asked |= torch.rand(len(places), generator=generator) < prompt_share
    asked &= torch.arange(len(places)) < last  # behind an answer the target was not asked
    going_on = torch.ones(len(places), dtype=torch.bool)
    if chain_share < 1:
        going_on = torch.rand(len(places), generator=generator) < chain_share
    probs = texts.top_logprobs[source, :CHOICES].float().exp()
    return Batch(
        tokens=texts.tokens[source].long(),
        states=torch.cat([texts.states[a:b][:, list(layers)] for a, b in spans]).float(),
        places=places,
        last=last,
        ids=texts.top_ids[source, :CHOICES].long(),
        probs=probs / probs.sum(-1, keepdim=True).clamp(min=1e-9),
        asked=asked,
        going_on=going_on,
    )


class UnrolledCache:
    """The verbs of a head's ``RowCache`` over a batch: all rows, then steps of some of them.

    A row sees the rows before it as they were in step 0, and its own guesses of the later steps:
    what a chain drafted behind it would see. Step i of a row at place j stands at place j + i.
    """

    def __init__(self, batch: Batch, shape: LayerShape) -> None:
        self._places = batch.places
        self._shape = shape
        rows = torch.arange(len(batch))
        self._seen = (batch.last[:, None] == batch.last) & (rows <= rows[:, None])
        self._guessed = rows[:0]  # the row of each key behind the keys of step 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def committed_rows(self, n: int) -> Rows:
        del self._keys[:], self._values[:]
        self._guessed = self._guessed[:0]
        return self._rows(self._places, self._seen)

    def node_rows(self, parents: torch.Tensor) -> Rows:
        """The next step of the batch's rows ``parents``."""
        self._guessed = torch.cat([self._guessed, parents])
        own = parents[:, None] == self._guessed
        places = self._places[parents] + len(self._keys)
        return self._rows(places, torch.cat([self._seen[parents], own], dim=1))

    def keep(self, rows: Rows) -> None:
        """Keys stay as they came."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys.append(key)
        self._values.append(value)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)

    def _rows(self, places: torch.Tensor, seen: torch.Tensor) -> Rows:
        frequencies, factor = self._shape.inverse_frequencies()
        angles = torch.outer(places.double(), frequencies).repeat(1, 2)
        mask = torch.zeros(seen.shape)
        mask.masked_fill_(~seen, torch.finfo(torch.float32).min)
        return Rows(
            cache=self,  # type: ignore[arg-type]
            cos=(angles.cos() * factor).float(),
            sin=(angles.sin() * factor).float(),
            plan=AttentionPlan(mask=mask[None, None]),
            parents=None,
        )


def frequent(texts: Texts, vocab: int) -> torch.Tensor:
    """``[vocab]`` all ids, by how often the target said them or was about to."""
    answered = texts.tokens[is_answer(texts)].long()
    count = 2 * torch.bincount(answered, minlength=vocab)
    count += torch.bincount(texts.top_ids[:, :2].flatten().long(), minlength=vocab)
    return torch.argsort(count, descending=True, stable=True)


def least_squares(
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight ``[out, in]`` and bias ``[out]`` of the best linear guess of y from x."""
    gram = cross = None
    for x, y in pairs:
        x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        gram = x.T @ x if gram is None else gram + x.T @ x
        cross = x.T @ y if cross is None else cross + x.T @ y
    assert gram is not None and cross is not None
    ridge = 1e-2 * gram.diagonal() + 1e-6
    found = torch.linalg.solve(gram + torch.diag(ridge), cross).T
    return found[:, :-1].contiguous(), found[:, -1].contiguous()


def loss_of(
    pupil: Pupil,
    batch: Batch,
    steps: int,
    *,
    others: torch.Tensor,
    noise: torch.Generator | None = None,
    entropy: float = 1.0,
) -> torch.Tensor:
    """Cross-entropy to the target's distribution, summed over a row's guesses, times ``entropy``.

    A softmax over all ids would cost several times as much as the head itself: it goes over what
    the target may say somewhere in the batch, and ``others``, ids of the target.
    """
    known = pupil.head_ids[batch.ids]
    chosen = torch.cat([known[batch.asked].flatten(), pupil.head_ids[others]]).unique()
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
        wanted = logprobs.gather(1, ids.clamp(min=0))
        loss = -(probs / probs.sum(-1, keepdim=True) * wanted).sum(-1).mean()
        total = total + entropy * _DECAY**step * loss
        if pupil.feature_loss and step == 0:
            truth = batch.states[:, -1]
            spread = truth.std()
            total = total + torch.nn.functional.smooth_l1_loss(
                states / spread, truth[rows + 1] / spread
            )
    return total


@torch.no_grad()
def held_out(pupil: Pupil, texts: Texts, chosen: list[int], layers: list[int]) -> Score:
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
            going_on = torch.from_numpy(alive[rows])  # a chain ends at its first miss
            rows, states = rows[going_on], states[going_on]
            guessed = (states @ pupil.lm_head.T).argmax(-1)
            wanted = pupil.head_ids[batch.ids[rows + 1 + step, 0]]
            right[rows, step] = (guessed == wanted).numpy()
            asked_by_step[step] += len(rows)
            right_by_step[step] += right[rows, step].sum()
            alive &= right[:, step]
        # Row j guesses the tokens from j + 2 on; the answer's first one comes with the prompt.
        chains = right[int(texts.prompts[i]) - 1 : len(batch) - 2]
        tokens, passes = tokens + len(chains), passes + steps_of(chains)
    shares = right_by_step / asked_by_step.clip(min=1)
    return {
        "top1": [round(float(x), 4) for x in shares],
        "chain_mat": round(tokens / max(passes, 1), 3),
    }
