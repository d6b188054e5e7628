"""What no runner measures of a GPU: bandwidth, loops side by side, time by kernel.

    python -m scripts.bench gpu PART [KEY=VALUE ...]

Parts: bandwidth (copies and reads of the device's memory), loops (plain decoding five ways, turn
about; and the clock of CUDA events against the wall), kernels (microseconds of a pass by family of
kernels, at few rows and at many). The model is the one that ``run.py`` would take, with random
weights. `make gpu-check` runs these parts.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from scripts.bench import console, print_table
from specbench.config.compose import compose
from specbench.config.schema import ModelConfig
from specbench.decoding.device import seconds, synchronize
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.models.graph_target import GraphTarget
from specbench.models.loading import choose_device, shape_model
from specbench.models.target import Target
from specbench.system import bandwidth, cuda_settings

PROMPT, KERNEL_ROWS, PROFILED = 128, (1, 64), 5
# By the first that a kernel's name matches.
FAMILIES = {
    "attention": r"attention|flash|fmha|sdpa",
    "product": r"gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|(add)?mm\b|linear",
    "norm": r"norm|rsqrt|mean|pow",
    "copy": r"memcpy|memset|copy|index|gather|scatter|cat",
    "choice": r"argmax|reduce|topk|sort",
    "other": "",
}


def random_model(overrides: list[str]) -> PreTrainedModel:
    node = compose([*overrides, "model.shape=true"]).model
    model = cast("ModelConfig", OmegaConf.to_object(node))
    dtype = getattr(torch, str(model.dtype))
    device = choose_device(str(model.device))
    network = shape_model(model.shape_config, dtype=dtype, device=device)
    return network.eval().requires_grad_(False)  # type: ignore[no-any-return]


def measure_bandwidth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = choose_device(str(compose(options.overrides).model.device))
    read = bandwidth.FastestRead(device, bandwidth.COPY_BYTES[device.type])
    copies, reads = [], []
    for _ in range(options.repeats):
        copies.append(bandwidth.copy_bandwidth(device))
        read.measure()
        reads.append(read.bytes_per_s)
        yield {"copy_bytes_per_s": copies, "read_bytes_per_s": reads}


def measure_loops(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens/s of whole calls, the prompt's pass included; ``decode_s`` is taken of CUDA events."""
    tokens = options.tokens
    stock, model = random_model(options.overrides), random_model(options.overrides)
    prompt = np.random.default_rng(0).integers(3, 200, PROMPT)
    ids = torch.from_numpy(prompt)[None].to(stock.device)
    sizes: dict[str, Any] = {"max_len": PROMPT + tokens, "max_nodes": 1}
    capture = model.device.type == "cuda"
    graphs = {  # as a run has it; fusing moves the weights, so it comes first
        "graph": GraphTarget(model, capture=capture, fused=True, **sizes),
        "graph_stock": GraphTarget(model, capture=capture, **sizes),
    }
    engines = {
        name: Engine(target, GreedyVerifier(), eos_ids=frozenset())
        for name, target in {"eager": Target(model, **sizes), **graphs}.items()
    }
    clock: list[float] = []
    results: dict[str, Any] = {
        "tokens": tokens,
        "weight_bytes": bandwidth.streamed_bytes(stock),
        "copy_bytes_per_s": bandwidth.copy_bandwidth(model.device),
        "tokens_per_s": {name: [] for name in ("generate", "generate_static", *engines)},
        "passes_per_s": {name: [] for name in engines},  # behind the prompt's
        "clock_over_wall": clock,
        "failed": {} if options.static else {"generate_static": "left out: it compiles"},
    }

    def theirs(**more: Any) -> None:
        generate: Any = stock.generate
        out = generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            min_new_tokens=tokens, eos_token_id=None, pad_token_id=0, **more,
        )  # fmt: skip
        assert out.shape[1] == PROMPT + tokens

    def ours(name: str, counted: bool) -> None:
        synchronize(model.device)
        start = time.perf_counter()
        decoded = engines[name].decode(prompt, Drafter(name="ar"), max_new_tokens=tokens)
        synchronize(model.device)
        wall = time.perf_counter() - start
        if counted:
            results["passes_per_s"][name].append((tokens - 1) / decoded.timings.decode_s)
            clock.append(decoded.timings.wall_s / wall)

    calls: dict[str, Callable[[bool], None]] = {
        **{name: partial(ours, name) for name in engines},
        "generate": lambda _: theirs(),
        "generate_static": lambda _: theirs(cache_implementation="static"),
    }
    # The compiled loop comes last: on an H200, with torch 2.11, all of ours ended with an illegal
    # memory access once it had run.
    for names in ([name for name in calls if name != "generate_static"], ["generate_static"]):
        for i in range(options.repeats + 1):  # the first one warms up, and compiles
            for name in names[::-1] if i % 2 else names:
                if name in results["failed"]:
                    continue
                try:
                    spent = seconds(partial(calls[name], i > 0), stock.device)
                except (RuntimeError, ValueError) as error:  # one way that fails ends no other
                    results["failed"][name] = f"{type(error).__name__}: {str(error)[:300]}"
                    continue
                if i:
                    results["tokens_per_s"][name].append(tokens / spent)
                yield results | {"passes": {name: t.describe() for name, t in graphs.items()}}


