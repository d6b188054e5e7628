"""Train the draft model and the heads of the bundled model (assets/README.md).

    python -m scripts.training draft           # texts, training, assets/draft_smollm2_135m
    python -m scripts.training heads           # EAGLE (1 and 2), Medusa-1, EAGLE-3 and Hydra++
    python -m scripts.training eagle eagle3    # or some of them

The target answers this project's own prompts (none from a benchmark), and reads prose; its most
likely next tokens, and for heads its hidden states, are kept on the way. Everything is seeded, and
goes on where it stopped when the command is typed again; texts and states lie in --work.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from analysis.runs.cli import parser_of, reporting_errors
from scripts.training import draft, heads
from scripts.training.texts import (
    Author,
    Mix,
    facts_of,
    near_a_question,
    prepare_texts,
    split_held_out,
    take_evenly,
)
from scripts.training.trainer import Recipe, learn
from specbench.config.compose import compose, to_config
from specbench.data.chat_templates import PromptTemplate
from specbench.models import loading
from specbench.storage import jsonl

FACTS = "training.json"
RECIPES = {"draft": draft.RECIPE, **heads.RECIPES}
_SCORED = 24  # held-out texts at most
_TITLES = {
    "draft": "Draft model",
    "medusa": "Medusa-1 heads (shared LM head)",
    "hydra": "Hydra++ heads (shared LM head)",
    "eagle": "An EAGLE-1/2 head",
    "eagle3": "An EAGLE-3 head",
}
_CARD = """# {title} for SmolLM2-135M-Instruct

Made by `python -m scripts.training {name}`: assets/README.md says how, and what the files hold.
Matrices are kept as bytes with a scale a row (`specbench/models/checkpoints/int8.py`).
Licence: Apache-2.0, as the weights it derives from (HuggingFaceTB/SmolLM2-135M-Instruct).

```json
{facts}
```
"""


def train(
    recipe: Recipe,
    mix: Mix,
    work: Path,
    out: Path,
    *,
    device: str = "cpu",
    apart: Sequence[Path] = (),
    model: Sequence[str] = ("model=smollm2_135m",),
) -> None:
    """Make the texts that are missing below ``work``, train, and write the model to ``out``.

    Args:
        apart: .jsonl files of questions; texts that share 13 words in a row with one are excluded.
        model: words that name the target.
    """

    def author() -> Author:
        # Where the machine has instructions for it, half the precision is twice the speed, and what
        # is learnt here need not be exact; where it has none, it is four times as slow.
        half = device != "cpu" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if half else "float32"
        cfg = to_config(compose([*model, f"model.device={device}", f"model.dtype={dtype}"]))
        loaded = loading.load_model(cfg)
        return Author(mix, loaded, PromptTemplate.from_config(loaded.tokenizer, cfg))

    texts = prepare_texts(mix, work, author)
    loaded = loading.load_model(to_config(compose([*model, f"model.device={device}"])))
    tokenizer: Any = loaded.tokenizer
    decoded = [tokenizer.decode(text.tokens.tolist()) for text in texts] if apart else []
    near = near_a_question(decoded, apart)
    held, numbers = split_held_out(texts, near)
    held, learnt = take_evenly(held, _SCORED), [texts[i] for i in numbers]
    torch.manual_seed(recipe.seed)
    family = heads.FAMILIES.get(recipe.name, draft.TrainableDraft)
    trainable = family(recipe, loaded, texts, learnt)
    facts = {name: value for name, value in asdict(recipe).items() if value or name == "seed"}
    facts |= {"parameters": trainable.parameters} | facts_of(texts, learnt)
    facts["held_out_texts"] = len(held)
    if apart:
        names = ", ".join(path.name for path in apart)
        facts["texts_with_13_words_of_a_question"] = f"{len(near)}, left out; of {names}"
    facts |= learn(trainable, learnt, held, work)
    out.mkdir(parents=True, exist_ok=True)
    facts["sha256"] = hashlib.sha256(trainable.save(out).read_bytes()).hexdigest()
    jsonl.write_json(out / FACTS, facts)
    card = _CARD.format(
        title=_TITLES[recipe.name], name=recipe.name, facts=json.dumps(facts, indent=1)
    )
    jsonl.write_text(out / "README.md", card)
    print(card)


def work(options: argparse.Namespace) -> int:
    names = [n for name in options.names for n in (heads.RECIPES if name == "heads" else [name])]
    for name in names:
        family = draft if name == "draft" else heads
        out = options.out or family.FOLDER
        train(
            RECIPES[name],
            family.MIX.scaled(options.scale),
            options.work or Path(".cache") / family.FOLDER.name,
            out if name == "draft" else out / name,
            device=options.device,
            apart=options.apart,
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "scripts.training")
    add = parser.add_argument
    add("names", nargs="+", choices=("heads", *RECIPES), help="what is trained")
    add("--work", type=Path, help="texts and the state of the training (default: in .cache)")
    add("--out", type=Path, help="the draft's folder, or that of the heads' folders")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--scale", type=float, default=1.0, help="times as many texts (default: %(default)s)")
    apart = "questions that no text may share 13 words in a row with"
    add("--apart", type=Path, nargs="*", default=[], metavar="FILE.jsonl", help=apart)
    options = parser.parse_args(argv)
    return reporting_errors(lambda: work(options))


if __name__ == "__main__":
    sys.exit(main())
