"""A target pass by one call against the same pass layer by layer, interleaved in one process.

    python -m scripts.bench passes [--rows 1 2 4 8 16 64] [--threads 1 2] [--contexts 256 800]

For each number of threads, context and rows both take turns, and the table shows milliseconds (the
median), the ratio of the two (the median over pairs) and what one row costs of the others by one
call. Of one row it shows the share of the memory's speed: the bytes of weights that a pass reads,
by its time, over the fastest read of memory in the same process by the same threads.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench import console, print_table
from scripts.bench.engine import pass_over
from specbench.config.compose import compose, typed
from specbench.config.schema import packed_bytes
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target
from specbench.system.bandwidth import FastestRead, streamed_bytes

ROWS = (1, 2, 4, 8, 16, 64)
THREADS = (1, 2)
CONTEXTS = (256, 800)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2_135m", help="a name of conf/model")
    add("--rows", type=int, nargs="+", default=list(ROWS))
    add("--threads", type=int, nargs="+", default=list(THREADS))
    add("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    add("--pairs", type=int, default=30, help="of passes, for each line of the table")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = typed(compose([f"model={options.model}"]))
    loaded = load_model(config, load_tokenizer(config))
    sizes = {"max_len": max(options.contexts) + 64, "max_nodes": max(options.rows)}
    memory, plans = packed_bytes(config.engine.packed), Path(config.cache_dir)
    one_call = Target(loaded.model, **sizes, packed_bytes=memory, cache_dir=plans)
    layered = Target(loaded.model, **sizes, one_call=False)
    weights = streamed_bytes(loaded.model)
    results: dict[str, Any] = {
        "pass": one_call.packed_weights["pass"],
        "huge_pages_kb": _huge_pages(),
        "pairs": [],
    }
    before = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        fastest = FastestRead(torch.device("cpu"), weights, model=loaded.model)
        fastest.measure()
        for context in options.contexts:
            for target in (one_call, layered):
                target.prefill(np.random.default_rng(context).integers(100, 1000, context))
            for rows in options.rows:
                line = pair(pass_over(one_call, rows), pass_over(layered, rows), options.pairs)
                fastest.measure_between()
                of_memory = weights / (line["one_call_ms"] * 1e-3) / fastest.bytes_per_s
                sizes = {"threads": threads, "context": context, "rows": rows}
                results["pairs"].append(
                    sizes | line | {"share": of_memory, "read_bytes_per_s": fastest.bytes_per_s}
                )
                yield results
    torch.set_num_threads(before)


def pair(new: Callable[[], object], old: Callable[[], object], times: int) -> dict[str, float]:
    """Milliseconds of both, medians and fastest, and their ratio, interleaved."""
    spent: dict[str, list[float]] = {"one_call": [], "layers": []}
    for number in range(times + 2):
        for name, call in (("one_call", new), ("layers", old))[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            call()
            spent[name].append(1e3 * (time.perf_counter() - start))
    both = {name: values[2:] for name, values in spent.items()}
    found = {f"{name}_ms": statistics.median(values) for name, values in both.items()}
    found |= {f"{name}_fastest_ms": min(values) for name, values in both.items()}
    ratios = [a / b for a, b in zip(both["one_call"], both["layers"], strict=True)]
    return found | {"ratio": statistics.median(ratios)}


def _huge_pages() -> int | None:
    """Of this process's memory, in KB; None where the system does not say."""
    try:
        lines = Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("AnonHuge")), None)


def show(results: dict[str, Any]) -> None:
    console.print(f"passes by: {results['pass']}; in huge pages: {results['huge_pages_kb']} KB")
    columns = ["threads", "context", "rows", "one call ms", "layers ms", "ratio", "of fastest"]
    columns += ["to its 1 row", "of memory's speed"]
    ones = {(r["threads"], r["context"]): r["one_call_ms"] for r in results["pairs"][::-1]}
    cells = []
    for row in results["pairs"]:
        fastest = row["one_call_fastest_ms"] / row["layers_fastest_ms"]
        relative = row["one_call_ms"] / ones[row["threads"], row["context"]]
        cell = "{threads}|{context}|{rows}|{one_call_ms:.1f}|{layers_ms:.1f}|{ratio:.2f}|"
        share = f"{row['share']:.0%}" if row["rows"] == 1 else ""
        cells.append(
            [*cell.format_map(row).split("|")[:-1], f"{fastest:.2f}", f"{relative:.2f}", share]
        )
    print_table("a target pass by one call and layer by layer", columns, cells)
