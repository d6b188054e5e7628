"""Several sequences on one model: all their rows in one pass, and nothing else shared.

The rows of all drafts follow each other on one axis, without padding. Products, norms and rotations
work row by row and do not know sequences. Attention runs for each sequence over its own keys, so
what a sequence gets does not depend on its neighbours, except for the order in which a product of
many rows may add numbers.

Each sequence has a slot: a cache with its own length, positions and commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.device import to_device
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import TreeGeometry
from specbench.decoding.turn import SlotDraft
from specbench.errors import CaseFailed, ConfigurationError
from specbench.kernels.architectures import one_text_layers
from specbench.kernels.attention import AttentionPlan
from specbench.kernels.compiled_call import Segment
from specbench.kernels.compiled_pass import CompiledPass
from specbench.models.graph_target import ROW_BUCKETS, GraphTarget, StaticPass, row_bucket
from specbench.models.kv_cache import KVCache, SequenceCaches
from specbench.models.scores import Scores
from specbench.models.target import Target, read_draft
from specbench.system import host_memory


class Slot:
    """State of one sequence between passes: keys and values, and its draft's geometry."""

    def __init__(self, target: Target, cache: KVCache) -> None:
        self._target, self.cache = target, cache
        self.geometry = TreeGeometry(target.max_nodes)

    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> Scores:
        """See `Target.prefill`; a prompt has a pass of its own."""
        with self._target.on(self.cache):
            return self._target.prefill(prompt, all_logits=all_logits, hidden_layers=hidden_layers)

    def commit(self, tree: DraftTree, path: IntArray) -> None:
        with self._target.on(self.cache):
            self._target.commit(tree, path)

    def free_rows(self) -> int:
        """Count the draft nodes that still fit after the committed tokens."""
        return min(self.cache.max_len - self.cache.length - 1, self._target.max_nodes)


def refuse_one_text_layers(target: Target, size: int) -> None:
    """Refuse a pass over ``size`` texts of a model, or draft model, whose layers read one.

    Raises:
        ConfigurationError: names the layers.
    """
    if layers := one_text_layers(target.model):
        raise ConfigurationError(
            f"batch.size={size}: {layers} read one text at a time. Type batch.size=1."
        )


