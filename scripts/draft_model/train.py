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

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from analysis.runs.command import parser_of, reporting_errors
from scripts.draft_model.folder import DRAFT_FOLDER, FACTS, read_draft, write_card, write_draft
from scripts.draft_model.lesson import Lesson, batches, frequent_ids, lesson, loss_of, split
from scripts.draft_model.prompts import GROUP
from scripts.draft_model.score import evaluate, matches_on, pass_times, pooled_mat
from scripts.draft_model.texts import is_answer, prepare, read_texts
from specbench.config.compose import compose, typed
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.storage import jsonl

# Of the target's thirty. Layer 16 has the head that looks at the token before, 17 and 18 those that
# find what followed the same token earlier; together they copy, which a draft needs most. Measured
# (docs/draft_model.md): the embeddings' layers 0, 1 and the last with a cut of this circuit learn
# far less.
LAYERS = [0, 1, 16, 17, 18, 29]
STEPS_BETWEEN_SAVES = 100
# What a training's state belongs to.
RECIPE = ("seed", "layers", "vocab", "lr", "epochs", "batch_tokens", "prompt_weight")


def cut_down(target: PreTrainedModel, ids: torch.Tensor, layers: list[int]) -> PreTrainedModel:
    """A Llama of some of the target's layers and rows of its embeddings, tied.

    ``ids`` is the draft's vocabulary, see ``frequent_ids``; the row of -1 is the others' mean.
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
    draft: Any = LlamaForCausalLM(LlamaConfig(**numbers))
    draft.to(target.dtype)
    with torch.no_grad():
        rows = target.model.embed_tokens.weight[ids.clamp(min=0)]
        rows[ids < 0] = rows[ids >= 0].mean(0)
        draft.model.embed_tokens.weight.copy_(rows)
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
        for own, number in zip(draft.model.layers, layers, strict=True):
            own.load_state_dict(target.model.layers[number].state_dict())
    small: PreTrainedModel = draft
    return small


def train(options: argparse.Namespace) -> None:
    texts, styles = read_texts(options.work, options.groups)
    cfg = typed(compose(["model=smollm2_135m"]))
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
    plans = _plans(taught.starts.diff()[texts], texts, options)
    path = options.work / "training.pt"
    recipe = {name: getattr(options, name) for name in RECIPE}
    key = json.dumps([recipe, len(plans), int(taught.starts[-1])], sort_keys=True)
    done, seconds = _resume(path, key, draft, optimizer)
    if done:
        print(f"going on at batch {done} of {len(plans)}", flush=True)
    start = time.perf_counter() - seconds
    counted = torch.zeros(2)
    for number in range(done, len(plans)):
        rate = _rate(number, len(plans))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate
        with torch.autocast(draft.device.type, torch.bfloat16):
            loss, agreed = loss_of(draft, taught, plans[number])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        counted += agreed.cpu()
        seconds = time.perf_counter() - start
        last = number == len(plans) - 1
        if number % 25 == 24 or last:
            print(
                f"batch {number + 1} of {len(plans)}: loss {loss.item():.3f}, agreement "
                f"{float(counted[0] / counted[1]):.3f} since the last line, "
                f"{seconds / 60:.1f} min",
                flush=True,
            )
            counted.zero_()
        if number % STEPS_BETWEEN_SAVES == STEPS_BETWEEN_SAVES - 1 or last:
            _save(path, key, draft, optimizer, number + 1, seconds)
    return seconds / 60


def _plans(
    lengths: torch.Tensor, texts: torch.Tensor, options: argparse.Namespace
) -> list[list[int]]:
    plans = []
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        plans += [texts[b].tolist() for b in batches(lengths, options.batch_tokens, generator)]
    return plans


def _rate(number: int, count: int) -> float:
    """Share of the learning rate: a short warm-up, then half a cosine down to 0.02."""
    rate = min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * (number / count)))
    return max(rate, 0.02)


def _resume(
    path: Path, key: str, draft: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Load a stopped training of the same recipe; gives its batches and seconds."""
    if not path.is_file():
        return 0, 0.0
    state = torch.load(path, map_location=draft.device, weights_only=True)
    if state["recipe"] != key:
        return 0, 0.0
    draft.load_state_dict(state["draft"])
    optimizer.load_state_dict(state["optimizer"])
    return state["done"], state["seconds"]


def _save(
    path: Path,
    key: str,
    draft: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    done: int,
    seconds: float,
) -> None:
    state = {"draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
    with jsonl.replacing(path) as partial:
        torch.save({"recipe": key, "done": done, "seconds": seconds, **state}, partial)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
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
    add("--share", type=share, default=(0, 1), metavar="I/N", help="prepare every N-th group")
    add("--evaluate", type=Path, metavar="RUN", help="only tell the MAT on a recorded run")
    add("--time", action="store_true", help="only compare one-token passes with the target")
    add("--draft-len", type=int, default=4, help="tokens of a chain (default: %(default)s)")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def share(text: str) -> tuple[int, int]:
    """I and N of ``I/N``."""
    number, shares = (int(part) for part in text.split("/"))
    if not 0 <= number < shares:
        raise ValueError(text)
    return number, shares


def work(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.evaluate:
        evaluate(options)
    elif options.time:
        slow, fast = pass_times(options.out)
        found = {"target_ms": round(slow * 1e3, 2), "draft_ms": round(fast * 1e3, 2)}
        found["ratio"] = round(fast / slow, 3)
        print(f"one-token pass: {found}")
        write_card(options.out, {"one-token_pass": found})
    else:
        if options.only != "train":
            prepare(options)
        if options.only != "prepare":
            train(options)
    return 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return reporting_errors(lambda: work(options))


if __name__ == "__main__":
    sys.exit(main())
