"""For every token its likeliest successors, as a target's logits last said.

Tensor operations of fixed shape, so that a GPU need never be waited for.
"""

from __future__ import annotations

import torch

from specbench.errors import unknown_name
from specbench.index.static_tree import StaticTree

UPDATE_RULES = ("last", "first", "parallel")

_GROUP = 64  # logits whose maximum stands for them in the first round of `top_ids`


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """``[n, k]`` int64 ids of the largest entries of each row of ``[n, >= k]``, largest first.

    Two rounds: the largest k entries lie in the k groups of 64 with the largest maxima (or in
    the rest that fills no group), so only those are sorted. Over 81 × 49152 entries on one CPU
    core that takes 0.8 ms, `torch.topk` 4.6 ms. Equal entries come in the order `torch.topk` gives
    them.
    """
    n, vocab = logits.shape
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
    found: torch.Tensor = ids.gather(1, logits.gather(1, ids).topk(k).indices)
    return found


class AdjacencyMatrix:
    """For every token of the vocabulary its ``k`` likeliest successors, as last seen.

    Unknown rows are zeros, as in the paper, so they draft token 0.

    Attributes:
        rows: ``[vocab_size, k]`` int32, the likeliest candidate first.
    """

    def __init__(self, vocab_size: int, k: int, device: torch.device | str = "cpu") -> None:
        self.k = k
        self.rows = torch.zeros(vocab_size, k, dtype=torch.int32, device=device)
        self._levels: tuple[torch.Tensor, ...] = ()
        self._columns = torch.arange(k, device=device)

    def clear(self) -> None:
        self.rows.zero_()

    def prepare(self, tree: StaticTree) -> None:
        """Say which tree `fill` fills; its ranks must be below ``k``."""
        self._levels = tuple(
            torch.from_numpy(above * self.k + ranks).to(self.rows.device)
            for above, ranks in tree.levels
        )

    def fill(self, root: int) -> torch.Tensor:
        """``[n]`` int64 tokens of the prepared tree's nodes below ``root``, on the device."""
        candidates = self.rows[root]
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
            logits: ``[n, >= vocab]`` what the target gave after each; columns beyond the
                vocabulary (padding of the model's head) are left out.
            rule: which occurrence of a repeated token counts. ``last`` and ``first`` go by the
                order of ``tokens``. ``parallel``: entry j comes from occurrence j modulo their
                number, one fixed outcome of those the paper's unordered writes can have.

        Raises:
            ConfigurationError: no such rule.
        """
        candidates = top_ids(logits[:, : len(self.rows)], self.k).to(self.rows.device)
        # Equal tokens lie side by side in `order`, [begin, end) for each; all of them then write
        # the same candidates, so the order of the writes does not matter.
        grouped, order = torch.sort(tokens, stable=True)
        begin = torch.searchsorted(grouped, grouped)
        end = torch.searchsorted(grouped, grouped, right=True)
        if rule == "last":
            chosen = candidates.index_select(0, order.index_select(0, end - 1))
        elif rule == "first":
            chosen = candidates.index_select(0, order.index_select(0, begin))
        elif rule == "parallel":
            count = (end - begin).unsqueeze(1)
            occurrence = begin.unsqueeze(1) + self._columns.remainder(count)
            chosen = candidates[order[occurrence], self._columns]
        else:
            raise unknown_name("update rule", rule, UPDATE_RULES)
        self.rows.index_copy_(0, grouped, chosen.int())