class BatchTarget:
    """The passes of up to ``size`` sequences over one ``target``, whose cache stays untouched.

    Passes are one compiled call where the target's are (`specbench.kernels.compiled_pass`), and
    otherwise go through transformers' layers. A batch layout (``DraftTree.rows``) is read as a
    tree.

    Args:
        max_nodes: of a sequence's draft; by default the target's.
        draft_bytes: of draft models' caches, for each token of a sequence.

    Raises:
        ConfigurationError: layers keep a state or latents, or the machine has no memory for so
            many sequences; says how many fit.
    """

    def __init__(
        self, target: Target, size: int, max_nodes: int | None = None, draft_bytes: int = 0
    ) -> None:
        refuse_one_text_layers(target, size)
        self._target, self._size, self._most = target, size, max_nodes
        self._draft_bytes = draft_bytes
        self.device = target.device
        self.slots: list[Slot] = []
        self._nodes = 0  # of a draft
        self.reserve()

    def reserve(self, max_len: int = 0) -> None:
        """Allocate slots for ``max_len`` tokens, or as many as the target has room for; untimed.

        Raises:
            ConfigurationError: the machine has no memory for them; slots stay as they are.
            RuntimeError: the machine had less than it reported; slots keep their length.
        """
        nodes = self._target.max_nodes if self._most is None else self._most
        required_len = KVCache.length_for(max_len, self._target.max_nodes + 1) if max_len else 0
        sizes = (max(required_len, self._target.cache.max_len), nodes)
        if self.slots and sizes == (self.slots[0].cache.max_len, self._nodes):
            return
        self._refuse_more_than_fit(*sizes)
        before = (self.slots[0].cache.max_len, self._nodes) if self.slots else None
        self.slots = []  # both at once might not fit
        try:
            self._allocate(*sizes)
        except RuntimeError:  # the allocators of torch
            if before is not None:
                self.slots = []
                self._allocate(*before)  # a run's other groups go on
            raise

    def _allocate(self, length: int, nodes: int) -> None:
        target, self._nodes = self._target, nodes
        self._joint: KVCache | None = None
        self._passes: dict[tuple[int, tuple[int, ...]], StaticPass | None] = {}
        if isinstance(target, GraphTarget):  # whose passes have all sequences, in one tensor
            self._joint = joint = target.new_cache(length, self._size)
            self.slots = [Slot(target, joint.sequence(i)) for i in range(self._size)]
            self.capture()
        else:
            self.slots = [Slot(target, target.new_cache(length)) for _ in range(self._size)]
        self._compiled = (
            CompiledPass(target.model, length, self._size * (nodes + 1), target.windows)
            if target.compiled is not None
            else None
        )

    def capture(self) -> None:
        """Make the passes that the target's drafters are known to take; untimed."""
        target = self._target
        if isinstance(target, GraphTarget) and target.captures:
            most = row_bucket(self._nodes + 1) or ROW_BUCKETS[-1]
            for layers in target.hidden_layers:
                for rows in ROW_BUCKETS:
                    if rows <= most:
                        self._pass(target, rows, layers)

    def _pass(
        self, target: GraphTarget, rows: int, hidden_layers: tuple[int, ...]
    ) -> StaticPass | None:
        assert self._joint is not None
        key = rows, hidden_layers
        if key not in self._passes:
            self._passes[key] = target.batch_pass(self._joint, rows, hidden_layers)
        return self._passes[key]

    def _refuse_more_than_fit(self, length: int, nodes: int) -> None:
        target = self._target
        cached = target.token_bytes * length
        scored = (nodes + 1) * target.vocab_size * target.dtype.itemsize
        per_sequence = cached + scored + self._draft_bytes * length
        # The slots' memory is freed before others are allocated.
        held = sum(s.cache.nbytes + self._draft_bytes * s.cache.max_len for s in self.slots)
        fits = int((free_bytes(self.device) + held) // per_sequence)
        if fits < self._size:
            drafts = ", of draft models, too" if self._draft_bytes else ""
            raise ConfigurationError(
                f"batch.size={self._size}: a sequence takes {per_sequence / 1e9:.2f} GB (keys and "
                f"values of {length} tokens{drafts}; logits of {nodes + 1} rows), and the free "
                f"memory holds {fits}. Type batch.size={max(1, fits)}, or fewer "
                "generation.max_new_tokens."
            )

    def read(self, prompt: IntArray) -> None:
        """Fill all slots with one prompt, read once, to time passes after it."""
        first, *others = self.slots
        first.prefill(prompt)
        for slot in others:
            slot.cache.copy_text(first.cache)

    def clear(self) -> None:
        for slot in self.slots:
            slot.cache.clear()

    def check(self, slot: int, tree: DraftTree) -> None:
        """Refuse a malformed draft, or one without room, before it joins a pass with others.

        Raises:
            CaseFailed: says what is wrong.
        """
        text_slot = self.slots[slot]
        read_draft(tree, text_slot.geometry, text_slot.free_rows(), self._target.vocab_size)

    @torch.inference_mode()
    def forward(
        self, drafts: Sequence[SlotDraft], *, hidden_layers: tuple[int, ...] = ()
    ) -> list[Scores]:
        """Run one pass over root and draft of each sequence; commits nothing.

        Args:
            drafts: what `check` has read, each of another slot.
            hidden_layers: hidden states to return, the same for all sequences.
        """
        if (scores := self._static_pass(drafts, hidden_layers)) is not None:
            return scores
        sequences, roots = [], to_device(np.array([root for _, root, _ in drafts]), self.device)
        ids: list[torch.Tensor] = []
        for (number, _, tree), root in zip(drafts, roots.split(1), strict=True):
            slot = self.slots[number]
            seen = self._target.seen(tree, slot.geometry)
            sequences.append(_SequenceRows(slot.cache, len(tree) + 1, *seen))
            ids += [root, to_device(tree.tokens, self.device)]
        # An id outside would end the whole process there; the verifier refuses the case.
        inside = torch.cat(ids).clamp(0, self._target.vocab_size - 1)
        whole = _joint_pass(self._target, self._compiled, inside, sequences, hidden_layers)
        scores, first = [], 0
        for (number, _, _), sequence in zip(drafts, sequences, strict=True):
            part = slice(first, first + sequence.rows)
            scores.append(whole.part(part, self.slots[number].geometry.depths[: sequence.rows]))
            first += sequence.rows
        return scores

    def _static_pass(
        self, drafts: Sequence[SlotDraft], hidden_layers: tuple[int, ...]
    ) -> list[Scores] | None:
        """Run a pass of fixed shape over all sequences; None where there is none."""
        target, joint = self._target, self._joint
        if joint is None or not isinstance(target, GraphTarget):
            return None
        bucket = row_bucket(max(len(tree) for *_, tree in drafts) + 1)
        step = None if bucket is None else self._pass(target, bucket, hidden_layers)
        lengths = [slot.cache.length for slot in self.slots]
        used = {number for number, *_ in drafts}
        free = joint.max_len - (0 if step is None else step.rows)
        if step is None or any(lengths[number] > free for number in used):
            target.eager_passes += 1
            return None
        geometries = [self.slots[number].geometry for number, *_ in drafts]
        # A sequence that left may have no room for padding; nobody reads its rows again.
        step.load_sequences(drafts, geometries, [min(length, free) for length in lengths])
        target.run_batch(step, joint)
        by_slot = step.logits.unflatten(0, (joint.batch, step.rows))
        scores = []
        for (number, _, tree), geometry in zip(drafts, geometries, strict=True):
            n, first = len(tree) + 1, number * step.rows
            states = {i: rows[first : first + n] for i, rows in step.hidden.items()}
            scores.append(Scores(by_slot[number, :n], states=states, depths=geometry.depths[:n]))
        return scores


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows for a sequence's target to read next.

    Nodes as in `Target.extend`; without ``depths``, text as in `Target.append`.
    """

    target: Target
    ids: torch.Tensor
    visible: torch.Tensor | None = None
    depths: torch.Tensor | None = None


@torch.inference_mode()
def read_rows(requests: Sequence[NewRows]) -> list[Scores]:
    """Run `Target.append` or `Target.extend` for each request, all of them in one pass.

    Their targets are clones of one another.
    """
    if len(requests) == 1:
        (request,) = requests
        if request.depths is None:
            return [request.target.append(request.ids)]
        return [request.target.extend(request.ids, request.visible, request.depths)]
    sequences = []
    for request in requests:
        cache, n, visible = request.target.cache, len(request.ids), request.visible
        depths = request.target.positions(n) if request.depths is None else request.depths
        if cache.length + len(depths) > cache.max_len:
            raise CaseFailed("invalid_draft", f"a draft's rows exceed the cache's {cache.max_len}")
        if visible is None:
            visible = request.target.lower_triangle(n, cache.retained)
        sequences.append(_SequenceRows(cache, n, visible, depths))
    ids, target = torch.cat([request.ids for request in requests]), requests[0].target
    whole = _joint_pass(target, target.compiled, ids, sequences)
    scores, end = [], 0
    for request, sequence_rows in zip(requests, sequences, strict=True):
        first, end = end, end + sequence_rows.rows
        if request.depths is None:
            sequence_rows.cache.commit(None, sequence_rows.rows)
            first = end - 1
        else:
            sequence_rows.cache.retain(sequence_rows.rows)
        scores.append(whole.part(slice(first, end)))
    return scores


class _SequenceRows(NamedTuple):
    """One sequence's rows in a pass over several."""

    cache: KVCache
    rows: int
    visible: torch.Tensor | None  # which held and new rows they see; None: all
    depths: torch.Tensor  # of held and new rows


def _joint_pass(
    target: Target,
    compiled: CompiledPass | None,
    ids: torch.Tensor,
    sequences: Sequence[_SequenceRows],
    hidden_layers: tuple[int, ...] = (),
) -> Scores:
    """Run one pass over ``ids``, the rows of all sequences in turn; scores in that order."""
    positions = torch.cat([t.depths[-t.rows :] + t.cache.length for t in sequences])
    if compiled is not None:
        target.hidden_states.check(hidden_layers)
        segments = [
            Segment(t.cache.storage, 0, t.cache.length, t.cache.retained, t.rows, t.visible)
            for t in sequences
        ]
        if outputs := compiled.run(ids, positions, segments, hidden_layers=hidden_layers):
            return Scores.from_outputs(outputs)
    plans = [
        (t.rows, target.plan_of(t.cache.length, t.visible, t.depths + t.cache.length, t.rows))
        for t in sequences
    ]
    with target.on(SequenceCaches([t.cache for t in sequences], [t.rows for t in sequences])):
        logits, hidden = target.through_layers(
            ids[None], positions[None], AttentionPlan(sequences=tuple(plans)), hidden_layers
        )
    return Scores(logits[0], states=hidden)


def free_bytes(device: torch.device) -> int:
    """Measure the free memory of the device that the model is on."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory.free_bytes()
