"""Distil a small draft model for the bundled target, on a CPU in half an hour or two.

    python -m scripts.draft_model.train                        # generate, train, write the assets
    python -m scripts.draft_model.train --evaluate RUN         # MAT of the draft on a recorded run
    python -m scripts.draft_model.train --only prepare --share 0/2   # one of two that generate

The target answers prompts of ``scripts/draft_model/prompts.py`` (none from a benchmark), half of
them greedily, half at temperature 0.7; for every position of prompt and answer its most likely next
tokens are kept. The draft is a plain ``LlamaForCausalLM``: some of the target's layers, and its
embeddings of the most frequent ids alone (``id_map.safetensors``: key ``ids``, draft id -> target
id; the row of -1 is fed for every token left out). It learns the target's distribution (KL) and its
first choice (cross-entropy).

Everything is seeded and resumes: groups of answers and the training's state lie in ``--work``.
``RUN`` is the folder of a greedy run with recorded ``ar`` outputs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from scripts.draft_model.prompts import GROUP
from scripts.draft_model.texts import Texts, is_answer, prepare, read_texts
from specbench.config.compose import compose
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError, SpecBenchError
from specbench.models import int8_checkpoint, loading
from specbench.models.draft_loading import ID_MAP_FILE, read_id_map
from specbench.models.draft_model import DraftModel
from specbench.models.target import Target
from specbench.paths import ASSETS
from specbench.results.records import CASES, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_FOLDER = ASSETS / "draft_smollm2_135m"
# Of the target's thirty. Layer 16 has the head that looks at the token before, 17 and 18 those that
# find what followed the same token earlier; together they copy, which a draft needs most. Measured
# (docs/draft_model.md): the embeddings' layers 0, 1 and the last with a cut of this circuit learn
# far less.
LAYERS = [0, 1, 16, 17, 18, 29]
STEPS_BETWEEN_SAVES = 100
FACTS = "training.json"
CARD = """# Draft model for SmolLM2-135M-Instruct

Made by `python -m scripts.draft_model.train` (docs/draft_model.md): a plain `LlamaForCausalLM`, its
matrices kept as bytes with a scale a row (`specbench/models/int8_checkpoint.py`), cut out of the
target and trained on the target's answers to this project's own prompts, none from a benchmark.
`id_map.safetensors` holds the target's id of each of its ids; its first row stands for every id
left out. There is no tokenizer: it is the target's.

| | |
|---|---|
{rows}
{scores}
Licence: Apache-2.0, as the weights it derives from (HuggingFaceTB/SmolLM2-135M-Instruct). This page
is written by the script from `training.json`, whose row on prompts was added by hand.
"""


# -- the draft -------------------------------------------------------------------------------------


def frequent_ids(texts: Texts, size: int, keep: list[int]) -> torch.Tensor:
    """The draft's vocabulary: ``[size]`` target ids in rising order, after one -1.

    Ids by how often they are in answers and among the target's choices, prompts counting a
    quarter; ``keep`` always belongs to it. Ids that never occur follow in their own order, which in
    a byte-pair vocabulary is that of frequency. The -1 in front stands for every id left out.
    """
    vocab = int(max(texts.tokens.max(), texts.top_ids.max(), max(keep, default=0))) + 1
    vocab = max(vocab, size)
    answered = is_answer(texts)
    tokens = texts.tokens.long()
    count = torch.bincount(tokens[answered], minlength=vocab).double()
    count += 0.25 * torch.bincount(tokens[~answered], minlength=vocab)
    count += torch.bincount(texts.top_ids[:, 0].long(), minlength=vocab)
    count[torch.tensor(keep, dtype=torch.long)] = torch.inf
    chosen = torch.argsort(count, descending=True, stable=True)[: size - 1]
    return torch.cat([torch.tensor([-1]), chosen.sort().values])


def cut_down(target: PreTrainedModel, ids: torch.Tensor, layers: list[int]) -> PreTrainedModel:
    """A Llama of some of the target's layers and rows of its embeddings, tied.

    Args:
        target: a ``LlamaForCausalLM``.
        ids: the draft's vocabulary, see ``frequent_ids``; the row of -1 is the mean of the others.
        layers: numbers of the target's layers, in order.

    Raises:
        ConfigurationError: no such layer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    depth = target.config.num_hidden_layers
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise ConfigurationError(f"--layers {layers}: the target has layers 0 to {depth - 1}.")
    numbers = target.config.to_dict() | {
        "vocab_size": len(ids),
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": True,
        "layer_types": None,
    }
    # Ids of the target's special tokens mean others here; who needs them asks the target.
    numbers |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    draft = LlamaForCausalLM(LlamaConfig(**numbers)).to(target.dtype)
    with torch.no_grad():
        rows = target.model.embed_tokens.weight[ids.clamp(min=0)]
        rows[ids < 0] = rows[ids >= 0].mean(0)
        draft.model.embed_tokens.weight.copy_(rows)
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
        for own, number in zip(draft.model.layers, layers, strict=True):
            own.load_state_dict(target.model.layers[number].state_dict())
    return draft


