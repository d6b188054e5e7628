"""What a trained head does in a step as CUDA graphs: it reads what was committed, and drafts.

Beside a target whose passes are replayed, a head that is launched kernel by kernel would take
longer than it has to. Both parts have a fixed shape: rows that were committed are padded, trees are
drafted whole, keys are rounded up as for the target. What exceeds the shapes is launched as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.device import fill
from specbench.kernels.cuda_graphs import GraphRecorder, RecordedCall
from specbench.models.graph_target import key_bucket, key_buckets
from specbench.models.heads.row_cache import FixedRows, RowCache

# Of the committed rows there were before, how many are new, and the ids behind those, in one array
# ``[2 + rows]``; of the new rows' states ``[rows, width]``; and of the keys to look at.
Reads = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
# Of what was read last ``[1, size]``; of committed rows and a number of the method's ``[2]``; and
# of the keys.
Drafts = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class HeadGraphs(GraphRecorder):
    """The graphs of one drafter's head, which `capture` makes.

    Args:
        draft: gives what the drafter makes its tree of.
        size: of what is read.
        read: gives ``[1, size]``; None where the last state is all that the head reads.
        width: of the target's states.
        rows: committed rows that are read at once at most.
        nodes: of the head's cache, for a tree.

    Attributes:
        feature: ``[1, size]`` what was read last; the next reading overwrites it.
    """

    def __init__(
        self,
        draft: Drafts,
        *,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        read: Reads | None = None,
        width: int = 0,
        rows: int = 0,
        nodes: int = 0,
    ) -> None:
        super().__init__(device)
        self._read, self._draft = read, draft
        self._most, self._span = rows, max(rows, nodes)
        self._steps: dict[tuple[str, int], RecordedCall] = {}
        self._longest = 0
        with torch.inference_mode(False):  # they may be written to outside of that mode, too
            self.feature = torch.zeros(1, size, dtype=dtype, device=device)
            self._states = torch.zeros(rows, width, dtype=dtype, device=device)
            # One row is read where nothing was loaded: no place is before the first.
            self._new = torch.ones(2 + rows, dtype=torch.int64, device=device)
            self._asked = torch.ones(2, dtype=torch.int64, device=device)

    def capture(self, longest: int = 0) -> None:
        """Record all shapes, for a cache of ``longest`` rows; 0 where the head has none.

        What the cache holds is lost, so call it before a text is read.
        """
        self._longest = longest
        for keys in key_buckets(longest) if longest else [0]:
            if keys < self._span:
                continue
            if self._read is not None:
                made = RecordedCall(self, self._reading(self._read, keys), self._new, self._states)
                self._add("reading", keys, made)
            made = RecordedCall(self, self._drafting(keys), self.feature, self._asked)
            self._add("drafting", keys, made)

    def release(self) -> None:
        """Let go of all graphs at once: they and this hold each other, as long as none collects."""
        self._steps.clear()

    def _add(self, what: str, keys: int, made: RecordedCall) -> None:
        if self.record(made, f"{what}, {keys} keys"):
            self._steps[what, keys] = made

    def _reading(self, read: Reads, keys: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def work(numbers: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.feature.copy_(read(numbers, states, keys))
            return ()

        return work

    def _drafting(self, keys: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda feature, asked: (self._draft(feature, asked, keys),)

    def _step(self, what: str, length: int) -> RecordedCall | None:
        if self._longest and length + self._span > self._longest:
            return None
        keys = key_bucket(length + self._span, self._longest) if self._longest else 0
        return self._steps.get((what, keys))

    def read(self, length: int, states: torch.Tensor, ids: IntArray) -> bool:
        """Read ``states [n, width]`` behind ``length`` rows; ``ids [n]`` come after them.

        False where no graph does it, and nothing was read.
        """
        step, n = self._step("reading", length), len(states)
        if step is None or n > self._most:
            return False
        fill(self._new, np.concatenate(([length, n], ids)))
        self._states[:n] = states
        step.run()
        return True

    def draft(self, length: int, feature: torch.Tensor, number: int = 0) -> torch.Tensor | None:
        """What ``draft`` gives behind ``length`` rows; None where no graph does it."""
        step = self._step("drafting", length)
        if step is None:
            return None
        if feature is not self.feature:
            self.feature.copy_(feature)
        fill(self._asked, np.array([length, number]))
        step.run()
        return step.outputs[0].clone()  # the next run of any of these graphs may overwrite it


@contextmanager
def on_fixed_rows(head: Any, length: torch.Tensor, keys: int) -> Iterator[None]:
    """Within, ``head.cache`` counts its committed rows on the device: ``length [1]`` of them."""
    own = head.cache
    head.cache = cast(RowCache, FixedRows(own, length, keys))
    try:
        yield
    finally:
        head.cache = own
