"""The fast target: every pass has one of a few fixed shapes, so that a GPU can replay it.

A pass of the eager engine launches some thousand kernels from Python, and on a GPU the launches
take longer than the kernels. A CUDA graph launches them all at once, but is tied to addresses and
shapes. So the number of rows is rounded up to a bucket, and what changes from pass to pass, the
length of the text too, lies in buffers that the graph reads.

From the ids to the accepted path and the rows kept in the cache everything is on the device; a step
copies one small array there and one back. What is captured is a shape's ``device_part``, and the
same code runs uncaptured on any device, which is how it is tested: a padded pass gives the numbers
of the exact one. Queueing a pass waits for nothing; who first asks what it found out waits for it,
and so does whoever would write to the buffers that it may still be reading.

Buffers and buckets follow the static-cache decoding of gpt-fast (``generate.py``); trees,
acceptance and the commit within the graph are this project's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import BoolArray, IntArray
from specbench.decoding.device import fill, to_device
from specbench.decoding.sampling import Sampling, Uniforms, sample
from specbench.decoding.structs import NO_TOKENS, DraftTree
from specbench.decoding.tree import TreeGeometry
from specbench.decoding.turn import SlotDraft
from specbench.errors import CaseFailed
from specbench.kernels.attention import AttentionPlan
from specbench.kernels.cuda_graphs import GraphRecorder, Recorded
from specbench.kernels.fused_pass import Products, fused_pass
from specbench.kernels.static_rows import StaticRows
from specbench.models.kv_cache import KVCache, in_place
from specbench.models.scores import Outcome, Scores, batch_select, greedy_ids
from specbench.models.target import Target
from specbench.results.manifest import Passes

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
_TOO_LARGE = f"more than {ROW_BUCKETS[-1]} rows"  # why a pass has no bucket
_NODES = 0  # in place of a batch: a pass over nodes that hang below no root
# Rows of the accepted path that a pass moves itself. All of a large tree would be a copy of 130 MB
# in a 7B model, and more than these are seldom accepted.
MOVED_ROWS = 16


def row_bucket(rows: int) -> int | None:
    """Round ``rows`` up to the smallest bucket that holds them; None where none does."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= rows), None)