@dataclass(frozen=True)
class Lesson:
    """Texts in the draft's own ids: what it reads and what it should say.

    Attributes:
        tokens: ``[n]`` int64.
        starts: ``[texts + 1]`` borders.
        weight: ``[n]`` float32 of each position's loss; 0 where there is nothing to say.
        first: ``[n]`` the target's first choice, -100 where the draft has no such id.
        top_ids: ``[n, k]``, 0 where the draft has no such id.
        top_probs: ``[n, k]`` float32, 0 there; rows sum to one.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    weight: torch.Tensor
    first: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor


def lesson(texts: Texts, ids: torch.Tensor, prompt_weight: float) -> Lesson:
    """Translate texts into the draft's ids."""
    vocab = int(max(ids.max(), texts.tokens.max(), texts.top_ids.max())) + 1
    own = torch.zeros(vocab, dtype=torch.long)  # 0: the row of all ids left out
    own[ids[1:]] = torch.arange(1, len(ids))
    top = own[texts.top_ids.long()]
    probs = texts.top_logprobs.float().exp() * (top > 0)
    mass = probs.sum(-1)
    # A position teaches what comes next, so the last one of a prompt already counts as answer.
    answered = is_answer(texts)
    answered[texts.starts[:-1] + texts.prompts - 1] = True
    weight = torch.where(answered, 1.0, prompt_weight) * (mass > 0)
    first = torch.where(top[:, 0] > 0, top[:, 0], -100)
    first[weight == 0] = -100
    return Lesson(
        tokens=own[texts.tokens.long()],
        starts=texts.starts,
        weight=weight,
        first=first,
        top_ids=top,
        top_probs=probs / mass.clamp(min=1e-9)[:, None],
    )


