"""Train heads for a given time on the outputs of a target that runs in the same process.

Texts hold tokens only: one pass of the target over a batch trains all heads, on its whole
distribution and on equal data. Training continues from the saved heads, without the optimizer's
moments, which the warm-up rebuilds. Each run ends with a falling learning rate, and the next begins
at the full one (WSD-S, arXiv 2410.05192).
"""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.training import heads
from scripts.training.heads import Batch, TrainableHead
from scripts.training.texts import Mix, Texts
from scripts.training.trainer import FACTS, Recipe, batches, facts_of_recipe, swap_weights, write
from specbench.models.loading import LoadedModel

FOLDER = Path(".cache/heads_smollm2_135m_live")
MIX = Mix(texts=6, asked=18, batch=4096, live=True)
_CHANGES: dict[str, dict[str, Any]] = {"eagle3": {"steps": 5}, "medusa": {"vocab": 4096}}
RECIPES = {
    name: replace(r, lr=2 * r.lr, average=0.999, batch_tokens=4096, **_CHANGES.get(name, {}))
    for name, r in heads.RECIPES.items()
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


def train(
    recipes: Sequence[Recipe],
    loaded: LoadedModel,
    texts: Texts,
    learnt: Texts,
    held: Texts,
    out: Path,
    end: float,
    shared: dict[str, Any],
) -> None:
    """Train from the heads below ``out``, and write them there every minute, until ``end``.

    Args:
        end: of `time.monotonic`.
        shared: facts for all cards.
    """
    model = loaded.model
    sample = [read(model, group) for group in heads.sample_of(learnt)]
    for batch in sample:
        batch.logits = None  # only states are needed
    families, facts = dict[str, TrainableHead](), dict[str, dict[str, Any]]()
    for recipe in recipes:
        folder = out / recipe.name
        before = json.loads(p.read_text()) if (p := folder / FACTS).is_file() else {}
        torch.manual_seed(recipe.seed)
        head = heads.FAMILIES[recipe.name](
            recipe, loaded, texts, learnt, sample=sample, begin=folder if before else None
        )
        families[recipe.name] = head
        earlier = {
            key: before.get(key, start) for key, start in (("token_visits", 0), ("curve", {}))
        }
        facts[recipe.name] = facts_of_recipe(head) | shared | earlier
    modules = torch.nn.ModuleDict({name: head.module for name, head in families.items()})
    trained = {name: w for name, w in modules.named_parameters() if w.requires_grad}
    average = {name: weight.detach().clone() for name, weight in trained.items()}
    groups = [
        {"params": list(m.parameters()), "lr": families[n].recipe.lr} for n, m in modules.items()
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    seed = max(head_facts["token_visits"] for head_facts in facts.values())
    draw = torch.Generator().manual_seed(seed)
    noise = torch.Generator(model.device).manual_seed(seed)
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
                for batch in (read(model, [text]) for text in held):
                    with torch.no_grad(), _half(model):
                        for name, head in families.items():
                            losses[name] += float(head.loss_of(batch, noise)) / len(held)
            for name, head_facts in facts.items():
                head_facts["token_visits"] += visits
                point = f"held-out loss {losses[name]:.3f}"
                head_facts["curve"].setdefault(f"visits {head_facts['token_visits']}", point)
                write(families[name], head_facts, out / name)
            swap_weights(trained, current)
            print(f"{visits / (now - saved or 1):.0f} tokens/s, held-out {losses}", flush=True)
            saved, visits = time.monotonic(), 0
            if now >= end:
                return
        plan = plan or batches(lengths, recipe.batch_tokens, draw)
        numbers = plan.pop()
        shares = {"prompt_share": recipe.prompt_share, "chain_share": recipe.chain_share}
        batch = read(model, [learnt[i] for i in numbers], **shares, draw=draw)
        with _half(model):
            loss = torch.stack([head.loss_of(batch, noise) for head in families.values()]).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        rate = min(1.0, (done + 1) / _WARM_UP, (end - now) / (end - began) / _FALL)
        for group, head in zip(optimizer.param_groups, families.values(), strict=True):
            group["lr"] = head.recipe.lr * rate
            torch.nn.utils.clip_grad_norm_(group["params"], head.recipe.clip)
        optimizer.step()
        # The average takes in more of the first batches.
        share = 1 - min(recipe.average, done / (done + 10))
        for name, weight in trained.items():
            average[name].lerp_(weight.detach(), share)
        visits += int(lengths[numbers].sum())


def _half(model: Any) -> torch.autocast:
    """Compute products in bfloat16 where a GPU does."""
    kind = model.device.type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
