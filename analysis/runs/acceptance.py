"""Details of drafting and acceptance.

Acceptance by depth in the draft, by position in the output and over the stream; drafters'
counters over the turns of a label: draft passes, cache hits, rows, time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from analysis.runs.comparisons import ComparedLabel
from analysis.runs.estimates import STEP_PHASES, phase_s, pooled_ratio, steps
from specbench.results.cells import ABSENT, NumberCell
from specbench.results.records import CaseRecord


def by_depth(
    records: Sequence[CaseRecord],
    seed: int = 0,
    deepest: int = 12,
    depths: Mapping[tuple[int, str, int, str], Sequence[int]] | None = None,
    conditional: bool = False,
) -> list[tuple[int, NumberCell]]:
    """Return the share of drafts accepted at each depth, up to the last accepted one.

    The share is among the steps with a draft; one plus the sum over all depths
    is the acceptance length of these steps.

    Args:
        records: of one label.
        seed: of the bootstrap.
        deepest: the last depth.
        depths: of each step's draft by turn, 0 without one (`analysis.runs.load.Run.depths`); if
            they were not recorded, all steps count.
        conditional: of the steps that accepted the token before it and drafted so deep (of a tree,
            on any branch). A draft that ends before rejects nothing.
    """

    def steps_with(accepted: int, drafted: int) -> Callable[[CaseRecord], float | None]:
        def count(record: CaseRecord) -> float | None:
            committed = record.committed_per_step
            deep = depths.get(record.key, []) if depths else [math.inf] * len(committed)
            if len(deep) != len(committed):
                return None  # the turn's depths are not of its steps
            return sum(n > accepted and d >= drafted for n, d in zip(committed, deep, strict=True))

        return count

    last = max((n - 1 for record in records for n in record.committed_per_step), default=0)
    shares = []
    for depth in range(1, min(last, deepest) + 1):
        among = steps_with(depth - 1, depth) if conditional else steps_with(0, 1)
        shares.append((depth, pooled_ratio(records, steps_with(depth, depth), among, seed, 1)))
    return shares


conditional_by_depth = partial(by_depth, conditional=True)


def by_position(
    records: Sequence[CaseRecord], width: int = 16, seed: int = 0
) -> list[tuple[float, NumberCell]]:
    """Compute MAT of one label's steps that begin within each stretch of the output.

    Returns:
        Middle of the stretch in tokens of the output, and MAT.
    """

    def steps_in(record: CaseRecord, stretch: int) -> list[int]:
        begin, inside = 1, []  # the first token came from the prompt's pass
        for n in record.committed_per_step:
            inside += [n] if begin // width == stretch else []
            begin += n
        return inside

    longest = max((record.n_new for record in records), default=0)

    def mat_in(stretch: int) -> NumberCell:
        tokens, passes = (
            (lambda r: sum(steps_in(r, stretch))),
            (lambda r: len(steps_in(r, stretch))),
        )
        return pooled_ratio(records, tokens, passes, seed)

    return [((i + 0.5) * width, mat_in(i)) for i in range(-(-longest // width))]


def stream_parts(records: Sequence[CaseRecord], parts: int) -> list[tuple[float, list[CaseRecord]]]:
    """Split the turns of one label into at most ``parts`` equal parts of the request stream.

    Returns:
        Tokens (prompt and output) of the requests finished by the part's middle, and its turns.
    """
    turns = sorted(
        (record for record in records if record.status != "failed"),
        key=lambda record: (record.stream_index, record.turn),
    )
    seen, members_at = 0, []
    for part in np.array_split(np.arange(len(turns)), max(1, min(parts, len(turns)))):
        members = [turns[i] for i in part]
        size = sum(turn.n_prompt + turn.n_new for turn in members)
        members_at.append((seen + size / 2, members))
        seen += size
    return members_at


def drafter_count(key: str) -> Callable[[CaseRecord], float | None]:
    """Return a function that reads a drafter's counter in a turn; None if it was not counted.

    Parts put their name and a dot before: ``sps.draft_forwards`` in a union.
    """

    def count(record: CaseRecord) -> float | None:
        counts = [v for k, v in record.drafter.items() if k == key or k.endswith(f".{key}")]
        return float(sum(counts)) if counts else None

    return count


draft_passes, draft_tokens = drafter_count("draft_forwards"), drafter_count("draft_tokens")


def rows_of_target_pass(entry: ComparedLabel) -> NumberCell:
    """Compute the tokens of a target pass: draft, auxiliary nodes and root."""
    return pooled_ratio(
        entry.records, lambda r: r.n_drafted + r.n_aux + r.n_target_passes, steps, entry.run.seed
    )


def rows_of_draft_pass(entry: ComparedLabel) -> NumberCell:
    """Compute the tokens of a pass of the draft model; no number without one."""
    return pooled_ratio(entry.records, draft_tokens, draft_passes, entry.run.seed)


def load_of_pass(rows: NumberCell, parameters: int | None) -> str:
    """Compute Params × L_new: billions of parameters times tokens of one pass."""
    if rows.value is None or parameters is None:
        return ABSENT
    return f"{rows.value * parameters / 1e9:.3g}"


def phase_share(entry: ComparedLabel, phase: str = "draft") -> NumberCell:
    """Compute a phase's share of the time of an entry's timed steps; no number without phases."""
    clocked = [record for record in entry.timed_records if record.phase_s]
    return pooled_ratio(
        clocked,
        lambda r: phase_s(r, phase),
        lambda r: sum(phase_s(r, step_phase) for step_phase in STEP_PHASES),
        entry.run.seed,
        at_most=1,
    )


def hit_rate(entry: ComparedLabel) -> NumberCell:
    """Compute the share of queries whose corrected token was cached; no number without a cache."""
    hits, misses = drafter_count("hits"), drafter_count("misses")

    def queries(record: CaseRecord) -> float | None:
        hit, missed = hits(record), misses(record)
        return None if hit is None or missed is None else hit + missed

    return pooled_ratio(entry.records, hits, queries, entry.run.seed, 1)
