"""How far ahead panels are asked for, measured on this machine.

It takes a fraction of a second at a run's first start, and changes no number. Later starts keep it,
so that a run's passes take one time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import torch

from specbench.kernels import panel_kernels

MEASURE_BYTES = 48 << 20  # of panels at least, so that they come from memory and not from a cache
_ROWS = (1, 2, 4, 8)  # that are timed; those between take the next one's
_STRIDE_BYTES = 16 << 20  # of panels per timing of a distance; each reads others than the last
_STRIDES = 9  # timings of a distance and a number of rows
_NEARLY_ALL = 8  # of them that another distance than the first must win, by ``_GAIN`` in the middle
_GAIN = 0.98

_measured: set[tuple[panel_kernels.Form, int]] = set()  # with how many threads


def choose_distances(products: Sequence[torch.Tensor]) -> dict[str, dict[int, int]]:
    """Measure and set how far ahead panels are requested, by their form and a pass's rows.

    Each timing reads on where the last one ended, as a pass does, so that weights come from where a
    pass finds them. A distance stays unless another is clearly faster: two runs then
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
        measurement = (form, torch.get_num_threads())
        if measurement not in _measured and sum(panels.nbytes for panels in held) >= MEASURE_BYTES:
            _measured.add(measurement)
            _choose_distances(form, held)
    return {form.name: panel_kernels.distances(form) for form in by_form}


def keep_distances(chosen: Mapping[str, Mapping[str, int]], threads: int) -> None:
    """Set what `choose_distances` gave an earlier start of a run, and measure it no more.

    Args:
        chosen: bytes by form and rows, as a manifest holds them. What this build has not is left.
        threads: that the earlier start measured with; other numbers are measured again.
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
    buckets = [rows for rows in _ROWS if rows <= panel_kernels.TILE]
    for below, rows in zip([0, *buckets], buckets, strict=False):
        current = panel_kernels.distances(form)[rows]
        others = [d for d in panel_kernels.DISTANCES if d != current]
        x = torch.randn(rows, read.in_features)
        rounds = []
        for i in range(_STRIDES + 1):
            times = {}
            for distance in _turned([current, *others], i):
                panel_kernels.set_distance(form, rows, distance)
                start = time.perf_counter()
                read.next(x)
                times[distance] = time.perf_counter() - start
            rounds.append(times)
        chosen = _clearly_faster(rounds[1:], current, others)  # the first round wakes the threads
        for n_rows in range(below + 1, rows + 1):
            panel_kernels.set_distance(form, n_rows, chosen)


def _clearly_faster(rounds: Sequence[dict[int, float]], current: int, others: Sequence[int]) -> int:
    """Give the fastest of ``others`` that clearly beats ``current``, or else ``current``."""
    faster = {current: 1.0}
    for other in others:
        ratios = [times[other] / times[current] for times in rounds]
        middle = statistics.median(ratios)
        if middle < _GAIN and sum(ratio < 1 for ratio in ratios) >= _NEARLY_ALL:
            faster[other] = middle
    return min(faster, key=faster.__getitem__)


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
        together = min(max(map(len, alike)), max(1, _STRIDE_BYTES // 4 // per_panel))
        parts = [part for panels in alike for part in panels.split(together)]
        self._parts = cycle([part for part in parts if len(part) == together])
        self._times = max(1, _STRIDE_BYTES // (together * per_panel))
        self.in_features = shape[0] * (panel_kernels.QUANTS if held[0].dtype == torch.uint8 else 1)

    def next(self, x: torch.Tensor) -> None:
        for part in islice(self._parts, self._times):
            panel_kernels.panel_gemm(x, part, len(part) * panel_kernels.WIDTH)
