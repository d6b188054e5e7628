"""How fast each kernel reads a model's weights: GB/s by layer, kernel and rows, interleaved.

    python scripts/bench/linears.py [--threads 1] [--rows 1,2,4,8] [--out linears.json]

Weights are random and as many as the model has, so that they come from memory and not from a cache.
``read`` sums the weights up: what a plain stream reaches. With one thread the clock is the
thread's CPU time, which other programs on the machine disturb little; else it is the wall's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from specbench.config.compose import compose
from specbench.kernels.autotune import KERNELS, available_kernels, pack
from specbench.system import environment

if TYPE_CHECKING:
    from collections.abc import Callable


def layers(shape: Any) -> dict[str, tuple[int, int, int]]:
    """Products of a Llama-like shape, those of one input together: ``(out, in, how many)``."""
    hidden, inner, n = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers
    head = shape.get("head_dim") or hidden // shape.num_attention_heads
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    return {
        "query, key, value": (heads * head, hidden, n),
        "output": (hidden, shape.num_attention_heads * head, n),
        "gate, up": (2 * inner, hidden, n),
        "down": (hidden, inner, n),
        "vocabulary": (shape.vocab_size, hidden, 1),
    }


def measure(
    size: tuple[int, int, int], rows: list[int], repeats: int, clock: Any
) -> dict[str, Any]:
    """Median seconds of one product by kernel and rows, in one interleaved loop."""
    out_features, in_features, count = size
    weights = [torch.randn(out_features, in_features) for _ in range(count)]
    calls: dict[tuple[str, int], Callable[[], object]] = {
        ("read", 0): lambda: [w.sum() for w in weights]
    }
    for kind in available_kernels():
        packs = [pack(kind, w) for w in weights]
        for n in rows:
            x = torch.randn(n, in_features)
            calls[kind, n] = lambda k=KERNELS[kind], p=packs, x=x: [  # type: ignore[misc]
                k(x, w, q, None) for w, q in zip(weights, p, strict=True)
            ]
    flush = torch.ones(16 << 20)  # what one call leaves in the caches is no help to the next
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for i in range(repeats + 1):
        for key, call in calls.items():
            flush.add_(1.0)
            start = clock()
            call()
            if i:
                times[key].append((clock() - start) / count)
    return {f"{kind} {n}": statistics.median(values) for (kind, n), values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2_135m", help="a name of conf/model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with all times")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = [int(n) for n in args.rows.split(",")]
    shapes = layers(compose([f"model={args.model}"]).model.shape_config)
    with torch.inference_mode():
        found = {name: measure(size, rows, args.repeats, clock) for name, size in shapes.items()}
    keys = list(next(iter(found.values())))
    total = {k: sum(found[name][k] * shapes[name][2] for name in shapes) for k in keys}
    table = Table(title=f"GB/s of weights read, {args.threads} thread(s); all: ms for a pass")
    for column in ("kernel", "rows", *found, "all"):
        table.add_column(column, justify="right")
    for key in keys:
        kind, n = key.split()
        rates = (4e-9 * shapes[name][0] * shapes[name][1] / found[name][key] for name in found)
        table.add_row(kind, n, *(f"{rate:.1f}" for rate in rates), f"{1e3 * total[key]:.1f}")
    Console(width=120).print(table)
    if args.out:
        facts = {
            "command": " ".join(sys.argv),
            "date": time.strftime("%Y-%m-%d"),
            "environment": environment.describe(),
            "seconds": found,
            "pass_s": total,
        }
        args.out.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
