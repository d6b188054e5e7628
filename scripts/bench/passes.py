"""A target pass by one call, of weights in several forms, against the pass layer by layer.

    python -m scripts.bench passes [--weights float32 bfloat16 stored] [--rows 1 2 4 8 16 64]
                                   [--threads 1 2] [--contexts 256 800] [--out FILE]

All are interleaved in one process. For each number of threads, context and rows all take turns, and
the table shows milliseconds (the median), the ratio to float32 layer by layer (the median over
turns) and what the rows cost of one row in the same form. Of one row it shows the share of the
memory's speed: the bytes of weights that a pass reads, by its time, over the fastest read of memory
in the same process by the same threads. In the same turns the products of a pass are called alone,
one after the other, so that the table shows what a pass takes beside them.
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
from specbench.config.schema import FLOAT32_WEIGHTS, WEIGHTS, packed_bytes
from specbench.kernels.compiled_pass import products_of
from specbench.kernels.packed_linear import PackedLinear
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target
from specbench.system.bandwidth import FastestRead, streamed_bytes

ROWS = (1, 2, 4, 8, 16, 64)
THREADS = (1, 2)
CONTEXTS = (256, 800)
LAYERS = "layers"  # float32, layer by layer: what the others are compared with
PRODUCTS = " products"  # behind a form's name


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2_135m", help="a name of conf/model")
    add("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="engine.weights")
    add("--rows", type=int, nargs="+", default=list(ROWS))
    add("--threads", type=int, nargs="+", default=list(THREADS))
    add("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    add("--turns", type=int, default=30, help="of each pass, for each line of the table")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sizes = {"max_len": max(options.contexts) + 64, "max_nodes": max(options.rows)}
    targets: dict[str, Target] = {}
    products: dict[str, list[PackedLinear]] = {}
    read: dict[str, int] = {}  # bytes that a pass of one row reads
    for kind in dict.fromkeys([FLOAT32_WEIGHTS, *options.weights]):
        config = typed(compose([f"model={options.model}", f"engine.weights={kind}"]))
        loaded = load_model(config, load_tokenizer(config))
        memory, plans = packed_bytes(config.engine.packed), Path(config.cache_dir)
        target = Target(loaded.model, **sizes, packed_bytes=memory, cache_dir=plans)
        if kind == FLOAT32_WEIGHTS:
            plain = loaded.model
            targets[LAYERS] = Target(plain, **sizes, one_call=False)
            read[LAYERS] = streamed_bytes(plain)
        if kind in options.weights:
            targets[kind], read[kind] = target, streamed_bytes(loaded.model)
        if kind in options.weights or kind == FLOAT32_WEIGHTS:
            products[kind + PRODUCTS] = products_of(loaded.model)
    results: dict[str, Any] = {
        "pass": {name: target.packed_weights["pass"] for name, target in targets.items()},
        "forms": {name: target.packed_weights["forms"] for name, target in targets.items()},
        "weight_bytes": read,
        "huge_pages_kb": _huge_pages(),
        "turns": [],
    }
    before = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        fastest = FastestRead(torch.device("cpu"), read[LAYERS], model=plain)
        fastest.measure()
        for context in options.contexts:
            for target in targets.values():
                target.prefill(np.random.default_rng(context).integers(100, 1000, context))
            for rows in options.rows:
                passes = {name: pass_over(target, rows) for name, target in targets.items()}
                alone = {name: one_by_one(all_, rows) for name, all_ in products.items()}
                found = in_turns(passes | alone, options.turns)
                fastest.measure_between()
                for name, line in found.items():
                    if name in products:
                        continue
                    speed = read[name] / (line["ms"] * 1e-3)
                    line["share"] = speed / fastest.bytes_per_s
                    beside = found[(FLOAT32_WEIGHTS if name == LAYERS else name) + PRODUCTS]
                    line["beside_products"] = 1 - beside["ms"] / line["ms"]
                asked = {"threads": threads, "context": context, "rows": rows}
                results["turns"].append(
                    asked | {"by": found, "read_bytes_per_s": fastest.bytes_per_s}
                )
                yield results
    torch.set_num_threads(before)


def one_by_one(products: list[PackedLinear], rows: int) -> Callable[[], object]:
    """All products of a pass over ``rows``, without what lies between them."""
    sizes = {product.in_features for product in products}
    inputs = {size: torch.rand(rows, size) - 0.5 for size in sizes}

    def call() -> None:
        with torch.inference_mode():
            for product in products:
                product(inputs[product.in_features])

    return call


def in_turns(passes: dict[str, Callable[[], object]], times: int) -> dict[str, dict[str, float]]:
    """By name: median and fastest milliseconds, and the median ratio to ``LAYERS`` in its turn."""
    spent: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(times + 2):
        for name, call in [*passes.items()][:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            call()
            spent[name].append(1e3 * (time.perf_counter() - start))
    kept = {name: values[2:] for name, values in spent.items()}
    return {
        name: {
            "ms": statistics.median(values),
            "fastest_ms": min(values),
            "ratio": statistics.median(a / b for a, b in zip(values, kept[LAYERS], strict=True)),
        }
        for name, values in kept.items()
    }


def _huge_pages() -> int | None:
    """Of this process's memory, in KB; None where the system does not say."""
    try:
        lines = Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("AnonHuge")), None)


def show(results: dict[str, Any]) -> None:
    said = "; ".join(f"{name}: {how}" for name, how in results["pass"].items())
    console.print(f"passes: {said}; in huge pages: {results['huge_pages_kb']} KB")
    columns = ["threads", "context", "rows", "weights", "ms", "fastest", "of layers"]
    columns += ["to its 1 row", "of memory's speed", "beside products"]
    ones = {(t["threads"], t["context"]): t["by"] for t in results["turns"] if t["rows"] == 1}
    cells = []
    for turn in results["turns"]:
        one = ones.get((turn["threads"], turn["context"]))
        for name, line in turn["by"].items():
            where = "{threads}|{context}|{rows}".format_map(turn).split("|")
            times = "{ms:.2f}|{fastest_ms:.2f}|{ratio:.2f}".format_map(line).split("|")
            relative = f"{line['ms'] / one[name]['ms']:.2f}" if one else ""
            share = f"{line['share']:.0%}" if turn["rows"] == 1 and "share" in line else ""
            beside = f"{line['beside_products']:.0%}" if "beside_products" in line else ""
            cells.append([*where, name, *times, relative, share, beside])
    print_table("a target pass by one call, and layer by layer", columns, cells)
