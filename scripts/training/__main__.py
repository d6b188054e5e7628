"""Train the draft model and the heads of the bundled model (assets/README.md).

    python -m scripts.training draft           # texts, training, assets/draft_smollm2_135m
    python -m scripts.training heads           # EAGLE (1 and 2), Medusa-1, EAGLE-3, Hydra++, DFlash
    python -m scripts.training eagle eagle3    # or some of them
    python -m scripts.training heads --minutes 8 --device cuda    # from the target as it runs

The target answers this project's own prompts (none from a benchmark), and reads prose; its most
likely next tokens, and for heads its hidden states, are kept on the way. Everything is seeded, and
goes on where it stopped when the command is typed again; texts and states lie in --work.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from analysis.runs.cli import parser_of, reporting_errors
from scripts.training import draft, heads, live
from scripts.training.texts import (
    Author,
    Mix,
    facts_of,
    near_a_question,
    prepare_texts,
    split_held_out,
    take_evenly,
)
from scripts.training.trainer import Recipe, facts_of_recipe, learn, write
from specbench.config.compose import compose, to_config
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError
from specbench.models import loading

_SCORED = 24  # held-out texts at most


def train(
    recipes: Sequence[Recipe],
    mix: Mix,
    work: Path,
    out: Path,
    *,
    device: str = "cpu",
    apart: Sequence[Path] = (),
    model: Sequence[str] = ("model=smollm2_135m",),
    minutes: float | None = None,
) -> None:
    """Make the texts that are missing below ``work``, train, and write models below ``out``.

    Args:
        apart: .jsonl files of questions; texts that share 13 words in a row with one are excluded.
        model: words that name the target.
        minutes: for texts and training together, of heads that learn from a live target.
    """
    end = time.monotonic() + 60 * (minutes or math.inf)

    def author() -> Author:
        # Where the machine has instructions for it, half the precision is twice the speed, and what
        # is learnt here need not be exact; where it has none, it is four times as slow.
        half = device != "cpu" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if half else "float32"
        cfg = to_config(compose([*model, f"model.device={device}", f"model.dtype={dtype}"]))
        loaded = loading.load_model(cfg)
        return Author(mix, loaded, PromptTemplate.from_config(loaded.tokenizer, cfg))

    texts = prepare_texts(mix, work, author, 20 * (minutes or math.inf))
    loaded = loading.load_model(to_config(compose([*model, f"model.device={device}"])))
    tokenizer: Any = loaded.tokenizer
    decoded = [tokenizer.decode(text.tokens.tolist()) for text in texts] if apart else []
    near = near_a_question(decoded, apart)
    held, numbers = split_held_out(texts, near)
    learnt = [texts[i] for i in numbers]
    held = take_evenly(held, _SCORED if minutes is None else 4 * _SCORED)
    shared = facts_of(texts, learnt) | {"held_out_texts": len(held), "device": device}
    if apart:
        names = ", ".join(path.name for path in apart)
        shared["texts_with_13_words_of_a_question"] = f"{len(near)}, left out; of {names}"
    if minutes is not None:
        live.train(recipes, loaded, texts, learnt, held, out, end, shared)
        return
    for recipe in recipes:
        torch.manual_seed(recipe.seed)
        family = heads.FAMILIES.get(recipe.name, draft.TrainableDraft)
        trainable = family(recipe, loaded, texts, learnt)
        facts = facts_of_recipe(trainable) | shared
        facts |= learn(trainable, learnt, held, work)
        print(write(trainable, facts, out if recipe.name == "draft" else out / recipe.name))


def work(options: argparse.Namespace) -> int:
    names = [n for name in options.names for n in (heads.RECIPES if name == "heads" else [name])]
    if options.minutes is not None and "draft" in names:
        raise ConfigurationError("--minutes must be given for heads alone. Leave draft out.")
    for job in [names] if options.minutes is not None else [[name] for name in names]:
        family: Any = draft if job == ["draft"] else heads if options.minutes is None else live
        train(
            [family.RECIPES[name] for name in job],
            family.MIX.scaled(options.scale),
            options.work or Path(".cache") / family.FOLDER.name,
            options.out or family.FOLDER,
            device=options.device,
            apart=options.apart,
            minutes=options.minutes,
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "scripts.training")
    add = parser.add_argument
    add("names", nargs="+", choices=("heads", "draft", *heads.RECIPES), help="what is trained")
    add("--work", type=Path, help="texts and the state of the training (default: in .cache)")
    add("--out", type=Path, help="the draft's folder, or that of the heads' folders")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--scale", type=float, default=1.0, help="times as many texts (default: %(default)s)")
    apart = "questions that no text may share 13 words in a row with"
    add("--apart", type=Path, nargs="*", default=[], metavar="FILE.jsonl", help=apart)
    add("--minutes", type=float, help="learn from the target while it runs, texts included")
    options = parser.parse_args(argv)
    return reporting_errors(lambda: work(options))


if __name__ == "__main__":
    sys.exit(main())
