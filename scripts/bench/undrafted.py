"""What a step without a draft costs, against a step of plain decoding.

    python -m scripts.bench undrafted [--tokens 96] [--questions 4]

Two drafters within ``adaptive``: one that drafts nothing (``nothing``: the wrapper's own cost), and
suffix decoding of which every draft is refused (``refused``: its search and its learning too). They
and plain decoding, which stands there twice (``ar again``: what chance does), decode the same
answers with a cache each, a step of each in turn, in changing order. A ratio is the median over
pairs of steps; its 95 % interval resamples stretches of steps.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from methods.adaptive import Adaptive
from methods.suffix_decoding import SuffixDecoding
from scripts.bench import console, print_table
from scripts.bench.others import QUESTIONS
from specbench.arrays import BoolArray, FloatArray, IntArray
from specbench.config.compose import compose, typed
from specbench.config.schema import packed_bytes
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.decoding.turn import Decoding, StopRules
from specbench.decoding.verify import GreedyVerifier
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target

_STRETCH = 16  # steps that are resampled together
_RESAMPLED = 1000


class _Silent(Drafter):
    says_survival: ClassVar[bool] = True


class _Refusing(Adaptive):
    def _worth(self, tree: DraftTree, context: int) -> BoolArray:
        return np.zeros(len(tree), dtype=np.bool_)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2_135m", help="a name of conf/model")
    add("--tokens", type=int, default=96, help="new tokens a question")
    add("--questions", type=int, default=len(QUESTIONS), help=f"of {len(QUESTIONS)}")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = typed(compose([f"model={options.model}"]))
    tokenizer = load_tokenizer(config)
    loaded = load_model(config, tokenizer)
    template, eos = PromptTemplate(tokenizer), frozenset(loaded.eos_ids)
    drafters = {
        "ar": Drafter(name="ar"),
        "ar again": Drafter(name="ar"),
        "nothing": Adaptive(drafter=_Silent(name="silent")),
        "refused": _Refusing(drafter=SuffixDecoding()),
    }
    target = Target(
        loaded.model,
        max_len=options.tokens + 512,
        max_nodes=max(drafter.needs.max_nodes for drafter in drafters.values()),
        packed_bytes=packed_bytes(config.engine.packed),
        cache_dir=Path(config.cache_dir),
    )
    targets = {label: target.twin() for label in drafters}
    for drafter in drafters.values():
        drafter.setup(DraftContext(target.vocab_size, eos))
    spent: dict[str, list[FloatArray]] = {label: [] for label in drafters}
    for question in (QUESTIONS[0], *QUESTIONS[: options.questions]):  # the first warms up
        prompt = np.array(template.render([(question, None)]))
        for label, seconds in _steps(targets, drafters, prompt, options.tokens, eos).items():
            spent[label].append(seconds)
    times = {label: np.concatenate(values[1:]) for label, values in spent.items()}
    yield {
        "threads": torch.get_num_threads(),
        "steps": len(times["ar"]),
        "ar_ms": 1e3 * float(np.median(times["ar"])),
        "labels": [
            {"label": label, **against(times[label], times["ar"])}
            for label in drafters
            if label != "ar"
        ],
    }


def _steps(
    targets: dict[str, Target],
    drafters: dict[str, Drafter],
    prompt: IntArray,
    tokens: int,
    eos: frozenset[int],
) -> dict[str, FloatArray]:
    """Seconds of each label's steps over one answer, turn about."""
    verifier, rules = GreedyVerifier(), StopRules(eos)
    turns, engines = {}, {}
    for label, drafter in drafters.items():
        drafter.reset()
        engines[label] = Engine(targets[label], verifier, eos_ids=eos)
        turns[label] = Decoding(targets[label], verifier, rules, drafter, prompt, tokens)
        turns[label].read_prompt()
        turns[label].begin()
    spent: dict[str, list[float]] = {label: [] for label in drafters}
    orders = itertools.cycle(itertools.permutations(drafters))
    while not any(turn.finished for turn in turns.values()):
        for label in next(orders):
            engine = engines[label]
            start = time.perf_counter()
            engine._step(turns[label], engine._clock)
            spent[label].append(time.perf_counter() - start)
    texts = {tuple(turn.state.new_tokens.tolist()) for turn in turns.values()}
    assert len(texts) == 1, "labels decoded different answers"
    return {label: np.array(seconds) for label, seconds in spent.items()}


def against(steps: FloatArray, plain: FloatArray) -> dict[str, Any]:
    """The ratio of paired steps, its interval, and the difference in microseconds."""
    ratios = steps / plain
    stretches = [ratios[i : i + _STRETCH] for i in range(0, len(ratios), _STRETCH)]
    rng = np.random.default_rng(0)
    medians = [
        float(np.median(np.concatenate([stretches[i] for i in drawn])))
        for drawn in rng.integers(0, len(stretches), (_RESAMPLED, len(stretches)))
    ]
    return {
        "ratio": float(np.median(ratios)),
        "ratio_ci": np.quantile(medians, (0.025, 0.975)).tolist(),
        "more_us": 1e6 * statistics.median(steps - plain),
    }


def show(results: dict[str, Any]) -> None:
    console.print(
        f"a step of plain decoding: {results['ar_ms']:.2f} ms ({results['steps']} steps, "
        f"{results['threads']} threads)"
    )
    cells = [
        [
            row["label"],
            f"{row['ratio']:.4f}",
            "{:.4f} to {:.4f}".format(*row["ratio_ci"]),
            f"{row['more_us']:.0f}",
        ]
        for row in results["labels"]
    ]
    print_table("a step without a draft", ("drafts", "ratio to ar", "95 %", "µs more"), cells)
