"""What a step takes beside the target's pass, part by part, by one call and layer by layer.

    python -m scripts.bench steps [--tokens 128] [--threads 1 2] [--out FILE]

Parts: draft, pass, accept (the verdict, with the argmax and its way to the host where the pass has
not made it), cache (accepted rows move into place) and observe. Plain decoding, a draft of seven
random tokens (8 rows a pass), EAGLE-2 with the model's head and one token, and Token Recycling with
a run's tree and the published one of 80 nodes decode the same answers; all take turns, a step each.
Microseconds are medians.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra.utils
import numpy as np
import torch

from scripts.bench import print_table
from scripts.bench.engine import Scripted, random_tree
from scripts.bench.others import QUESTIONS
from specbench.config.compose import compose, typed
from specbench.config.schema import packed_bytes
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftContext
from specbench.decoding.turn import Decoding, StopRules
from specbench.decoding.verify import GreedyVerifier
from specbench.models.heads import folder as head_folder
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target

PARTS = ("draft", "pass", "accept", "cache", "observe")
PASSES = {"one call": True, "layers": False}
METHODS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("eagle2", "eagle2", {"total": 2, "depth": 0, "top_k": 1}),
    ("token_recycling", "token_recycling", {}),
    ("token_recycling_80", "token_recycling", {"levels": None}),
)
_WARM_UP = 8  # steps of each


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2_135m", help="a name of conf/model")
    add("--tokens", type=int, default=128, help="new tokens a question")
    add("--threads", type=int, nargs="+", default=[1, 2])
    add("--questions", type=int, default=len(QUESTIONS), help=f"of {len(QUESTIONS)}")


def drafters_of(model: str, vocab_size: int) -> dict[str, Drafter]:
    """By label; the methods with the values that a run of the model takes, but for the knobs."""
    scripted = Scripted(name="8_rows")
    scripted.tree = random_tree(7, vocab_size, 0)
    drafters = {"ar": Drafter(name="ar"), "8_rows": scripted}
    for label, name, knobs in METHODS:
        node = typed(compose([f"model={model}", f"method={name}"])).method
        kept = {key: value for key, value in node.items() if key not in ("label", "search")}
        drafters[label] = hydra.utils.instantiate({**kept, **knobs})
    return drafters


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = typed(compose([f"model={options.model}", "method=eagle2"]))
    tokenizer = load_tokenizer(config)
    loaded = load_model(config, tokenizer)
    eos = frozenset(loaded.eos_ids)
    targets: dict[tuple[str, str], Target] = {}
    drafters: dict[tuple[str, str], Drafter] = {}
    for passes, one_call in PASSES.items():
        first: Target | None = None
        for label, drafter in drafters_of(options.model, len(tokenizer)).items():
            first = first or Target(
                loaded.model,
                max_len=options.tokens + 512,
                max_nodes=96,
                packed_bytes=packed_bytes(config.engine.packed),
                cache_dir=Path(config.cache_dir),
                one_call=one_call,
            )
            target = first.twin()
            target.draft_weights = config.engine.draft_weights
            needed = drafter.needs.heads
            heads = {n: head_folder.find(n, config.pair.heads, config.model) for n in needed}
            drafter.setup(
                DraftContext(
                    target.vocab_size,
                    eos,
                    max_len=options.tokens + 512,
                    heads={name: path for name, path in heads.items() if path},
                    target=target,
                )
            )
            targets[passes, label], drafters[passes, label] = target, drafter
    results: dict[str, Any] = {"steps": []}
    template, before = PromptTemplate(tokenizer), torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        spent: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
        for question in QUESTIONS[: options.questions]:
            prompt = np.array(template.render([(question, None)]))
            for key, steps in one_answer(targets, drafters, prompt, options.tokens, eos).items():
                spent[key] += steps[_WARM_UP:]
        for (passes, label), steps in spent.items():
            medians = 1e6 * np.median(np.array(steps), axis=0)
            parts = {f"{part}_us": us for part, us in zip(PARTS, medians.tolist(), strict=True)}
            about = {"threads": threads, "passes": passes, "label": label, "n_steps": len(steps)}
            results["steps"].append(about | parts)
        yield results
    torch.set_num_threads(before)


def one_answer(
    targets: dict[tuple[str, str], Target],
    drafters: dict[tuple[str, str], Drafter],
    prompt: Any,
    tokens: int,
    eos: frozenset[int],
) -> dict[tuple[str, str], list[list[float]]]:
    """Seconds of each part of each step; a turn that is over leaves, the others go on."""
    verifier, turns = GreedyVerifier(), {}
    for key, drafter in drafters.items():
        drafter.reset()
        turns[key] = Decoding(targets[key], verifier, StopRules(eos), drafter, prompt, tokens)
        turns[key].read_prompt()
        turns[key].begin()
    spent: dict[tuple[str, str], list[list[float]]] = {key: [] for key in turns}
    while going := [key for key, turn in turns.items() if not turn.finished]:
        for key in going[:: 1 if len(spent[going[0]]) % 2 else -1]:
            spent[key].append(one_step(targets[key], turns[key]))
    texts = {tuple(turn.state.new_tokens.tolist()) for turn in turns.values()}
    assert len(texts) == 1, "labels decoded different answers"
    return spent


def one_step(target: Target, turn: Decoding) -> list[float]:
    """Seconds of each of ``PARTS``."""
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    turn.propose()
    mark()
    layers = turn.needs.hidden_layers
    scores = target.forward(turn.state.root, turn.tree, hidden_layers=layers)
    mark()
    turn.judge(scores)
    mark()
    turn.commit()
    mark()
    turn.observe()
    mark()
    return np.diff(marks).tolist()


def show(results: dict[str, Any]) -> None:
    cells = [
        [str(row["threads"]), row["label"], row["passes"]]
        + [f"{row[f'{part}_us']:.0f}" for part in PARTS]
        for row in results["steps"]
    ]
    print_table("µs of a step", ("threads", "drafts", "passes", *PARTS), cells)