def batches(lengths: torch.Tensor, tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Texts in batches of similar length, padded to ``tokens`` at most, in random order."""
    noise = torch.rand(len(lengths), generator=generator) * 8
    order = torch.argsort(lengths + noise).tolist()
    found: list[list[int]] = [[]]
    for i in order:
        if found[-1] and (len(found[-1]) + 1) * int(lengths[i]) > tokens:
            found.append([])
        found[-1].append(i)
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def loss_of(
    draft: PreTrainedModel, taught: Lesson, chosen: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean over positions of KL and cross-entropy, and ``[2]`` agreements and positions.

    Agreement is counted over positions of full weight: the draft's first choice is the target's.
    """
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
    logits = draft.lm_head(hidden.flatten(0, 1)[place]).float()
    logprobs = logits.log_softmax(-1)
    weight = taught.weight[source].to(device)
    probs = taught.top_probs[source].to(device)
    own = logprobs.gather(1, taught.top_ids[source].to(device))
    kl = (torch.special.xlogy(probs, probs) - probs * own).sum(-1)
    first = taught.first[source].to(device)
    known = first >= 0
    ce = -logprobs.gather(1, first.clamp(min=0)[:, None])[:, 0] * known
    loss = (weight * (kl + 0.5 * ce)).sum() / weight.sum()
    full = weight == 1
    agreed = ((logits.detach().argmax(-1) == first) & full).sum()
    return loss, torch.stack([agreed, full.sum()])


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
    unseen = {prompt for prompt, out in zip(prompts, held.tolist(), strict=True) if out}
    return held, torch.tensor([prompt not in unseen for prompt in prompts])


def train(options: argparse.Namespace) -> None:
    """Train on the prepared texts and write the draft's folder."""
    texts, styles = read_texts(options.work, options.groups)
    cfg = compose(["model=smollm2_135m"])
    tokenizer = loading.load_tokenizer(cfg)
    loaded = loading.load_model(cfg, tokenizer)
    ids = frequent_ids(
        texts, options.vocab, sorted(loaded.eos_ids | set(tokenizer.all_special_ids))
    )
    taught = lesson(texts, ids, options.prompt_weight)
    held, learnt = split(texts)
    torch.manual_seed(options.seed)
    draft = cut_down(loaded.model, ids, options.layers)
    draft = draft.float().train().requires_grad_(True).to(options.device)
    draft.model.embed_tokens.weight.requires_grad_(False)  # the target's, and good as they are
    size = sum(p.numel() for p in draft.parameters())
    print(
        f"{len(styles)} texts, {len(texts.tokens)} tokens ({int(is_answer(texts).sum())} of them "
        f"answers); draft: {size / 1e6:.1f} M parameters; ids known in answers: "
        f"{float((taught.tokens[is_answer(texts)] > 0).float().mean()):.1%}",
        flush=True,
    )
    minutes = learn(draft, taught, torch.nonzero(learnt)[:, 0], options)
    facts = {
        "texts": len(styles),
        "texts_learnt": int(learnt.sum()),
        "tokens": len(texts.tokens),
        "answer_tokens": int(is_answer(texts).sum()),
        "epochs": options.epochs,
        "seed": options.seed,
        "layers": options.layers,
        "parameters": size,
        "training_minutes": round(minutes, 1),
        "torch": torch.__version__,
    }
    write_draft(draft, ids, options.out, loading.tokenizer_hash(tokenizer), facts)
    written = read_draft(options.out)
    matches = [
        matches_on(written, texts.tokens[a:b], int(prompt), ids)
        for a, b, prompt in zip(
            texts.starts[:-1][held], texts.starts[1:][held], texts.prompts[held], strict=True
        )
    ]
    write_card(options.out, {"held_out_mat": round(pooled_mat(matches, options.draft_len), 3)})
    print((options.out / FACTS).read_text(encoding="utf-8"))


def learn(
    draft: PreTrainedModel, taught: Lesson, texts: torch.Tensor, options: argparse.Namespace
) -> float:
    """Run the epochs that are left; gives the minutes that training took in all."""
    optimizer = torch.optim.AdamW(
        [p for p in draft.parameters() if p.requires_grad],
        lr=options.lr,
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )
    lengths = taught.starts.diff()[texts]
    plans = []
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        plans += [texts[b].tolist() for b in batches(lengths, options.batch_tokens, generator)]
    path = options.work / "training.pt"
    recipe = json.dumps([vars_of(options), len(plans), int(taught.starts[-1])], sort_keys=True)
    done, seconds = 0, 0.0
    if path.is_file():
        state = torch.load(path, map_location=options.device, weights_only=True)
        if state["recipe"] == recipe:
            draft.load_state_dict(state["draft"])
            optimizer.load_state_dict(state["optimizer"])
            done, seconds = state["done"], state["seconds"]
            print(f"going on at batch {done} of {len(plans)}", flush=True)
    start = time.perf_counter() - seconds
    counted = torch.zeros(2)
    shown = 0.0
    for number in range(done, len(plans)):
        share = number / len(plans)
        rate = min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * max(rate, 0.02)
        with torch.autocast(draft.device.type, torch.bfloat16):
            loss, agreed = loss_of(draft, taught, plans[number])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        counted += agreed.cpu()
        if number % 25 == 24 or number == len(plans) - 1:
            seconds = time.perf_counter() - start
            shown = float(counted[0] / counted[1])
            print(
                f"batch {number + 1} of {len(plans)}: loss {loss.item():.3f}, agreement "
                f"{shown:.3f} since the last line, {seconds / 60:.1f} min",
                flush=True,
            )
            counted.zero_()
        if number % STEPS_BETWEEN_SAVES == STEPS_BETWEEN_SAVES - 1 or number == len(plans) - 1:
            partial = path.with_suffix(".partial")
            torch.save(
                {
                    "recipe": recipe,
                    "draft": draft.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "done": number + 1,
                    "seconds": time.perf_counter() - start,
                },
                partial,
            )
            partial.replace(path)
    return (time.perf_counter() - start) / 60


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a training's state belongs to."""
    names = ("seed", "layers", "vocab", "lr", "epochs", "batch_tokens", "prompt_weight")
    return {name: getattr(options, name) for name in names}


def write_draft(
    draft: PreTrainedModel, ids: torch.Tensor, folder: Path, made_for: str, facts: dict[str, Any]
) -> None:
    """Weights in bytes, configuration, vocabulary and how it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    draft.config.tokenizer_hash = made_for
    int8_checkpoint.save(draft, folder)
    save_file({"ids": ids}, folder / ID_MAP_FILE)
    (folder / FACTS).unlink(missing_ok=True)
    write_card(folder, facts)


def read_draft(folder: Path) -> PreTrainedModel:
    """The draft as it was written, rounding included."""
    return int8_checkpoint.load(folder, dtype=torch.float32, attention="sdpa").eval()


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Add facts to those of a draft, and write its card anew from all of them."""
    path = folder / FACTS
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known |= facts
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    rows = "\n".join(
        f"| {name.replace('_', ' ')} | {', '.join(map(str, v)) if isinstance(v, list) else v} |"
        for name, v in known.items()
        if not isinstance(v, dict)
    )
    scores = "".join(
        f"\n{name.replace('_', ' ')}:\n\n"
        + "\n".join(f"- {key}: {value}" for key, value in found.items())
        + "\n"
        for name, found in known.items()
        if isinstance(found, dict)
    )
    (folder / "README.md").write_text(CARD.format(rows=rows, scores=scores), encoding="utf-8")


# -- what it is worth ------------------------------------------------------------------------------


@torch.inference_mode()
def matches_on(
    draft: PreTrainedModel, tokens: torch.Tensor, first: int, ids: torch.Tensor
) -> np.ndarray:
    """For each token of an answer after its first: whether the draft's likeliest token is it.

    A draft of any length is accepted up to the first miss, and up to there what it was drafted from
    is the text itself: one pass over the text tells what every step would have accepted.

    Args:
        draft: the draft model.
        tokens: ``[n]`` ids of the target, prompt and answer.
        first: place of the answer's first token.
        ids: the draft's vocabulary, see ``frequent_ids``.
    """
    own = torch.zeros(int(max(ids.max(), tokens.max())) + 1, dtype=torch.long)
    own[ids[1:]] = torch.arange(1, len(ids))
    rows = own[tokens.long()][None, :-1].to(draft.device)
    hidden = draft.model(input_ids=rows, use_cache=False).last_hidden_state[0, first:]
    logits = draft.lm_head(hidden)
    logits[:, 0] = -torch.inf
    return (ids[logits.argmax(-1).cpu()] == tokens[first + 1 :]).numpy()


def steps_of(matches: np.ndarray, draft_len: int) -> int:
    """Steps of greedy decoding with chains of ``draft_len`` tokens.

    Args:
        matches: from ``matches_on``; a step commits the matches in front, and one token more.
        draft_len: tokens of a chain.
    """
    steps = at = 0
    while at < len(matches):
        miss = np.flatnonzero(~matches[at : at + draft_len])
        at += (int(miss[0]) if len(miss) else draft_len) + 1
        steps += 1
    return steps


def pooled_mat(matches: list[np.ndarray], draft_len: int) -> float:
    """New tokens after the first over steps, over all texts; NaN where there is no step."""
    steps = sum(steps_of(m, draft_len) for m in matches)
    return sum(map(len, matches)) / steps if steps else float("nan")


def evaluate(options: argparse.Namespace) -> None:
    """MAT of the written draft on the recorded `ar` outputs of a run; goes into the card too."""
    found, _ = read_records(options.evaluate / CASES)
    plain = [r for r in found if r.label == "ar" and r.status != "failed" and r.repeat == 0]
    if not plain:
        raise ConfigurationError(f"{options.evaluate} has no finished `ar` records.")
    draft = read_draft(options.out)
    ids = load_file(options.out / ID_MAP_FILE)["ids"]
    by_task: dict[str, list[np.ndarray]] = {}
    for record in plain:
        tokens = torch.tensor([*record.prompt_ids, *record.output_ids])
        by_task.setdefault(str(record.task), []).append(
            matches_on(draft, tokens, len(record.prompt_ids), ids)
        )
    by_task["overall"] = [m for found in by_task.values() for m in found]
    scores: dict[str, Any] = {}
    for task, matches in by_task.items():
        agreement = np.concatenate(matches).mean()
        scores[task] = (
            f"MAT {pooled_mat(matches, options.draft_len):.3f}, agreement {agreement:.3f}, "
            f"{len(matches)} turns"
        )
        print(f"{task:16} {scores[task]}")
    name = f"{plain[0].dataset}_chains_of_{options.draft_len}"
    write_card(options.out, {name: scores})


def pass_times(folder: Path, context: int = 256, repeats: int = 60) -> tuple[float, float]:
    """Median seconds of a one-token pass of target and draft, taken in turns, linears packed.

    The draft's is a whole step as methods take it: ids translated, one node fed, logits over its
    own ids.
    """
    cfg = compose(["model=smollm2_135m"])

    def packed(network: PreTrainedModel) -> Target:
        return Target(
            network,
            max_len=context + 8,
            max_nodes=1,
            packed_bytes=2_000_000_000,
            cache_dir=Path(cfg.cache_dir),
        )

    target = packed(loading.load_model(cfg).model)
    draft = DraftModel(
        packed(read_draft(folder)),
        target_vocab=target.vocab_size,
        id_map=read_id_map(folder),
        max_nodes=1,
    )
    tokens = np.random.default_rng(0).integers(3, target.vocab_size, context)
    target.prefill(tokens)
    draft.begin(tokens)
    node, above = tokens[:1], np.array([-1])
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        start = time.perf_counter()
        target.forward(int(tokens[0]), DraftTree.empty())
        middle = time.perf_counter()
        draft.extend(node, above, own=True)
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - middle)
        draft.drop_nodes()
    return statistics.median(times[0]), statistics.median(times[1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, default=Path(".cache/draft_smollm2_135m"), help="texts and state")
    add("--out", type=Path, default=DRAFT_FOLDER, help="the draft's folder")
    add("--seed", type=int, default=0)
    add("--groups", type=int, default=48, help="batches of prompts (default: %(default)s)")
    add("--batch", type=int, default=GROUP, help="prompts in each (default: %(default)s)")
    add("--new-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    add("--vocab", type=int, default=18000, help="the draft's ids (default: %(default)s)")
    add("--layers", type=_numbers, default=LAYERS, help="of the target (default: %(default)s)")
    add("--epochs", type=int, default=2)
    add("--lr", type=float, default=1e-3)
    add("--batch-tokens", type=int, default=1024, help="padding included")
    add("--prompt-weight", type=float, default=0.1, help="of what follows a prompt's tokens")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="of the CPU; fewer than cores is faster on a busy machine")
    add("--only", choices=("prepare", "train"), help="one half of the work")
    add("--share", type=_share, default=(0, 1), metavar="I/N", help="prepare every N-th group")
    add("--evaluate", type=Path, metavar="RUN", help="only tell the MAT on a recorded run")
    add("--time", action="store_true", help="only compare one-token passes with the target")
    add("--draft-len", type=int, default=4, help="tokens of a chain (default: %(default)s)")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _share(text: str) -> tuple[int, int]:
    share, shares = (int(part) for part in text.split("/"))
    if not 0 <= share < shares:
        raise ValueError(text)
    return share, shares


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        if options.evaluate:
            evaluate(options)
        elif options.time:
            slow, fast = pass_times(options.out)
            found = {
                "target_ms": round(slow * 1e3, 2),
                "draft_ms": round(fast * 1e3, 2),
                "ratio": round(fast / slow, 3),
            }
            print(f"one-token pass: {found}")
            write_card(options.out, {"one-token_pass": found})
        else:
            if options.only != "train":
                prepare(options)
            if options.only != "prepare":
                train(options)
    except SpecBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
