"""Heads trained on a target that runs beside them, as a GPU allows, for a time instead of epochs.

Texts are tokens alone: one pass of the target over a batch teaches all heads, which so learn the
whole of its distribution, from equal data. A training goes on from the heads as they were written,
without the optimizer's moments, which the warm-up rebuilds. Each time ends with a falling rate, and
the next begins at the full one (WSD-S, arXiv 2410.05192).
"""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.training import heads
from scripts.training.heads import Batch, TrainableHead
from scripts.training.texts import Mix, Texts, facts_of
from scripts.training.trainer import FACTS, Recipe, batches, facts_of_recipe, swap_weights, write
from specbench.models.loading import LoadedModel

MIX = Mix(texts=6, asked=18, batch=4096, live=True)
_CHANGES: dict[str, dict[str, Any]] = {
    "eagle": {"lr": 2e-3},
    "medusa": {"lr": 2e-3, "vocab": 4096},
    "eagle3": {"lr": 2e-3, "steps": 5},
    "hydra": {"lr": 1e-3},
    "dflash": {},
}
RECIPES = {
    name: replace(heads.RECIPES[name], average=0.999, batch_tokens=4096, **changes)
    for name, changes in _CHANGES.items()
}
SECONDS_BETWEEN_SAVES = 60.0
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
        rows = rows.to(model.device)
        out = model.model(input_ids=rows, output_hidden_states=True, use_cache=False)
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


def train(
    families: Mapping[str, TrainableHead],
    facts: Mapping[str, dict[str, Any]],
    model: Any,
    learnt: Texts,
    held: Texts,
    out: Path,
    end: float,
) -> None:
    """Train until ``end`` (of `time.monotonic`), and write the heads below ``out`` every minute.

    Args:
        facts: of each head's card; tokens read, minutes and held-out losses are added.
    """
    recipe = next(iter(families.values())).recipe
    trained = {
        f"{name}.{key}": weight
        for name, head in families.items()
        for key, weight in head.module.named_parameters()
        if weight.requires_grad
    }
    of_head = {n: [w for k, w in trained.items() if k.startswith(f"{n}.")] for n in families}
    optimizer = torch.optim.AdamW(
        [{"params": weights, "name": name} for name, weights in of_head.items()],
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    average = {key: weight.detach().clone() for key, weight in trained.items()}
    before = {
        name: (known["token_visits"], known["training_minutes"]) for name, known in facts.items()
    }
    seed = max(visits for visits, _ in before.values())
    draw = torch.Generator().manual_seed(seed)
    noise = torch.Generator(model.device).manual_seed(seed)
    shares = {"prompt_share": recipe.prompt_share, "chain_share": recipe.chain_share}
    lengths = torch.tensor([len(text) for text in learnt])
    began = saved = time.monotonic()
    plan: list[list[int]] = []
    visits = 0
    for done in itertools.count():
        now = time.monotonic()
        if not done or now >= end or now - saved >= SECONDS_BETWEEN_SAVES:
            current = swap_weights(trained, average)
            if not done or now >= end:
                losses = dict.fromkeys(families, 0.0)
                with torch.no_grad(), _half(model):
                    for batch in (read(model, [text]) for text in held):
                        for name, head in families.items():
                            losses[name] += float(head.loss_of(batch, noise)) / len(held)
            for name, (earlier, minutes) in before.items():
                facts[name]["token_visits"] = earlier + visits
                facts[name]["training_minutes"] = round(minutes + (now - began) / 60, 1)
                curve = facts[name]["curve"]
                curve.setdefault(f"visits {earlier + visits}", f"held-out loss {losses[name]:.3f}")
                write(families[name], facts[name], out / name)
            swap_weights(trained, current)
            saved = time.monotonic()
            print(f"{visits / (saved - began):.0f} tokens/s, held-out losses {losses}", flush=True)
            if now >= end:
                return
        plan = plan or batches(lengths, recipe.batch_tokens, draw)
        numbers = plan.pop()
        batch = read(model, [learnt[i] for i in numbers], **shares, draw=draw)
        with _half(model):
            loss = torch.stack([head.loss_of(batch, noise) for head in families.values()]).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        rate = min(1.0, (done + 1) / _WARM_UP, (end - now) / (end - began) / _FALL)
        for group in optimizer.param_groups:
            group["lr"] = families[group["name"]].recipe.lr * rate
            torch.nn.utils.clip_grad_norm_(group["params"], recipe.clip)
        optimizer.step()
        # The average takes in more of the first batches.
        share = 1 - min(recipe.average, done / (done + 10))
        for key, weight in trained.items():
            average[key].lerp_(weight.detach(), share)
        visits += int(lengths[numbers].sum())


def _half(model: Any) -> torch.autocast:
    """Compute products in bfloat16 where a GPU does."""
    kind = model.device.type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
