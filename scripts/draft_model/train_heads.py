"""Train heads for the embedded model: Medusa-1, Hydra++, EAGLE (1 and 2), EAGLE-3.

    python -m scripts.draft_model.train_heads                  # texts, then each head in turn
    python -m scripts.draft_model.train_heads --stage texts    # one stage: texts or a head's name
    python -m scripts.draft_model.train_heads --stage eagle3 --minutes 55    # stops, and goes on
                                                               # when the command is typed again

The target answers prompts of ``scripts/draft_model/prompts.py`` (none from a benchmark), half of
them greedily, half at temperature 0.7; its hidden states and its most likely next tokens are kept
on the way. Heads learn its distribution (soft cross-entropy, by steps); EAGLE its next state too.
Everything is seeded and resumes; ``--work`` holds texts and states. A head is written, int8, in its
published format whenever a stage ends, with a card and its held-out curve.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from analysis.runs.command import parser_of, reporting_errors
from scripts.draft_model.folder import FACTS, write_card
from scripts.draft_model.head_families import Pupil, Teacher, makers
from scripts.draft_model.head_lesson import frequent, pack
from scripts.draft_model.head_loss import HELD_STEPS, held_out, loss_of
from scripts.draft_model.lesson import batches, split
from scripts.draft_model.texts import Texts, group_file, is_answer, prepare, read_texts
from scripts.draft_model.train import share
from specbench.config.compose import compose, typed
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.checkpoints import int8
from specbench.models.embeddings import Embeddings
from specbench.paths import ASSETS
from specbench.storage import jsonl

HEADS_FOLDER = ASSETS / "heads_smollm2_135m"
STEPS_BETWEEN_SAVES = 50
_SAMPLE = 160  # texts that a head's linear start is fitted on


@dataclass(frozen=True)
class Recipe:
    """How one head is trained; what its state belongs to."""

    name: str
    epochs: int
    lr: float
    steps: int  # guesses per row: heads, or steps over the head's own guesses
    seed: int = 0
    batch_tokens: int = 512
    prompt_share: float = 0.5  # of a prompt's positions that are learned, drawn anew each time
    chain_share: float = 0.5  # of the rows that learn more than their first guess, likewise
    candidates: int = 2048  # most frequent ids in each softmax, besides the batch's own
    drawn: int = 512  # and drawn ones
    layers: tuple[int, ...] = (2, 19, 27)  # states that EAGLE-3 reads
    vocab: int = 16384  # ids that EAGLE-3 says


# Rates far above the papers' 3e-5 … 1e-4, which are for widths of 4096 and more, and for days.
# EAGLE's paper learns one step, from true states alone (`--steps 1`); three steps, as EAGLE-3 has
# them, are what a chain drafts with.
RECIPES = {
    "eagle": Recipe("eagle", epochs=10, lr=1e-3, steps=3),
    "medusa": Recipe("medusa", epochs=3, lr=1e-3, steps=4),
    "eagle3": Recipe("eagle3", epochs=3, lr=1e-3, steps=3),
    "hydra": Recipe("hydra", epochs=4, lr=5e-4, steps=4),
}


CARD = """# {title} for SmolLM2-135M-Instruct

Made by `python -m scripts.draft_model.train_heads` (docs/draft_model.md) in the published format
that `specbench/models/heads/` reads, its matrices kept as bytes with a scale a row
(`specbench/models/checkpoints/int8.py`). Trained on the target's answers to this project's own
prompts, none from a benchmark. The curve is measured on held-out greedy answers, in float32:
`top1` is the share of a chain's first, second, … guesses that are the target's own choice, of
those whose guesses before were right; `chain MAT` is that of greedy decoding with chains of
{held_steps}. Epoch 0 is the head before training.

