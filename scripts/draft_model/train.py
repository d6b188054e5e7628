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
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from analysis.runs.command import parser_of, reporting_errors
from scripts.draft_model.folder import DRAFT_FOLDER, FACTS, read_draft, write_card, write_draft
from scripts.draft_model.learning import Recipe, Training, learn
from scripts.draft_model.prompts import GROUP
from scripts.draft_model.score import draft_ids, evaluate, matches_on, pass_times, pooled_mat
from scripts.draft_model.sources import add_options, groups_of, numbers, prepare, read_texts
from scripts.draft_model.texts import Texts, facts_of, is_answer, split
from specbench.config.compose import compose, typed
from specbench.errors import ConfigurationError
from specbench.models import loading

# Of the target's thirty. Layer 16 has the head that looks at the token before, 17 and 18 those that
# find what followed the same token earlier; together they copy, which a draft needs most. Measured
# (docs/draft_model.md): the embeddings' layers 0, 1 and the last with a cut of this circuit learn
# far less.
LAYERS = (0, 1, 16, 17, 18, 29)


@dataclass(frozen=True, kw_only=True)
class DraftRecipe(Recipe):
    name: str = "draft"
    layers: tuple[int, ...]
    vocab: int
    prompt_weight: float


def frequent_ids(texts: Texts, size: int, keep: list[int]) -> torch.Tensor:
    """The draft's vocabulary: ``[size]`` target ids in rising order, after one -1.

    Ids by how often they are in answers and among the target's choices, prompts counting a
    quarter; ``keep`` always belongs to it. Ids that never occur follow in their own order, which in
    a byte-pair vocabulary is that of frequency. The -1 in front stands for every id left out.
    """
    vocab = int(max(texts.tokens.max(), texts.top_ids.max())) + 1
    vocab = max(vocab, size, max(keep, default=0) + 1)
    answered = is_answer(texts)
    tokens = texts.tokens.long()
    count = torch.bincount(tokens[answered], minlength=vocab).double()
    count += 0.25 * torch.bincount(tokens[~answered], minlength=vocab)
    count += torch.bincount(texts.top_ids[:, 0].long(), minlength=vocab)
    count[torch.tensor(keep, dtype=torch.long)] = torch.inf
    chosen = torch.argsort(count, descending=True, stable=True)[: size - 1]
    return torch.cat([torch.tensor([-1]), chosen.sort().values])


@dataclass(frozen=True)
class Lesson:
    """Texts in the draft's own ids: what it reads and what it should say.

    Attributes:
        ids: the draft's vocabulary, see `frequent_ids`.
        tokens: ``[n]`` int64.
        starts: ``[texts + 1]`` borders.
        weight: ``[n]`` float32 of each position's loss; 0 where there is nothing to say.
        first: ``[n]`` the target's first choice, -100 where the draft has no such id.
        top_ids: ``[n, k]``, 0 where the draft has no such id.
        top_probs: ``[n, k]`` float32, 0 there; rows sum to one.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    weight: torch.Tensor
    first: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor


def lesson(texts: Texts, ids: torch.Tensor, prompt_weight: float) -> Lesson:
    draft_id = draft_ids(ids, max(int(texts.tokens.max()), int(texts.top_ids.max())))
    top = draft_id[texts.top_ids.long()]
    probs = texts.top_logprobs.float().exp() * (top > 0)
    mass = probs.sum(-1)
    # A position teaches what comes next, so the last one of a prompt already counts as answer.
    answered = is_answer(texts)
    answered[texts.starts[:-1] + texts.prompts - 1] = True
    weight = torch.where(answered, 1.0, prompt_weight) * (mass > 0)
    first = torch.where(top[:, 0] > 0, top[:, 0], -100)
    first[weight == 0] = -100
    return Lesson(
        ids=ids,
        tokens=draft_id[texts.tokens.long()],
        starts=texts.starts,
        weight=weight,
        first=first,
        top_ids=top,
        top_probs=probs / mass.clamp(min=1e-9)[:, None],
    )


def loss_of(draft: PreTrainedModel, taught: Lesson, chosen: list[int]) -> torch.Tensor:
    """Weighted mean over positions of KL and cross-entropy."""
    device = draft.device
    spans = [(int(taught.starts[i]), int(taught.starts[i + 1])) for i in chosen]
    rows = torch.nn.utils.rnn.pad_sequence(
        [taught.tokens[a:b] for a, b in spans], batch_first=True
    ).to(device)
    place = torch.cat(
        [torch.arange(b - a) + row * rows.shape[1] for row, (a, b) in enumerate(spans)]
    )
    source = torch.cat([torch.arange(a, b) for a, b in spans])
    asked = taught.weight[source] > 0
    place, source = place[asked].to(device), source[asked]
    # Padding is on the right, where no causal position sees it.
    hidden = draft.model(input_ids=rows, use_cache=False).last_hidden_state
    logprobs = draft.lm_head(hidden.flatten(0, 1)[place]).float().log_softmax(-1)
    weight = taught.weight[source].to(device)
    probs = taught.top_probs[source].to(device)
    top_logprobs = logprobs.gather(1, taught.top_ids[source].to(device))
    kl = (torch.special.xlogy(probs, probs) - probs * top_logprobs).sum(-1)
    first = taught.first[source].to(device)
    ce = -logprobs.gather(1, first.clamp(min=0)[:, None])[:, 0] * (first >= 0)
    loss: torch.Tensor = (weight * (kl + 0.5 * ce)).sum() / weight.sum()
    return loss


def cut_down(target: PreTrainedModel, ids: torch.Tensor, layers: tuple[int, ...]) -> Any:
    """A Llama of some of the target's layers and rows of its embeddings, tied.

    ``ids`` is the draft's vocabulary, see ``frequent_ids``; the row of -1 is the others' mean.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    depth = target.config.num_hidden_layers
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise ConfigurationError(
            f"--layers {list(layers)}: the target has layers 0 to {depth - 1}."
        )
    # Ids of the target's special tokens mean others here; who needs them asks the target.
    sizes = target.config.to_dict() | {
        "vocab_size": len(ids),
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": True,
        **dict.fromkeys(("layer_types", "bos_token_id", "eos_token_id", "pad_token_id")),
    }
    draft: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    draft.to(target.dtype)
    with torch.no_grad():
        rows = target.model.embed_tokens.weight[ids.clamp(min=0)]
        rows[ids < 0] = rows[ids >= 0].mean(0)
        draft.model.embed_tokens.weight.copy_(rows)
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
        for layer, number in zip(draft.model.layers, layers, strict=True):
            layer.load_state_dict(target.model.layers[number].state_dict())
    return draft


