"""What drafters counted, over the turns of a label: draft passes, cache hits, rows, time."""

from __future__ import annotations

from collections.abc import Callable

from analysis.runs.comparisons import ComparedLabel
from analysis.runs.estimates import STEP_PHASES, phase_s, pooled_ratio, steps
from specbench.results.estimate import ABSENT, Estimate
from specbench.results.records import CaseRecord


def drafter_count(key: str) -> Callable[[CaseRecord], float | None]:
    """What a drafter, or a part of it, counted in a turn; None where neither did.

    Parts put their name and a dot before: ``sps.draft_forwards`` in a union.
    """

    def count(record: CaseRecord) -> float | None:
        found = [v for k, v in record.drafter.items() if k == key or k.endswith(f".{key}")]
        return float(sum(found)) if found else None

    return count


draft_passes, draft_tokens = drafter_count("draft_forwards"), drafter_count("draft_tokens")


def rows_of_target_pass(entry: ComparedLabel) -> Estimate:
    """Tokens of a target pass: draft, auxiliary nodes and root."""
    return pooled_ratio(
        entry.records, lambda r: r.n_drafted + r.n_aux + r.n_target_passes, steps, entry.run.seed
    )


def rows_of_draft_pass(entry: ComparedLabel) -> Estimate:
    """Tokens of a pass of the draft model; no number without one."""
    return pooled_ratio(entry.records, draft_tokens, draft_passes, entry.run.seed)


def load_of_pass(rows: Estimate, parameters: int | None) -> str:
    """Params × L_new: billions of parameters times tokens of one pass."""
    if rows.value is None or parameters is None:
        return ABSENT
    return f"{rows.value * parameters / 1e9:.3g}"


def phase_share(entry: ComparedLabel, phase: str = "draft") -> Estimate:
    """A phase's share of the time of an entry's timed steps; no number without phases."""
    return pooled_ratio(
        [record for record in entry.timed_records if record.phase_s],
        lambda r: phase_s(r, phase),
        lambda r: sum(phase_s(r, each) for each in STEP_PHASES),
        entry.run.seed,
        at_most=1,
    )


def hit_rate(entry: ComparedLabel) -> Estimate:
    """Share of queries whose corrected token was in the cache; no number without a cache."""
    hits, misses = drafter_count("hits"), drafter_count("misses")

    def queries(record: CaseRecord) -> float | None:
        found = hits(record), misses(record)
        return None if found[0] is None or found[1] is None else found[0] + found[1]

    return pooled_ratio(entry.records, hits, queries, entry.run.seed, 1)
