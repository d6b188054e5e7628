"""For every token its likeliest successors by the target's latest logits.

Tensor operations of fixed shape, so that the host never waits for a GPU; compiled loops on a CPU,
where calling each operation would take longer than its work.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from specbench.arrays import Array, IntArray
from specbench.decoding.device import fill, to_device
from specbench.draft_structures.static_tree import StaticTree
from specbench.errors import unknown_name
from specbench.kernels.cuda_graphs import GraphRecorder, RecordedCall

UPDATE_RULES = ("last", "first", "parallel")

_GROUP = 64  # logits per group of the first round
_FEW = 32  # most ids sorted by insertion


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return ``[n, k]`` int64 ids of each row's largest entries of ``[n, >= k]``, largest first.

    On a CPU a single scan of float32 logits finds a few ids. Otherwise there are two rounds: the
    largest k entries are in the k groups of 64 with the largest maxima (or in the incomplete last
    group), so only those are sorted. Over 81 × 49152 entries on one CPU core this takes 0.8 ms,
    `torch.topk` 4.6 ms. Equal entries come in any order.
    """
    n, vocab = logits.shape
    if (
        logits.is_cpu
        and logits.dtype == torch.float32
        and n
        and logits.stride(1) == 1
        and k <= _FEW
    ):
        step = logits.stride(0)
        flat = logits.detach().as_strided(((n - 1) * step + vocab,), (1,)).numpy()
        best = np.empty((n, k), dtype=np.int64)
        _largest(flat, step, vocab, best)
        return torch.from_numpy(best)
    groups = vocab // _GROUP
    if groups <= k:
        largest: torch.Tensor = logits.topk(k).indices
        return largest
    whole = groups * _GROUP
    maxima = logits[:, :whole].unflatten(1, (groups, _GROUP)).amax(-1)
    best = maxima.topk(k, sorted=False).indices
    within = torch.arange(_GROUP, device=logits.device)
    ids = (best.unsqueeze(-1) * _GROUP + within).flatten(1)
    if whole < vocab:
        rest = torch.arange(whole, vocab, device=logits.device).expand(n, -1)
        ids = torch.cat([ids, rest], 1)
    top: torch.Tensor = ids.gather(1, logits.gather(1, ids).topk(k).indices)
    return top


@njit(cache=True)
def _largest(logits: Array, step: int, vocab: int, ids: IntArray) -> None:
    """Write ``ids [n, k]`` of each row's largest ``vocab`` logits, rows ``step`` numbers apart."""
    n, k = ids.shape
    values = np.empty(k, dtype=np.float32)
    for row in range(n):
        first = row * step
        held = 0
        for start in range(0, vocab, _GROUP):
            group = logits[first + start : first + min(start + _GROUP, vocab)]
            if held == k:
                least, larger = values[k - 1], 0
                for i in range(len(group)):
                    larger += group[i] > least
                if not larger:
                    continue
            for i in range(len(group)):
                if held == k and not group[i] > values[k - 1]:
                    continue
                slot = min(held, k - 1)
                while slot and group[i] > values[slot - 1]:
                    values[slot], ids[row, slot] = values[slot - 1], ids[row, slot - 1]
                    slot -= 1
                values[slot], ids[row, slot] = group[i], start + i
                held = min(held + 1, k)


@njit(cache=True)
def _overwrite(rows: IntArray, tokens: IntArray, candidates: IntArray, rule: int) -> None:
    """Run ``AdjacencyMatrix.update`` on the host; ``rule`` is an index of ``UPDATE_RULES``."""
    n = len(tokens)
    for i in range(n):
        if rule < 2:
            at = n - 1 - i if rule else i
            rows[tokens[at]] = candidates[at]
            continue
        before, count = 0, 0
        for other in range(n):
            if tokens[other] == tokens[i]:
                before += other < i
                count += 1
        for j in range(before, candidates.shape[1], count):
            rows[tokens[i], j] = candidates[i, j]