| | |
|---|---|
{{rows}}
{{scores}}
Licence: Apache-2.0, as the weights it derives from (HuggingFaceTB/SmolLM2-135M-Instruct). This page
is written by the script from `training.json`.
"""
# What the templates of prompts.yaml share with a benchmark's.
PROMPTS = (
    "Two of five templates of translations begin with Translate German to English:, two of five of "
    "summaries with Summarize:, as Spec-Bench's own do; no prompt is a benchmark's"
)
TITLES = {
    "medusa": "Medusa-1 heads (shared LM head)",
    "hydra": "Hydra++ heads (shared LM head)",
    "eagle": "An EAGLE-1/2 head",
    "eagle3": "An EAGLE-3 head",
}


@dataclass
class Progress:
    """Where a training stands."""

    done: int = 0
    minutes: float = 0.0
    loss: float = 0.0  # moving mean
    curve: list[dict[str, Any]] = field(default_factory=list)


def learn(
    pupil: Pupil,
    texts: Texts,
    learnt: torch.Tensor,
    test: list[int],
    recipe: Recipe,
    options: argparse.Namespace,
    common: torch.Tensor,
) -> Progress:
    """Train until the recipe is done or the stage's minutes are over; the state is saved."""
    layers = states_of(recipe)
    trained = [p for p in pupil.head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    plans: list[list[int]] = []
    ends = {0: 0}
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
        found = batches(texts.starts.diff()[learnt], recipe.batch_tokens, generator)
        plans += [learnt[b].tolist() for b in found]
        ends[len(plans)] = epoch + 1
    path = options.work / f"{recipe.name}.pt"
    key = json.dumps([asdict(recipe), len(plans), int(texts.starts[-1])], sort_keys=True)
    progress = _resume(path, key, pupil, optimizer)
    began, before = time.perf_counter(), progress.minutes
    while True:
        done = progress.done
        progress.minutes = before + (time.perf_counter() - began) / 60
        if done in ends and len(progress.curve) == ends[done]:
            score = held_out(pupil, texts, test, layers)
            mean = {"loss": round(progress.loss, 3)} if done else {}
            progress.curve.append({"epoch": ends[done], **mean, **score})
            print(f"{recipe.name}: {progress.curve[-1]}, {progress.minutes:.1f} min", flush=True)
        over = (time.perf_counter() - began) / 60 > options.minutes
        if over or done == len(plans) or done % STEPS_BETWEEN_SAVES == 0:
            _save(path, key, pupil, optimizer, progress)
        if over or done == len(plans):
            return progress
        draw = torch.Generator().manual_seed(recipe.seed * 1_000_003 + done)
        batch = pack(
            texts,
            plans[done],
            layers,
            prompt_share=recipe.prompt_share,
            chain_share=recipe.chain_share,
            generator=draw,
        )
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * _rate(done, len(plans))
        drawn = torch.randint(len(common), (recipe.drawn,), generator=draw)
        others = torch.cat([common[: recipe.candidates], drawn])
        loss = loss_of(pupil, batch, recipe.steps, others=others, noise=draw)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        progress.done += 1
        share = 0.05 if progress.loss else 1.0
        progress.loss += share * (float(loss.detach()) - progress.loss)
        if progress.done % 25 == 0:
            print(
                f"{recipe.name}: batch {progress.done} of {len(plans)}, loss {progress.loss:.3f}, "
                f"{progress.minutes:.1f} min",
                flush=True,
            )


def _rate(number: int, count: int) -> float:
    """Share of the learning rate: a short warm-up, then half a cosine down to 0.02."""
    return max(0.02, min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * number / count)))


def _resume(path: Path, key: str, pupil: Pupil, optimizer: torch.optim.Optimizer) -> Progress:
    if not path.is_file():
        return Progress()
    state = torch.load(path, weights_only=True)
    if state["recipe"] != key:
        return Progress()
    pupil.head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    progress = Progress(**state["progress"])
    print(f"going on at batch {progress.done}", flush=True)
    return progress


def _save(
    path: Path,
    key: str,
    pupil: Pupil,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    state = {"head": pupil.head.state_dict(), "optimizer": optimizer.state_dict()}
    with jsonl.replacing(path) as partial:
        torch.save({"recipe": key, "progress": asdict(progress), **state}, partial)


def write_head(
    folder: Path, pupil: Pupil, recipe: Recipe, progress: Progress, facts: dict[str, Any]
) -> None:
    """The head in its published format, and its card."""
    name, tensors, config = pupil.file()
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write_json(folder / "config.json", config)
    with jsonl.replacing(folder / name) as partial:
        save_file(int8.rounded(tensors), partial)
    (folder / FACTS).unlink(missing_ok=True)
    about = asdict(recipe) | {"layers": list(recipe.layers)}
    if recipe.name != "eagle3":
        del about["layers"], about["vocab"]
    about |= {
        "parameters": sum(p.numel() for p in pupil.head.parameters()),
        "batches_done": progress.done,
        "training_minutes": round(progress.minutes, 1),
        **facts,
        "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        "curve": {
            f"epoch {point['epoch']}": ", ".join(
                f"{name} {value}" for name, value in point.items() if name != "epoch"
            )
            for point in progress.curve
        },
    }
    card = CARD.format(title=TITLES[recipe.name], held_steps=HELD_STEPS)
    write_card(folder, about, card)