def no_graphs(model: PreTrainedModel) -> str | None:
    """Say why passes of ``model`` cannot be replayed as CUDA graphs; None where they can."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        return f"the model is spread over {len(devices)} devices (model.device_map)"
    if model.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {model.device.type}"
    return None


class StaticPass(Recorded):
    """A step of the target: root and tree, acceptance and the rows that stay; or new nodes.

    Until something is loaded, the buffers describe a pass at position 0 whose rows go to the end
    of the cache. A shape is made for a text that leaves its rows free there, so that the warm-ups
    of a capture in mid-text overwrite nothing that is committed or held.

    Args:
        rows: of each sequence, with padding.
        batch: rows of the batch layout; 1 for a tree.
        hidden_layers: the hidden states that it hands out.
        held: nodes of a tree that grows, which new ones may see, see ``Target.extend``. Such a pass
            has no root and verifies nothing.
    """

    def __init__(
        self,
        target: GraphTarget,
        rows: int,
        batch: int = 1,
        hidden_layers: tuple[int, ...] = (),
        held: int = 0,
    ) -> None:
        super().__init__(target)
        self.rows, self.batch = rows, batch
        self._hidden_layers, self._target = hidden_layers, target
        device, slots = target.device, max(held, rows)
        pinned = device.type == "cuda"
        # ids, depths of the rows, their parents and which are candidates; lengths; first slots;
        # whether an id was outside the vocabulary
        self._sizes = [batch * rows] * 4 + [batch] * 2 + [1]
        self._host = torch.zeros(sum(self._sizes), dtype=torch.int64, pin_memory=pinned)
        self._host_visible = torch.zeros(batch, rows, slots, dtype=torch.bool, pin_memory=pinned)
        self._host_parts = [part.numpy() for part in self._host.split(self._sizes)]
        # Of batch rows, and under a verifier that the pass does not know, the host accepts.
        self._verifies = target.commits and batch == 1 and not held
        self._sampling = target.sampling if self._verifies else None
        drawn = rows if self._sampling else 0
        self._result = torch.zeros(2 * rows + 2 + drawn, dtype=torch.int64, pin_memory=pinned)
        if rows == 1:
            self._result[2] = 1  # the root: such a pass tells its choice alone
        self._host_uniforms = torch.ones(drawn, dtype=torch.float64, pin_memory=pinned)
        self._uniforms = torch.ones(drawn, dtype=torch.float64, device=device)
        self.numbers = torch.zeros_like(self._host, device=device)
        self.visible = torch.zeros_like(self._host_visible, device=device)
        self._row_numbers, self._eye = torch.arange(rows, device=device), np.eye(rows, dtype=bool)
        spare = target.cache.max_len - rows
        *parts, lengths, first, self._outside = self.numbers.split(self._sizes)
        self._ids, self._depths, self._parents, self._candidates = (
            part.view(batch, rows) for part in parts
        )
        lengths.fill_(spare)
        first.fill_(spare)
        self._depths.fill_(-spare)  # position 0 is one that any model has
        self.visible.diagonal(0, 1, 2).fill_(1)  # an empty softmax is NaN
        # Of a growing tree's rows the depths are those of the slots that they get.
        self._key_depths = (
            torch.zeros(batch, slots, dtype=torch.int64, device=device) if held else self._depths
        )
        self._static = StaticRows(
            lengths, first, self.visible, self._depths, self._key_depths, target.triton
        )
        self._done = torch.cuda.Event() if pinned else None
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
        """Load a tree after ``length`` committed rows into the buffers; device ids stay there.

        A batch layout's rows are chains of equal length. Waits for the buffers' last pass if it
        still runs. ``depths`` and ``visible`` are those of ``TreeGeometry``, for a batch layout of
        one of its chains.
        """
        ids, row_depths, parents, candidates, seen = self._begin_load([length] * self.batch)
        n, tokens = len(tree) // self.batch, tree.tokens
        ids[:, 0] = root
        if isinstance(tokens, np.ndarray):
            ids[:, 1 : n + 1] = tokens.reshape(self.batch, n)
        row_depths[:, : n + 1] = depths[: n + 1]
        if self._verifies:
            parents[0, 1 : n + 1] = tree.parents + 1
            candidates[0, 1 : n + 1] = 1 if tree.aux is None else ~tree.aux
        seen[:, : n + 1, : n + 1] = visible[: n + 1, : n + 1]
        if self._sampling:
            uniforms = self._target.uniforms.peek(int(depths[: n + 1].max()) + 1)
            self._host_uniforms.numpy()[: n + 1] = uniforms[depths[: n + 1]]
            self._uniforms.copy_(self._host_uniforms, non_blocking=True)
        self._ship()
        if n and isinstance(tokens, torch.Tensor):
            # An id outside would end the whole process there; the outcome tells of it.
            inside = tokens.clamp(0, self._target.vocab_size - 1)
            self._ids[0, 1 : n + 1] = inside
            self._outside.copy_((tokens != inside).any()[None])

    def load_sequences(
        self, drafts: Sequence[SlotDraft], geometries: Sequence[TreeGeometry], lengths: list[int]
    ) -> None:
        """Load drafts of several sequences, which `batch` counts; ``lengths`` of all of them.

        Those without a draft read rows that nobody uses, behind their text.
        """
        ids, row_depths, _, _, seen = self._begin_load(lengths)
        for (slot, root, tree), geometry in zip(drafts, geometries, strict=True):
            n = len(tree) + 1
            ids[slot, 0] = root
            if isinstance(tree.tokens, np.ndarray):
                ids[slot, 1:n] = tree.tokens
            row_depths[slot, :n] = geometry.depths[:n]
            seen[slot, :n, :n] = geometry.visible[:n, :n]
        self._ship()
        for slot, _, tree in drafts:
            if isinstance(tree.tokens, torch.Tensor):
                # An id outside would end the whole process there; the verifier refuses the case.
                inside = tree.tokens.clamp(0, self._target.vocab_size - 1)
                self._ids[slot, 1 : len(tree) + 1] = inside

    def _begin_load(self, lengths: list[int]) -> tuple[Any, ...]:
        """Wait for the last run; give ids, depths, parents, candidates and what rows see, empty."""
        self.land()
        *parts, text, first, outside = self._host_parts
        for part in parts:
            part[:] = 0
        text[:], first[:], outside[:] = lengths, lengths, 0
        seen = self._host_visible.numpy()
        seen[:] = self._eye  # a padded row sees itself
        return *(part.reshape(self.batch, self.rows) for part in parts), seen

    def _ship(self) -> None:
        self.numbers.copy_(self._host, non_blocking=True)
        self.visible.copy_(self._host_visible, non_blocking=True)

    def load_nodes(
        self, ids: torch.Tensor, visible: torch.Tensor | None, depths: torch.Tensor, length: int
    ) -> None:
        """Load nodes after ``length`` committed rows into the buffers, see ``Target.extend``."""
        n, total = len(ids), len(depths)
        fill(self.numbers[-3:-1], np.array([length, length + total - n]))
        self._ids[0, :n] = ids
        self._key_depths[0, :total] = depths
        self._depths.zero_()  # a position that any model has, for the rest
        self._depths[0, :n] = depths[total - n :]
        if visible is None:  # a chain, and what pads it
            n, total = self.rows, total - n + self.rows
            seen = self._target.lower_triangle(n, total - n)
            visible = self.visible.new_ones(1, 1) if seen is None else seen
        # The rest of the rows keeps what the last nodes saw.
        self.visible[0, :n, :total] = visible
        self.visible[0, :n, total:].zero_()

    def land(self) -> None:
        """Wait for the last run: until its copies are done, they read the pinned buffers.

        What it found out is kept for those who hold its scores; they no longer hold this pass.
        """
        if self.outcome is not None:
            self.outcome.read()
        elif self._done is not None and not self._verifies:
            self._done.synchronize()

    def device_part(self) -> tuple[torch.Tensor, ...]:
        """Compute logits ``[batch * rows, vocab]``; ``[2 * rows + 2]`` int64 if the pass verifies.

        Those are: greedy choices (-1 where not finite), rows of the accepted path with the root
        first (padded with their own numbers), how many of them there are, and whether a draft token
        was outside the vocabulary; of a single row its choice alone. Where the pass draws, there
        are ``rows`` drawn tokens more. After them the hidden states that were asked for.

        The first ``MOVED_ROWS`` of the path are where they shall stay; ``GraphTarget.commit`` moves
        the others, which few steps have.
        """
        target, lengths = self._target, self._static.lengths
        batched, states = target.static_layers(
            self._ids, self._depths + lengths[:, None], replace(self._static, masks={}),
            self._hidden_layers,
        )  # fmt: skip
        logits = batched.flatten(0, 1)
        hidden = tuple(states[i] for i in self._hidden_layers)
        if not self._verifies:
            return logits, *hidden
        choices = greedy_ids(logits)
        if self.rows == 1 and not self._sampling:  # the root alone is accepted, and is in place
            return logits, choices, *hidden
        drawn: tuple[torch.Tensor, ...] = ()
        if self._sampling:
            drawn = (sample(self._sampling.probs(logits), self._uniforms),)
        path, count = self._accept(*drawn or (choices,))
        first = slice(MOVED_ROWS)
        target.cache.move(self._row_numbers[first] + lengths, path[first] + lengths)
        return logits, torch.cat([choices, path, count, self._outside, *drawn]), *hidden

    def _accept(self, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify greedily without a walk: a node is accepted if no ancestor fails to match.

        Of equally deep accepted nodes the first wins, as in `longest_match` of the greedy verifier.
        """
        rows, depths, visible = self._row_numbers, self._depths[0], self.visible[0]
        matches = self._candidates[0].bool() & (self._ids[0] == choices[self._parents[0]])
        matches = matches | (rows == 0)
        accepted = ~(visible & ~matches).any(1)
        # Largest depth first, then the smallest row: one number orders both.
        rank = torch.where(accepted, depths * self.rows - rows, -self.rows)
        best = rank.argmax(0, keepdim=True)  # indexing by a tensor without dimensions would sync
        # The row of the path at each depth; beyond its end each row stays where it is.
        at_depth = visible.index_select(0, best) & (depths == rows[:, None])
        path = torch.where(at_depth.any(1), at_depth.long().argmax(1), rows)
        return path, depths.index_select(0, best) + 1

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
        outcome = self.outputs[1]
        self._result[: len(outcome)].copy_(outcome, non_blocking=True)

    def read(self) -> IntArray:
        """Wait for the last run's outcome; the step's only wait."""
        if self._done is not None:
            self._done.synchronize()
        return self._result.numpy()


