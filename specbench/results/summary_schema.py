"""The keys of ``summary.json``. Free of torch; what the numbers mean: `statistics.summary`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

from specbench.results.cells import Interval

# The numbers of a label on a task, or over the whole run (``overall``): each of
# :data:`specbench.results.metrics.METRICS` with its interval (``NAME_ci``), None if absent, and
#   label, method, task, estimator, state_scope, timing;
#   n_cases: cases that MAT and verdicts are about; n_timed: those that speeds are about;
#   n_dropped: cases left out for all labels because one failed;
#   n_disturbed: cases that hold a disturbed turn; disturbed_counted: they are timed all the same;
#   phase_share: each phase's part of the wall time, under ``measure=phases``;
#   lossless: turns by verdict.
SummaryRow: TypeAlias = dict[str, Any]


def number(row: SummaryRow | ServedLabel, key: str) -> float | None:
    """Give a number by a key that is a variable."""
    return cast("Mapping[str, float | None]", row)[key]


def interval(row: SummaryRow, key: str) -> Interval | None:
    """Give the 95 % interval of a number; None too where it has none by nature."""
    bounds: Interval | None = row.get(f"{key}_ci")
    return bounds


def n_of(row: SummaryRow, key: str) -> int:
    """Count the cases that a number of a row is about: MAT all, speeds the timed ones."""
    return int(row["n_cases"] if key == "mat" else row["n_timed"])


class Pair(TypedDict):
    """Two labels on the same timed cases."""

    first: str
    second: str
    family: str  # ``ar``: second is the baseline; ``best``: it was the fastest method
    n_cases: int
    ratio: float | None  # speed of the first over the second's
    ratio_ci: Interval | None  # of ``best`` over whichever method truly is
    p: float  # of this pair by itself
    verdict: str  # :func:`specbench.results.statistics.pairs.verdict`
    margin: float  # a ratio from 1/(1 + margin) to 1 + margin is a tie
    detectable: float | None  # the smallest ratio that is shown with a power of 80 %
    p_family: float  # among its family, as the interval
    needed: int | None  # cases that would show the ratio so; None where more would not do


class Standing(TypedDict):
    """The comparison of a label with the fastest method.

    Attributes:
        verdict: of the fastest method ``best`` (all others and plain decoding are shown slower),
            ``slower than ar``, or ``highest``; where plain decoding was faster, but is not shown to
            be, the verdict on the two. Of others as of a pair, plain decoding being its first.
        p: of the pair, among its family; None of the fastest method, and of too few cases.
    """

    verdict: str
    p: float | None


class Disturbance(TypedDict):
    """The effect of the rule about disturbed turns."""

    turns: dict[str, int]  # by label
    flagged: dict[str, int]  # of these, whose first measurement was called disturbed
    cases_again: int  # cases (and repeats) measured again
    turns_again: int  # their turns, all labels
    without_rule: dict[str, dict[str, Any]]  # by label, numbers of turns as first measured


class ServedLabel(TypedDict):
    """The numbers of a label that a server answered."""

    label: str
    engine: str
    numerics: str
    concurrency: int
    ttft_s: float | None  # median over timed turns
    user_tokens_per_s: float | None  # after it, for one user
    system_tokens_per_s: float | None  # None where no batch was whole
    system_speedup: float | None  # over the plain server's, of common batches
    system_speedup_ci: Interval | None  # holds for all labels together
    pays: str  # to draft at this load: ``yes``, ``no``, ``unknown``; "" of plain decoding
    equal: int  # answers that are the same server's plain ones
    compared: int
    first_difference: str
    uncounted: int  # turns whose server did not say its steps
    together: int  # turns whose tokens came all at once
    latency: dict[str, dict[str, float]]  # seconds by name and percentile
    good_requests_per_s: float | None  # within ``limits``; None without one
    limits: str


class BatchedLabel(TypedDict):
    """The numbers of a label that decoded sequences at once, over whole groups."""

    label: str
    size: int  # sequences at once, as requested
    groups: int  # timed ones
    system_tokens_per_s: float | None
    user_tokens_per_s: float | None
    full_tokens_per_s: float | None  # of the steps in which all sequences of a group ran
    full_speedup: float | None  # over the baseline's such steps
    tail_share: float | None  # of the groups' time, outside these steps
    idle_share: float | None  # of all slots' time, after their sequences' end
    useless_rows: float | None  # of all rows of passes
    model_share: NotRequired[float | None]  # of the time, passes of heads and draft models
    outside_share: NotRequired[float | None]  # of the steps' time, outside passes
    equal: int  # outputs that are the baseline's at the same batch
    compared: int


class WarningLine(TypedDict):
    """A warning by its code, with its values, see :mod:`specbench.results.conditions`."""

    code: str
    values: dict[str, object]


class Compared(TypedDict):
    """The comparison of the labels."""

    rows: list[SummaryRow]
    pairs: list[Pair]
    leaders: list[str]  # the methods that may be the fastest, the first first
    against_best: dict[str, Standing]  # by label; empty where nothing was timed
    verdict: str  # the comparison in one sentence


class Summary(Compared):
    """All of the file; ``pairs`` is empty unless two methods were compared."""

    schema_version: int
    run_key: str | None
    disturbed: Disturbance | None  # None where no time was measured
    conditions: dict[str, str]  # of the numbers, a condition a line
    warnings: list[WarningLine]
    served: NotRequired[list[ServedLabel]]  # where servers answered
    batched: NotRequired[list[BatchedLabel]]  # where several texts were decoded at once
