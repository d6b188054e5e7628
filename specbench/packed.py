"""Linear layers whose weights are packed once for a CPU's matrix library.

A draft tree turns matrix-vector products into products with 2 to 128 columns. Called with plain
row-major weights, the CPU libraries behind torch repack them on every call, and between 2 and 64
rows that costs more than the arithmetic. Weights packed once (by oneDNN or MKL, whatever is faster
on this machine) make draft rows nearly free until arithmetic becomes the limit.

Linears that read the same input (query, key and value; gate and up) become one product: a matrix
of a few hundred rows is too small for these libraries to read at the memory's speed.

Which kernel serves which number of rows is decided by measuring the model's own shapes, once per
machine: the plan is cached as a small JSON file, so that later runs (and a resumed run) use the
same kernels and round the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
PACK_ROWS = {"mkl": 8, "onednn": 32}
PLAN_VERSION = 2
CLEARLY = 0.8  # share of the packed kernel's time that an unpacked one must stay below
MEASURE_BYTES = 48 << 20  # weights streamed per timing, so that they come from memory, not cache
MAX_PREFILL_ROWS_PACKED = 512

# Children of one module that are called one after the other with the same tensor, in this order.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Kernel = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def _plain(
    x: torch.Tensor, weight: torch.Tensor, _: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    return nn.functional.linear(x, weight, bias)


def _transposed(
    x: torch.Tensor, weight: torch.Tensor, _: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


def _mkl(
    x: torch.Tensor, weight: torch.Tensor, pack: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkl._mkl_linear(x, pack, weight, bias, x.shape[0])
    return out


def _onednn(x: torch.Tensor, _: torch.Tensor, pack: Any, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, pack, bias, "none", [], "")
    return out


KERNELS: dict[str, Kernel] = {
    "plain": _plain,
    "transposed": _transposed,
    "mkl": _mkl,
    "onednn": _onednn,
}


def _pack(kind: str, weight: torch.Tensor) -> Any:
    """Packed copy of ``weight [out, in]`` for kernel ``kind``; None for kernels without one."""
    if kind == "mkl":
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, PACK_ROWS[kind])
    if kind == "onednn":
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS[kind])
    return None


def available_kernels() -> tuple[str, ...]:
    """Kernels that this build of torch has and that agree with the plain product on a sample."""
    found = ["plain", "transposed"]
    weight, x = torch.randn(16, 8), torch.randn(3, 8)
    for kind, backend in (("mkl", torch.backends.mkl), ("onednn", torch.backends.mkldnn)):
        if not backend.is_available():
            continue
        try:
            out = KERNELS[kind](x, weight, _pack(kind, weight), None)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            log.info("packed linears: %s not usable here (%s)", kind, error)
            continue
        if torch.allclose(out, x @ weight.t(), atol=1e-5):
            found.append(kind)
    return tuple(found)


class PackedLinear(nn.Module):
    """Stands in for ``nn.Linear``: same parameters, a kernel chosen by the number of rows.

    Args:
        linear: the layer to stand in for; its parameters are shared, not copied.
        kernels: kernel name by row bucket, the last one for anything longer.
    """

    def __init__(self, linear: nn.Linear, kernels: dict[int, str]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        packs = {kind: _pack(kind, linear.weight.detach()) for kind in set(kernels.values())}
        plain: tuple[Kernel, Any] = (_plain, None)
        self._by_rows: list[tuple[Kernel, Any]] = [plain] * (MAX_PREFILL_ROWS_PACKED + 1)
        buckets = sorted(kernels)
        for rows in range(1, MAX_PREFILL_ROWS_PACKED + 1):
            bucket = next((b for b in buckets if rows <= b), buckets[-1])
            self._by_rows[rows] = (KERNELS[kernels[bucket]], packs[kernels[bucket]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        rows = x.numel() // self.in_features
        if rows > MAX_PREFILL_ROWS_PACKED:
            return nn.functional.linear(x, self.weight, self.bias)
        kernel, pack = self._by_rows[rows]
        out = kernel(x.reshape(rows, self.in_features), self.weight, pack, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


class SiblingLinear(nn.Module):
    """One of several linears with the same input, which share one product.

    The first one called computes all; the others return their part of it. A sibling that is given
    any other tensor computes anew, so the order of calls costs time but never correctness.

    Args:
        linear: the layer to stand in for; its weight is a part of ``product``'s.
        product: the siblings' common product.
        start: its first output within the product.
    """

    def __init__(self, linear: nn.Linear, product: SharedProduct, start: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._product = (product,)  # in a tuple: not a submodule, or its weights would count twice
        self._part = slice(start, start + linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``, a view of the common product."""
        return self._product[0].of(x)[..., self._part]