def measure_kernels(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = random_model(options.overrides)
    on_gpu = model.device.type == "cuda"
    sizes: dict[str, Any] = {"max_len": PROMPT + 64, "max_nodes": max(KERNEL_ROWS)}
    target = GraphTarget(model, capture=on_gpu, fused=True, **sizes)  # as runs have it
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    by_rows: dict[str, Any] = {}
    for rows in KERNEL_ROWS:
        target.prefill(np.arange(3, 3 + PROMPT) % 200)
        tree = DraftTree.chain(np.arange(rows - 1))
        for _ in range(2):
            GreedyVerifier().verify(tree, target.forward(7, tree))
        wall = statistics.median(
            seconds(partial(target.forward, 7, tree), target.device) for _ in range(PROFILED)
        )
        with torch.profiler.profile(activities=[kind]) as profile:
            for _ in range(PROFILED):
                GreedyVerifier().verify(tree, target.forward(7, tree))
            synchronize(target.device)
        spent, launched, names = (defaultdict[str, float](float) for _ in range(3))
        for event in profile.key_averages():
            own: float = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if own > 0:
                family = next(f for f, p in FAMILIES.items() if re.search(p, event.key.lower()))
                spent[family] += own / PROFILED
                launched[family] += event.count / PROFILED
                names[event.key[:120]] += own / PROFILED
        by_rows[str(rows)] = {
            "wall_us": 1e6 * wall,
            "us": dict(spent),
            "launches": dict(launched),
            "longest_us": dict(sorted(names.items(), key=lambda item: -item[1])[:12]),
        }
        yield {"by_rows": by_rows, "passes": {"graph": target.describe()}}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "bandwidth": measure_bandwidth,
    "loops": measure_loops,
    "kernels": measure_kernels,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("part", choices=PARTS)
    add("overrides", nargs="*", metavar="KEY=VALUE", help="of run.py, e.g. model=vicuna7b")
    add("--tokens", type=int, default=128, help="new tokens of a loop; over 100 for the clock")
    add("--repeats", type=int, default=5)
    add("--no-static", dest="static", action="store_false", help="loops without the compiled one")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cuda_settings.fix()
    with torch.inference_mode():
        for results in PARTS[options.part](options):
            yield results | {"cuda_settings": cuda_settings.in_force()}


def show(results: dict[str, Any]) -> None:
    if "tokens_per_s" in results:
        _show_loops(results)
    elif copies := results.get("copy_bytes_per_s"):
        reads = max(results["read_bytes_per_s"]) * 1e-9
        console.print(f"copy {spread(copies, 1e-9)} GB/s, fastest read {reads:.0f} GB/s")
    for rows, found in results.get("by_rows", {}).items():
        cells = [
            (family, f"{us:.0f}", f"{found['launches'][family]:.0f}")
            for family, us in found["us"].items()
        ]
        cells.append(("a pass, by the wall", f"{found['wall_us']:.0f}", ""))
        print_table(f"a pass of {rows} rows", ("kernels", "µs", "launches"), cells)
    for name, described in results.get("passes", {}).items():
        if described.get("eager"):
            console.print(f"{name} ran eagerly: {described['eager']}")
        if stock := (described.get("layers") or {}).get("stock"):
            console.print(f"{name} has layers that are not fused: {stock}")


def _show_loops(results: dict[str, Any]) -> None:
    rows = []
    for name, rates in results["tokens_per_s"].items():
        passes = results["passes_per_s"].get(name)
        busy = results["weight_bytes"] * statistics.median(passes) if passes else 0
        share = f"{busy / results['copy_bytes_per_s']:.0%}" if passes else "–"
        rows.append([name, spread(rates) if rates else results["failed"].get(name, "–"), share])
    print_table("plain decoding", ("loop", "tokens/s", "share of copy bandwidth"), rows)
    if clock := results["clock_over_wall"]:
        off = max(abs(share - 1) for share in clock)
        steps = results["tokens"] - 1
        verdict = "within 1 %" if off <= 0.01 else "NOT within 1 %"
        verdict = verdict if steps >= 100 else "too few steps to tell"
        console.print(
            f"CUDA-event times against the wall over {steps} steps: off by at most {off:.2%}, "
            f"{verdict}"
        )


def spread(values: list[float], scale: float = 1.0) -> str:
    """Median, smallest and largest of some measurements."""
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] of {len(values)}"
