"""The texts that a draft model learns from: prompts, answered by the target.

For every position of prompt and answer the target's most likely next tokens are kept: they are
computed anyway, and say far more than the token that was chosen. Groups of texts are files, each
with a seed of its own, so that a stopped job goes on and several processes share the work.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.models.hidden_states import HiddenStates, decoder_layers
from specbench.models.kv_cache import KVCache

TEMPERATURE = 0.7
TOP = 16  # next tokens of the target kept for each position; sampling draws from them
# What the templates of prompts.yaml share with a benchmark's.
PROMPTS = (
    "Two of five templates of translations begin with Translate German to English:, two of five of "
    "summaries with Summarize:, as Spec-Bench's own do; no prompt is a benchmark's"
)


class MappedStates:
    """States of groups one after the other, left where they are: read files stay on the disk.

    A million tokens' states are gigabytes. A slice must lie in one group, as every text does.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __getitem__(self, span: slice) -> torch.Tensor:
        number = int(np.searchsorted(self._ends, span.start, side="right"))
        before = int(self._ends[number]) - len(self._parts[number])
        return self._parts[number][span.start - before : span.stop - before]


@dataclass(frozen=True)
class Texts:
    """Prompts with the target's answers, one after the other in flat tensors.

    Attributes:
        tokens: ``[n]`` int32 ids of all texts.
        starts: ``[texts + 1]`` int64 border of each text.
        prompts: ``[texts]`` int64 length of each prompt.
        greedy: ``[texts]`` bool, whether the answer was decoded greedily.
        top_ids: ``[n, TOP]`` int32 the target's likeliest next tokens after each token.
        top_logprobs: ``[n, TOP]`` float16 their log-probabilities. After an answer's last token
            the target was not asked: minus infinity.
        states: ``[n, layers, hidden]`` float16 the target's hidden states that were asked for,
            zeros after an answer's last token; None where none were.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    prompts: torch.Tensor
    greedy: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    states: "torch.Tensor | MappedStates | None" = None

    @staticmethod
    def joined(parts: list["Texts"]) -> "Texts":
        offsets = np.cumsum([0] + [len(p.tokens) for p in parts])
        starts = [p.starts[:-1] + int(at) for p, at in zip(parts, offsets, strict=False)]
        states = [p.states for p in parts if isinstance(p.states, torch.Tensor)]
        fields = ["tokens", "prompts", "greedy", "top_ids", "top_logprobs"]
        return Texts(
            starts=torch.cat([*starts, torch.tensor([int(offsets[-1])])]),
            states=MappedStates(states) if len(states) == len(parts) else None,
            **{name: torch.cat([getattr(p, name) for p in parts]) for name in fields},
        )


def is_answer(texts: Texts) -> torch.Tensor:
    """``[n]`` bool: tokens that the target wrote."""
    place = torch.arange(len(texts.tokens))
    lengths = texts.starts.diff()
    start = torch.repeat_interleave(texts.starts[:-1], lengths)
    return place - start >= torch.repeat_interleave(texts.prompts, lengths)


def split(texts: Texts) -> tuple[torch.Tensor, torch.Tensor]:
    """``[texts]`` bool: what is held out (every 24th text, all of them greedy), what is learnt.

    Short prompts come up more than once: where one of two is held out the other is not learnt.
    """
    starts = texts.starts[:-1].tolist()
    prompts = [
        tuple(texts.tokens[a : a + n].tolist())
        for a, n in zip(starts, texts.prompts.tolist(), strict=True)
    ]
    held = torch.arange(len(prompts)) % 24 == 0
    unseen = set(prompts[::24])
    return held, torch.tensor([prompt not in unseen for prompt in prompts])


def sha256_of(texts: Texts) -> str:
    """Of their tokens."""
    return hashlib.sha256(texts.tokens.numpy().tobytes()).hexdigest()


def facts_of(texts: Texts, styles: list[str], learnt: torch.Tensor) -> dict[str, object]:
    """What a card says of the texts, of which those with the numbers ``learnt`` are learnt."""
    return {
        "texts": len(texts.prompts),
        "styles": sorted(set(styles)),
        "prompts": PROMPTS,
        "texts_learnt": len(learnt),
        "tokens": len(texts.tokens),
        "answer_tokens": int(is_answer(texts).sum()),
        "texts_sha256": sha256_of(texts),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def top_next(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[rows, TOP]`` and log-probabilities of the likeliest next tokens."""
    logits = logits.float()
    values, ids = logits.topk(TOP, dim=-1)
    return ids, values - logits.logsumexp(-1, keepdim=True)