class SharedProduct:
    """The product of several linears' stacked weights with their common input.

    Args:
        linears: the siblings, in the order in which they are called. Their weights become views
            of one matrix, so that stacking takes no memory.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.linears = linears
        first = linears[0]
        stacked = nn.Linear(first.in_features, 1, bias=False, device="meta")
        stacked.out_features = sum(linear.out_features for linear in linears)
        stacked.weight = self._stack([linear.weight for linear in linears])
        if first.bias is not None:
            stacked.bias = self._stack([linear.bias for linear in linears])
        self.stacked = stacked
        self._packed: PackedLinear
        self._waiting = 0
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    @staticmethod
    def _stack(parts: Sequence[torch.Tensor]) -> nn.Parameter:
        stacked = torch.cat([part.detach() for part in parts])
        start = 0
        for part in parts:
            part.data = stacked[start : start + len(part)]
            start += len(part)
        return nn.Parameter(stacked, requires_grad=False)

    def pack(self, kernels: dict[int, str]) -> list[SiblingLinear]:
        """What stands in for the linears, in their order."""
        self._packed = PackedLinear(self.stacked, kernels)
        starts = [0]
        for linear in self.linears:
            starts.append(starts[-1] + linear.out_features)
        return [
            SiblingLinear(linear, self, start)
            for linear, start in zip(self.linears, starts, strict=False)
        ]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., out of all siblings]``; kept until each sibling has taken its part."""
        if x is not self._input or self._output is None:
            self._input, self._output = x, self._packed(x)
            self._waiting = len(self.linears)
        out = self._output
        self._waiting -= 1
        if self._waiting == 0:  # the next pass may bring the same tensor with other numbers
            self._input = self._output = None
        return out


