"""What a draft model is taught: its vocabulary, the target's answers in it, and the loss."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from scripts.draft_model.texts import Texts, is_answer


def frequent_ids(texts: Texts, size: int, keep: list[int]) -> torch.Tensor:
    """The draft's vocabulary: ``[size]`` target ids in rising order, after one -1.

    Ids by how often they are in answers and among the target's choices, prompts counting a
    quarter; ``keep`` always belongs to it. Ids that never occur follow in their own order, which in
    a byte-pair vocabulary is that of frequency. The -1 in front stands for every id left out.
    """
    vocab = int(max(texts.tokens.max(), texts.top_ids.max())) + 1
    vocab = max(vocab, size, max(keep, default=0) + 1)
    answered = is_answer(texts)
    tokens = texts.tokens.long()
    count = torch.bincount(tokens[answered], minlength=vocab).double()
    count += 0.25 * torch.bincount(tokens[~answered], minlength=vocab)
    count += torch.bincount(texts.top_ids[:, 0].long(), minlength=vocab)
    count[torch.tensor(keep, dtype=torch.long)] = torch.inf
    chosen = torch.argsort(count, descending=True, stable=True)[: size - 1]
    return torch.cat([torch.tensor([-1]), chosen.sort().values])


@dataclass(frozen=True)
class Lesson:
    """Texts in the draft's own ids: what it reads and what it should say.

    Attributes:
        ids: the draft's vocabulary, see `frequent_ids`.
        tokens: ``[n]`` int64.
        starts: ``[texts + 1]`` borders.
        weight: ``[n]`` float32 of each position's loss; 0 where there is nothing to say.
        first: ``[n]`` the target's first choice, -100 where the draft has no such id.
        top_ids: ``[n, k]``, 0 where the draft has no such id.
        top_probs: ``[n, k]`` float32, 0 there; rows sum to one.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    weight: torch.Tensor
    first: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor


def draft_ids(ids: torch.Tensor, largest: int) -> torch.Tensor:
    """The draft's id of each id of the target up to ``largest``; 0 stands for all left out."""
    draft_id = torch.zeros(max(int(ids.max()), largest) + 1, dtype=torch.long)
    draft_id[ids[1:]] = torch.arange(1, len(ids))
    return draft_id


def lesson(texts: Texts, ids: torch.Tensor, prompt_weight: float) -> Lesson:
    draft_id = draft_ids(ids, max(int(texts.tokens.max()), int(texts.top_ids.max())))
    top = draft_id[texts.top_ids.long()]
    probs = texts.top_logprobs.float().exp() * (top > 0)
    mass = probs.sum(-1)
    # A position teaches what comes next, so the last one of a prompt already counts as answer.
    answered = is_answer(texts)
    answered[texts.starts[:-1] + texts.prompts - 1] = True
    weight = torch.where(answered, 1.0, prompt_weight) * (mass > 0)
    first = torch.where(top[:, 0] > 0, top[:, 0], -100)
    first[weight == 0] = -100
    return Lesson(
        ids=ids,
        tokens=draft_id[texts.tokens.long()],
        starts=texts.starts,
        weight=weight,
        first=first,
        top_ids=top,
        top_probs=probs / mass.clamp(min=1e-9)[:, None],
    )


def loss_of(draft: PreTrainedModel, taught: Lesson, chosen: list[int]) -> torch.Tensor:
    """Weighted mean over positions of KL and cross-entropy."""
    device = draft.device
    spans = [(int(taught.starts[i]), int(taught.starts[i + 1])) for i in chosen]
    rows = torch.nn.utils.rnn.pad_sequence(
        [taught.tokens[a:b] for a, b in spans], batch_first=True
    ).to(device)
    place = torch.cat(
        [torch.arange(b - a) + row * rows.shape[1] for row, (a, b) in enumerate(spans)]
    )
    source = torch.cat([torch.arange(a, b) for a, b in spans])
    asked = taught.weight[source] > 0
    place, source = place[asked].to(device), source[asked]
    # Padding is on the right, where no causal position sees it.
    hidden = draft.model(input_ids=rows, use_cache=False).last_hidden_state
    logprobs = draft.lm_head(hidden.flatten(0, 1)[place]).float().log_softmax(-1)
    weight = taught.weight[source].to(device)
    probs = taught.top_probs[source].to(device)
    top_logprobs = logprobs.gather(1, taught.top_ids[source].to(device))
    kl = (torch.special.xlogy(probs, probs) - probs * top_logprobs).sum(-1)
    first = taught.first[source].to(device)
    ce = -logprobs.gather(1, first.clamp(min=0)[:, None])[:, 0] * (first >= 0)
    loss: torch.Tensor = (weight * (kl + 0.5 * ce)).sum() / weight.sum()
    return loss
