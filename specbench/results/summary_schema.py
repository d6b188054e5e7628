"""The keys of ``summary.json``. Free of torch; what the numbers mean: `statistics.summary`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

from specbench.results.estimate import Interval

# What a label reached on a task, or over the whole run (``overall``): each of
# :data:`specbench.results.metrics.METRICS` with its interval (``NAME_ci``), None where it cannot be
# had, and beside these
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
    """Two labels on the same timed cases.

    Attributes:
        family: ``ar``: the second is the baseline; ``best``: the second was the fastest method,
            and the interval is over whichever truly is (:mod:`.statistics.multiple`).
        ratio: speed of the first over the second's.
        p: of this pair by itself; ``p_family``: among its family, as its interval.
        verdict: ``faster``, ``slower`` (the first is), ``tie``, ``undecided`` or ``too few`` cases.
        margin: a ratio from 1/(1 + margin) to 1 + margin is a tie.
        detectable: the smallest ratio that the sample shows with a power of 80 %.
        needed: cases that would show the measured ratio with that power, of ``too few`` the fewest
            that an interval is made of; None where more cases would not do.
    """

    first: str
    second: str
    family: str
    n_cases: int
    ratio: float | None
    ratio_ci: Interval | None
    p: float
    verdict: str
    margin: float
    detectable: float | None
    p_family: float
    needed: int | None


class Standing(TypedDict):
    """How a label stands against the fastest method.

    Attributes:
        verdict: of the fastest method ``best`` (all others and plain decoding are shown slower),
            ``slower than ar``, or ``highest``; where plain decoding was faster, but is not shown to
            be, the verdict on the two. Of others as of a pair, plain decoding being its first.
        p: of the pair, among its family; None of the fastest method, and of too few cases.
    """

    verdict: str
    p: float | None


class Disturbance(TypedDict):
    """What the rule about disturbed turns found and did.

    Attributes:
        turns: by label, measured turns; ``flagged``: of these the ones whose first measurement was
            called disturbed.
        cases_again: cases (and repeats) measured again; ``turns_again``: their turns, all labels.
        without_rule: by label, numbers of a row that has every turn as it was first measured.
    """

    turns: dict[str, int]
    flagged: dict[str, int]
    cases_again: int
    turns_again: int
    without_rule: dict[str, dict[str, Any]]


class ServedLabel(TypedDict):
    """What a label reached that a server answered.

    Attributes:
        ttft_s: median over timed turns; ``user_tokens_per_s``: after it, for one user.
        system_tokens_per_s: None where no batch was undisturbed by failures.
        system_speedup: all users' tokens/s over the plain server's, of common batches, its interval
            holding for all labels together; ``pays``: whether to draft at this load: ``yes``,
            ``no``, ``unknown``; "" of plain decoding.
        equal, compared: answers that are the same server's plain ones, of how many.
        first_difference: words on the first that is not, or "".
        uncounted: turns whose server did not say its steps.
        together: turns whose tokens came all at once.
        latency: seconds by name and percentile, see ``specbench.results.statistics.latency``.
        good_requests_per_s: requests/s within ``limits``, None without one.
    """

    label: str
    engine: str
    numerics: str
    concurrency: int
    ttft_s: float | None
    user_tokens_per_s: float | None
    system_tokens_per_s: float | None
    system_speedup: float | None
    system_speedup_ci: Interval | None
    pays: str
    equal: int
    compared: int
    first_difference: str
    uncounted: int
    together: int
    latency: dict[str, dict[str, float]]
    good_requests_per_s: float | None
    limits: str


class BatchedLabel(TypedDict):
    """What a label reached that decoded texts at once, over whole groups.

    Attributes:
        size: texts at once, as asked for; ``groups``: timed ones.
        full_tokens_per_s, full_speedup: of the steps in which all texts of a group ran, and over
            the baseline's such steps.
        tail_share: of the groups' time, what is not of these steps; ``idle_share``: of all seats'
            time, what was after their texts' end; ``useless_rows``: of all rows of passes.
        model_share: of the groups' time, passes of heads and draft models; None: not counted.
        outside_share: of the steps' time, what was in no pass, theirs or the target's; likewise.
        equal, compared: outputs that are the baseline's at the same batch, of how many.
    """

    label: str
    size: int
    groups: int
    system_tokens_per_s: float | None
    user_tokens_per_s: float | None
    full_tokens_per_s: float | None
    full_speedup: float | None
    tail_share: float | None
    idle_share: float | None
    useless_rows: float | None
    model_share: NotRequired[float | None]
    outside_share: NotRequired[float | None]
    equal: int
    compared: int


class WarningLine(TypedDict):
    """A warning by its code, with its values, see :mod:`specbench.results.conditions`."""

    code: str
    values: dict[str, object]


class Compared(TypedDict):
    """The labels of records beside each other.

    Attributes:
        leaders: the methods that may be the fastest, the first first.
        against_best: by label; empty where nothing was timed.
        verdict: what the comparison says in one sentence.
    """

    rows: list[SummaryRow]
    pairs: list[Pair]
    leaders: list[str]
    against_best: dict[str, Standing]
    verdict: str


class Summary(Compared):
    """All of the file; ``pairs`` is empty unless two methods were compared.

    Attributes:
        disturbed: None where no time was measured.
        conditions: what the numbers stand on, a condition a line; ``warnings``: by their codes.
        served: where servers answered.
        batched: where several texts were decoded at once.
    """

    schema_version: int
    run_key: str | None
    disturbed: Disturbance | None
    conditions: dict[str, str]
    warnings: list[WarningLine]
    served: NotRequired[list[ServedLabel]]
    batched: NotRequired[list[BatchedLabel]]