def _seconds(call: Callable[[], object], repeats: int = 3) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_plan(weights: Iterable[torch.Tensor]) -> dict[str, dict[int, str]]:
    """Fastest kernel by weight shape and row bucket, at most one packed format per shape.

    Args:
        weights: all weights ``[out, in]`` that would be packed.

    Returns:
        ``{"OUTxIN": {rows: kernel}}``.
    """
    shapes: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        out_features, in_features = weight.shape
        shapes[out_features, in_features].append(weight)
    kinds = available_kernels()
    plan: dict[str, dict[int, str]] = {}
    for (out_features, in_features), group in shapes.items():
        wanted = max(1, MEASURE_BYTES // (4 * out_features * in_features))
        sample = group[:wanted]
        times: dict[str, dict[int, float]] = {}
        for kind in kinds:
            packs = [_pack(kind, w) for w in sample]
            kernel = KERNELS[kind]
            times[kind] = {}
            for rows in ROW_BUCKETS:
                x = torch.randn(rows, in_features)
                times[kind][rows] = _seconds(
                    lambda k=kernel, x=x, p=packs, s=sample: [  # type: ignore[misc]
                        k(x, w, q, None) for w, q in zip(s, p, strict=True)
                    ]
                )
        plan[f"{out_features}x{in_features}"] = _choose(times)
    return plan


def _choose(times: dict[str, dict[int, float]]) -> dict[int, str]:
    """Kernel by row bucket from seconds by kernel and bucket, with at most one packed format.

    A kernel that needs no packed copy must win clearly: a timing taken while another process was
    busy shall not send some row count to a kernel that is slow on a quiet machine.
    """
    free = [kind for kind in times if kind not in PACK_ROWS]

    def best(rows: int, pack: str | None) -> str:
        unpacked = min(free, key=lambda kind: times[kind][rows])
        if pack is None or times[unpacked][rows] < CLEARLY * times[pack][rows]:
            return unpacked
        return pack

    def cost(pack: str | None) -> float:
        return sum(times[best(r, pack)][r] / times["plain"][r] for r in ROW_BUCKETS)

    pack = min([None, *(kind for kind in times if kind in PACK_ROWS)], key=cost)
    return {rows: best(rows, pack) for rows in ROW_BUCKETS}


def _plan_path(cache_dir: Path, shapes: Iterable[str]) -> Path:
    key = json.dumps(
        [
            PLAN_VERSION,
            torch.__version__,
            torch.get_num_threads(),
            platform.machine(),
            _cpu_model(),
            sorted(set(shapes)),
        ]
    )
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


def pack_linears(
    model: nn.Module, *, memory_bytes: int, cache_dir: Path | None = None
) -> dict[str, Any]:
    """Swap ``model``'s float32 CPU linears for packed ones, the largest weights first.

    Args:
        model: any module; only ``nn.Linear`` layers in float32 on the CPU are touched.
        memory_bytes: packed copies together take at most this much.
        cache_dir: where the measured plan is kept.

    Returns:
        What was done, for the run's manifest: ``{"layers", "bytes", "plan"}``.
    """
    groups = _groups(model)
    if not groups:
        return {"layers": 0, "bytes": 0, "plan": {}}
    with torch.inference_mode():
        products = [
            SharedProduct(list(linears.values())) if len(linears) > 1 else None
            for linears in groups
        ]
        stacked = [
            product.stacked if product else next(iter(linears.values()))
            for product, linears in zip(products, groups, strict=True)
        ]
        plan = load_plan([linear.weight.detach() for linear in stacked], cache_dir)
        used = packed = 0
        for i in sorted(range(len(groups)), key=lambda i: -stacked[i].weight.numel()):
            linear, product = stacked[i], products[i]
            kernels = plan[f"{linear.out_features}x{linear.in_features}"]
            size = 4 * linear.weight.numel() if set(kernels.values()) & set(PACK_ROWS) else 0
            if set(kernels.values()) == {"plain"} or used + size > memory_bytes:
                continue
            parts = product.pack(kernels) if product else [PackedLinear(linear, kernels)]
            for name, part in zip(groups[i], parts, strict=True):
                _replace(model, name, part)
            used += size
            packed += len(parts)
    return {"layers": packed, "bytes": used, "plan": plan}


def _groups(model: nn.Module) -> list[dict[str, nn.Linear]]:
    """The linears to pack by name, siblings together."""
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
    }
    groups = []
    while found:
        name = next(iter(found))
        parent, _, child = name.rpartition(".")
        together = next((names for names in SIBLINGS if child in names), (child,))
        names = [f"{parent}.{sibling}" if parent else sibling for sibling in together]
        group = {sibling: found[sibling] for sibling in names if sibling in found}
        alike = {(linear.in_features, linear.bias is None) for linear in group.values()}
        if len(group) < len(names) or len(alike) > 1:
            group = {name: found[name]}
        groups.append(group)
        for sibling in group:
            del found[sibling]
    return groups


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def unpack_linears(model: nn.Module) -> None:
    """Undo ``pack_linears``."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear | SiblingLinear):
            linear = nn.Linear(1, 1, bias=False, device="meta")
            linear.in_features, linear.out_features = module.in_features, module.out_features
            linear.weight, linear.bias = module.weight, module.bias
            _replace(model, name, linear)