@torch.inference_mode()
def answers(
    target: PreTrainedModel,
    prompts: list[list[int]],
    greedy: list[bool],
    *,
    eos_ids: frozenset[int],
    limit: int,
    seed: int,
    layers: Sequence[int] = (),
    temperature: float = TEMPERATURE,
) -> Texts:
    """Let the target answer prompts in one batch, and keep its likeliest tokens everywhere.

    ``greedy`` says of each prompt whether its answer takes the likeliest token or a drawn one;
    ``limit`` is the most new tokens; ``layers`` are hidden states to keep, see ``HiddenStates``.
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    rows, longest = len(prompts), max(map(len, prompts))
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    padding = longest - lengths
    # Padding on the left: all rows then write the same cache column.
    ids = torch.zeros(rows, longest, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
    column = torch.arange(longest + limit, device=device)
    real = column >= padding[:, None]
    column = column[:longest]
    causal = column[None, :] <= column[:, None]
    reader = _Reader(target, rows, longest + limit, layers)
    cache = reader.cache
    positions = (column[None] - padding[:, None]).clamp(min=0)
    states, kept_states = reader.read(ids, causal[None] & real[:, None, :longest], positions)
    begins = padding.tolist()
    tops = [[top_next(target.lm_head(states[row, at:]))] for row, at in enumerate(begins)]
    seen = [[kept_states[row, at:]] for row, at in enumerate(begins)]
    texts = [list(p) for p in prompts]
    active = list(range(rows))
    take_first = torch.tensor(greedy, device=device)
    last_ids, last_logprobs = (torch.stack([top[0][i][-1] for top in tops]) for i in (0, 1))
    for step in range(limit):
        weights = (last_logprobs / temperature).softmax(-1)
        drawn = torch.multinomial(weights, 1, generator=generator)
        choice = last_ids.gather(1, drawn.masked_fill_(take_first[active][:, None], 0))[:, 0]
        for row, token in zip(active, choice.tolist(), strict=True):
            texts[row].append(token)
        kept = [i for i, token in enumerate(choice.tolist()) if token not in eos_ids]
        if not kept or step == limit - 1:
            break
        if len(kept) < len(active):
            stored = cache.storage[..., : cache.length, :]
            stored[:, : len(kept)] = stored[:, kept]
            active, choice = [active[i] for i in kept], choice[kept]
        positions = (lengths[active] + step)[:, None]
        shown = real[active][:, None, : cache.length + 1]
        states, kept_states = reader.read(choice[:, None], shown, positions)
        last_ids, last_logprobs = top_next(target.lm_head(states[:, -1]))
        for i, row in enumerate(active):
            tops[row].append((last_ids[i : i + 1], last_logprobs[i : i + 1]))
            seen[row].append(kept_states[i])
    flat = _flat(texts, lengths, greedy, tops)
    if not layers:
        return flat
    last = torch.zeros_like(seen[0][0][:1])
    return replace(flat, states=torch.cat([part for text in seen for part in (*text, last)]).cpu())


class _Reader:
    """Passes of the target over a batch of ``rows``, whose keys and values a cache keeps."""

    def __init__(self, target: PreTrainedModel, rows: int, max_len: int, layers: Sequence[int]):
        config = target.config
        heads = config.num_attention_heads
        self.cache = KVCache(
            [target.device] * config.num_hidden_layers,
            batch=rows,
            kv_heads=config.num_key_value_heads,
            max_len=max_len,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=target.dtype,
        )
        self._target, self._layers = target, layers
        self._states = HiddenStates(target, decoder_layers(target), target.device)

    def read(
        self, ids: torch.Tensor, shown: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read ids ``[rows, columns]``.

        ``shown`` is ``[rows, columns, stored + columns]`` bool: what each of them may look at.
        Gives the last states ``[rows, columns, d]`` and float16 ``[rows, columns, layers, d]``.
        """
        target = self._target
        mask = torch.zeros(shown.shape, dtype=target.dtype, device=target.device)
        mask.masked_fill_(~shown, torch.finfo(target.dtype).min)
        with self._states.collected(self._layers) as collected:
            out = target.model(
                input_ids=ids,
                attention_mask=mask[:, None],
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            )
        self.cache.commit(None, ids.shape[1])
        last: torch.Tensor = out.last_hidden_state
        kept = [collected[i].half().view(last.shape) for i in self._layers]
        return last, torch.stack(kept or [last], dim=2)


def _flat(
    texts: list[list[int]],
    lengths: torch.Tensor,
    greedy: list[bool],
    tops: list[list[tuple[torch.Tensor, torch.Tensor]]],
) -> Texts:
    """Texts one after the other; after the last token of each nothing is known."""
    device = lengths.device
    unknown = (
        torch.zeros(1, TOP, dtype=torch.long, device=device),
        torch.full((1, TOP), -torch.inf, device=device),
    )
    every = [top for text in tops for top in (*text, unknown)]
    return Texts(
        tokens=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        starts=torch.tensor([0, *np.cumsum([len(text) for text in texts]).tolist()]),
        prompts=lengths.cpu(),
        greedy=torch.tensor(greedy),
        top_ids=torch.cat([ids for ids, _ in every]).int().cpu(),
        top_logprobs=torch.cat([logprobs for _, logprobs in every]).half().cpu(),
    )
