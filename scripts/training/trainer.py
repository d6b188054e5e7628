"""The one trainer: seeded, judged by texts that are not learnt, and resumable."""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from tqdm import tqdm

from scripts.training.texts import Texts, sha256_of
from specbench.storage import jsonl

STEPS_BETWEEN_SAVES = 100
FACTS = "training.json"
_TITLES = {
    "draft": "Draft model",
    "medusa": "Medusa-1 heads",
    "hydra": "Hydra++ heads (shared LM head)",
    "eagle": "An EAGLE-1/2 head",
    "eagle3": "An EAGLE-3 head",
    "dflash": "A DFlash head",
}
_CARD = """# {title} for SmolLM2-135M-Instruct

Made by `python -m scripts.training {name}`: assets/README.md says how, and what the files hold.
Matrices are kept as bytes with a scale a row (`specbench/models/checkpoints/int8.py`).
Licence: Apache-2.0, as the weights it derives from (HuggingFaceTB/SmolLM2-135M-Instruct).

```json
{facts}
```
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training; defaults are those of the shipped heads.

    Attributes:
        batch_tokens: padding included.
        average: share of the weights' moving average that a batch leaves as it was; the average is
            what is scored and kept. 0 keeps the weights themselves.
        clip: norm of the gradients at most.
        steps: guesses a row: heads, or steps over a head's own guesses.
        prompt_share: of a prompt's positions that are learned, redrawn each time.
        chain_share: of the rows that learn more than their first guess, likewise.
        candidates, drawn: most frequent and drawn ids in a softmax, besides the batch's own.
        layers: that a draft takes over, or whose states EAGLE-3 reads.
        vocab: ids that it predicts; EAGLE-3 the most frequent of ``vocab_in_training``.
    """

    name: str
    epochs: int = 3
    lr: float = 1e-3
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    batch_tokens: int = 512
    average: float = 0.998
    clip: float = 0.5
    steps: int = 3
    prompt_share: float = 0.5
    chain_share: float = 0.5
    candidates: int = 2048
    drawn: int = 512
    layers: tuple[int, ...] = ()
    vocab: int = 0
    vocab_in_training: int = 0


class Trainable(Protocol):
    """A model of some family, in training."""

    module: nn.Module
    recipe: Recipe
    parameters: int

    def loss(self, chosen: Texts, draw: torch.Generator) -> torch.Tensor: ...

    def save(self, folder: Path) -> Path: ...


def learn(trainable: Trainable, learnt: Texts, held: Texts, work: Path) -> dict[str, object]:
    """Train; ``work`` gets the state, from which the same call goes on after a kill.

    The loss on ``held`` is printed before the training and after each epoch. Returns facts.
    """
    recipe = trainable.recipe
    model = trainable.module
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=recipe.lr,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    plans: list[list[int]] = []
    ends = {0: 0}  # the batches after which it is judged, and the epochs they make
    lengths = torch.tensor([len(text) for text in learnt])
    for epoch in range(recipe.epochs):
        plans += batches(lengths, recipe.batch_tokens, _generator(recipe, epoch))
        ends[len(plans)] = epoch + 1
    key = json.dumps([asdict(recipe), sha256_of(learnt), sha256_of(held)])
    state: dict[str, Any] = {"key": key, "done": 0, "visits": 0, "minutes": 0.0, "loss": 0.0}
    state["curve"] = {}
    state["average"] = {name: p.detach().clone() for name, p in trained.items()}
    path = work / f"{recipe.name}.pt"
    if path.is_file():
        device = next(model.parameters()).device
        stored = torch.load(path, map_location=device, weights_only=True)
        if stored["key"] == key:
            model.load_state_dict(stored.pop("model"))
            optimizer.load_state_dict(stored.pop("optimizer"))
            state = stored
    average = state["average"]
    began = time.perf_counter() - 60 * state["minutes"]
    bar = tqdm(total=len(plans), initial=state["done"], desc=recipe.name, mininterval=5)
    for done in range(state["done"], len(plans) + 1):
        state["minutes"] = (time.perf_counter() - began) / 60
        point = f"epoch {ends.get(done)}"
        if done in ends and point not in state["curve"]:
            trained_weights = swap_weights(trained, average)
            with torch.no_grad():
                losses = [float(trainable.loss([text], _generator(recipe, 0))) for text in held]
            swap_weights(trained, trained_weights)
            state["curve"][point] = (
                f"visits {state['visits']}, loss {state['loss']:.3f}, "
                f"held-out loss {sum(losses) / len(losses):.3f}"
            )
            bar.write(f"{recipe.name}, {point}: {state['curve'][point]}")
        if done == len(plans) or done % STEPS_BETWEEN_SAVES == 0:
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with jsonl.replacing(path) as partial:
                torch.save(state | weights, partial)
        if done == len(plans):
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * _rate(done, len(plans))
        loss = trainable.loss([learnt[i] for i in plans[done]], _generator(recipe, done))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        state["done"] = done + 1
        # The average takes in more of the first batches.
        rate = min(recipe.average, done / (done + 10))
        with torch.no_grad():
            for name, weight in trained.items():
                average[name].lerp_(weight, 1 - rate)
        state["visits"] += int(lengths[plans[done]].sum())
        state["loss"] += (0.05 if state["loss"] else 1.0) * (float(loss.detach()) - state["loss"])
        bar.update()
        bar.set_postfix(loss=f"{state['loss']:.3f}", refresh=False)
    bar.close()
    swap_weights(trained, average)
    minutes = round(state["minutes"], 1)
    facts = {"batches_done": state["done"], "token_visits": state["visits"]}
    return facts | {"training_minutes": minutes, "curve": state["curve"]}


def facts_of_recipe(trainable: Trainable) -> dict[str, Any]:
    """Describe the settings that are not empty, and count the parameters."""
    settings = asdict(trainable.recipe).items()
    set_values = {name: value for name, value in settings if value or name == "seed"}
    return set_values | {"parameters": trainable.parameters}


def write(trainable: Trainable, facts: dict[str, Any], folder: Path) -> str:
    """Write the weights with ``facts`` of their training; returns the card."""
    folder.mkdir(parents=True, exist_ok=True)
    facts["sha256"] = hashlib.sha256(trainable.save(folder).read_bytes()).hexdigest()
    jsonl.write_json(folder / FACTS, facts)
    name, listed = trainable.recipe.name, json.dumps(facts, indent=1)
    card = _CARD.format(title=_TITLES[name], name=name, facts=listed)
    jsonl.write_text(folder / "README.md", card)
    return card


def batches(lengths: torch.Tensor, tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Divide texts into batches of similar length, at most ``tokens`` padded, in random order."""
    noise = torch.rand(len(lengths), generator=generator) * 8
    groups: list[list[int]] = [[]]
    for i in torch.argsort(lengths + noise).tolist():
        if groups[-1] and (len(groups[-1]) + 1) * int(lengths[i]) > tokens:
            groups.append([])
        groups[-1].append(i)
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def swap_weights(trained: Mapping[str, nn.Parameter], weights: Mapping[str, torch.Tensor]) -> Any:
    """Give the model these weights; returns those it had."""
    previous = {name: p.data for name, p in trained.items()}
    for name, weight in weights.items():
        trained[name].data = weight
    return previous


def _generator(recipe: Recipe, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(recipe.seed * 1_000_003 + number)


def _rate(number: int, count: int) -> float:
    """Share of the learning rate: a short warm-up, then half a cosine down to 0.02."""
    return max(0.02, min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * number / count)))