def held_out_mat(
    draft: PreTrainedModel, texts: Texts, held: torch.Tensor, ids: torch.Tensor, draft_len: int
) -> float:
    """MAT of chains on the texts where ``held [texts]`` is true."""
    starts, prompts = texts.starts.tolist(), texts.prompts.tolist()
    matches = [
        matches_on(draft, texts.tokens[starts[i] : starts[i + 1]], prompts[i], ids)
        for i in held.nonzero()[:, 0].tolist()
    ]
    return round(pooled_mat(matches, draft_len), 3)


def training_of(
    draft: Any, taught: Lesson, recipe: DraftRecipe, held_out: tuple[Texts, torch.Tensor, int]
) -> Training:
    """``held_out``: all texts, which of them are held out, and the tokens of a chain."""
    texts, held, draft_len = held_out
    trained = [p for p in draft.parameters() if p.requires_grad]

    def loss(chosen: list[int], _: torch.Generator) -> torch.Tensor:
        with torch.autocast(draft.device.type, torch.bfloat16):
            return loss_of(draft, taught, chosen)

    return Training(
        recipe=recipe,
        model=draft,
        optimizer=torch.optim.AdamW(trained, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01),
        loss=loss,
        score=lambda: {"held_out_mat": held_out_mat(draft, texts, held, taught.ids, draft_len)},
        clip=1.0,
    )


def train(options: argparse.Namespace) -> None:
    texts, styles = read_texts(groups_of(options))
    cfg = typed(compose(["model=smollm2_135m"]))
    tokenizer = loading.load_tokenizer(cfg)
    loaded = loading.load_model(cfg, tokenizer)
    keep = sorted(loaded.eos_ids | set(tokenizer.all_special_ids))
    recipe = DraftRecipe(
        epochs=options.epochs,
        lr=options.lr,
        seed=options.seed,
        batch_tokens=options.batch_tokens,
        layers=options.layers,
        vocab=options.vocab,
        prompt_weight=options.prompt_weight,
    )
    taught = lesson(texts, frequent_ids(texts, recipe.vocab, keep), recipe.prompt_weight)
    held, learnt = split(texts)
    torch.manual_seed(recipe.seed)
    draft = cut_down(loaded.model, taught.ids, recipe.layers)
    draft = draft.float().train().requires_grad_(True).to(options.device)
    draft.model.embed_tokens.weight.requires_grad_(False)  # the target's, and good as they are
    size = sum(p.numel() for p in draft.parameters())
    rows = learnt.nonzero()[:, 0]
    facts = facts_of(texts, styles, rows) | asdict(recipe) | {"parameters": size}
    known = float((taught.tokens[is_answer(texts)] > 0).float().mean())
    print(
        f"{len(styles)} texts, {len(texts.tokens)} tokens ({facts['answer_tokens']} of them "
        f"answers); draft: {size / 1e6:.1f} M parameters; ids known in answers: {known:.1%}",
        flush=True,
    )
    training = training_of(draft, taught, recipe, (texts, held, options.draft_len))
    facts |= learn(training, texts.starts.diff(), rows, options.work).facts()
    write_draft(draft, taught.ids, options.out, loading.tokenizer_hash(tokenizer), facts)
    written = held_out_mat(read_draft(options.out), texts, held, taught.ids, options.draft_len)
    write_card(options.out, {"held_out_mat": written})
    print((options.out / FACTS).read_text(encoding="utf-8"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(parser, work=".cache/draft_smollm2_135m", groups=48, batch=GROUP)
    add = parser.add_argument
    add("--out", type=Path, default=DRAFT_FOLDER, help="the draft's folder")
    add("--vocab", type=int, default=18000, help="the draft's ids (default: %(default)s)")
    add("--layers", type=numbers, default=LAYERS, help="of the target (default: %(default)s)")
    add("--epochs", type=int, default=2)
    add("--lr", type=float, default=1e-3)
    add("--batch-tokens", type=int, default=1024, help="padding included")
    add("--prompt-weight", type=float, default=0.1, help="of what follows a prompt's tokens")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--only", choices=("prepare", "train"), help="one half of the work")
    add("--evaluate", type=Path, metavar="RUN", help="only tell the MAT on a recorded run")
    add("--time", action="store_true", help="only compare one-token passes with the target")
    add("--draft-len", type=int, default=4, help="tokens of a chain (default: %(default)s)")
    return parser.parse_args(argv)


def work(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.evaluate:
        evaluate(options)
    elif options.time:
        slow, fast = pass_times(options.out)
        times = {"target_ms": round(slow * 1e3, 2), "draft_ms": round(fast * 1e3, 2)}
        times["ratio"] = round(fast / slow, 3)
        print(f"one-token pass: {times}")
        write_card(options.out, {"one-token_pass": times})
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
