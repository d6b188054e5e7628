"""Train heads for the embedded model: Medusa-1, Hydra++, EAGLE (1 and 2), EAGLE-3.

    python -m scripts.draft_model.train_heads                  # texts, then each head in turn
    python -m scripts.draft_model.train_heads --stage texts    # one stage: texts or a head's name
    python -m scripts.draft_model.train_heads --stage eagle3 --minutes 55    # stops, and goes on
                                                               # when the command is typed again
    python -m scripts.draft_model.train_heads --asked 80 --read 12 --visits 12e6    # broad texts,
                                                               # the same budget for each head

The target answers prompts of ``scripts/draft_model/prompts.py`` (none from a benchmark), half of
them greedily, half at temperature 0.7; its hidden states and its most likely next tokens are kept
on the way. Heads learn its distribution (soft cross-entropy, by steps); EAGLE its next state too.
Everything is seeded and resumes; ``--work`` holds texts and states. A head is written, int8, in its
published format whenever a stage ends, with a card and its held-out curve.
"""

import argparse
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from analysis.runs.command import parser_of, reporting_errors
from scripts.draft_model.folder import HEADS_FOLDER, write_head
from scripts.draft_model.head_families import Teacher, make
from scripts.draft_model.head_lesson import Pupil, frequent, held_out, loss_of, pack
from scripts.draft_model.learning import Recipe, Score, Training, learn
from scripts.draft_model.sources import (
    add_options,
    check,
    group,
    groups_of,
    mix_of,
    near_a_question,
    numbers,
    prepare,
    read_texts,
)
from scripts.draft_model.texts import Texts, facts_of, sha256_of, split
from specbench.config.compose import compose, typed
from specbench.models import loading
from specbench.models.hidden_states import Embeddings

_SAMPLE = 160  # texts that a head's linear start is fitted on


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Recipe):
    lr: float = 1e-3
    batch_tokens: int = 512
    steps: int  # guesses per row: heads, or steps over the head's own guesses
    prompt_share: float = 0.5  # of a prompt's positions that are learned, drawn anew each time
    chain_share: float = 0.5  # of the rows that learn more than their first guess, likewise
    candidates: int = 2048  # most frequent ids in each softmax, besides the batch's own
    drawn: int = 512  # and drawn ones
    layers: tuple[int, ...] = (2, 19, 27)  # states that EAGLE-3 reads
    vocab: int = 16384  # ids that EAGLE-3 says
    entropy: float = 1.0  # weight of the cross-entropy; EAGLE's feature loss weighs 1
    weight_decay: float = 0.0

    @property
    def states(self) -> list[int]:
        """Which of the kept states the head reads."""
        last = len(self.layers)
        return list(range(last + 1)) if self.name == "eagle3" else [last]


# Rates far above the papers' 3e-5 … 1e-4, which are for widths of 4096 and more, and for days.
# EAGLE's paper learns one step, from true states alone (`--steps 1`); three steps, as EAGLE-3 has
# them, are what a chain drafts with.
RECIPES = {
    "eagle": HeadRecipe(name="eagle", epochs=10, steps=3),
    "medusa": HeadRecipe(name="medusa", epochs=3, steps=4),
    "eagle3": HeadRecipe(name="eagle3", epochs=3, steps=3),
    "hydra": HeadRecipe(name="hydra", epochs=4, lr=5e-4, steps=4),
}
# With --visits: texts enough that few come often, the weights' average, and early looks, which say
# what more texts are worth.
_BROAD: dict[str, Any] = {
    "weight_decay": 0.05,
    "average": 0.998,
    "looks": (0.05, 0.1, 0.2, 0.4, 0.7),
}


def training_of(
    pupil: Pupil,
    texts: Texts,
    test: list[int],
    recipe: HeadRecipe,
    common: torch.Tensor,
    other: Texts | None = None,
) -> Training:
    """What trains a head.

    Args:
        test: numbers of the held-out texts.
        common: ids by falling frequency.
        other: texts of a source that is not learnt; the best weights on them are kept.
    """
    trained = [p for p in pupil.head.parameters() if p.requires_grad]

    def loss(chosen: list[int], draw: torch.Generator) -> torch.Tensor:
        batch = pack(
            texts,
            chosen,
            recipe.states,
            prompt_share=recipe.prompt_share,
            chain_share=recipe.chain_share,
            generator=draw,
        )
        drawn = torch.randint(len(common), (recipe.drawn,), generator=draw)
        others = torch.cat([common[: recipe.candidates], drawn])
        return loss_of(
            pupil, batch, recipe.steps, others=others, noise=draw, entropy=recipe.entropy
        )

    def score() -> Score:
        found = held_out(pupil, texts, test, recipe.states)
        if other is not None:
            every = list(range(len(other.prompts)))
            elsewhere = held_out(pupil, other, every, recipe.states)
            found |= {f"other_{name}": value for name, value in elsewhere.items()}
        return found

    return Training(
        recipe=recipe,
        model=pupil.head,
        optimizer=torch.optim.AdamW(
            trained,
            lr=recipe.lr,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=True,
        ),
        loss=loss,
        score=score,
        clip=0.5,
        judge=(lambda score: cast(float, score["other_chain_mat"])) if other else None,
        texts=",".join([sha256_of(texts), sha256_of(other) if other else "", str(test)]),
    )


