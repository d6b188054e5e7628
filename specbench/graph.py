"""The fast target: every pass has one of a few fixed shapes, so that a GPU can replay it.

A pass of the eager engine launches some thousand kernels from Python, and on a GPU the launches
take longer than the kernels. A CUDA graph launches them all at once, but is tied to addresses and
shapes. So the number of rows is rounded up to a bucket, and so is the number of keys; all that
changes from pass to pass (ids, tree, length of the text) lies in buffers that the graph reads. From
the ids to the accepted path and the rows kept in the cache everything is one graph; a step copies
one small array to the device and one back.

The same code runs without capture on any device, which is how it is tested: a padded pass gives the
numbers of the exact one. Buffers and buckets follow the static-cache decoding of gpt-fast
(``generate.py``); trees, acceptance and the commit within the graph are this project's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbench.attention import AttentionPlan
from specbench.errors import CaseFailed
from specbench.target import Scores, Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.structs import DraftTree, IntArray

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
SHORTEST_KEYS = 256  # key buckets double from here: a short text does not pay for a long one
_WARM_UPS = 3  # passes before a capture: libraries choose kernels and allocate on the first ones


def row_bucket(rows: int) -> int | None:
    """The smallest bucket that holds ``rows`` rows; None where none does."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= rows), None)


def key_bucket(keys: int, most: int) -> int:
    """The smallest bucket of keys for ``keys`` of them: powers of two, ``most`` at last."""
    bucket = SHORTEST_KEYS
    while bucket < keys:
        bucket *= 2
    return min(bucket, most)


