"""Drafting time per step of every method that looks at committed tokens alone.

    python -m scripts.bench drafters [--context 1000] [--steps 400] [--out results/drafters.json]

A text is committed one to three tokens a step, whatever was drafted, and each call is timed; no
model runs. Methods come from conf/method/; some of them are run with several knobs. The text is
prose of Python's own documentation, tokenized as the bundled model does. The last row is a plain
walk over dictionaries that finds the followers of Cacheback's tree without building it: the ratios
are against its time, measured in the same run.
"""

import argparse
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import hydra.utils
import numpy as np

from methods.cacheback import Cacheback
from methods.cacheback.frozen_table import FrozenTable
from scripts.bench import print_table
from specbench.arrays import IntArray
from specbench.artifacts import resolve
from specbench.artifacts.documentation import installed_prose
from specbench.config.compare import method_node
from specbench.config.compose import compose, option_names, typed
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, Needs, StepOutcome
from specbench.models import loading
from specbench.models.checkpoints import weights

# Besides every method with its own defaults: the knobs worth a row of their own.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "pld": [{"variant": name} for name in ("hf", "vllm", "recent")],
    "cacheback": [
        {"merge": True},
        {"table": "dynamic"},
        {"table": "dynamic", "merge": True},
        {"merge": True, "total_draft_len": 16, "chaining_reserved": 2},
    ],
}
WARM_UP = 20
PARTS = ("propose", "observe", "both")


def tokens_of_prose(tokenizer: Any, count: int) -> IntArray:
    """``[count]`` Python's own documentation in the bundled model's tokens."""
    _, prose = next(installed_prose())
    ids: list[int] = []
    for paragraph in prose:
        ids += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False)
        if len(ids) >= count:
            break
    return np.array(ids[:count], dtype=np.int64)


def time_steps(drafter: Drafter, text: IntArray, context: int, seed: int) -> dict[str, Any]:
    """Median nodes of a draft, and microseconds of propose and observe: medians and 95th."""
    random = np.random.default_rng(seed)
    state = DecodeState(text[:context], len(text) - context)
    drafter.reset()
    state.commit(text[context : context + 1])
    drafter.begin(state)
    steps: list[tuple[int, int, int]] = []
    while state.remaining >= 3:
        size = int(random.integers(1, 4))
        committed = text[state.length : state.length + size]
        start = time.perf_counter_ns()
        tree = drafter.propose(state)
        proposed = time.perf_counter_ns()
        state.step += 1
        state.commit(committed)
        outcome = StepOutcome(tree, NO_TOKENS, committed, None)
        committing = time.perf_counter_ns()
        drafter.observe(state, outcome)
        observed = time.perf_counter_ns()
        steps.append((len(tree), proposed - start, observed - committing))
    drafter.end(state)
    nodes, propose, observe = np.array(steps[WARM_UP:]).T
    row: dict[str, Any] = {"steps": len(nodes), "nodes_median": float(np.median(nodes))}
    for part, values in zip(PARTS, (propose, observe, propose + observe), strict=True):
        row[f"{part}_median_us"] = round(float(np.median(values)) / 1e3, 2)
        row[f"{part}_p95_us"] = round(float(np.percentile(values, 95)) / 1e3, 2)
    return row


class DictionaryWalk(Drafter):
    """Cacheback's two tables in dictionaries, its tree as a list of followers: no arrays."""

    def setup(self, context: DraftContext) -> None:
        leaders, _, offsets, followers = FrozenTable.open(context.artifacts["frozen_table"]).arrays
        rows = [tuple(row) for row in followers.tolist()]
        self.frozen = {
            leader: rows[offsets[i] : offsets[i + 1]]
            for i, leader in enumerate(leaders[:, 0].tolist())
        }

    @property
    def needs(self) -> Needs:
        return Cacheback().needs

    def reset(self) -> None:
        self.table: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def begin(self, state: DecodeState) -> None:
        self._insert(state.tokens.tolist())

    def _insert(self, tokens: list[int]) -> None:
        for i in range(len(tokens) - 3):
            followers = self.table.setdefault(tokens[i], OrderedDict())
            follower = tuple(tokens[i + 1 : i + 4])
            followers[follower] = None
            followers.move_to_end(follower)

    def propose(self, state: DecodeState) -> Any:
        room, level, first = 80 - state.last_committed, [state.root], True
        drafted: list[tuple[int, ...]] = []
        while level and room >= 3:
            grown = []
            for leader in level:
                for source in (reversed(self.table.get(leader, ())), self.frozen.get(leader, ())):
                    for follower in source:
                        if room < 3:
                            break
                        drafted.append(follower)
                        grown.append(follower[-1])
                        room -= 3
            room += 16 if first else 0
            level, first = grown, False
        return range(3 * len(drafted))

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        begin = state.length - len(outcome.committed) - 3
        self._insert(state.buffer[begin : state.length].tolist())


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--context", type=int, default=1000, help="tokens committed at first")
    add("--steps", type=int, default=400, help="about so many are timed")
    add("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cfg = typed(compose([]))
    tokenizer = loading.load_tokenizer(cfg)
    text = tokens_of_prose(tokenizer, options.context + 3 * (options.steps + WARM_UP))
    drafters: dict[str, Drafter] = {}
    for name in option_names("method"):
        for knobs in ({}, *VARIANTS.get(name, [])):
            label = " ".join([name, *(f"{key}={value}" for key, value in knobs.items())])
            node = method_node(name, knobs, "pair=none")
            drafters[label] = hydra.utils.instantiate(node, _convert_="all")
    drafters["plain dictionary walk"] = DictionaryWalk(name="plain")
    rows = []
    for label, drafter in drafters.items():
        if not drafter.needs.tokens_only or drafter.needs.draft_model:
            continue
        files = resolve.resolve(
            drafter.needs.artifacts,
            tokenizer=tokenizer,
            bundled=True,
            cache_dir=cfg.cache_dir,
            model_key=weights.model_key(cfg),
        )
        drafter.setup(
            DraftContext(
                vocab_size=len(tokenizer),
                eos_ids=frozenset({tokenizer.eos_token_id}),
                tokenizer_hash=loading.tokenizer_hash(tokenizer),
                max_len=cfg.model.context_length or 0,
                artifacts=files,
                seed=options.seed,
            )
        )
        rows.append({"label": label, **time_steps(drafter, text, options.context, options.seed)})
        drafter.close()
    walk = rows[-1]["both_median_us"]
    for row in rows:
        row["ratio_to_walk"] = round(row["both_median_us"] / walk, 3)
    yield {"context": options.context, "seed": options.seed, "rows": rows}


def show(results: dict[str, Any]) -> None:
    def cells(row: dict[str, Any]) -> list[str]:
        times = (f"{row[f'{part}_median_us']:.1f} ({row[f'{part}_p95_us']:.1f})" for part in PARTS)
        return [row["label"], f"{row['nodes_median']:.0f}", *times, f"{row['ratio_to_walk']:.2f}"]

    print_table(
        f"µs per step at {results['context']} tokens of context: median (95th percentile)",
        ("method", "nodes", "propose", "observe", "both", "× walk"),
        map(cells, results["rows"]),
    )
