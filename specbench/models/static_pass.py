"""Passes of fixed shape: buffers that a CUDA graph reads, and the device's part of a step.

From the ids to the accepted path and the rows kept in the cache everything is on the device; a step
copies one small array there and one back. What is captured is a shape's ``device_part``, and the
same code runs uncaptured on any device. Queueing a pass waits for nothing; who first asks what it
found out waits for it, and so does whoever would write to the buffers that it may still be reading.

Two kinds: ``StaticPass`` is a step of the target, ``StaticNodes`` a draft model's pass over nodes
of a tree that grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np
import torch

from specbench.arrays import BoolArray, IntArray
from specbench.decoding.device import fill
from specbench.decoding.structs import DraftTree
from specbench.kernels.attention import AttentionPlan
from specbench.kernels.cuda_graphs import GraphPlace, Recorded
from specbench.models.kv_cache import KVCache
from specbench.models.scores import Outcome, batch_select, greedy_ids

# Rows of the accepted path that a pass moves itself. All of a large tree would be a copy of 130 MB
# in a 7B model, and more than these are seldom accepted.
MOVED_ROWS = 16


class FixedShapeTarget(GraphPlace, Protocol):
    """What the shapes of a target ask of it."""

    cache: KVCache
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    hidden_value: float  # what a mask holds where attention must not look
    windows: tuple[int, ...]  # lengths of the sliding windows that some layers have
    commits: bool  # whether a pass verifies its draft and moves the accepted rows itself

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """The model's pass over ``tokens`` ``[batch, rows]``.

        Logits ``[batch, rows, vocab]``, and hidden states ``[batch * rows, hidden]`` by number.
        """


class FixedShape(Recorded):
    """The device's work of one shape of pass, and its graph where there is one.

    Until something is loaded, the buffers describe a pass at position 0 whose rows go to the last
    of its keys. A shape is made for a text that leaves its rows free there, so that the warm-ups of
    a capture in mid-text overwrite nothing that is committed or held.

    ``rows`` of the pass and ``keys``, the cached rows that attention looks at (at least ``rows``),
    include padding.
    """

    def __init__(self, target: FixedShapeTarget, rows: int, keys: int) -> None:
        super().__init__(target)
        self.rows, self.keys = rows, keys
        self._spare = keys - rows  # where the rows of a pass go that was not loaded
        self._target = target
        self._key_numbers = torch.arange(keys, device=target.device)
        self._row_numbers = torch.arange(rows, device=target.device)

    def _masks(
        self, seen: torch.Tensor, positions: torch.Tensor, of_keys: Callable[[], torch.Tensor]
    ) -> AttentionPlan:
        """Masks of a pass whose rows see ``seen [rows, keys]``, windows aside.

        ``of_keys`` gives the positions of the keys; it is called where a window hides something.
        """
        hidden = self._target.hidden_value
        mask = torch.zeros(seen.shape, dtype=self._target.dtype, device=seen.device)
        plan = AttentionPlan(mask=mask.masked_fill(~seen, hidden)[None, None])
        for window in self._target.windows:
            if self.keys > window:
                near = seen & (positions[:, None] - of_keys()[None, :] < window)
                plan.windowed[window] = mask.masked_fill(~near, hidden)[None, None]
        return plan


class StaticNodes(FixedShape):
    """A pass over new nodes of a tree that grows behind the text, see ``Target.extend``."""

    def __init__(self, target: FixedShapeTarget, rows: int, keys: int) -> None:
        super().__init__(target, rows, keys)
        device = target.device
        # What changes from pass to pass is written by a few small kernels before the graph.
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._depths = torch.zeros_like(self._tokens)
        self._own = torch.zeros(rows, keys, dtype=torch.bool, device=device)  # seen, but for text
        self._places = self._key_numbers.clone()  # positions of keys, where a window asks
        # committed rows, slots of the first node and behind the last one, nodes, and whether `_own`
        # says what they see
        self._numbers = torch.zeros(5, dtype=torch.int64, device=device)
        self._numbers[1] = self._spare

    def load(
        self, ids: torch.Tensor, visible: torch.Tensor | None, depths: torch.Tensor, length: int
    ) -> None:
        """Bring nodes behind ``length`` committed rows into the buffers, see ``Target.extend``."""
        n, total = len(ids), len(depths)
        first = length + total - n
        fill(self._numbers, np.array([length, first, first + n, n, visible is not None]))
        self._tokens[:n] = ids
        self._depths[:n] = depths[-n:]
        if visible is not None:  # beside it the last nodes' still stand
            self._own[:n, length : length + total] = visible
        if self._target.windows:
            self._places.copy_(self._key_numbers)
            self._places[length : length + total] = depths + length

    def device_part(self) -> tuple[torch.Tensor, ...]:
        """Logits ``[rows, vocab]``."""
        length, first, end, count, tree = self._numbers.split(1)
        slots = self._row_numbers + first
        # Padded rows stand where any model has a position, and see what a chain would.
        real = self._row_numbers < count
        positions = torch.where(real, self._depths, 0) + length
        below = self._own & (self._key_numbers < end)
        own = torch.where((real & (tree > 0))[:, None], below, self._key_numbers <= slots[:, None])
        seen = own | (self._key_numbers < length)
        plan = self._masks(seen, positions, lambda: self._places)
        with self._target.cache.static(slots, self.keys):
            return (self._target.run(self._tokens[None], positions[None], plan)[0][0],)


class StaticPass(FixedShape):
    """A step of the target: root and tree, acceptance and the rows that stay.

    ``batch`` counts the rows of the batch layout; 1 for a tree. ``hidden_layers`` are the hidden
    states that it hands out.
    """

    def __init__(
        self,
        target: FixedShapeTarget,
        rows: int,
        keys: int,
        batch: int = 1,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        super().__init__(target, rows, keys)
        self.batch, self._hidden_layers = batch, hidden_layers
        device = target.device
        pinned = device.type == "cuda"
        # [ids of all batch rows | parent rows | depths | candidates | length | ids outside]
        n_ids = batch * rows
        self._host = torch.zeros(n_ids + 3 * rows + 2, dtype=torch.int64, pin_memory=pinned)
        self._host_visible = torch.zeros(rows, rows, dtype=torch.bool, pin_memory=pinned)
        self._result = torch.zeros(2 * rows + 2, dtype=torch.int64, pin_memory=pinned)
        if rows == 1:
            self._result[2] = 1  # the root: such a pass tells its choice alone
        self.numbers = torch.zeros_like(self._host, device=device)
        self.visible = torch.zeros_like(self._host_visible, device=device)
        self._parts = (n_ids, n_ids + rows, n_ids + 2 * rows, n_ids + 3 * rows)
        _, parents, deep, candidate = self._parts
        self.numbers[parents:deep] = -self._spare  # depths: position 0 is one that any model has
        self.numbers[candidate] = self._spare
        self._done = torch.cuda.Event() if pinned else None
        # Of batch rows, and under a verifier that draws, the host works the acceptance out.
        self._verifies = batch == 1 and target.commits
        self.outcome: Outcome | None = None  # of the last run, where it verifies
        self.select = batch_select(batch, rows, device) if batch > 1 else None

    @property
    def logits(self) -> torch.Tensor:
        """``[batch * rows, vocab]`` of the last run."""
        return self.outputs[0]

    @property
    def hidden(self) -> dict[int, torch.Tensor]:
        """``[batch * rows, hidden]`` of the last run, by number."""
        states = self.outputs[len(self.outputs) - len(self._hidden_layers) :]
        return dict(zip(self._hidden_layers, states, strict=True))

    def load(
        self, root: int, tree: DraftTree, depths: IntArray, visible: BoolArray, length: int
    ) -> None:
        """Bring a tree behind ``length`` committed rows into the buffers; device ids stay there.

        Waits for the buffers' last pass where nobody has. ``depths`` and ``visible`` are those of
        ``TreeGeometry``.
        """
        self.land()
        n, host = len(tree), self._host.numpy()
        ids, parents, deep, candidate = self._parts
        host[:] = 0
        host[0] = root
        if isinstance(tree.tokens, np.ndarray):
            host[1 : n + 1] = tree.tokens
        host[ids + 1 : ids + n + 1] = tree.parents + 1
        host[parents : parents + n + 1] = depths[: n + 1]
        host[deep + 1 : deep + n + 1] = 1 if tree.aux is None else ~tree.aux
        host[candidate] = length
        seen = self._host_visible.numpy()
        seen[:] = False
        np.fill_diagonal(seen, True)  # a padded row sees itself: an empty softmax is NaN
        seen[: n + 1, : n + 1] = visible[: n + 1, : n + 1]
        self._ship()
        if n and isinstance(tree.tokens, torch.Tensor):
            # An id outside would end the whole process there; the outcome tells of it.
            inside = tree.tokens.clamp(0, self._target.vocab_size - 1)
            self.numbers[1 : n + 1] = inside
            self.numbers[-1] = (tree.tokens != inside).any()

    def load_rows(self, root: int, tree: DraftTree, length: int) -> None:
        """Bring the k chains of a batch layout into the buffers; waits as ``load`` does."""
        self.land()
        host = self._host.numpy()
        ids, parents, deep, candidate = self._parts
        rows = host[:ids].reshape(self.batch, self.rows)
        rows[:, 0] = root
        rows[:, 1:] = np.asarray(tree.tokens).reshape(self.batch, self.rows - 1)
        host[ids:] = 0
        host[parents:deep] = np.arange(self.rows)
        host[candidate] = length
        np.copyto(self._host_visible.numpy(), np.tri(self.rows, dtype=np.bool_))
        self._ship()

    def land(self) -> None:
        """Wait for the last run: until its copies are done, they read the pinned buffers.

        What it found out is kept for those who hold its scores; they no longer hold this pass.
        """
        if self.outcome is not None:
            self.outcome.read()
        elif self._done is not None and not self._verifies:
            self._done.synchronize()

    def _ship(self) -> None:
        self.numbers.copy_(self._host, non_blocking=True)
        self.visible.copy_(self._host_visible, non_blocking=True)

    # -- the device's part ---------------------------------------------------------------------

    def device_part(self) -> tuple[torch.Tensor, ...]:
        """Logits ``[batch * rows, vocab]``, and of a pass that verifies ``[2 * rows + 2]`` int64.

        Those are: greedy choices (-1 where not finite), rows of the accepted path with the root
        first (padded with their own numbers), how many of them there are, and whether a draft token
        was outside the vocabulary; of a single row its choice alone. Behind them the hidden states
        that were asked for.

        The first ``MOVED_ROWS`` of the path are where they shall stay; ``GraphTarget.commit`` moves
        the others, which few steps have.
        """
        target, cache = self._target, self._target.cache
        ids, parents, deep, candidate = self._parts
        tokens = self.numbers[:ids].view(self.batch, self.rows)
        depths = self.numbers[parents:deep]
        length = self.numbers[candidate]
        positions = depths + length
        slots = self._row_numbers + length
        if self.rows == 1:
            seen = (self._key_numbers <= length)[None]
        else:
            seen = (self._key_numbers < length).expand(self.rows, -1)
            seen = seen.index_copy(1, slots, self.visible)
        of_keys = partial(self._key_numbers.index_copy, 0, slots, positions)
        plan = self._masks(seen, positions, of_keys)
        with cache.static(slots, self.keys):
            batched, found = target.run(
                tokens, positions.expand(self.batch, -1), plan, self._hidden_layers
            )
        logits = batched.flatten(0, 1)
        hidden = tuple(found[i] for i in self._hidden_layers)
        if not self._verifies:
            return logits, *hidden
        choices = greedy_ids(logits)
        if self.rows == 1:  # the root alone is accepted, and lies where it shall
            return logits, choices, *hidden
        parent_rows = self.numbers[ids:parents]
        candidates = self.numbers[deep:candidate].bool()
        path, count = self._accept(tokens[0], parent_rows, depths, candidates, choices)
        first = slice(MOVED_ROWS)
        cache.move(slots[first], path[first] + length)
        return logits, torch.cat([choices, path, count, self.numbers[-1:]]), *hidden

    def _accept(
        self,
        tokens: torch.Tensor,
        parent_rows: torch.Tensor,
        depths: torch.Tensor,
        candidates: torch.Tensor,
        choices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy verification without a walk: a node is accepted if no ancestor fails to match.

        Of equally deep accepted nodes the first wins, as in `longest_match` of the greedy verifier.
        """
        rows = self._row_numbers
        matches = candidates & (tokens == choices[parent_rows])
        matches = matches | (rows == 0)
        accepted = ~(self.visible & ~matches).any(1)
        # Largest depth first, then the smallest row: one number orders both.
        rank = torch.where(accepted, depths * self.rows - rows, -self.rows)
        best = rank.argmax(0, keepdim=True)  # indexing by a tensor without dimensions would sync
        # The row of the path at each depth; beyond its end each row stays where it is.
        at_depth = self.visible.index_select(0, best) & (depths == rows[:, None])
        path = torch.where(at_depth.any(1), at_depth.long().argmax(1), rows)
        return path, depths.index_select(0, best) + 1

    # -- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Queue the device's part and the copy of its outcome; waits for nothing."""
        super().run()
        if self._verifies:
            self._tell()
            self.outcome = Outcome(self.read, self.rows)
        if self._done is not None:
            with self._target.on_device():
                self._done.record()

    def _tell(self) -> None:
        found = self.outputs[1]
        self._result[: len(found)].copy_(found, non_blocking=True)

    def read(self) -> IntArray:
        """The last run's outcome on the host; the step's only wait."""
        if self._done is not None:
            self._done.synchronize()
        return self._result.numpy()
