"""Which kernel multiplies a weight with how many rows: measured once, cached for the machine.

The kernels of a CPU's matrix libraries differ by factors with shape and rows, and which one wins
differs from CPU to CPU. The plan is cached as a small JSON file, so that later runs (and a resumed
run) use the same kernels and round the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from specbench.kernels import panel_kernels
from specbench.kernels.weight_forms import shortest

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
PACK_ROWS = 32  # rows that oneDNN packs for
PACKED = ("onednn", "panels")  # kernels with a copy of the weights
PLAN_VERSION = 5
CLEARLY = 0.95  # share of the packed kernel's time that the plain one must stay below
ROUNDS = 7  # timings of a kernel and a number of rows; their median counts
MEASURE_BYTES = 48 << 20  # weights streamed per timing, so that they come from memory, not cache

# Input, weight, its packed copy (the weight itself where there is none) and bias, to the product.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def plain(
    x: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``[rows, in]`` to ``[rows, out]`` by row-major weights."""
    return nn.functional.linear(x, weight, bias)


def _onednn(
    x: torch.Tensor, _: torch.Tensor, pack: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, pack, bias, "none", [], "")
    return out


def _panels(
    x: torch.Tensor, weight: torch.Tensor, pack: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = panel_kernels.panel_gemm(x, pack, weight.shape[0])
    return out if bias is None else out.add_(bias)


KERNELS: dict[str, Kernel] = {"plain": plain, "onednn": _onednn, "panels": _panels}


def pack(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Packed copy of ``weight [out, in]`` for kernel ``kind``; itself for the plain one."""
    if kind == "onednn":
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)
        return packed
    if kind == "panels":
        return panel_kernels.pack(shortest(weight))
    return weight.detach()


def available_kernels() -> tuple[str, ...]:
    """Kernels that this build of torch has and that agree with the plain product on a sample."""
    found = ["plain"]
    weight, x = torch.randn(16, 8), torch.randn(3, 8)
    for kind in PACKED:
        try:
            out = KERNELS[kind](x, weight, pack(kind, weight), None)
        except (RuntimeError, AttributeError, NotImplementedError, OSError) as error:
            log.info("packed linears: %s not usable here (%s)", kind, error)
            continue
        if torch.allclose(out, x @ weight.t(), atol=1e-5):
            found.append(kind)
    return tuple(found)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_plan(
    weights: Iterable[torch.Tensor], *, without: Collection[str] = ()
) -> dict[str, dict[int, str]]:
    """Fastest kernel by weight shape and row bucket, at most one packed format per shape.

    ``without`` names kernels that are not to be chosen. Gives ``{"OUTxIN": {rows: kernel}}``.
    """
    shapes: dict[str, list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        shapes[f"{weight.shape[0]}x{weight.shape[1]}"].append(weight)
    kinds = [kind for kind in available_kernels() if kind not in without]
    plan: dict[str, dict[int, str]] = {}
    for shape, group in shapes.items():
        sample = group[: max(1, MEASURE_BYTES // (4 * group[0].numel()))]
        plan[shape] = _choose(_seconds_by_kernel(kinds, sample))
    return plan


def _seconds_by_kernel(
    kinds: Sequence[str], weights: list[torch.Tensor]
) -> dict[str, dict[int, float]]:
    """Median seconds by kernel and rows. Kernels take turns, so a busy moment hits them all."""
    packs = {kind: [pack(kind, weight) for weight in weights] for kind in kinds}

    def products(kind: str, x: torch.Tensor) -> None:
        for weight, packed in zip(weights, packs[kind], strict=True):
            KERNELS[kind](x, weight, packed, None)

    found: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    for rows in ROW_BUCKETS:
        calls = {k: partial(products, k, torch.randn(rows, weights[0].shape[1])) for k in kinds}
        for call in calls.values():
            call()  # what a first call prepares is not timed
        rounds = [{k: _seconds(call) for k, call in calls.items()} for _ in range(ROUNDS)]
        for kind in kinds:
            found[kind][rows] = statistics.median(times[kind] for times in rounds)
    return found


def _choose(times: dict[str, dict[int, float]]) -> dict[int, str]:
    """Kernel by row bucket from seconds by kernel and bucket, with at most one packed format.

    One row counts for more than all other buckets together: plain decoding is in every run, and
    half of all passes are of one row. The plain kernel must win clearly.
    """
    plain_s = times["plain"]

    def best(rows: int, packed: str) -> str:
        return "plain" if plain_s[rows] < CLEARLY * times[packed][rows] else packed

    def cost(packed: str) -> float:
        ratio = {rows: times[best(rows, packed)][rows] / plain_s[rows] for rows in ROW_BUCKETS}
        return len(ROW_BUCKETS) * ratio[1] + sum(ratio.values())

    packed = min(times, key=cost)  # the plain one comes first, so it wins a tie
    return {rows: best(rows, packed) for rows in ROW_BUCKETS}


def _plan_path(cache_dir: Path, shapes: Iterable[str]) -> Path:
    software = [PLAN_VERSION, torch.__version__, torch.get_num_threads()]
    key = json.dumps([*software, platform.machine(), _cpu_model(), sorted(set(shapes))])
    return cache_dir / "packed" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip() + torch.backends.cpu.get_cpu_capability()
    except OSError:
        pass
    return platform.processor()


def _read_plan(path: Path, shapes: set[str]) -> dict[str, dict[int, str]] | None:
    """A cached plan; None where it is missing, damaged, or names what this build lacks."""
    try:
        stored = json.loads(path.read_text())
        plan = {shape: {int(r): str(k) for r, k in by.items()} for shape, by in stored.items()}
    except (OSError, ValueError, AttributeError):
        return None
    usable = set(available_kernels())
    complete = all(
        set(by) == set(ROW_BUCKETS) and set(by.values()) <= usable for by in plan.values()
    )
    return plan if complete and set(plan) >= shapes else None


def load_plan(weights: list[torch.Tensor], cache_dir: Path | None) -> dict[str, dict[int, str]]:
    """The cached plan for these shapes on this machine; measured and cached where there is none."""
    shapes = [f"{w.shape[0]}x{w.shape[1]}" for w in weights]
    path = _plan_path(cache_dir, shapes) if cache_dir else None
    stored = _read_plan(path, set(shapes)) if path else None
    if stored is not None:
        return stored
    plan = measure_plan(weights)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(plan, file, indent=1)
        os.replace(file.name, path)
    return plan