def train(options: argparse.Namespace, names: list[str]) -> None:
    groups = groups_of(options)
    texts, styles = read_texts(groups)
    held_apart = [group(options.work, "other", 0)] if options.other else []
    check(options, [*groups, *held_apart], _kept(options))
    cfg = typed(compose(["model=smollm2_135m"]))
    tokenizer = loading.load_tokenizer(cfg)
    target = loading.load_model(cfg, tokenizer).model
    ends = Embeddings(target)
    held, learnt = split(texts)
    near = near_a_question(texts, tokenizer.decode, options.apart)
    learnt[near] = False
    common = frequent(texts, len(ends.embedding))
    rows = learnt.nonzero()[:, 0]
    test = _spaced(held.nonzero()[:, 0], options.held)
    other = read_texts(held_apart)[0] if held_apart else None
    about_texts = facts_of(texts, styles, rows) | {"held_out_texts": len(test)}
    if options.apart:
        compared = f"{len(near)}, left out; of {', '.join(path.name for path in options.apart)}"
        about_texts["texts_with_13_words_of_a_question"] = compared
    if other is not None:
        about_texts["other"] = f"{options.other.name}, {sha256_of(other)}"
    about_texts["mix"] = mix_of(texts, styles, rows)
    spaced = _spaced(rows, _SAMPLE)
    positions = int(texts.starts.diff()[rows].sum())
    for name in names:
        recipe = _recipe(options, name, positions)
        sample = [pack(texts, spaced[i : i + 8], recipe.states) for i in range(0, len(spaced), 8)]
        torch.manual_seed(recipe.seed)
        teacher = Teacher(ends, target.config.to_dict(), common, sample)
        pupil = make(name, teacher, recipe.layers, recipe.vocab)
        training = training_of(pupil, texts, test, recipe, common, other)
        progress = learn(training, texts.starts.diff(), rows, options.work, options.minutes)
        size = sum(p.numel() for p in pupil.head.parameters())
        facts = asdict(recipe) | {"parameters": size}
        if name != "eagle3":
            del facts["layers"], facts["vocab"]
        write_head(options.out / name, pupil.file(), facts | about_texts | progress.facts())
        print((options.out / name / "README.md").read_text(encoding="utf-8"))


def _recipe(options: argparse.Namespace, name: str, positions: int) -> HeadRecipe:
    """The recipe of a head for so many learnt positions, with what was typed."""
    recipe = replace(RECIPES[name], layers=options.layers, seed=options.seed)
    if options.visits:
        recipe = replace(recipe, epochs=max(1, round(options.visits / positions)), **_BROAD)
    typed_ones = {"epochs": options.epochs, "steps": options.steps, "entropy": options.entropy}
    return replace(recipe, **{k: v for k, v in typed_ones.items() if v is not None})


def _spaced(rows: torch.Tensor, count: int) -> list[int]:
    """So many of the rows at most, from all over them."""
    chosen: list[int] = rows[:: max(1, -(-len(rows) // count))].tolist()
    return chosen


def _kept(options: argparse.Namespace) -> tuple[int, ...]:
    """Hidden states that texts are kept with: EAGLE-3's, and those after the final norm."""
    return (*options.layers, -1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(parser, work=".cache/heads_smollm2_135m", groups=14, batch=96)
    add = parser.add_argument
    add("--stage", choices=("texts", *RECIPES), help="one of them (default: all in turn)")
    add("--out", type=Path, default=HEADS_FOLDER, help="a folder for each head goes into it")
    add("--minutes", type=float, default=math.inf, help="of one head's training in this stage")
    add("--layers", type=numbers, default=(2, 19, 27), help="EAGLE-3's states: 2,19,27")
    add("--epochs", type=int, help="instead of the recipe's")
    add("--visits", type=float, help="of tokens, instead of epochs: equal budgets for all heads")
    add("--entropy", type=float, help="weight of the cross-entropy beside EAGLE's feature loss")
    add("--steps", type=int, help="of a head's guesses, instead of the recipe's")
    add("--held", type=int, default=24, help="held-out texts that are scored")
    return parser.parse_args(argv)


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
