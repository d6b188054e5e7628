"""The fast target: every pass has one of a few fixed shapes, so that a GPU can replay it.

A pass of the eager engine launches some thousand kernels from Python, and on a GPU the launches
take longer than the kernels. A CUDA graph launches them all at once, but is tied to addresses and
shapes. So the numbers of rows and of keys are rounded up to buckets, and what changes from pass to
pass lies in buffers that the graph reads (``static_pass``).

The same code runs without capture on any device, which is how it is tested: a padded pass gives the
numbers of the exact one. Buffers and buckets follow the static-cache decoding of gpt-fast
(``generate.py``); trees, acceptance and the commit within the graph are this project's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import IntArray
from specbench.decoding.device import to_device
from specbench.decoding.structs import DraftTree
from specbench.errors import CaseFailed
from specbench.kernels.attention import AttentionPlan
from specbench.kernels.cuda_graphs import GraphRecorder
from specbench.kernels.gpu_layers import GRAPH_USERS, fuse
from specbench.models.hidden_states import decoder_layers
from specbench.models.kv_cache import in_place
from specbench.models.scores import Outcome, Scores
from specbench.models.static_pass import MOVED_ROWS, FixedShape, StaticNodes, StaticPass
from specbench.models.target import Target
from specbench.results.manifest import Passes

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
_TOO_LARGE = f"more than {ROW_BUCKETS[-1]} rows"  # why a pass has no bucket
SHORTEST_KEYS = 256  # key buckets double from here: a short text does not pay for a long one
_NODES = 0  # in place of a batch: a pass over nodes that hang below no root


def row_bucket(rows: int) -> int | None:
    """The smallest bucket that holds ``rows`` rows; None where none does."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= rows), None)


def key_bucket(keys: int, most: int) -> int:
    """The smallest bucket of keys for ``keys`` of them: powers of two, ``most`` at last."""
    bucket = SHORTEST_KEYS
    while bucket < keys:
        bucket *= 2
    return min(bucket, most)


def key_buckets(most: int) -> list[int]:
    """All of them, the smallest first."""
    buckets = [key_bucket(0, most)]
    while buckets[-1] < most:
        buckets.append(key_bucket(buckets[-1] + 1, most))
    return buckets


