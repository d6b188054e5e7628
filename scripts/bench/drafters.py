"""Drafting time per step of every method that looks at committed tokens alone.

    python scripts/bench/drafters.py [--out results/drafters.json] [--context 1000] [--steps 400]

A text is committed one to three tokens a step, whatever was drafted, and each call is timed; no
model runs. Methods come from conf/method/; some of them are run with several knobs. The text is
prose of Python's own documentation, tokenised as the bundled model does. The last row is a plain
walk over dictionaries that finds the followers of Cacheback's tree without building it: the ratios
are against its time, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils
import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from methods.cacheback import Cacheback
from specbench.artifacts import resolve
from specbench.artifacts.installed_text import installed_prose
from specbench.config.compare import with_parts
from specbench.config.compose import compose, option_names
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    Needs,
    StepOutcome,
)
from specbench.errors import SpecBenchError
from specbench.index.lru.frozen_table import FrozenTable
from specbench.models import loading, weights

if TYPE_CHECKING:
    from specbench.arrays import IntArray

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


def documentation_tokens(tokenizer: Any, count: int) -> IntArray:
    """The first ``count`` tokens of the prose in Python's own library, in reading order."""
    _, prose = next(installed_prose())
    ids: list[int] = []
    for paragraph in prose:
        ids += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False)
        if len(ids) >= count:
            break
    return np.array(ids[:count], dtype=np.int64)


def make(name: str, knobs: dict[str, Any]) -> Drafter:
    """The drafter with its yaml's knobs, and these instead of some."""
    config = OmegaConf.to_container(compose([f"method={name}", "pair=none"]).method, resolve=True)
    assert isinstance(config, dict)
    config.pop("label", None)
    drafter: Drafter = hydra.utils.instantiate(with_parts({**config, **knobs}), _convert_="all")
    return drafter


def measure(drafter: Drafter, text: IntArray, context: int, seed: int) -> dict[str, IntArray]:
    """Of every step: nodes of the draft, and nanoseconds of propose and observe."""
    random = np.random.default_rng(seed)
    state = DecodeState(text[:context], len(text) - context)
    drafter.reset()
    state.commit(text[context : context + 1])
    drafter.begin(state)
    times: dict[str, list[int]] = {"propose": [], "observe": [], "nodes": []}
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
        times["propose"].append(proposed - start)
        times["observe"].append(observed - committing)
        times["nodes"].append(len(tree))
    drafter.end(state)
    return {name: np.array(values[WARM_UP:]) for name, values in times.items()}


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


def summary(label: str, times: dict[str, IntArray]) -> dict[str, Any]:
    """Microseconds: medians and 95th percentiles."""
    nodes = float(np.median(times["nodes"]))
    row: dict[str, Any] = {"label": label, "steps": len(times["nodes"]), "nodes_median": nodes}
    parts = {"propose": times["propose"], "observe": times["observe"]}
    parts["both"] = times["propose"] + times["observe"]
    for part, values in parts.items():
        row[f"{part}_median_us"] = round(float(np.median(values)) / 1e3, 2)
        row[f"{part}_p95_us"] = round(float(np.percentile(values, 95)) / 1e3, 2)
    return row


def run(context: int, steps: int, seed: int) -> list[dict[str, Any]]:
    cfg = compose([])
    tokenizer = loading.load_tokenizer(cfg)
    text = documentation_tokens(tokenizer, context + 3 * (steps + WARM_UP))
    contenders: list[tuple[str, Drafter]] = []
    for name in option_names("method"):
        for knobs in ({}, *VARIANTS.get(name, [])):
            words = " ".join(f"{key}={value}" for key, value in knobs.items())
            contenders.append((f"{name} {words}".strip(), make(name, knobs)))
    contenders.append(("plain dictionary walk", DictionaryWalk(name="plain")))
    rows = []
    for label, drafter in contenders:
        needs = drafter.needs
        if not needs.tokens_only or needs.draft_model:
            continue
        files = resolve.resolve(
            needs.artifacts,
            tokenizer=tokenizer,
            bundled=True,
            cache_dir=cfg.cache_dir,
            model_key=weights.identity(cfg),
        )
        drafter.setup(
            DraftContext(
                vocab_size=len(tokenizer),
                eos_ids=frozenset({tokenizer.eos_token_id}),
                tokenizer_hash=loading.tokenizer_hash(tokenizer),
                max_len=cfg.model.context_length,
                artifacts=files,
                seed=seed,
            )
        )
        rows.append(summary(label, measure(drafter, text, context, seed)))
        drafter.close()
    for row in rows:
        row["ratio_to_walk"] = round(row["both_median_us"] / rows[-1]["both_median_us"], 3)
    return rows


def show(rows: list[dict[str, Any]], context: int) -> None:
    table = Table(title=f"µs per step at {context} tokens of context: median (95th percentile)")
    table.add_column("method", no_wrap=True)
    for column in ("nodes", "propose", "observe", "both", "× walk"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row[f'{part}_median_us']:.1f} ({row[f'{part}_p95_us']:.1f})"
            for part in ("propose", "observe", "both")
        ]
        nodes, ratio = f"{row['nodes_median']:.0f}", f"{row['ratio_to_walk']:.2f}"
        table.add_row(row["label"], nodes, *cells, ratio)
    # Whole rows also where the output is not a terminal.
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=1000, help="tokens committed at first")
    parser.add_argument("--steps", type=int, default=400, help="about so many are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON with the rows")
    options = parser.parse_args()
    try:
        rows = run(options.context, options.steps, options.seed)
    except SpecBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    show(rows, options.context)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"context": options.context, "seed": options.seed, "machine": platform.platform()}
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
