"""The target model: the only place that knows transformers' calling convention.

One pass takes the root and the draft nodes and returns the logits of every row. The host works the
tree out in buffers that are made once. Ids, positions and masks are small tensors of each pass;
``specbench.models.graph_target`` has buffers for these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import Array, IntArray
from specbench.config.schema import FLOAT32_WEIGHTS
from specbench.decoding.device import to_device
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import TreeGeometry, visibility
from specbench.errors import CaseFailed
from specbench.kernels.architectures import window_sizes
from specbench.kernels.attention import AttentionPlan, install, prompt_windows, windowed_masks
from specbench.kernels.compiled_pass import ONE_CALL, CompiledPass, PassOutputs, prepare
from specbench.kernels.recurrent import kernel_files
from specbench.kernels.weight_forms import is_quantised, stored_bytes
from specbench.models.cache_layout import read_layout
from specbench.models.checkpoints.weights import sample_weights
from specbench.models.hidden_states import Embeddings, HiddenStates, decoder_layers
from specbench.models.kv_cache import KVCache, SequenceCaches, StateCache, in_place
from specbench.models.scores import Scores, batch_select
from specbench.results.manifest import Passes
from specbench.system import cuda_settings

_PIECE = 256  # rows of a prompt that one call reads
_ALIGNED = 8  # numbers; CUDA's kernels copy a mask whose rows begin elsewhere, in every layer


class Target:
    """A causal language model with an exact, rewindable cache.

    Args:
        max_len: longest text (prompt and answer).
        batch: rows of the batch layout.
        packed_bytes: memory for products in panels on a CPU, for the models of ``compiled_pass``,
            whose passes are then run by one call; 0 runs all models' through their layers.
        sequences: how many clones, itself included, read their rows in one pass.
        reason: why passes run eagerly although another engine was asked for; None: as asked.

    Attributes:
        kernel_files: where the kernels of layers that keep a state are; none without such layers.
        layout: what each layer of the cache holds.
        windows: sizes of the model's sliding windows.
        hidden_value: what a mask holds where attention must not look.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_len: int,
        max_nodes: int = 128,
        batch: int = 1,
        packed_bytes: int = 0,
        sequences: int = 1,
        reason: str | None = None,
    ) -> None:
        cuda_settings.fix()
        self._reason, self._sequences, self.graph_tokens = reason, sequences, 0
        self.draft_weights = FLOAT32_WEIGHTS  # what heads read
        self.model = model.eval()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        embedding: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = model.dtype
        self.hidden_value = torch.finfo(self.dtype).min
        self.windows = window_sizes(model)
        self.layout = read_layout(model)
        install(model)
        self.kernel_files = kernel_files(model)
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
        return HiddenStates(self.model)

    @property
    def embeddings(self) -> Embeddings:
        return Embeddings.from_model(self.model, self.draft_weights)

    @property
    def config(self) -> Mapping[str, Any]:
        named: dict[str, Any] = self.model.config.get_text_config().to_dict()
        return named

    @property
    def devices(self) -> frozenset[torch.device]:
        return frozenset(layer.device for layer in self.layout)

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def fingerprint(self) -> Array:
        return sample_weights(self.model)

    def memory_bytes(self, rows: int) -> int:
        """Count the bytes of weights, their packed copies, and a cache of ``rows`` tokens.

        A text's states are counted once, whatever its length.
        """
        if is_quantised(self.model):
            size = stored_bytes(self.model)
        else:
            size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        size += sum(layer.state_bytes for layer in self.layout)
        return int(size + self.packed_weights["bytes"] + rows * self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.cache.nbytes // (self.cache.max_len * self.cache.batch)

    def reserve(self, max_len: int, max_nodes: int, batch: int = 1) -> None:
        """Allocate buffers for texts of ``max_len`` tokens and trees of ``max_nodes`` nodes.

        Does nothing where the present ones suffice. Never called inside a timed region.
        """
        rows, before = max_nodes + 1, self._sizes
        required = (KVCache.length_for(max_len, rows), rows, batch)
        sizes = tuple(map(max, before, required))
        if sizes == before:
            return
        self._free()  # both at once might not fit
        try:
            self._allocate(*sizes)
        except RuntimeError:  # the allocators of torch, a GPU's and a CPU's
            if any(before):
                self._allocate(*before)  # a run's other cases go on
            raise

    def _free(self) -> None:
        if any(self._sizes):
            del self.cache

    def _allocate(self, length: int, rows: int, batch: int) -> None:
        self._sizes = (length, rows, batch)
        self.cache = self.new_cache(length, batch)
        self._key_positions = torch.arange(length, device=self.device)
        self._geometry = TreeGeometry(max_nodes=rows - 1)
        self._ids = np.zeros(rows, dtype=np.int64)
        compiled = self.packed_weights.get("pass") == ONE_CALL
        sizes = (length, max(self._sequences * rows + batch, _PIECE), self.windows)
        self.compiled = CompiledPass(self.model, *sizes) if compiled else None

    def new_cache(self, length: int, batch: int = 1) -> KVCache:
        """Make an empty cache for texts of this model, of ``length`` rows."""
        if self.kernel_files:
            return StateCache(self.layout, batch=1, max_len=length, dtype=self.dtype)
        return KVCache(self.layout, batch=batch, max_len=length, dtype=self.dtype)

    def clone(self) -> Target:
        """Make a target of the same model for another text; one of them passes at a time."""
        other = copy.copy(self)
        other.cache = self.new_cache(self.cache.max_len, self.cache.batch)
        other._geometry = TreeGeometry(max_nodes=self.max_nodes)
        return other

    def describe(self) -> Passes:
        return {"engine": "eager", "reason": self._reason} if self._reason else {"engine": "eager"}

    @property
    def max_nodes(self) -> int:
        return self._sizes[1] - 1

    def free_rows(self) -> int:
        """Count the draft nodes that still fit after the committed tokens."""
        return self.cache.max_len - self.cache.length - 1

    @contextmanager
    def on(self, cache: KVCache | SequenceCaches) -> Iterator[None]:
        """Let passes within, and their commits, use another sequence's cache, or several caches."""
        saved, self.cache = self.cache, cast("KVCache", cache)
        try:
            yield
        finally:
            self.cache = saved

    # -- passes ------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> Scores:
        """Read ``prompt [n]`` on an empty cache; scores of its last token, or of all.

        Hidden states, if requested, cover all tokens.
        """
        n, keep = len(prompt), 0 if all_logits else 1
        self.cache.reset()
        ids = torch.from_numpy(np.ascontiguousarray(prompt, dtype=np.int64))[None].to(self.device)
        positions = self._key_positions[None, :n]
        if self.compiled is not None and n <= self.compiled.most_keys:
            pieces = [
                self._prompt_piece(ids[:, piece], positions[:, piece], keep, hidden_layers)
                for piece in (slice(first, first + _PIECE) for first in range(0, n, _PIECE))
            ]
            logits = torch.cat([p.logits for p in pieces]) if all_logits else pieces[-1].logits
            return Scores(
                logits, states={i: torch.cat([p.hidden[i] for p in pieces]) for i in hidden_layers}
            )
        windowed = prompt_windows(self.windows, positions[0], self._additive)
        plan = AttentionPlan(causal=True, windowed=windowed, prompt=True)
        whole, hidden = self.through_layers(ids, positions, plan, hidden_layers, keep)
        self.cache.commit(None, n)
        return Scores(whole[0], states=hidden)

    def _prompt_piece(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: int, hidden_layers: tuple[int, ...]
    ) -> PassOutputs:
        outputs = self._in_one_call(ids, positions, None, keep=keep, hidden_layers=hidden_layers)
        assert outputs is not None
        self.cache.commit(None, ids.shape[1])
        return outputs

    @torch.inference_mode()
    def append(self, ids: torch.Tensor) -> Scores:
        """Read ``ids [n]`` (on the device) as text after the committed tokens.

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
        """Read more nodes of a tree that grows after the committed tokens.

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
        """Run a pass over rows that see the committed tokens and, of the uncommitted, ``visible``.

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
        positions = depths + past
        if outputs := self._in_one_call(ids[None], positions[None, -n:], visible, keep=keep):
            return Scores.from_outputs(outputs)
        plan = self.plan_of(past, visible, positions, n)
        return Scores(self.through_layers(ids[None], positions[None, -n:], plan, keep=keep)[0][0])

    @torch.inference_mode()
    def forward(self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()) -> Scores:
        """Read the root and the nodes of ``tree``; commits nothing.

        Args:
            root: the last committed token, whose keys and values are not cached yet.
            hidden_layers: hidden states to hand over, see ``Needs.hidden_layers``.

        Raises:
            CaseFailed: the tree is malformed or a token is outside the vocabulary.
            ConfigurationError: the model has no such hidden states.
        """
        self._check(tree)
        past, depths = self.cache.length, self._geometry.depths[: len(tree) + 1]
        select: torch.Tensor | None = None
        if (rows := self.row_layout(tree)) is not None:
            ids, width = self._row_ids(root, tree, *rows), rows[1] + 1
            visible, row_depths = self.lower_triangle(width), self.positions(width)
            if rows not in self._selects:
                self._selects[rows] = batch_select(rows[0], width, self.device)
            select = self._selects[rows]
        else:
            ids = self._tree_ids(root, tree)[None]
            visible, row_depths = self.seen(tree, self._geometry)
        positions = row_depths + past
        read = (ids, positions.expand(len(ids), -1))
        # One call reads the rows of a batch layout as sequences, which see themselves as such.
        seen = visible if select is None else None
        if outputs := self._in_one_call(*read, seen, hidden_layers=hidden_layers):
            return Scores.from_outputs(outputs, depths, select)
        plan = self.plan_of(past, visible, positions, len(positions))
        if self.kernel_files and (np.diff(tree.parents, prepend=-2) != 1).any():
            plan.parents = np.append(-1, tree.parents + 1)
        logits, hidden = self.through_layers(*read, plan, hidden_layers)
        return Scores(logits.flatten(0, 1), select, hidden, depths)

    def row_layout(self, tree: DraftTree) -> tuple[int, int] | None:
        """Give number and draft tokens of the rows that ``tree`` is read in; None: as a tree."""
        return tree.rows if tree.rows and self.cache.batch >= tree.rows[0] > 1 else None

    def _row_ids(self, root: int, tree: DraftTree, k: int, w: int) -> torch.Tensor:
        self.cache.broadcast()
        rows = np.empty((k, w + 1), dtype=np.int64)
        rows[:, 0] = root
        rows[:, 1:] = np.asarray(tree.tokens).reshape(k, w)
        return to_device(rows, self.device)

    def _tree_ids(self, root: int, tree: DraftTree) -> torch.Tensor:
        if isinstance(tree.tokens, np.ndarray):
            ids = self._ids[: len(tree) + 1]
            ids[0], ids[1:] = root, tree.tokens
            return to_device(ids, self.device)
        root_id = to_device(torch.tensor([root]), self.device)
        # An id outside would end the whole process there; the verifier refuses the case.
        return torch.cat([root_id, tree.tokens]).clamp(0, self.vocab_size - 1)

    def commit(self, tree: DraftTree, path: IntArray) -> None:
        """Commit the rows of the root and of the accepted path."""
        count = len(path) + 1
        if layout := self.row_layout(tree):
            self.cache.commit_row(int(path[0]) // layout[1] if len(path) else 0, count)
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
        keep: int = 0,
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Run transformers' layers over ``ids [batch, rows]``; commits nothing.

        Gives logits ``[batch, rows, vocab]``, of the last ``keep`` rows where it is not 0, and
        states ``[batch * rows, hidden]`` by number.
        """
        states: AbstractContextManager[None] = nullcontext()
        if isinstance(self.cache, StateCache):
            states = self.cache.row_by_row(self.kernel_files, plan.parents, prompt=plan.prompt)
        with self.hidden_states.collected(hidden_layers) as hidden, states:
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
                plan=plan,
            )
        return out.logits, hidden

    # -- parts of a pass -----------------------------------------------------------------------

    def _check(self, tree: DraftTree) -> None:
        read_draft(tree, self._geometry, min(self.max_nodes, self.free_rows()), self.vocab_size)

    def _in_one_call(
        self, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor | None, **more: Any
    ) -> PassOutputs | None:
        """Run the pass over ``ids [sequences, rows]``; None if it is not run by one call."""
        if self.compiled is None:
            return None
        self.hidden_states.check(more.get("hidden_layers", ()))
        sequences, rows = ids.shape
        segments = self.cache.segments(sequences, rows, visible)
        return self.compiled.run(ids.flatten(), positions.flatten(), segments, **more)

    def seen(
        self, tree: DraftTree, geometry: TreeGeometry
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Compute which rows of a tree see each other ``[rows, rows]``, and depths ``[rows]``.

        ``geometry`` has read the tree.
        """
        rows = len(tree) + 1
        if rows == 1:  # plain decoding: a row that sees all, at the next position
            return None, self._key_positions[:1]
        if self.device.type == "cpu":
            visible = torch.from_numpy(geometry.visible[:rows, :rows])
            return visible, torch.from_numpy(geometry.depths[:rows])
        return visibility(to_device(tree.parents, self.device))  # n numbers instead of n * n

    def lower_triangle(self, n: int, before: int = 0) -> torch.Tensor | None:
        """Mask what rows of a chain see of ``before`` others and of themselves; None: all."""
        if n == 1:
            return None
        ones = torch.ones(n, before + n, dtype=torch.bool, device=self.device)
        return ones.tril(before)

    def positions(self, n: int) -> torch.Tensor:
        """Return ``[n]`` positions from 0, on the device."""
        return self._key_positions[:n]

    def plan_of(
        self, past: int, visible: torch.Tensor | None, positions: torch.Tensor, rows: int
    ) -> AttentionPlan:
        """Plan a pass of ``rows`` rows over ``past`` committed tokens and others at ``positions``.

        ``visible [rows, positions]`` as in `extend`; None where nothing is hidden, windows aside.
        """
        plan = AttentionPlan()
        if visible is not None:
            keys = past + len(positions)
            mask = torch.nn.functional.pad(self._additive(visible), (past, -keys % _ALIGNED))
            plan.mask = mask[None, None, :, :keys]
        text = self._key_positions[:past]
        plan.windowed = windowed_masks(self.windows, text, positions, rows, visible, self._additive)
        return plan

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return mask.masked_fill_(~seen, self.hidden_value)


def read_draft(tree: DraftTree, geometry: TreeGeometry, most: int, vocab_size: int) -> None:
    """Let ``geometry`` read a draft of ``most`` nodes at most.

    Raises:
        CaseFailed: it has more, is malformed, or a token is outside the vocabulary.
    """
    if len(tree) > most:
        raise CaseFailed(
            "invalid_draft",
            f"a draft of {len(tree)} nodes exceeds the {most} reserved; "
            "state the method's largest tree in needs.max_nodes",
        )
    geometry.read(tree, vocab_size)
