"""Heads trained on a target that runs beside them, as a GPU allows, for a time instead of epochs.

Texts are tokens alone: one pass of the target over a batch teaches all heads, which so learn the
whole of its distribution, from equal data. A training goes on from the heads as they were written,
without the optimizer's moments, which the warm-up rebuilds. Each time ends with a falling rate, and
the next begins at the full one (WSD-S, arXiv 2410.05192).
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.training import heads
from scripts.training.heads import Batch, TrainableHead
from scripts.training.texts import Mix, Texts, facts_of
from scripts.training.trainer import FACTS, Recipe, batches, facts_of_recipe, write
from specbench.models.loading import LoadedModel
from specbench.storage import jsonl

MIX = Mix(texts=6, asked=18, batch=4096, live=True)
_CHANGES: dict[str, dict[str, Any]] = {
    "eagle": {"lr": 2e-3},
    "medusa": {"lr": 2e-3, "vocab": 4096},
    "eagle3": {"lr": 2e-3, "steps": 5},
    "hydra": {},
}
RECIPES = {
    name: replace(heads.RECIPES[name], **{"lr": 1e-3, "average": 0.999, "batch_tokens": 4096} | own)
    for name, own in _CHANGES.items()
}
SECONDS_BETWEEN_SAVES = 60.0
PIECE_BYTES = 15 * 2**20
_WARM_UP = 300  # batches
_FALL = 0.15  # of the time, at its end, in which the rate falls to 0


@torch.no_grad()
def read(model: Any, texts: Texts, **shares: Any) -> Batch:
    """Run the target over texts; ``shares`` and their draws are those of `Batch`."""
    batch = Batch(texts, slice(None), model.device, **shares)
    rows = torch.nn.utils.rnn.pad_sequence([t.tokens.long() for t in texts], batch_first=True)
    # Padding is on the right, where no causal position sees it.
    lengths = torch.tensor([len(text) for text in texts])
    inside = (torch.arange(rows.shape[1]) < lengths[:, None]).to(model.device)
    with _half(model):
        out = model.model(
            input_ids=rows.to(model.device), output_hidden_states=True, use_cache=False
        )
        states = [out.hidden_states[layer][inside] for layer in heads.MIX.layers]
        batch.states = torch.stack(states, dim=1).float()
        batch.logits = model.lm_head(states[-1])
    batch.ids = batch.logits.argmax(-1, keepdim=True)
    return batch


def begin(
    recipes: Sequence[Recipe], loaded: LoadedModel, texts: Texts, learnt: Texts, out: Path
) -> tuple[dict[str, TrainableHead], dict[str, dict[str, Any]]]:
    """Make heads, and facts for their cards, from those that are below ``out``."""
    sample = [read(loaded.model, group) for group in heads.sample_of(learnt)]
    for batch in sample:
        batch.logits = None  # only states are needed
    families, facts = dict[str, TrainableHead](), dict[str, dict[str, Any]]()
    for recipe in recipes:
        folder = out / recipe.name
        goes_on = (folder / FACTS).is_file()
        earlier = json.loads((folder / FACTS).read_text()) if goes_on else {}
        torch.manual_seed(recipe.seed)
        head = families[recipe.name] = heads.FAMILIES[recipe.name](
            recipe, loaded, texts, learnt, sample=sample, begin=folder if goes_on else None
        )
        facts[recipe.name] = facts_of_recipe(head) | facts_of(texts, learnt)
        for name, start in {"token_visits": 0, "training_minutes": 0.0, "curve": {}}.items():
            facts[recipe.name][name] = earlier.get(name, start)
    return families, facts


class Lesson:
    """Heads that learn from the same batches, with a moving average of their weights."""

    def __init__(self, families: Mapping[str, TrainableHead], model: Any, seed: int = 0) -> None:
        self.families, self._model, self.seed, self.done = families, model, seed, 0
        self._draw = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator(model.device).manual_seed(seed)
        recipe = self.recipe = next(iter(families.values())).recipe
        trained = {
            name: [p for p in head.module.parameters() if p.requires_grad]
            for name, head in families.items()
        }
        self._weights = [weight for weights in trained.values() for weight in weights]
        self._average = [weight.detach().clone() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(
            [{"params": weights, "name": name} for name, weights in trained.items()],
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    def step(self, texts: Texts, rate: float) -> dict[str, torch.Tensor]:
        """Learn from some texts at a share of the heads' learning rates; returns the losses."""
        recipe = self.recipe
        shares = {"prompt_share": recipe.prompt_share, "chain_share": recipe.chain_share}
        batch = read(self._model, texts, **shares, draw=self._draw)
        with _half(self._model):
            losses = {n: head.loss_of(batch, self._noise) for n, head in self.families.items()}
        self._optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        for group in self._optimizer.param_groups:
            group["lr"] = self.families[group["name"]].recipe.lr * rate
            torch.nn.utils.clip_grad_norm_(group["params"], recipe.clip)
        self._optimizer.step()
        # The average takes in more of the first batches.
        share = 1 - min(recipe.average, self.done / (self.done + 10))
        torch._foreach_lerp_(self._average, [w.detach() for w in self._weights], share)
        self.done += 1
        return {name: loss.detach() for name, loss in losses.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the heads their average weights for a while."""
        current = [weight.data for weight in self._weights]
        for weight, average in zip(self._weights, self._average, strict=True):
            weight.data = average
        try:
            yield
        finally:
            for weight, data in zip(self._weights, current, strict=True):
                weight.data = data

    def score(self, texts: Texts) -> dict[str, str]:
        """Score each head's chains on texts that the target wrote greedily."""
        counts = {name: torch.zeros(2, h.recipe.steps) for name, h in self.families.items()}
        lengths = torch.tensor([len(text) for text in texts])
        plan = batches(lengths, self.recipe.batch_tokens, torch.Generator().manual_seed(0))
        with self.averaged(), _half(self._model):
            for numbers in plan:
                batch = read(self._model, [texts[i] for i in numbers])
                for name, head in self.families.items():
                    counts[name] += head.chain(batch)
        return {name: heads.chain_score(count) for name, count in counts.items()}


def train(
    lesson: Lesson,
    facts: Mapping[str, dict[str, Any]],
    learnt: Texts,
    scored: Mapping[str, Texts],
    out: Path,
    end: float,
) -> Iterator[None]:
    """Train until ``end`` (of `time.monotonic`), and write the heads below ``out`` every minute.

    Yields after each time that they were written.

    Args:
        facts: of each head's card; tokens read, minutes and scores are added to them.
        scored: texts that are not learnt, by their name.
    """
    before = {
        name: (known["token_visits"], known["training_minutes"]) for name, known in facts.items()
    }
    lengths = torch.tensor([len(text) for text in learnt])
    began = saved = time.monotonic()
    visits, epoch, losses = 0, 0, dict[str, torch.Tensor]()
    plan: list[list[int]] = []
    while True:
        now = time.monotonic()
        if not lesson.done or now >= end:
            scores = {source: lesson.score(texts) for source, texts in scored.items()}
            for name, known in facts.items():
                point = [f"{source} {by_head[name]}" for source, by_head in scores.items()]
                point += [f"loss {float(losses[name]):.3f}"] if losses else []
                known["curve"].setdefault(f"visits {before[name][0] + visits}", ", ".join(point))
                print(name, *point)
        if not lesson.done:  # as long as at the end, with the writing
            end -= 2 * (time.monotonic() - now)
        if now >= end or now - saved >= SECONDS_BETWEEN_SAVES:
            for name, (read_before, minutes) in before.items():
                facts[name]["token_visits"] = read_before + visits
                facts[name]["training_minutes"] = round(minutes + (now - began) / 60, 1)
                with lesson.averaged():
                    write(lesson.families[name], facts[name], out / name)
            print(f"{visits / (now - began):.0f} tokens/s")
            yield
            saved = time.monotonic()
            if now >= end:
                return
        if not plan:
            draw = torch.Generator().manual_seed(lesson.seed + epoch)
            plan, epoch = batches(lengths, lesson.recipe.batch_tokens, draw), epoch + 1
        numbers = plan.pop()
        rate = min(1.0, (lesson.done + 1) / _WARM_UP, (end - now) / (end - began) / _FALL)
        losses = lesson.step([learnt[i] for i in numbers], rate)
        visits += int(lengths[numbers].sum())


def pack(folder: Path, out: Path) -> None:
    """Write a folder as pieces of an archive, ``live.tgz.0`` and on, that replace earlier ones.

    ``cat live.tgz.* | tar xz -C FOLDER`` unpacks them; gzip's checksum refuses a mix of two times.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        archive.add(folder, ".")
    data = packed.getvalue()
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        with jsonl.replacing(out / f"live.tgz.{number}") as partial:
            partial.write_bytes(data[start : start + PIECE_BYTES])


def _half(model: Any) -> torch.autocast:
    """Compute products in bfloat16 where a GPU does."""
    kind = model.device.type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
