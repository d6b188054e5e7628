"""Which kernel multiplies a weight with how many rows: measured once, cached for the machine.

The kernels of a CPU's matrix libraries differ by factors with shape and rows, and which one wins
differs from CPU to CPU. The plan is cached as a small JSON file, so that later runs (and a resumed
run) use the same kernels and round the same way.

How far ahead panels are asked for is measured at a run's first start: it takes a fraction of a
second, and changes no number. Later starts keep it, so that a run's passes take one time.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
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
STRIDE_BYTES = 16 << 20  # of panels per timing of a distance; each reads others than the last
STRIDES = 9  # timings of a distance and a number of rows
NEARLY_ALL = 8  # of them that another distance than the first must win, by ``GAIN`` in the middle
GAIN = 0.98

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


_measured: set[tuple[panel_kernels.Form, int]] = set()  # with how many threads


def choose_distances(products: Sequence[torch.Tensor]) -> dict[str, dict[int, int]]:
    """Measure and set how far ahead panels are asked for, by their form and the rows of a pass.

    Each timing reads on where the last one ended, as a pass does, so that weights come from where a
    pass finds them. What stands stays unless another distance is clearly faster: two runs then
    differ where a machine does, not by chance. A form with less than ``MEASURE_BYTES`` is left, and
    so is one that another model of this process was measured with: the target comes before drafts.

    Args:
        products: packed weights of a model.

    Returns:
        Bytes by name of the form and rows, of the forms that ``products`` have.
    """
    by_form: dict[panel_kernels.Form, list[torch.Tensor]] = defaultdict(list)
    for panels in products:
        by_form[panel_kernels.form_of(panels)].append(panels)
    for form, held in by_form.items():
        known = (form, torch.get_num_threads())
        if known not in _measured and sum(panels.nbytes for panels in held) >= MEASURE_BYTES:
            _measured.add(known)
            _choose_distances(form, held)
    return {form.name: panel_kernels.distances(form) for form in by_form}


def keep_distances(chosen: Mapping[str, Mapping[str, int]], threads: int) -> None:
    """Set what `choose_distances` gave an earlier start of a run, and measure it no more.

    Args:
        chosen: bytes by form and rows, as a manifest holds them. What this build has not is left.
        threads: that the earlier start measured with; others are measured with anew.
    """
    for form in panel_kernels.FORMS:
        by_rows = {int(rows): distance for rows, distance in chosen.get(form.name, {}).items()}
        if by_rows.keys() != panel_kernels.distances(form).keys():
            continue
        _measured.add((form, threads))
        for rows, distance in by_rows.items():
            panel_kernels.set_distance(form, rows, distance)


def _choose_distances(form: panel_kernels.Form, held: Sequence[torch.Tensor]) -> None:
    read = _Strides(held)
    buckets = [rows for rows in ROW_BUCKETS if rows <= panel_kernels.TILE]
    for below, rows in zip([0, *buckets], buckets, strict=False):
        stands = panel_kernels.distances(form)[rows]
        others = [d for d in panel_kernels.DISTANCES if d != stands]
        x = torch.randn(rows, read.in_features)
        rounds = []
        for i in range(STRIDES + 1):
            times = {}
            for distance in _turned([stands, *others], i):
                panel_kernels.set_distance(form, rows, distance)
                times[distance] = _seconds(partial(read.next, x))
            rounds.append(times)
        chosen = _clearly_faster(rounds[1:], stands, others)  # the first round wakes the threads
        for each in range(below + 1, rows + 1):
            panel_kernels.set_distance(form, each, chosen)


def _clearly_faster(rounds: Sequence[dict[int, float]], stands: int, others: Sequence[int]) -> int:
    """The fastest of ``others`` that beats what ``stands`` clearly; else that."""
    found = {stands: 1.0}
    for other in others:
        ratios = [times[other] / times[stands] for times in rounds]
        middle = statistics.median(ratios)
        if middle < GAIN and sum(ratio < 1 for ratio in ratios) >= NEARLY_ALL:
            found[other] = middle
    return min(found, key=found.__getitem__)


def _turned(distances: list[int], by: int) -> list[int]:
    by %= len(distances)
    return distances[by:] + distances[:by]


class _Strides:
    """Products with a model's panels, some after the others and then from the first again.

    Only those with the number of inputs that most weights have: a stride takes as long as another.
    """

    def __init__(self, held: Sequence[torch.Tensor]) -> None:
        size: Counter[tuple[int, ...]] = Counter()
        for panels in held:
            size[panels.shape[1:]] += panels.nbytes
        shape = max(size, key=size.__getitem__)
        alike = [panels for panels in held if panels.shape[1:] == shape]
        per_panel = alike[0][:1].nbytes
        together = min(max(map(len, alike)), max(1, STRIDE_BYTES // 4 // per_panel))
        parts = [part for panels in alike for part in panels.split(together)]
        self._parts = cycle([part for part in parts if len(part) == together])
        self._times = max(1, STRIDE_BYTES // (together * per_panel))
        self.in_features = shape[0] * (panel_kernels.QUANTS if held[0].dtype == torch.uint8 else 1)

    def next(self, x: torch.Tensor) -> None:
        for part in islice(self._parts, self._times):
            panel_kernels.panel_gemm(x, part, len(part) * panel_kernels.WIDTH)


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
