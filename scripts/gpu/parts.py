"""Parts of the GPU check that no runner has: bandwidth, loops side by side, time by kernel.

``python -m scripts.gpu.parts KIND OUT TOKENS REPEATS OVERRIDE…`` measures one and writes what it
found to OUT as it goes, so that a part that is stopped leaves what it had.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf

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


def loaded(overrides: list[str]) -> Any:
    """The shape of the model that ``run.py`` would take, with random weights."""
    node = compose([*overrides, "model.shape=true"]).model
    model = cast("ModelConfig", OmegaConf.to_object(node))
    device = choose_device(str(model.device))
    dtype = getattr(torch, str(model.dtype))
    network = shape_model(model.shape_config, dtype=dtype, device=device)
    return network.eval().requires_grad_(False)


def bandwidths(save: Callable[[Any], None], tokens: int, repeats: int, words: list[str]) -> None:
    device = choose_device(str(compose(words).model.device))
    read = bandwidth.FastestRead(device, bandwidth.COPY_BYTES[device.type])
    copies, reads = [], []
    for _ in range(repeats):
        copies.append(bandwidth.copy_bandwidth(device))
        read.measure()
        reads.append(read.bytes_per_s)
        save({"copy_bytes_per_s": copies, "read_bytes_per_s": reads})


def loops(
    save: Callable[[Any], None], tokens: int, repeats: int, words: list[str], static: bool = True
) -> None:
    """Plain decoding five ways, turn about; tokens/s of whole calls, the prompt's pass included.

    ``graph`` is what a run measures, ``graph_stock`` the same without fused layers. Also our clock
    against the wall: ``decode_s`` is taken of CUDA events.
    """
    stock, model = loaded(words), loaded(words)
    prompt = np.random.default_rng(0).integers(3, 200, PROMPT)
    ids = torch.from_numpy(prompt)[None].to(stock.device)
    sizes: dict[str, Any] = {"max_len": PROMPT + tokens, "max_nodes": 1}
    graphs = {
        name: GraphTarget(model, capture=model.device.type == "cuda", fused=fused, **sizes)
        for name, fused in (("graph_stock", False), ("graph", True))
    }
    engines = {
        name: Engine(target, GreedyVerifier(), eos_ids=frozenset())
        for name, target in {"eager": Target(model, **sizes), **graphs}.items()
    }
    clock: list[float] = []
    found: dict[str, Any] = {
        "tokens": tokens,
        "weight_bytes": bandwidth.streamed_bytes(stock),
        "parameters": sum(p.numel() for p in stock.parameters()),
        "tokens_per_s": {name: [] for name in ("generate", "generate_static", *engines)},
        "passes_per_s": {name: [] for name in engines},  # behind the prompt's
        "clock_over_wall": clock,
        "failed": {} if static else {"generate_static": "not in --quick: it compiles"},
    }

    def theirs(**more: Any) -> None:
        out = stock.generate(
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
            found["passes_per_s"][name].append((tokens - 1) / decoded.timings.decode_s)
            clock.append(decoded.timings.wall_s / wall)

    for i in range(repeats + 1):  # the first one warms up, and compiles
        calls: dict[str, Callable[[], None]] = {
            **{name: partial(ours, name, i > 0) for name in engines},
            "generate": theirs,
            "generate_static": partial(theirs, cache_implementation="static"),
        }
        for name in [*calls][::-1] if i % 2 else calls:
            if name in found["failed"]:
                continue
            try:
                spent = seconds(calls[name], stock.device)
            except (RuntimeError, ValueError) as error:  # one way that fails ends no other
                found["failed"][name] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            if i:
                found["tokens_per_s"][name].append(tokens / spent)
            passes = {name: target.describe() for name, target in graphs.items()}
            save({**found, "passes": passes})


def kernels(save: Callable[[Any], None], tokens: int, repeats: int, words: list[str]) -> None:
    """Microseconds of a pass by family of kernels, at few rows and at many, and its launches."""
    model = loaded(words)
    on_gpu = model.device.type == "cuda"
    sizes: dict[str, Any] = {"max_len": PROMPT + 64, "max_nodes": max(KERNEL_ROWS)}
    target = GraphTarget(model, capture=on_gpu, fused=True, **sizes)  # as runs have it
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    found: dict[str, Any] = {}
    for rows in KERNEL_ROWS:
        target.prefill(np.arange(3, 3 + PROMPT) % 200)
        tree = DraftTree.chain(np.arange(rows - 1))
        for _ in range(2):
            GreedyVerifier().verify(tree, target.forward(7, tree))
        wall = statistics.median(
            seconds(lambda tree=tree: target.forward(7, tree), target.device)  # type: ignore[misc]
            for _ in range(PROFILED)
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
        found[str(rows)] = {
            "wall_us": 1e6 * wall,
            "us": dict(spent),
            "launches": dict(launched),
            "longest_us": dict(sorted(names.items(), key=lambda item: -item[1])[:12]),
        }
        save({**found, "passes": {"graph": target.describe()}})


KINDS: dict[str, Callable[..., None]] = {
    "bandwidth": bandwidths,
    "loops": loops,
    "loops-quick": partial(loops, static=False),
    "kernels": kernels,
}


def main(argv: list[str]) -> int:
    kind, out, tokens, repeats, *words = argv
    path = Path(out)
    cuda_settings.fix()

    def save(found: Any) -> None:
        path.write_text(json.dumps({**found, "cuda_settings": cuda_settings.in_force()}))

    with torch.inference_mode():
        KINDS[kind](save, int(tokens), int(repeats), words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
