"""Additional numbers of runs in static batches (``batch.size`` above 1).

Groups count whole or not at all, as everywhere. A group's steps in which all of its sequences run
are its full part; the rest is its tail, in which slots stay empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from specbench.results.cells import ABSENT, Cell, number
from specbench.results.records import CaseRecord, group_by
from specbench.results.statistics.summary import timed_turns
from specbench.results.summary_schema import BatchedLabel

_Groups: TypeAlias = Sequence[Sequence[CaseRecord]]  # turns of a label that were decoded at once


def batched_labels(
    records: Sequence[CaseRecord], labels: Sequence[str], baseline: str | None
) -> list[BatchedLabel]:
    """Describe the labels of a run that decoded in batches; empty for other runs."""
    timed = group_by((t for t in timed_turns(records, labels) if t.batch), lambda turn: turn.label)
    groups_of = {
        label: [*group_by(timed.get(label, ()), lambda turn: (turn.block, turn.turn)).values()]
        for label in labels
    }
    plain = {r.key[:3]: r.output_ids for r in records if r.label == baseline and r.output_ids}
    plain_speed = _full_speed(groups_of.get(baseline or "", ()))
    rows = []
    for label, groups in groups_of.items():
        batched = [r for r in records if r.label == label and r.batch and r.status != "failed"]
        if not batched:
            continue
        parts = [group[0].batch for group in groups if group[0].batch]
        turns = [turn for group in groups for turn in group]
        tokens = sum(turn.n_new - 1 for turn in turns)
        decode_s = math.fsum(turn.decode_s for turn in turns)
        longest = [max(turn.decode_s for turn in group) for group in groups]
        whole_s = math.fsum(longest)
        slots_s = math.fsum(len(g) * seconds for g, seconds in zip(groups, longest, strict=True))
        full = _full_speed(groups)
        query_tokens = sum(turn.n_target_passes + turn.n_drafted + turn.n_aux for turn in turns)
        committed = sum(sum(turn.committed_per_step) for turn in turns)
        model_s = [part.model_s for part in parts if part.model_s is not None]
        counted = len(model_s) == len(parts)
        compared = [r for r in batched if r.key[:3] in plain]
        rows.append(
            BatchedLabel(
                label=label,
                size=max(r.batch.size for r in batched if r.batch),
                groups=len({turn.unit for turn in turns}),
                system_tokens_per_s=tokens / whole_s if whole_s else None,
                user_tokens_per_s=tokens / decode_s if decode_s else None,
                full_tokens_per_s=full,
                full_speedup=full / plain_speed if full and plain_speed else None,
                tail_share=1 - math.fsum(p.full_s for p in parts) / whole_s if whole_s else None,
                idle_share=1 - decode_s / slots_s if slots_s else None,
                useless_rows=1 - committed / query_tokens if query_tokens else None,
                model_share=math.fsum(model_s) / whole_s if whole_s and counted else None,
                outside_share=_outside_share(groups),
                equal=sum(r.output_ids == plain[r.key[:3]] for r in compared),
                compared=len(compared),
            )
        )
    return rows


def _outside_share(groups: _Groups) -> float | None:
    """Compute the share of the steps' time outside passes; None if passes were not timed."""
    in_passes, in_steps = 0.0, 0.0
    for group in groups:
        batch = group[0].batch
        if batch is None or batch.pass_s is None:
            return None
        in_passes += batch.pass_s + (batch.model_s or 0.0)
        in_steps += max(turn.decode_s - turn.drafter_setup_s for turn in group)
    return 1 - in_passes / in_steps if in_steps else None


def _full_speed(groups: _Groups) -> float | None:
    """Compute tokens/s of the steps in which all sequences of a group run, of full groups."""
    groups = [g for g in groups if len(g) == max(map(len, groups))]
    tokens = 0
    for group in groups:
        steps = min(turn.n_target_passes for turn in group)
        tokens += sum(sum(turn.committed_per_step[:steps]) for turn in group)
    seconds = math.fsum(group[0].batch.full_s for group in groups if group[0].batch)
    return tokens / seconds if seconds else None


BATCHED_TEXT = (
    "tokens/s: of all sequences over the time of their groups. full: while all sequences of a "
    "group run. tail: time after the first one ended. equal: outputs that are ar's at this batch."
)


def batched_cells(row: BatchedLabel) -> dict[str, Cell]:
    """Make the line of a label for a table."""
    return {
        "method": row["label"],
        "batch": str(row["size"]),
        "tokens/s": number(row["system_tokens_per_s"], ".1f"),
        "full": number(row["full_tokens_per_s"], ".1f"),
        "speedup, full": number(row["full_speedup"], ".2f"),
        "tail": number(row["tail_share"], ".0%"),
        "equal": f"{row['equal']} of {row['compared']}" if row["compared"] else ABSENT,
    }