class AdjacencyMatrix:
    """The ``k`` likeliest successors of every token of the vocabulary, as last seen.

    Unknown rows are zeros, as in the paper, so they draft token 0.

    Args:
        compiled: write rows by a compiled loop; None does this on a CPU.

    Attributes:
        rows: ``[vocab_size, k]`` int32, the likeliest candidate first.
    """

    def __init__(
        self,
        vocab_size: int,
        k: int,
        device: torch.device | str = "cpu",
        compiled: bool | None = None,
    ) -> None:
        self.k = k
        self._compiled = torch.device(device).type == "cpu" if compiled is None else compiled
        self.rows = torch.zeros(vocab_size, k, dtype=torch.int32, device=device)
        self._levels: tuple[torch.Tensor, ...] = ()
        self._columns = torch.arange(k, device=device)

    def clear(self) -> None:
        self.rows.zero_()

    def prepare(self, tree: StaticTree) -> None:
        """Set the tree that `fill` fills; its ranks must be below ``k``."""
        self._levels = tuple(
            torch.from_numpy(above * self.k + ranks).to(self.rows.device)
            for above, ranks in tree.levels
        )

    def fill(self, root: int | torch.Tensor) -> torch.Tensor:
        """Return ``[n]`` int64 tokens of the prepared tree's nodes below ``root``, on the device.

        ``root`` may be a ``[1]`` tensor there.
        """
        candidates = self.rows[root].view(-1)
        tokens: list[torch.Tensor] = []
        for picks in self._levels:
            if tokens:
                candidates = self.rows.index_select(0, tokens[-1]).view(-1)
            tokens.append(candidates.index_select(0, picks))
        return torch.cat(tokens).long()

    def update(self, tokens: torch.Tensor, logits: torch.Tensor, rule: str = "last") -> None:
        """Overwrite the rows of ``tokens`` with the top candidates of their logits.

        Args:
            tokens: ``[n]`` int64 ids on the matrix's device; one may occur several times.
            logits: ``[n, >= vocab]`` the target's after each token; columns beyond the vocabulary
                (padding of the model's head) are ignored.
            rule: the occurrence of a repeated token that counts: the ``last`` or ``first`` of
                ``tokens``, or with ``parallel`` entry j from occurrence j modulo their number, one
                of the possible outcomes of the paper's unordered writes.

        Raises:
            ConfigurationError: no such rule.
        """
        if rule not in UPDATE_RULES:
            raise unknown_name("update rule", rule, UPDATE_RULES)
        candidates = top_ids(logits[:, : len(self.rows)], self.k).to(self.rows.device)
        if self._compiled:
            number = UPDATE_RULES.index(rule)
            _overwrite(self.rows.numpy(), tokens.numpy(), candidates.numpy(), number)
            return
        # Equal tokens are adjacent in `order`, at [begin, end); all of them then write the same
        # candidates, so the order of the writes does not matter.
        grouped, order = torch.sort(tokens, stable=True)
        begin = torch.searchsorted(grouped, grouped)
        end = torch.searchsorted(grouped, grouped, right=True)
        if rule == "last":
            chosen = candidates.index_select(0, order.index_select(0, end - 1))
        elif rule == "first":
            chosen = candidates.index_select(0, order.index_select(0, begin))
        else:
            count = (end - begin).unsqueeze(1)
            occurrence = begin.unsqueeze(1) + self._columns.remainder(count)
            chosen = candidates[order[occurrence], self._columns]
        self.rows.index_copy_(0, grouped, chosen.int())


class MatrixGraphs(GraphRecorder):
    """A matrix's two steps as CUDA graphs, for its prepared tree.

    Args:
        n: nodes of the tree.
        dtype: of logits.
        rule: as in `AdjacencyMatrix.update`.
    """

    def __init__(self, matrix: AdjacencyMatrix, n: int, dtype: torch.dtype, rule: str) -> None:
        device = matrix.rows.device
        super().__init__(device)

        def update(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix.update(tokens, logits, rule)
            return ()

        with torch.inference_mode(False):  # they may also be written outside of that mode
            root = torch.zeros(1, dtype=torch.int64, device=device)
            read = torch.zeros(n + 1, dtype=torch.int64, device=device)
            logits = torch.zeros(n + 1, len(matrix.rows), dtype=dtype, device=device)
        filled = RecordedCall(self, lambda root: (matrix.fill(root),), root)
        updated = RecordedCall(self, update, read, logits)
        self._filled = filled if self.record(filled, "the tree") else None
        self._updated = updated if self.record(updated, "the update") else None

    def fill(self, root: int) -> torch.Tensor | None:
        """Run `AdjacencyMatrix.fill`; None without a graph."""
        if self._filled is None:
            return None
        fill(self._filled.buffers[0], np.array([root]))
        self._filled.run()
        return self._filled.outputs[0].clone()  # the update's run may overwrite it

    def update(self, root: int, drafted: Array | torch.Tensor, logits: torch.Tensor) -> bool:
        """Run `AdjacencyMatrix.update` for a whole tree; False without a graph."""
        if self._updated is None:
            return False
        read, held = self._updated.buffers
        if len(drafted) != len(read) - 1 or logits.dtype != held.dtype:
            return False
        fill(read, np.array([root]))
        read[1:] = to_device(drafted, self.device)
        held.copy_(logits[:, : held.shape[1]])
        self._updated.run()
        return True