def no_graphs(model: PreTrainedModel) -> str | None:
    """Why passes of ``model`` cannot be replayed as CUDA graphs; None where they can."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        return f"the model is spread over {len(places)} devices (model.device_map)"
    if model.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {model.device.type}"
    return None


class StaticScores(Scores):
    """Scores of a padded pass, with what the pass itself found out.

    Args:
        raw: logits of all rows, padding included.
        rows: root and nodes.
        select: as for ``Scores``.
        verified: what ``verified`` gives.
    """

    __slots__ = ("_verified",)

    def __init__(
        self,
        raw: torch.Tensor,
        rows: int,
        select: torch.Tensor | None = None,
        verified: tuple[IntArray, IntArray] | None = None,
    ) -> None:
        super().__init__(raw if select is not None else raw[:rows], select)
        self._verified = verified

    @property
    def verified(self) -> tuple[IntArray, IntArray] | None:
        """Accepted path ``[a]`` and greedy choices ``[n + 1]``, found by the pass; else None."""
        return self._verified


class StaticPass:
    """One shape of pass: buffers, the device's work, and its graph where there is one.

    Args:
        target: whose model and cache it uses.
        rows: rows of the pass; the first ``n + 1`` are root and nodes, the others padding.
        keys: cached rows that attention looks at, padding included.
        batch: rows of the batch layout; 1 for a tree.
    """

    def __init__(self, target: GraphTarget, rows: int, keys: int, batch: int = 1) -> None:
        self.rows, self.keys, self.batch = rows, keys, batch
        self._target = target
        device = target.device
        pinned = device.type == "cuda"
        # [ids of all batch rows | parent rows | depths | candidates | length | ids outside]
        n_ids = batch * rows
        self._host = torch.zeros(n_ids + 3 * rows + 2, dtype=torch.int64, pin_memory=pinned)
        self._host_visible = torch.zeros(rows, rows, dtype=torch.bool, pin_memory=pinned)
        self._result = torch.zeros(n_ids + rows + 2, dtype=torch.int64, pin_memory=pinned)
        self.numbers = torch.zeros_like(self._host, device=device)
        self.visible = torch.zeros_like(self._host_visible, device=device)
        self._parts = (n_ids, n_ids + rows, n_ids + 2 * rows, n_ids + 3 * rows)
        self._key_numbers = torch.arange(keys, device=device)
        self._row_numbers = torch.arange(rows, device=device)
        self._graph: Any = None
        self._done = torch.cuda.Event() if pinned else None
        self.logits: torch.Tensor
        self.outcome: torch.Tensor

    def load(self, root: int, tree: DraftTree, depths: IntArray, visible: Any, length: int) -> None:
        """Bring a tree into the buffers; waits for nothing.

        Args:
            root: the last committed token.
            tree: the draft; ids on the device stay there.
            depths: ``[>= n + 1]`` of root and nodes.
            visible: ``[>= n + 1, >= n + 1]`` ancestor matrix.
            length: committed rows of the cache.
        """
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
        """Bring the k chains of a batch layout into the buffers."""
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

    def _ship(self) -> None:
        self.numbers.copy_(self._host, non_blocking=True)
        self.visible.copy_(self._host_visible, non_blocking=True)

    # -- the device's part ---------------------------------------------------------------------

    def device_part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """From the buffers to logits and outcome, without the host: what a graph captures.

        Returns:
            Logits ``[batch * rows, vocab]``, and ``[batch * rows + rows + 2]`` int64: greedy
            choices (-1 where not finite), rows of the accepted path with the root first (padded
            with their own numbers), how many of them there are, and whether a draft token was
            outside the vocabulary.
        """
        target, cache = self._target, self._target.cache
        ids, parents, deep, candidate = self._parts
        tokens = self.numbers[:ids].view(self.batch, self.rows)
        depths = self.numbers[parents:deep]
        length = self.numbers[candidate]
        positions = depths + length
        slots = self._row_numbers + length
        plan = self._plan(positions, slots, length)
        with cache.static(slots, self.keys):
            logits = target.run(tokens, positions.expand(self.batch, -1), plan).flatten(0, 1)
        choices = Scores(logits).greedy()
        if self.batch > 1 or not target.commits:
            path, count = self._row_numbers, torch.ones_like(length).view(1)
        else:
            parent_rows = self.numbers[ids:parents]
            candidates = self.numbers[deep:candidate].bool()
            path, count = self._accept(tokens[0], parent_rows, depths, candidates, choices)
            cache.move(slots, path + length)
        return logits, torch.cat([choices, path, count, self.numbers[-1:]])

    def _plan(
        self, positions: torch.Tensor, slots: torch.Tensor, length: torch.Tensor
    ) -> AttentionPlan:
        hidden = self._target.hidden_value
        seen = (self._key_numbers < length).expand(self.rows, -1)
        seen = seen.index_copy(1, slots, self.visible)
        mask = torch.zeros(seen.shape, dtype=self._target.dtype, device=seen.device)
        plan = AttentionPlan(mask=mask.masked_fill(~seen, hidden)[None, None])
        for window in self._target.windows:
            if self.keys > window:
                places = self._key_numbers.index_copy(0, slots, positions)
                near = seen & (positions[:, None] - places[None, :] < window)
                plan.windowed[window] = mask.masked_fill(~near, hidden)[None, None]
        return plan

    def _accept(
        self,
        tokens: torch.Tensor,
        parent_rows: torch.Tensor,
        depths: torch.Tensor,
        candidates: torch.Tensor,
        choices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy verification without a walk: a node is accepted if no ancestor fails to match.

        Of equally deep accepted nodes the first wins, as in ``tree.longest_match``.
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

    def capture(self, pool: Any) -> None:
        """Record the device's part as a CUDA graph.

        Raises:
            RuntimeError: something in it needs the host (some models read positions there).
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self.device_part()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.logits, self.outcome = self.device_part()
        self._graph = graph

    def run(self) -> None:
        """The device's part: replayed where it was captured."""
        if self._graph is None:
            self.logits, self.outcome = self.device_part()
        else:
            self._graph.replay()

    def read(self) -> IntArray:
        """The outcome on the host; the step's only wait."""
        self._result.copy_(self.outcome, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        return self._result.numpy()


class GraphTarget(Target):
    """A target whose passes have fixed shapes and, on a GPU, are replayed as CUDA graphs.

    Args:
        commits: accept greedily and keep the accepted rows within the pass; for the greedy
            verifier. Else the verifier decides and ``keep`` moves the rows.
        capture: record graphs; None does so on a GPU.
        **kwargs: as for ``Target``.

    Attributes:
        reasons: why passes of a shape ran eagerly, by shape; for the run's manifest.
        graphs: shapes that were captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        commits: bool = True,
        capture: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.commits = commits
        self._capture = capture
        self._passes: dict[tuple[int, int, int], StaticPass | None] = {}
        self.reasons: dict[str, str] = {}
        self.graphs: list[str] = []
        self._pool: Any = None
        self._committed: IntArray | None = None
        super().__init__(model, **kwargs)

    def reserve(self, max_len: int, max_nodes: int, batch: int = 1) -> None:
        """As ``Target.reserve``; also captures every shape that passes of a tree can take."""
        before = self._sizes
        padded = row_bucket(max_nodes + 1) or max_nodes + 1
        super().reserve(max_len, padded - 1, batch)
        if self._sizes == before:
            return
        self._passes.clear()  # their graphs point into the old cache
        self.graphs.clear()
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            keys = SHORTEST_KEYS
            while True:
                for rows in ROW_BUCKETS:
                    if rows <= padded:
                        self._pass(rows, key_bucket(keys, self.cache.max_len))
                if keys >= self.cache.max_len:
                    break
                keys *= 2

    @property
    def _captures(self) -> bool:
        return self.device.type == "cuda" if self._capture is None else self._capture

    def room(self) -> int:
        """Draft nodes that still fit behind the committed text, with their padding."""
        free = self.cache.max_len - self.cache.length
        fitting = [bucket for bucket in ROW_BUCKETS if bucket <= free]
        return (fitting[-1] if fitting and free <= ROW_BUCKETS[-1] else free) - 1

    @torch.inference_mode()
    def forward(self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()) -> Scores:
        """The pass over the root and the nodes of ``tree``, padded to its bucket.

        A tree larger than the largest bucket, and one whose hidden states are asked for, runs as
        in ``Target``.

        Raises:
            CaseFailed: the tree is malformed or a token is outside the vocabulary.
        """
        self._committed = None
        in_rows = tree.rows is not None and self.cache.batch >= tree.rows[0] > 1
        step = None if hidden_layers else self._choose(tree, in_rows)
        if step is None:
            return super().forward(root, tree, hidden_layers=hidden_layers)
        n, length = len(tree), self.cache.length
        self._check(tree, isinstance(tree.tokens, np.ndarray))
        if in_rows:
            self.cache.broadcast()
            step.load_rows(root, tree, length)
            step.run()
            order = torch.arange(step.batch * step.rows, device=self.device).view(step.batch, -1)
            select = torch.cat([order[0, :1], order[:, 1:].reshape(-1)])
            return StaticScores(step.logits, n + 1, select)
        step.load(root, tree, self._depths, self._visible, length)
        step.run()
        if not self.commits:
            return StaticScores(step.logits, n + 1)
        outcome = step.read()
        if outcome[-1]:
            raise CaseFailed("invalid_draft", "a draft token is outside the vocabulary")
        count = int(outcome[-2])
        path = outcome[step.rows + 1 : step.rows + count].copy() - 1
        self._committed = path
        return StaticScores(step.logits, n + 1, verified=(path, outcome[: n + 1].copy()))

    def keep(self, tree: DraftTree, path: IntArray) -> None:
        """Commit the root's row and the rows of the accepted path."""
        if self._committed is not None and np.array_equal(path, self._committed):
            self.cache.keep(None, len(path) + 1)  # the pass has moved them already
            return
        if self._committed is not None and len(path) and int(path[-1]) != len(path) - 1:
            raise CaseFailed("invalid_draft", "the pass committed another path than the verifier")
        super().keep(tree, path)

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> Any:
        """Logits ``[batch, rows, vocab]`` of a model call."""
        return self._call(tokens, positions, plan).logits

    @property
    def hidden_value(self) -> float:
        """What the mask adds to a score that a row must not see."""
        return self._hidden_value

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding-window sizes of the model's layers."""
        return self._windows

    def describe(self) -> dict[str, Any]:
        """What was captured and what ran eagerly and why; for the run's manifest."""
        return {"engine": "graph", "graphs": list(self.graphs), "eager": dict(self.reasons)}

    def _choose(self, tree: DraftTree, in_rows: bool) -> StaticPass | None:
        if in_rows and tree.rows is not None:
            batch, rows = tree.rows[0], tree.rows[1] + 1
            bucket: int | None = rows
        else:
            batch, rows = 1, len(tree) + 1
            bucket = row_bucket(rows)
        if bucket is None:
            self.reasons.setdefault(f"{rows} rows", f"more than {ROW_BUCKETS[-1]} rows")
            return None
        keys = self.cache.length + bucket
        if keys > self.cache.max_len:
            return None
        return self._pass(bucket, key_bucket(keys, self.cache.max_len), batch)

    def _pass(self, rows: int, keys: int, batch: int = 1) -> StaticPass | None:
        shape = (rows, keys, batch)
        if shape not in self._passes:
            self._passes[shape] = self._make(rows, keys, batch)
        return self._passes[shape]

    def _make(self, rows: int, keys: int, batch: int) -> StaticPass | None:
        made = StaticPass(self, rows, keys, batch)
        if not self._captures:
            return made
        name = f"{batch} x {rows} rows, {keys} keys"
        try:
            with torch.inference_mode():
                made.capture(self._pool)
        except RuntimeError as error:
            self.reasons[name] = str(error).splitlines()[0]
            log.warning("no CUDA graph for %s: %s", name, self.reasons[name])
            return None
        self.graphs.append(name)
        return made
