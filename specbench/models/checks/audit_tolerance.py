"""How far a token may lie below the maximum and still be a near tie: measured, not guessed.

In float32 and float64 the bounds are fixed and small. In half precision logits are multiples of a
spacing that grows with them, and a pass of many rows sums in another order than one of a single
row. So the audit's tolerance is measured at a run's start: the same positions of answers to the
run's own prompts are read by passes of one row and of many, and what their likeliest tokens differ
by sets the bound, as in the self-check (``self_check``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.lossless import TOLERANCE
from specbench.decoding.structs import NO_TOKENS, DraftTree
from specbench.models.checks.self_check import measure_spread
from specbench.models.target import Target

TOKENS = 32  # of an answer that are read again
_LIKELIEST = 8  # tokens of a position; what lies far below the maximum is never emitted
_FEW_ROWS = 8
_PROMPTS = 4
_TIMES = 4  # what may differ, in spreads of the passes


@dataclass(frozen=True, slots=True)
class AuditTolerance:
    """The audit's tolerance of near ties; written to the manifest.

    Attributes:
        value: largest shortfall of an emitted token below the maximum.
        spread: largest difference of a likely token's logit between passes of one row and of many;
            None where the tolerance is the dtype's fixed one.
        positions: how many were compared, and ``rows`` of the passes.
        blind: share of these positions whose second token lies within the tolerance: there the
            audit could not tell it from the first.
    """

    value: float
    spread: float | None = None
    positions: int = 0
    rows: list[int] = field(default_factory=list)
    blind: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def fixed_tolerance(dtype: torch.dtype) -> AuditTolerance | None:
    """Look up the dtype's fixed tolerance; None in half precision."""
    value = TOLERANCE.get(str(dtype).removeprefix("torch."))
    return None if value is None else AuditTolerance(value)


def chosen_prompts(prompts: Sequence[IntArray], context_length: int) -> list[IntArray]:
    """Choose a few of a run's prompts, evenly spaced, that leave room for output tokens."""
    fitting = [p for p in prompts if len(p) + TOKENS <= context_length]
    selected = list(fitting[:: max(1, len(fitting) // _PROMPTS)][:_PROMPTS])
    return selected or [prompts[0][: context_length - TOKENS]]


@torch.inference_mode()
def calibrate(targets: Sequence[Target], prompts: Sequence[IntArray]) -> AuditTolerance:
    """Measure the tolerance for engines of one model; the first one's passes are AR's.

    The targets must hold each prompt and `TOKENS` more; what their caches hold is lost.
    """
    plain, size = targets[0], 1 + min(target.max_nodes for target in targets)
    sizes = sorted({size, min(size, _FEW_ROWS)})
    ones, others = [], []
    for prompt in prompts:
        answer, single_rows = _one_row(plain, prompt)
        likeliest = single_rows.topk(min(_LIKELIEST, single_rows.shape[1]), dim=1).indices
        for target in targets:
            for rows in sizes:
                many = _many_rows(target, prompt, answer, rows)[: len(single_rows)]
                ones.append(single_rows[: len(many)].gather(1, likeliest[: len(many)]))
                others.append(many.gather(1, likeliest[: len(many)]))
    first = torch.cat(ones)
    spread = measure_spread(first, torch.cat(others))
    tolerance = spread.tolerance(_TIMES)
    if not math.isfinite(tolerance):  # no logits to judge by: its cases fail, and say so
        return AuditTolerance(0.0)
    margins = (first[:, 0] - first[:, 1]).double()
    return AuditTolerance(
        value=tolerance,
        spread=spread.value,
        positions=len(first),
        rows=sizes,
        blind=float((margins <= tolerance).double().mean()),
    )


def _one_row(target: Target, prompt: IntArray) -> tuple[IntArray, torch.Tensor]:
    """Decode a greedy output ``[n]``, with logits ``[n - 1, vocab]`` after all tokens but one."""
    token = int(target.prefill(prompt).logits[-1].argmax())
    answer, rows = [token], []
    for _ in range(TOKENS - 1):
        rows.append(target.forward(token, DraftTree.empty()).logits[-1].clone())
        target.commit(DraftTree.empty(), NO_TOKENS)
        token = int(rows[-1].argmax())
        answer.append(token)
    return np.array(answer, dtype=np.int64), torch.stack(rows)


def _many_rows(target: Target, prompt: IntArray, answer: IntArray, rows: int) -> torch.Tensor:
    """Compute logits after the output's tokens, as many as a pass of ``rows`` rows holds."""
    target.prefill(prompt)
    chain = answer[1:rows]
    # Siblings of the chain fill the pass: rows that nothing looks at, but that are computed.
    spare = rows - 1 - len(chain)
    tokens = np.concatenate([chain, np.repeat(answer[:1], spare)])
    parents = np.concatenate([np.arange(len(chain)) - 1, np.full(spare, -1)])
    scores = target.forward(int(answer[0]), DraftTree(tokens, parents.astype(np.int64)))
    return scores.logits[: len(chain) + 1].clone()
