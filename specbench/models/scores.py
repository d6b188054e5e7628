"""Scores of a target pass, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from specbench.arrays import IntArray
from specbench.decoding.tree import ROOT_ALONE
from specbench.errors import CaseFailed
from specbench.kernels.compiled_pass import PassOutputs


def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """Choose ``[rows]`` ids of largest logits, the smallest id on ties; -1 if not finite."""
    ids = logits.argmax(-1)
    top = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(torch.isfinite(top), ids, -1)


def batch_select(batch: int, rows: int, device: torch.device) -> torch.Tensor:
    """Make ``Scores.select [1 + batch * (rows - 1)]`` for a layout of ``batch * rows`` rows.

    The first row's root, then the nodes of each row.
    """
    order = torch.arange(batch * rows, device=device).view(batch, rows)
    return torch.cat([order[0, :1], order[:, 1:].reshape(-1)])


class Outcome:
    """Outcome of a queued pass; the first read waits for the pass.

    The answer stays as it is when the pass runs again. ``wait`` waits for the pass, of ``rows``
    rows with padding, and gives the numbers of ``StaticPass.device_part``.
    """

    __slots__ = ("_rows", "_values", "_wait")

    def __init__(self, wait: Callable[[], IntArray], rows: int) -> None:
        self._wait: Callable[[], IntArray] | None = wait
        self._rows = rows
        self._values: IntArray

    def read(self) -> IntArray:
        if self._wait is not None:
            self._values = self._wait().copy()
            self._wait = None
        return self._values

    def path(self) -> IntArray:
        """Return ``[a]``, the accepted nodes, whose rows the pass has moved.

        Raises:
            CaseFailed: a token of the draft, which was on the device, is outside the vocabulary.
        """
        values = self.read()
        count, outside = values[2 * self._rows : 2 * self._rows + 2]
        if outside:
            raise CaseFailed("invalid_draft", "a draft token is outside the vocabulary")
        first = self._rows + 1
        return values[first : first + int(count) - 1] - 1

    def choices(self, rows: int) -> IntArray:
        """Return ``[rows]`` greedy choices of root and nodes; -1 where logits are not finite."""
        return self.read()[:rows]

    def drawn(self, rows: int) -> IntArray:
        """Return ``[rows]`` the tokens that root and nodes drew, greedy choices if none."""
        first = 2 * self._rows + 2
        values = self.read()
        return values[first : first + rows] if len(values) > first else values[:rows]


@dataclass(slots=True, eq=False)
class Scores:
    """Scores of the rows of one pass: row 0 is the root, row i + 1 is node i."""

    raw: torch.Tensor  # logits as the pass returned them, [rows, vocab]
    # row numbers of root and nodes within `raw`, or None where they are in order
    select: torch.Tensor | None = None
    states: Mapping[int, torch.Tensor] | None = None  # hidden ones of those rows, by number
    depths: IntArray = field(default_factory=lambda: ROOT_ALONE)  # [n + 1], until the next pass
    outcome: Outcome | None = None  # of a queued pass that verifies its draft itself
    choices: IntArray | None = None  # [rows] `greedy_ids` of `raw`, where the pass gives them

    @staticmethod
    def from_outputs(
        outputs: PassOutputs, depths: IntArray = ROOT_ALONE, select: torch.Tensor | None = None
    ) -> Scores:
        """Take the scores of a pass that was run by one call."""
        return Scores(outputs.logits, select, outputs.hidden, depths, choices=outputs.choices)

    def part(self, selected: slice, depths: IntArray = ROOT_ALONE) -> Scores:
        """Take the scores of one sequence, the ``selected`` rows of a pass over several."""
        states = {i: rows[selected] for i, rows in (self.states or {}).items()}
        choices = None if self.choices is None else self.choices[selected]
        return Scores(self.raw[selected], states=states, depths=depths, choices=choices)

    @property
    def vocab_size(self) -> int:
        return self.raw.shape[-1]

    @property
    def verified(self) -> tuple[IntArray, IntArray, IntArray] | None:
        """Accepted path ``[a]``, tokens to match and greedy choices ``[n + 1]``, of such a pass.

        Raises:
            CaseFailed: a draft token is outside the vocabulary.
        """
        if self.outcome is None:
            return None
        rows = len(self.depths)
        return self.outcome.path(), self.outcome.drawn(rows), self.outcome.choices(rows)

    @property
    def logits(self) -> torch.Tensor:
        """``[n + 1, vocab]`` on the device."""
        return self.raw if self.select is None else self.raw.index_select(0, self.select)

    @property
    def hidden(self) -> Mapping[int, torch.Tensor] | None:
        """``[n + 1, hidden]`` on the device, by number; None where none were asked for."""
        if not self.states or self.select is None:
            return self.states or None
        return {i: states.index_select(0, self.select) for i, states in self.states.items()}

    def greedy(self) -> torch.Tensor | IntArray:
        """Return ``[n + 1]`` `greedy_ids`, on the host if the pass gives them."""
        if self.choices is not None:
            return self.choices if self.select is None else self.choices[self.select.numpy()]
        ids = greedy_ids(self.raw)
        return ids if self.select is None else ids.index_select(0, self.select)