class StaticChain(Recorded):
    """Passes of a draft model one after the other, each over the likeliest token of the last.

    Args:
        count: tokens of the chain; the first pass reads one or two tokens of text.
        never: ids that are not drafted.
    """

    TEXT = 2  # tokens that a step leaves unread at most: the root, and the last one drafted

    def __init__(self, target: GraphTarget, count: int, never: torch.Tensor) -> None:
        super().__init__(target)
        self._target, self._count, self._never = target, count, never
        spare = target.cache.max_len - self.TEXT - count
        with torch.inference_mode(False):  # they may be written to outside of that mode, too
            # committed tokens, tokens of text, and these
            self.numbers = torch.tensor([spare, 1, 0, 0], device=target.device)
            self._seen = torch.ones(1, self.TEXT, self.TEXT, dtype=torch.bool, device=target.device)
            self._seen.tril_()
            self._rows = torch.arange(self.TEXT, device=target.device)[None]

    def device_part(self) -> tuple[torch.Tensor, ...]:
        """Compute the chain's ids ``[count]``."""
        length, n, text = self.numbers.split([1, 1, self.TEXT])
        logits = self._pass(text[None], length, self._rows, self._seen)
        chosen = [self._likeliest(logits.index_select(0, n - 1))]
        first_row, seen = self._rows[:, :1], self._seen[:, :1, :1]
        for number in range(self._count - 1):
            logits = self._pass(chosen[-1][None], length + n + number, first_row, seen)
            chosen.append(self._likeliest(logits))
        return (torch.cat(chosen),)

    def _pass(
        self, ids: torch.Tensor, length: torch.Tensor, depths: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        static = StaticRows(length, length, seen, depths, depths, self._target.triton)
        return self._target.static_layers(ids, depths + length, static, ())[0][0]

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, self._never, -torch.inf).argmax(-1)