def no_graphs(model: PreTrainedModel) -> str | None:
    """Why passes of ``model`` cannot be replayed as CUDA graphs; None where they can."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        return f"the model is spread over {len(places)} devices (model.device_map)"
    if model.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {model.device.type}"
    return None


class GraphTarget(GraphRecorder, Target):
    """A target whose passes have fixed shapes and, on a GPU, are replayed as CUDA graphs.

    Args:
        commits: accept greedily and keep the accepted rows within the pass; for the greedy
            verifier. Else the verifier decides and ``commit`` moves the rows.
        capture: record graphs; None does so on a GPU.
        drafts: for a draft model, whose passes are ``append`` and ``extend``.
        layouts: batch rows and rows of each (the root's included) of the batch layouts to expect;
            any other is captured when it first comes, which costs its step a moment.
        fused: run the layers' steps in fewer kernels, see ``kernels.gpu_layers``. Other targets and
            programs with the same model are not affected.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        commits: bool = True,
        capture: bool | None = None,
        drafts: bool = False,
        layouts: Iterable[tuple[int, int]] = (),
        fused: bool = False,
        **kwargs: Any,
    ) -> None:
        self.commits = commits
        self._capture = capture
        self._drafts = drafts
        self._layouts = tuple(layouts)
        self._hidden_layers: list[tuple[int, ...]] = [()]
        self._passes: dict[tuple[int, int, int, tuple[int, ...]], FixedShape | None] = {}
        self._outcome: Outcome | None = None  # of the last pass, where that has moved its rows
        self._fusion = fuse(model, decoder_layers(model)) if fused else None
        if self._fusion is not None and self._fusion.stock:
            kept = ", ".join(self._fusion.stock)
            log.warning("engine.fused_layers: no fused form of %s is known, they stay", kept)
        self.begin_recording()
        Target.__init__(self, model, **kwargs)
        vars(model).setdefault(GRAPH_USERS, []).append(weakref.ref(self))

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
        if self.captures:
            self._pool = None
            for layers in self._hidden_layers:
                self._capture_all(layers)

    def twin(self) -> Target:
        """As in ``Target``; with passes of its own, for a graph writes to the cache that it knows.

        They have graphs and memory of their own, too.
        """
        other = super().twin()
        assert isinstance(other, GraphTarget)
        other._hidden_layers, other._passes, other._outcome = [*self._hidden_layers], {}, None
        other.begin_recording()
        vars(self.model)[GRAPH_USERS].append(weakref.ref(other))
        if other.captures:
            for layers in other._hidden_layers:
                other._capture_all(layers)
        return other

    def expect(self, hidden_layers: tuple[int, ...]) -> None:
        """Capture passes that hand over these hidden states too; they have graphs of their own.

        For ``Needs.hidden_layers`` as `Drafter.setup` leaves it: a head's files may decide.
        """
        if hidden_layers not in self._hidden_layers:
            self._hidden_layers.append(hidden_layers)
            if self.captures:
                self._capture_all(hidden_layers)

    def _capture_all(self, hidden_layers: tuple[int, ...]) -> None:
        for keys in key_buckets(self.cache.max_len):
            for rows, batch_rows in self._known_shapes():
                if rows <= keys:
                    self._pass(rows, keys, batch_rows, hidden_layers)

    def _free(self) -> None:
        """Also the passes, whose graphs point into the cache that goes and hold memory too."""
        for step in self._passes.values():
            if isinstance(step, StaticPass):
                # An unread outcome and its pass hold each other: frozen, the collector leaves them.
                step.land()
        self._passes.clear()
        self.graphs.clear()
        super()._free()

    def _known_shapes(self) -> list[tuple[int, int]]:
        _, most, batch = self._sizes
        one = _NODES if self._drafts else 1
        shapes = [(rows, one) for rows in ROW_BUCKETS if rows <= most]
        return shapes + [(rows, k) for k, rows in self._layouts if k <= batch]

    @property
    def captures(self) -> bool:
        """Whether passes are recorded as graphs."""
        return self.device.type == "cuda" if self._capture is None else self._capture

    def free_rows(self) -> int:
        """Draft nodes that still fit behind the committed text, with their padding."""
        free = self.cache.max_len - self.cache.length
        fitting = [bucket for bucket in ROW_BUCKETS if bucket <= free]
        return (fitting[-1] if fitting and free <= ROW_BUCKETS[-1] else free) - 1

    @torch.inference_mode()
    def forward(self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()) -> Scores:
        """As in ``Target``, padded to its bucket, queued and not waited for.

        The device works while the caller goes on, until somebody asks the scores what was accepted.
        That is where ids on the device are refused, too. A tree larger than the largest bucket runs
        as in ``Target``. Logits and hidden states may be overwritten by the next pass.
        """
        self._outcome = None
        in_rows = tree.rows is not None and self.cache.batch >= tree.rows[0] > 1
        self.hidden_states.check(hidden_layers)
        step = self._choose(tree, in_rows, hidden_layers)
        if step is None:
            self.eager_passes += 1
            return super().forward(root, tree, hidden_layers=hidden_layers)
        n, length = len(tree), self.cache.length
        self._check(tree)
        depths = self._geometry.depths[: n + 1]
        if in_rows:
            self.cache.broadcast()
            step.load_rows(root, tree, length)
            step.run()
            return Scores(step.logits, step.select, step.hidden, depths)
        step.load(root, tree, self._geometry.depths, self._geometry.visible, length)
        step.run()
        self._outcome = step.outcome
        hidden = {i: states[: n + 1] for i, states in step.hidden.items()}
        return Scores(step.logits[: n + 1], None, hidden, depths, step.outcome)

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

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        return self._call(tokens, positions, plan, hidden_layers=hidden_layers)

    def _call(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        with self._fusion.active() if self._fusion else nullcontext():
            return super()._call(*args, **kwargs)

    def describe(self) -> Passes:
        found = Passes(engine="graph", graphs=list(self.graphs), eager=dict(self.reasons))
        if self._fusion:
            found["layers"] = self._fusion.describe()
        return found

    def _choose(
        self, tree: DraftTree, in_rows: bool, hidden_layers: tuple[int, ...]
    ) -> StaticPass | None:
        if in_rows and tree.rows is not None:
            batch, rows = tree.rows[0], tree.rows[1] + 1
            bucket: int | None = rows
        else:
            batch, rows = 1, len(tree) + 1
            bucket = row_bucket(rows)
        if bucket is None:
            self.reasons.setdefault(f"{rows} rows", _TOO_LARGE)
            return None
        keys = self.cache.length + bucket
        if keys > self.cache.max_len:
            return None  # more than ``free_rows``: refused by the eager pass
        step = self._pass(bucket, key_bucket(keys, self.cache.max_len), batch, hidden_layers)
        assert step is None or isinstance(step, StaticPass)
        return step

    def _nodes(
        self, ids: torch.Tensor, visible: torch.Tensor | None, depths: torch.Tensor, keep: int = 0
    ) -> Scores:
        """As in ``Target``; padded where a shape that was made by ``reserve`` holds the nodes."""
        n, length = len(ids), self.cache.length
        bucket = row_bucket(n)
        step: FixedShape | None = None
        keys = length + len(depths) - n + (bucket or 0)
        if bucket is None:
            self.reasons.setdefault(f"{n} nodes", _TOO_LARGE)
        elif bucket > self._sizes[1]:
            self.reasons.setdefault(f"{n} nodes", f"more than the {self._sizes[1]} rows reserved")
        elif keys > self.cache.max_len:
            self.reasons.setdefault(
                f"{bucket} nodes at the end of the cache",
                f"padded, they exceed its {self.cache.max_len} rows",
            )
        else:
            step = self._pass(bucket, key_bucket(keys, self.cache.max_len), _NODES)
        if step is None:
            self.eager_passes += 1
            return super()._nodes(ids, visible, depths, keep)
        assert isinstance(step, StaticNodes)
        step.load(ids, visible, depths, length)
        step.run()
        # Out of the buffer, which the next pass writes to: a drafter compares several layers.
        return Scores(step.outputs[0][n - keep if keep else 0 : n].clone())

    def _pass(
        self, rows: int, keys: int, batch: int = 1, hidden_layers: tuple[int, ...] = ()
    ) -> FixedShape | None:
        shape = (rows, keys, batch, hidden_layers)
        if shape not in self._passes:
            self._passes[shape] = self._make(*shape)
        return self._passes[shape]

    def _make(
        self, rows: int, keys: int, batch: int, hidden_layers: tuple[int, ...]
    ) -> FixedShape | None:
        made: FixedShape
        if batch == _NODES:
            made, what = StaticNodes(self, rows, keys), f"{rows} nodes"
        else:
            made = StaticPass(self, rows, keys, batch, hidden_layers)
            what = f"{batch} x {rows} rows"
            if hidden_layers:
                what += f", hidden states {' '.join(map(str, hidden_layers))}"
        if self.captures and not self.record(made, f"{what}, {keys} keys"):
            return None
        return made
