"""The one training loop of the draft model and of the heads: seeded, scored, and resumable."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from specbench.storage import jsonl

STEPS_BETWEEN_SAVES = 100
Score = dict[str, float | list[float]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained; a stopped training goes on only with the same recipe.

    Attributes:
        batch_tokens: padding included.
        average: share of the weights' moving average that a batch leaves as it was; the average is
            what is scored and kept. 0 keeps the weights themselves.
        looks: shares of the first epoch after which the model is scored too.
    """

    name: str
    epochs: int
    lr: float
    seed: int = 0
    batch_tokens: int
    average: float = 0.0
    looks: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a family of models supplies.

    Attributes:
        loss: of a batch of texts, by their numbers; draws what it draws with the generator.
        score: of held-out texts, before the training and after each epoch.
        clip: norm of the gradients at most.
        judge: what a score is worth: the weights of the best one are what the training ends with.
            None ends with the last.
        texts: names what is learnt and scored; a stopped training goes on only with the same.
    """

    recipe: Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[list[int], torch.Generator], torch.Tensor]
    score: Callable[[], Score]
    clip: float
    judge: Callable[[Score], float] | None = None
    texts: str = ""


class Average:
    """The moving average of the weights that a model learns."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._rate = rate
        self._learnt = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.weights = {n: p.detach().clone() for n, p in self._learnt.items()}

    @torch.no_grad()
    def follow(self, done: int) -> None:
        """Take in the weights after ``done`` batches; the first ones weigh more."""
        rate = min(self._rate, done / (done + 10))
        for name, weight in self._learnt.items():
            self.weights[name].lerp_(weight, 1 - rate)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """The model has the average's weights meanwhile."""
        own = {n: p.data for n, p in self._learnt.items()}
        self.put(self.weights)
        yield
        self.put(own)

    def put(self, weights: dict[str, torch.Tensor]) -> None:
        """Give the model these weights."""
        for name, weight in weights.items():
            self._learnt[name].data = weight


@dataclass
class Progress:
    """Where a training stands; ``curve`` holds a score for each look and epoch."""

    done: int = 0
    visits: int = 0  # tokens seen, repetitions included
    minutes: float = 0.0
    loss: float = 0.0  # moving mean
    curve: list[Score] = field(default_factory=list)

    def facts(self) -> dict[str, object]:
        """What a card says of it."""
        curve = {
            f"epoch {point['epoch']}": ", ".join(
                f"{name} {value}" for name, value in point.items() if name != "epoch"
            )
            for point in self.curve
        }
        minutes = round(self.minutes, 1)
        done = {"batches_done": self.done, "token_visits": self.visits}
        return done | {"training_minutes": minutes, "curve": curve}


def learn(
    training: Training,
    lengths: torch.Tensor,
    learnt: torch.Tensor,
    work: Path,
    minutes: float = math.inf,
) -> Progress:
    """Train until the recipe is done or ``minutes`` are over; ``work`` gets the state.

    ``lengths`` has the length of every text, ``learnt`` the numbers of the texts that are learnt.
    """
    recipe, model, optimizer = training.recipe, training.model, training.optimizer
    plans: list[list[int]] = []
    looks = {0: 0.0}  # the batches after which the model is scored, and the epochs they make
    for epoch in range(recipe.epochs):
        order = _generator(recipe, epoch)
        plans += [learnt[b].tolist() for b in batches(lengths[learnt], recipe.batch_tokens, order)]
        if not epoch:
            looks |= {math.ceil(share * len(plans)): share for share in sorted(recipe.looks)}
        looks[len(plans)] = epoch + 1
    places = list(looks)
    path = work / f"{recipe.name}.pt"
    known = [asdict(recipe), len(plans), int(lengths.sum()), training.texts]
    key = json.dumps(known, sort_keys=True)
    average = Average(model, recipe.average)
    progress, best = _resume(path, key, training, average)
    if progress.done:
        print(f"going on at batch {progress.done} of {len(plans)}", flush=True)
    began, before = time.perf_counter(), progress.minutes
    while True:
        done = progress.done
        spent = (time.perf_counter() - began) / 60
        progress.minutes = before + spent
        if done in looks and len(progress.curve) == places.index(done):
            with average.worn():
                score = training.score()
            if training.judge and training.judge(score) > max(
                map(training.judge, progress.curve), default=-math.inf
            ):
                best = {name: weight.clone() for name, weight in average.weights.items()}
            mean: Score = {"loss": round(progress.loss, 3)} if done else {}
            seen: Score = {"epoch": looks[done], "visits": progress.visits}
            progress.curve.append({**seen, **mean, **score})
            print(f"{recipe.name}: {progress.curve[-1]}, {progress.minutes:.1f} min", flush=True)
        over = done == len(plans) or spent > minutes
        if over or done % STEPS_BETWEEN_SAVES == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"average": average.weights, "best": best}
            with jsonl.replacing(path) as partial:
                torch.save({"recipe": key, "progress": asdict(progress), **state}, partial)
        if over:
            average.put(best or average.weights)
            return progress
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * _rate(done, len(plans))
        loss = training.loss(plans[done], _generator(recipe, done))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        average.follow(done)
        progress.visits += int(lengths[plans[done]].sum())
        progress.done += 1
        share = 0.05 if progress.loss else 1.0
        progress.loss += share * (float(loss.detach()) - progress.loss)
        if progress.done % 25 == 0:
            print(
                f"{recipe.name}: batch {progress.done} of {len(plans)}, loss {progress.loss:.3f}, "
                f"{progress.minutes:.1f} min",
                flush=True,
            )


def batches(lengths: torch.Tensor, tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Texts in batches of similar length, padded to ``tokens`` at most, in random order."""
    noise = torch.rand(len(lengths), generator=generator) * 8
    groups: list[list[int]] = [[]]
    for i in torch.argsort(lengths + noise).tolist():
        if groups[-1] and (len(groups[-1]) + 1) * int(lengths[i]) > tokens:
            groups.append([])
        groups[-1].append(i)
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def _generator(recipe: Recipe, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(recipe.seed * 1_000_003 + number)


def _rate(number: int, count: int) -> float:
    """Share of the learning rate: a short warm-up, then half a cosine down to 0.02."""
    return max(0.02, min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * number / count)))


def _resume(
    path: Path, key: str, training: Training, average: Average
) -> tuple[Progress, dict[str, torch.Tensor]]:
    """Load what a stopped training of the same recipe left; also its best weights so far."""
    if not path.is_file():
        return Progress(), {}
    device = next(training.model.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    if state["recipe"] != key:
        return Progress(), {}
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    average.weights = state["average"]
    return Progress(**state["progress"]), state["best"]
