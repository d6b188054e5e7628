"""The target model: the only place that knows transformers' calling convention.

One pass takes the root and the draft nodes and returns the logits of every row. The host works the
tree out in buffers that are made once, and the mask of a tree lies in one, too. Ids, positions and
masks of sliding windows are small tensors of each pass; ``specbench.models.graph_target`` has
buffers for these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import Array, IntArray
from specbench.config.schema import FLOAT32_WEIGHTS
from specbench.decoding.device import to_device
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import TreeGeometry
from specbench.errors import CaseFailed
from specbench.kernels.architectures import window_sizes
from specbench.kernels.attention import AttentionPlan, install, prompt_windows
from specbench.kernels.compiled_pass import ONE_CALL, CompiledPass, PassOutputs, prepare
from specbench.models.checkpoints.weights import sample_weights
from specbench.models.hidden_states import Embeddings, HiddenStates, decoder_layers
from specbench.models.kv_cache import KVCache, TextCaches, in_place, layer_devices
from specbench.models.pass_masks import PassMasks
from specbench.models.scores import Scores, batch_select
from specbench.results.manifest import Passes
from specbench.system import cuda_settings

_PIECE = 256  # rows of a prompt that one call reads


class Target(PassMasks):
    """A causal language model with an exact, rewindable cache.

    Args:
        max_len: longest text (prompt and answer).
        batch: rows of the batch layout.
        packed_bytes: memory for products in panels on a CPU, for the models of ``compiled_pass``,
            whose passes are then run by one call; 0 runs all models' through their layers.
        texts: how many of its twins and itself read their rows in one pass.
        reason: why passes run eagerly although another engine was asked for; None: as asked.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_len: int,
        max_nodes: int = 128,
        batch: int = 1,
        packed_bytes: int = 0,
        texts: int = 1,
        reason: str | None = None,
    ) -> None:
        cuda_settings.fix()
        self._reason, self._texts, self.graph_tokens = reason, texts, 0
        self.draft_weights = FLOAT32_WEIGHTS  # what heads read
        self.model, config = model.eval(), model.config.get_text_config()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        embedding: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = model.dtype
        heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.windows = window_sizes(model)
        self._layer_devices = layer_devices(model, config.num_hidden_layers, self.device)
        install(model)
        self.packed_weights = prepare(model, packed_bytes)
        self.cache: KVCache
        self._sizes = (0, 0, 0)
        self.eager_passes = 0  # those for which a fixed shape was meant, see GraphTarget
        self._selects: dict[tuple[int, int], torch.Tensor] = {}  # by batch layout
        self.reserve(max_len, max_nodes, batch)

    @property
    def layers(self) -> torch.nn.ModuleList:
        return decoder_layers(self.model)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def hidden_states(self) -> HiddenStates:
        return HiddenStates(self.model, self.layers, self.device)

    @property
    def embeddings(self) -> Embeddings:
        return Embeddings(self.model, self.draft_weights)

    @property
    def config(self) -> Mapping[str, Any]:
        named: dict[str, Any] = self.model.config.get_text_config().to_dict()
        return named

    @property
    def devices(self) -> frozenset[torch.device]:
        return frozenset(self._layer_devices)

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def fingerprint(self) -> Array:
        return sample_weights(self.model)

    def memory_bytes(self, rows: int) -> int:
        """Weights with their packed copies, and a cache of ``rows`` tokens."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return int(weights + self.packed_weights["bytes"] + rows * self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token of a text."""
        return self.cache.nbytes // (self.cache.max_len * self.cache.batch)

    def reserve(self, max_len: int, max_nodes: int, batch: int = 1) -> None:
        """Allocate buffers for texts of ``max_len`` tokens and trees of ``max_nodes`` nodes.

        Does nothing where the present ones suffice. Never called inside a timed region.
        """
        rows = max_nodes + 1
        wanted = (KVCache.length_for(max_len, rows), rows, batch)
        if all(have >= want for have, want in zip(self._sizes, wanted, strict=True)):
            return
        length, rows, batch = (max(a, b) for a, b in zip(self._sizes, wanted, strict=True))
        before = self._sizes
        self._free()  # both at once might not fit
        try:
            self._allocate(length, rows, batch)
        except RuntimeError:  # the allocators of torch, a GPU's and a CPU's
            if any(before):
                self._allocate(*before)  # a run's other cases go on
            raise

    def _free(self) -> None:
        if any(self._sizes):
            del self.cache, self._mask

    def _allocate(self, length: int, rows: int, batch: int) -> None:
        self._sizes = (length, rows, batch)
        self.cache = self.new_cache(length, batch)
        self._new_mask(rows, length)
        self._geometry = TreeGeometry(max_nodes=rows - 1)
        self._ids = np.zeros(rows, dtype=np.int64)
        compiled = self.packed_weights.get("pass") == ONE_CALL
        sizes = (length, max(self._texts * rows + batch, _PIECE), self.windows)
        self.compiled = CompiledPass(self.model, *sizes) if compiled else None

    def new_cache(self, length: int, batch: int = 1) -> KVCache:
        """An empty cache for texts of this model, of ``length`` rows."""
        return KVCache(
            self._layer_devices,
            batch=batch,
            kv_heads=self._kv_heads,
            max_len=length,
            head_dim=self._head_dim,
            dtype=self.dtype,
        )

    def twin(self) -> Target:
        """The same model for another text, with a cache of its own; one passes at a time."""
        other = copy.copy(self)
        other.cache = self.new_cache(self.cache.max_len, self.cache.batch)
        other._new_mask(*self._mask.shape)
        other._geometry = TreeGeometry(max_nodes=self.max_nodes)
        return other

    def describe(self) -> Passes:
        return {"engine": "eager", "reason": self._reason} if self._reason else {"engine": "eager"}

    @property
    def max_nodes(self) -> int:
        return self._sizes[1] - 1

    def free_rows(self) -> int:
        """Draft nodes that still fit behind the committed text."""
        return self.cache.max_len - self.cache.length - 1

    @contextmanager
    def on(self, cache: KVCache | TextCaches) -> Iterator[None]:
        """Passes within it, and what they commit, are of another text, or of several."""
        own, self.cache = self.cache, cast("KVCache", cache)
        try:
            yield
        finally:
            self.cache = own

    # -- passes ------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> Scores:
        """The pass over ``prompt [n]`` on an empty cache; scores of its last token, or of all.

        Hidden states, where some are asked for, are those of all.
        """
        n = len(prompt)
        self.cache.reset()
        if scores := self._prefill_in_calls(prompt, all_logits, hidden_layers):
            return scores
        positions = self._key_positions[:n]
        windowed = prompt_windows(self.windows, positions, self._additive)
        plan = AttentionPlan(causal=True, windowed=windowed)
        logits, hidden = self._call(
            torch.from_numpy(np.ascontiguousarray(prompt, dtype=np.int64))[None].to(self.device),
            positions[None],
            plan,
            keep=0 if all_logits else 1,
            hidden_layers=hidden_layers,
        )
        self.cache.commit(None, n)
        return Scores(logits[0], hidden=hidden)

    def _prefill_in_calls(
        self, prompt: IntArray, all_logits: bool, hidden_layers: tuple[int, ...]
    ) -> Scores | None:
        """`prefill` piece by piece; None, with nothing read, where it is not run by calls."""
        n = len(prompt)
        if self.compiled is None or n > self.compiled.most_keys:
            return None
        ids = torch.from_numpy(np.ascontiguousarray(prompt, dtype=np.int64))
        pieces: list[PassOutputs] = []
        for start in range(0, n, _PIECE):
            piece = ids[None, start : start + _PIECE]
            positions = self._key_positions[None, start : start + piece.shape[1]]
            keep = 0 if all_logits else 1
            outputs = self._in_one_call(
                piece, positions, None, keep=keep, hidden_layers=hidden_layers
            )
            assert outputs is not None
            pieces.append(outputs)
            self.cache.commit(None, piece.shape[1])
        logits = torch.cat([p.logits for p in pieces]) if all_logits else pieces[-1].logits
        hidden = {i: torch.cat([p.hidden[i] for p in pieces]) for i in hidden_layers}
        return Scores(logits, hidden=hidden)

    @torch.inference_mode()
    def append(self, ids: torch.Tensor) -> Scores:
        """The pass over ``ids [n]`` (on the device) as text behind the committed text.

        Their rows are committed; uncommitted ones must have been dropped. Scores of the last one.
        """
        n = len(ids)
        scores = self._nodes(ids, None, self.positions(n), keep=1)
        self.cache.commit(None, n)
        return scores

    @torch.inference_mode()
    def extend(
        self, ids: torch.Tensor, visible: torch.Tensor | None, depths: torch.Tensor
    ) -> Scores:
        """The pass over more nodes of a tree that grows behind the committed text.

        Their rows are held: the next such pass sees them. Unlike `forward` there is no root: the
        last committed token has its row in the cache already.

        Args:
            ids: ``[n]`` on the device.
            visible: ``[n, held + n]`` bool on the device: which held and new rows a node sees;
                None where each sees all before it and itself (a chain).
            depths: ``[held + n]`` of held and new nodes; 0 follows the last committed token.
        """
        n = len(ids)
        scores = self._nodes(ids, visible, depths)
        self.cache.retain(n)
        return scores

    def _nodes(
        self, ids: torch.Tensor, visible: torch.Tensor | None, depths: torch.Tensor, keep: int = 0
    ) -> Scores:
        """A pass over rows that see the committed text and, of the uncommitted, ``visible``.

        None: all before them.
        """
        past, n = self.cache.length, len(ids)
        if visible is None:
            visible = self.lower_triangle(n, len(depths) - n)
        if past + len(depths) > self.cache.max_len:
            raise CaseFailed(
                "invalid_draft",
                f"{past + len(depths)} rows exceed the cache's {self.cache.max_len}",
            )
        own = depths + past
        if outputs := self._in_one_call(ids[None], own[None, -n:], visible, keep=keep):
            return Scores.of(outputs)
        plan = self.plan_of(past, visible, own, n)
        return Scores(self._call(ids[None], own[None, -n:], plan, keep=keep)[0][0])

    @torch.inference_mode()
    def forward(self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()) -> Scores:
        """The pass over the root and the nodes of ``tree``; commits nothing.

        Args:
            root: the last committed token, whose keys and values are not cached yet.
            hidden_layers: hidden states to hand over, see ``Needs.hidden_layers``.

        Raises:
            CaseFailed: the tree is malformed or a token is outside the vocabulary.
            ConfigurationError: the model has no such hidden states.
        """
        if tree.rows is not None and self.cache.batch >= tree.rows[0] > 1:
            return self._forward_rows(root, tree, hidden_layers)
        rows = len(tree) + 1
        on_host = isinstance(tree.tokens, np.ndarray)
        self._check(tree)
        visible, depths = self.seen(tree, self._geometry)
        if on_host:
            self._ids[0] = root
            self._ids[1:rows] = tree.tokens
            ids = to_device(self._ids[:rows], self.device)
        else:
            own = to_device(torch.tensor([root]), self.device)
            ids = torch.cat([own, torch.as_tensor(tree.tokens)])
            # An id outside would end the whole process there; the verifier refuses the case.
            ids = ids.clamp(0, self.vocab_size - 1)
        positions, below = depths + self.cache.length, self._geometry.depths[:rows]
        read = (ids[None], positions[None])
        if outputs := self._in_one_call(*read, visible, hidden_layers=hidden_layers):
            return Scores.of(outputs, below)
        plan = self._plan(rows, visible, positions)
        logits, hidden = self._call(*read, plan, hidden_layers=hidden_layers)
        return Scores(logits[0], hidden=hidden, depths=below)

    def _forward_rows(self, root: int, tree: DraftTree, hidden_layers: tuple[int, ...]) -> Scores:
        """The batch layout: k rows of root + w draft tokens under plain causal attention."""
        k, w = tree.rows or (0, 0)
        self.cache.broadcast()
        self._check(tree)
        rows = np.empty((k, w + 1), dtype=np.int64)
        rows[:, 0] = root
        rows[:, 1:] = np.asarray(tree.tokens).reshape(k, w)
        visible = self.lower_triangle(w + 1)
        positions = self._key_positions[self.cache.length : self.cache.length + w + 1]
        if (k, w) not in self._selects:
            self._selects[k, w] = batch_select(k, w + 1, self.device)
        select, depths = self._selects[k, w], self._geometry.depths[: len(tree) + 1]
        ids, each = to_device(rows, self.device), positions.expand(k, -1)
        if outputs := self._in_one_call(ids, each, None, hidden_layers=hidden_layers):
            return Scores.of(outputs, depths, select)
        plan = self._plan(w + 1, visible, positions)
        logits, hidden = self._call(ids, each, plan, hidden_layers=hidden_layers)
        return Scores(logits.flatten(0, 1), select, hidden, depths)

    def commit(self, tree: DraftTree, path: IntArray) -> None:
        """Commit the rows of the root and of the accepted path."""
        count = len(path) + 1
        if tree.rows is not None and self.cache.batch >= tree.rows[0] > 1:
            self.cache.commit_row(int(path[0]) // tree.rows[1] if len(path) else 0, count)
            return
        rows = None
        if not in_place(path):
            rows = torch.from_numpy(np.concatenate(([0], path + 1)))
        self.cache.commit(rows, count)

    def through_layers(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """A pass that somebody else has planned, over ``ids [batch, rows]``; commits nothing.

        Gives logits ``[batch, rows, vocab]``, and states ``[batch * rows, hidden]`` by number.
        """
        return self._call(ids, positions, plan, hidden_layers=hidden_layers)

    # -- parts of a pass -----------------------------------------------------------------------

    def _check(self, tree: DraftTree) -> None:
        n = len(tree)
        most = min(self.max_nodes, self.free_rows())
        if n > most:
            raise CaseFailed(
                "invalid_draft",
                f"a draft of {n} nodes exceeds the {most} reserved; "
                "state the method's largest tree in needs.max_nodes",
            )
        self._geometry.read(tree, self.vocab_size)

    def _in_one_call(
        self, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor | None, **more: Any
    ) -> PassOutputs | None:
        """The pass over ``ids [texts, rows]``; None where it is not run by one call."""
        if self.compiled is None:
            return None
        self.hidden_states.check(more.get("hidden_layers", ()))
        texts, rows = ids.shape
        segments = self.cache.segments(texts, rows, visible)
        return self.compiled.run(ids.flatten(), positions.flatten(), segments, **more)

    def _call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        *,
        keep: int = 0,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Logits ``[batch, rows, vocab]``, and ``[batch * rows, hidden]`` by number."""
        with self.hidden_states.collected(hidden_layers) as hidden:
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
                plan=plan,
            )
        return out.logits, hidden