def train(options: argparse.Namespace, names: list[str]) -> None:
    texts, styles = read_texts(options.work, options.groups)
    with safe_open(group_file(options.work, 0), "pt") as opened:
        stored = opened.metadata().get("layers")
    if stored != ",".join(map(str, _kept(options))):
        raise ConfigurationError(
            f"--layers {options.layers}: the texts in {options.work} were kept with the states "
            f"{stored or 'of no layers'}. Type those, or name another folder with --work."
        )
    cfg = typed(compose(["model=smollm2_135m"]))
    loaded = loading.load_model(cfg, loading.load_tokenizer(cfg))
    ends = Embeddings(loaded.model)
    held, learnt = split(texts)
    common = frequent(texts, len(ends.embedding))
    rows = torch.nonzero(learnt)[:, 0]
    test = torch.nonzero(held)[:, 0].tolist()[: options.held]
    facts = {
        "texts": len(texts.prompts),
        "styles": sorted(set(styles)),
        "prompts": PROMPTS,
        "texts_learnt": len(rows),
        "tokens": len(texts.tokens),
        "answer_tokens": int(is_answer(texts).sum()),
        "texts_sha256": hashlib.sha256(texts.tokens.numpy().tobytes()).hexdigest(),
        "held_out_texts": len(test),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for name in names:
        recipe = replace(RECIPES[name], layers=options.layers, seed=options.seed)
        recipe = replace(
            recipe,
            epochs=options.epochs or recipe.epochs,
            steps=options.steps or recipe.steps,
        )
        spaced = rows[:: -(-len(rows) // _SAMPLE)].tolist()
        sample = [
            pack(texts, spaced[i : i + 8], states_of(recipe)) for i in range(0, len(spaced), 8)
        ]
        torch.manual_seed(recipe.seed)
        pupil = makers(recipe.layers, recipe.vocab)[name](
            Teacher(ends, loaded.model.config.to_dict(), common, sample)
        )
        progress = learn(pupil, texts, rows, test, recipe, options, common)
        write_head(options.out / name, pupil, recipe, progress, facts)
        print((options.out / name / "README.md").read_text(encoding="utf-8"))


def _kept(options: argparse.Namespace) -> tuple[int, ...]:
    """Hidden states that texts are kept with: EAGLE-3's, and those after the final norm."""
    return (*options.layers, -1)


def states_of(recipe: Recipe) -> list[int]:
    """Which of the kept states a head reads."""
    last = len(recipe.layers)
    return list(range(last + 1)) if recipe.name == "eagle3" else [last]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--stage", choices=("texts", *RECIPES), help="one of them (default: all in turn)")
    add("--work", type=Path, default=Path(".cache/heads_smollm2_135m"), help="texts and states")
    add("--out", type=Path, default=HEADS_FOLDER, help="a folder for each head goes into it")
    add("--minutes", type=float, default=math.inf, help="of one head's training in this stage")
    add("--seed", type=int, default=0)
    add("--groups", type=int, default=14, help="batches of prompts (default: %(default)s)")
    add("--batch", type=int, default=96, help="prompts in each (default: %(default)s)")
    add("--new-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    add("--layers", type=_numbers, default=(2, 19, 27), help="EAGLE-3's states: 2,19,27")
    add("--epochs", type=int, help="instead of the recipe's")
    add("--steps", type=int, help="of a head's guesses, instead of the recipe's")
    add("--held", type=int, default=24, help="held-out texts that are scored")
    add("--threads", type=int, help="of the CPU; fewer than cores is faster on a busy machine")
    add("--share", type=share, default=(0, 1), metavar="I/N", help="texts of every N-th group")
    return parser.parse_args(argv)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def work(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.stage in (None, "texts"):
        prepare(options, _kept(options))
    if options.stage != "texts":
        train(options, [options.stage] if options.stage else list(RECIPES))
    return 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return reporting_errors(lambda: work(options))


if __name__ == "__main__":
    sys.exit(main())
