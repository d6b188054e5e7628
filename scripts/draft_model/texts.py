"""The texts that a draft model learns from: prompts, answered by the target.

For every position of prompt and answer the target's most likely next tokens are kept: they are
computed anyway, and say far more than the token that was chosen. Groups of texts are files, each
with a seed of its own, so that a stopped job goes on and several processes share the work.
"""

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from scripts.draft_model.prompts import prompts_of_group, read_paragraphs, seed_of_group
from specbench.config.compose import compose, typed
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.hidden_states import HiddenStates, decoder_layers
from specbench.models.kv_cache import KVCache
from specbench.storage import jsonl

TEMPERATURE = 0.7
TOP = 16  # next tokens of the target kept for each position; sampling draws from them
# What the templates of prompts.yaml share with a benchmark's.
PROMPTS = (
    "Two of five templates of translations begin with Translate German to English:, two of five of "
    "summaries with Summarize:, as Spec-Bench's own do; no prompt is a benchmark's"
)


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
    states: torch.Tensor | None = None

    @staticmethod
    def joined(parts: list["Texts"]) -> "Texts":
        offsets = np.cumsum([0] + [len(p.tokens) for p in parts])
        starts = [p.starts[:-1] + int(at) for p, at in zip(parts, offsets, strict=False)]
        fields = ["tokens", "prompts", "greedy", "top_ids", "top_logprobs"]
        fields += ["states"] * all(p.states is not None for p in parts)
        return Texts(
            starts=torch.cat([*starts, torch.tensor([int(offsets[-1])])]),
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


def facts_of(texts: Texts, styles: list[str], learnt: torch.Tensor) -> dict[str, object]:
    """What a card says of the texts, of which those with the numbers ``learnt`` are learnt."""
    return {
        "texts": len(texts.prompts),
        "styles": sorted(set(styles)),
        "prompts": PROMPTS,
        "texts_learnt": len(learnt),
        "tokens": len(texts.tokens),
        "answer_tokens": int(is_answer(texts).sum()),
        "texts_sha256": hashlib.sha256(texts.tokens.numpy().tobytes()).hexdigest(),
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
        weights = (last_logprobs / TEMPERATURE).softmax(-1)
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


def add_options(parser: argparse.ArgumentParser, *, work: str, groups: int, batch: int) -> None:
    """What every training that begins with texts can be told."""
    add = parser.add_argument
    add("--work", type=Path, default=Path(work), help="texts and the training's state")
    add("--seed", type=int, default=0)
    add("--groups", type=int, default=groups, help="batches of prompts (default: %(default)s)")
    add("--batch", type=int, default=batch, help="prompts in each (default: %(default)s)")
    add("--new-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    add("--threads", type=int, help="of the CPU; fewer than cores is faster on a busy machine")
    add("--share", type=share, default=(0, 1), metavar="I/N", help="texts of every N-th group")


def share(text: str) -> tuple[int, int]:
    """I and N of ``I/N``."""
    number, shares = (int(part) for part in text.split("/"))
    if not 0 <= number < shares:
        raise ValueError(text)
    return number, shares


def numbers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(int(part) for part in text.split(","))


def prepare(options: argparse.Namespace, layers: Sequence[int] = ()) -> None:
    """Let the target answer what is missing; ``layers`` are hidden states to keep of it."""
    share, shares = options.share
    wanted = [i for i in range(options.groups) if i % shares == share]
    missing = [i for i in wanted if not group_file(options.work, i).is_file()]
    if not missing:
        return
    # Where the machine has instructions for it, half the precision is twice the speed, and what is
    # learnt here need not be exact; where it has none, it is four times as slow.
    half = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    dtype = "bfloat16" if half else "float32"
    cfg = typed(compose(["model=smollm2_135m", f"model.dtype={dtype}"]))
    tokenizer = loading.load_tokenizer(cfg)
    loaded = loading.load_model(cfg, tokenizer)
    template = PromptTemplate(tokenizer, str(cfg.model.template))
    paragraphs = read_paragraphs()
    for i in missing:
        start = time.perf_counter()
        style, asked = prompts_of_group(options.seed, i, options.batch, paragraphs)
        prompts = [template.render([(prompt, None)]) for prompt in asked]
        texts = answers(
            loaded.model,
            prompts,
            [row % 2 == 0 for row in range(options.batch)],
            eos_ids=loaded.eos_ids,
            limit=options.new_tokens,
            seed=seed_of_group(options.seed, i),
            layers=layers,
        )
        about = {"style": style, "layers": ",".join(map(str, layers))}
        with jsonl.replacing(group_file(options.work, i)) as partial:
            known = {k: v for k, v in vars(texts).items() if v is not None}
            save_file(known, partial, metadata=about)
        answered = len(texts.tokens) - int(texts.prompts.sum())
        print(
            f"group {i} of {options.groups} ({style}): {len(texts.tokens)} tokens, {answered} of "
            f"them answers, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


def group_file(work: Path, i: int) -> Path:
    return work / f"texts-{i:04d}.safetensors"


def read_texts(work: Path, groups: int) -> tuple[Texts, list[str]]:
    parts, styles = [], []
    for i in range(groups):
        path = group_file(work, i)
        if not path.is_file():
            raise ConfigurationError(
                f"{path} is missing: {i} of {groups} groups of texts are there. Type the command "
                f"without --only, or with --groups {i}."
            )
        parts.append(Texts(**load_file(path)))
        with safe_open(path, "pt") as opened:
            styles += [opened.metadata()["style"]] * len(parts[-1].prompts)
    return Texts.joined(parts), styles