class GraphTarget(GraphRecorder, Target):
    """A target whose passes have fixed shapes and, on a GPU, are replayed as CUDA graphs.

    Args:
        commits: accept and keep the accepted rows within the pass; for the verifiers greedy and
            match. Else the verifier decides and ``commit`` moves the rows.
        sampling: of the verifier match, which shares ``uniforms``; None: the pass accepts greedily.
        capture: record graphs; None does so on a GPU.
        drafts: for a draft model, whose passes are ``append`` and ``extend``.
        layouts: batch rows and rows of each (the root's included) of the batch layouts to expect;
            any other is captured when it first comes, which costs its step a moment.
        fused: run passes in few kernels, see ``kernels.fused_pass``, where the layers are known.
            Other targets and programs with the same model are not affected.
        exact: multiply all numbers of rows by one kernel, so that chains are exact, see
            ``kernels.row_kernels``.
        folder: where the fastest kernels for products are kept; None keeps none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        commits: bool = True,
        sampling: Sampling | None = None,
        capture: bool | None = None,
        drafts: bool = False,
        layouts: Iterable[tuple[int, int]] = (),
        fused: bool = False,
        exact: bool = False,
        folder: Path | None = None,
        **kwargs: Any,
    ) -> None:
        self.commits, self.sampling = commits, sampling
        self.uniforms = Uniforms()
        self._capture = capture
        self._drafts = drafts
        self._layouts = tuple(layouts)
        self.hidden_layers: list[tuple[int, ...]] = [()]
        self._passes: dict[tuple[int, int, tuple[int, ...]], StaticPass | None] = {}
        self._chains: dict[int, StaticChain | None] = {}  # by tokens
        self._expected_chains: dict[int, torch.Tensor] = {}  # ids that are not drafted
        self._outcome: Outcome | None = None  # of the last pass, where that has moved its rows
        # A model's weights are stacked before its first graph, whether this target needs it or not.
        layers = fused_pass(model, Products(exact, folder))
        self._fused = layers if fused else "engine.fused_layers=false"
        if fused and isinstance(self._fused, str):
            log.warning("engine.fused_layers: %s, and passes run its own layers", self._fused)
        self._compared, self.triton = "", fused
        self.begin_recording()
        Target.__init__(self, model, **kwargs)

    def reserve(self, max_len: int, max_nodes: int, batch: int = 1) -> None:
        """As ``Target.reserve``; also captures every shape that passes are known to take.

        A draft model's largest pass is ``max_nodes`` rows.
        """
        before = self._sizes
        padded = row_bucket(max_nodes + 1) or max_nodes + 1
        super().reserve(max_len, padded - 1, batch)
        if self._sizes == before:
            return
        self.graph_tokens = self.cache.max_len if self.captures else 0
        self._pool = None
        self._capture_all(self.hidden_layers)
        for count, never in self._expected_chains.items():
            self.expect_chain(count, never)

    def clone(self) -> Target:
        """As in ``Target``; with passes of its own, for a graph writes to the cache that it knows.

        They have graphs and memory of their own, too.
        """
        other = super().clone()
        assert isinstance(other, GraphTarget)
        other.hidden_layers, other._passes, other._outcome = [*self.hidden_layers], {}, None
        other._chains, other._expected_chains = {}, {}
        other.begin_recording()
        other._capture_all(other.hidden_layers)
        return other

    def expect(self, hidden_layers: tuple[int, ...]) -> None:
        """Capture passes that hand over these hidden states too; they have graphs of their own.

        For ``Needs.hidden_layers`` as `Drafter.setup` leaves it: a head's files may decide.
        """
        if hidden_layers not in self.hidden_layers:
            self.hidden_layers.append(hidden_layers)
            self._capture_all([hidden_layers])

    def _capture_all(self, hidden_layers: Iterable[tuple[int, ...]]) -> None:
        """Capture every known shape, if passes are recorded at all."""
        if not self.captures:
            return
        _, most, batch = self._sizes
        tree_batch = _NODES if self._drafts else 1
        shapes = [(rows, tree_batch) for rows in ROW_BUCKETS if rows <= most]
        shapes += [(rows, k) for k, rows in self._layouts if k <= batch]
        for layers in hidden_layers:
            for rows, batch_rows in shapes:
                self._pass(rows, batch_rows, layers)

    def _free(self) -> None:
        """Free the cache and the passes, whose graphs point into it and hold memory, too."""
        for step in self._passes.values():
            if step is not None:
                # An unread outcome and its pass hold each other: frozen, the collector leaves them.
                step.land()
        self._passes.clear()
        self._chains.clear()
        self.graphs.clear()
        super()._free()

    @property
    def captures(self) -> bool:
        """True if passes are recorded as graphs."""
        return self.device.type == "cuda" if self._capture is None else self._capture

    def free_rows(self) -> int:
        """Count the draft nodes that still fit after the committed tokens, padding included."""
        free = self.cache.max_len - self.cache.length
        fitting = [bucket for bucket in ROW_BUCKETS if bucket <= free]
        return (fitting[-1] if fitting and free <= ROW_BUCKETS[-1] else free) - 1

    @torch.inference_mode()
    def compare_rows(self) -> None:
        """Compare each row of chains with a pass of that row alone, bit for bit; untimed.

        `describe` tells the result. What the cache holds is lost.
        """
        random, most = np.random.default_rng(0), max(1, min(self.max_nodes, 63))
        texts = [n for n in (1, 40, 200, 1000) if n + most < self.cache.max_len]
        n_equal = n_rows = 0
        for n in texts:
            text, chain = np.split(random.integers(0, self.vocab_size, n + most), [n])
            self.prefill(text)
            tree = DraftTree.chain(chain[1:])
            logits = self.forward(int(chain[0]), tree).logits.clone()
            for row, token in enumerate(chain):
                alone = self.forward(int(token), DraftTree.empty()).logits[0]
                n_equal, n_rows = n_equal + torch.equal(alone, logits[row]), n_rows + 1
                self.commit(DraftTree.empty(), NO_TOKENS)
        self.cache.reset()
        kind = str(self.dtype).removeprefix("torch.")
        self._compared = (
            f"{n_equal} of {n_rows} rows of chains equal rows alone, bit for bit ({kind})"
        )

    @torch.inference_mode()
    def forward(self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()) -> Scores:
        """As in ``Target``, padded to its bucket, queued and not waited for.

        The device works while the caller goes on, until the caller reads what was accepted. Ids on
        the device are checked then, too. A tree larger than the largest bucket runs
        as in ``Target``. Logits and hidden states may be overwritten by the next pass.
        """
        self._outcome = None
        self.hidden_states.check(hidden_layers)
        step = self._choose(tree, hidden_layers)
        if step is None:
            self.eager_passes += 1
            return super().forward(root, tree, hidden_layers=hidden_layers)
        n, length = len(tree), self.cache.length
        self._check(tree)
        depths = self._geometry.depths[: n + 1]
        if step.batch > 1:
            self.cache.broadcast()
        step.load(root, tree, self._geometry.depths, self._geometry.visible, length)
        step.run()
        if step.batch > 1:
            return Scores(step.logits, step.select, step.hidden, depths)
        self._outcome = step.outcome
        hidden = {i: states[: n + 1] for i, states in step.hidden.items()}
        return Scores(step.logits[: n + 1], None, hidden, depths, step.outcome)

    def batch_pass(
        self, cache: KVCache, rows: int, hidden_layers: tuple[int, ...] = ()
    ) -> StaticPass | None:
        """Make a pass over ``rows`` rows of each sequence of ``cache``; None if not recorded."""
        with self.on(cache):
            step = StaticPass(self, rows, cache.batch, hidden_layers)
            recorded = not self.captures or self.record(
                step, f"{cache.batch} sequences x {rows} rows"
            )
        return step if recorded else None

    def run_batch(self, step: StaticPass, cache: KVCache) -> None:
        """Queue a `batch_pass` of ``cache``, whose sequences then commit their own paths."""
        self._outcome = None
        with self.on(cache):
            step.run()

    def commit(self, tree: DraftTree, path: IntArray) -> None:
        """As in ``Target``; raises CaseFailed where the pass has kept another path's rows."""
        if self._outcome is not None:
            moved = self._outcome.path()[: len(path)]
            if np.array_equal(path, moved):
                self._move_rest(path)
                self.cache.commit(None, len(path) + 1)
                return
            if not (in_place(path) and in_place(moved)):
                raise CaseFailed(
                    "invalid_draft",
                    "the pass has kept another path than the verifier's: a verifier that is not "
                    "greedy needs GraphTarget(..., commits=False)",
                )
        super().commit(tree, path)

    def _move_rest(self, path: IntArray) -> None:
        """Move rows of a path that is longer than what the pass itself has moved."""
        if len(path) < MOVED_ROWS or in_place(path):
            return
        start = self.cache.length
        rows = path[MOVED_ROWS - 1 :] + 1 + start  # the root is one of those that were moved
        slots = np.arange(start + MOVED_ROWS, start + len(path) + 1)
        self.cache.move(to_device(slots, self.device), to_device(rows, self.device))

    def static_layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        static: StaticRows,
        hidden_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Compute logits and states as in ``through_layers``, of rows whose slots the device knows.

        In few kernels where the layers are known.
        """
        plan, cache = AttentionPlan(static=static), self.cache
        if not isinstance(self._fused, str):
            cached = partial(cache.whole, batch=len(tokens))
            return self._fused.run(tokens, positions, plan, cached, hidden_layers)
        with cache.static(static.first):
            return self.through_layers(tokens, positions, plan, hidden_layers)

    def describe(self) -> Passes:
        layers = self._fused if isinstance(self._fused, str) else "fused"
        passes = Passes(
            engine="graph", graphs=list(self.graphs), eager=dict(self.reasons), layers=layers
        )
        return passes | {"exact": self._compared} if self._compared else passes

    def _choose(self, tree: DraftTree, hidden_layers: tuple[int, ...]) -> StaticPass | None:
        batch, rows = 1, len(tree) + 1
        bucket = row_bucket(rows)
        if layout := self.row_layout(tree):
            batch, bucket = layout[0], layout[1] + 1
        if bucket is None:
            self.reasons.setdefault(f"{rows} rows", _TOO_LARGE)
            return None
        if self.cache.length + bucket > self.cache.max_len:
            return None  # more than ``free_rows``: refused by the eager pass
        return self._pass(bucket, batch, hidden_layers)

    def _nodes(
        self, ids: torch.Tensor, visible: torch.Tensor | None, depths: torch.Tensor, keep: int = 0
    ) -> Scores:
        """As in ``Target``; padded where a shape that was made by ``reserve`` holds the nodes."""
        n, length = len(ids), self.cache.length
        bucket = row_bucket(n)
        step: StaticPass | None = None
        end = length + len(depths) - n + (bucket or 0)
        if bucket is None:
            self.reasons.setdefault(f"{n} nodes", _TOO_LARGE)
        elif bucket > self._sizes[1]:
            self.reasons.setdefault(f"{n} nodes", f"more than the {self._sizes[1]} rows reserved")
        elif end > self.cache.max_len:
            self.reasons.setdefault(
                f"{bucket} nodes at the end of the cache",
                f"padded, they exceed its {self.cache.max_len} rows",
            )
        else:
            step = self._pass(bucket, _NODES, ())
        if step is None:
            self.eager_passes += 1
            return super()._nodes(ids, visible, depths, keep)
        step.load_nodes(ids, visible, depths, length)
        step.run()
        # Out of the buffer, which the next pass writes to: a drafter compares several layers.
        return Scores(step.logits[n - keep if keep else 0 : n].clone())

    def expect_chain(self, count: int, never: torch.Tensor) -> None:
        """Capture the graph of `chain`; the ids ``never`` are not drafted."""
        self._expected_chains[count] = never
        if self.captures and count not in self._chains:
            step = StaticChain(self, count, never)
            self._chains[count] = step if self.record(step, f"a chain of {count}") else None

    def chain(self, text: IntArray, count: int) -> torch.Tensor | None:
        """Read ``text [1 or 2]`` and draft the likeliest chain ``[count]`` behind it in one graph.

        Rows of the text are committed, those of all drafted tokens but the last are held. None
        where no graph does it, and nothing was read.
        """
        chain, end = self._chains.get(count), self.cache.length + StaticChain.TEXT + count
        if chain is None or len(text) > StaticChain.TEXT or end > self.cache.max_len:
            return None
        fill(chain.numbers, np.concatenate(([self.cache.length, len(text)], text)))
        chain.run()
        self.cache.commit(None, len(text), count - 1)
        return chain.outputs[0].clone()

    def _pass(self, rows: int, batch: int, hidden_layers: tuple[int, ...]) -> StaticPass | None:
        """Get the pass of a shape, made on first use; None if it could not be recorded."""
        shape = (rows, batch, hidden_layers)
        if shape not in self._passes:
            if batch == _NODES:
                step, name = StaticPass(self, rows, held=2 * self._sizes[1]), f"{rows} nodes"
            else:
                step, name = StaticPass(self, *shape), f"{batch} x {rows} rows"
                if hidden_layers:
                    name += f", hidden states {' '.join(map(str, hidden_layers))}"
            recorded = not self.captures or self.record(step, name)
            self._passes[shape] = step if recorded else None
        return self._passes[shape]
