"""Converts the counters of all servers to ours. Free of torch.

Ours: a step is a target pass after the prompt's; it commits the accepted draft tokens and one more.
MAT is (new tokens - 1) / steps, and steps without a draft count. Acceptance lengths of
servers differ from it in three ways (docs/servers.md): some leave out steps without a draft, some
count the prompt's token, some leave out the token that every step adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MOST = 2**31
ServerJson = Mapping[str, object]  # an object of JSON that a server wrote


@dataclass(frozen=True, slots=True)
class CounterNames:
    """Names of one set of a server's step counters; "" and (): it has no such counter.

    Attributes:
        json_path: keys that lead to the counters in an answer; (): Prometheus counters.
        drafted, accepted: names of draft tokens and of accepted ones, without bonus; the first
            that is present counts.
        passes: name of steps; ``all_passes``: whether that counts every step after the
            prompt's pass, also without a draft.
        per_step: name of the accepted draft tokens of each step with a draft.
        by_event: whether a step's tokens arrive in one event, so that there were no fewer steps.
        new_tokens: name of new tokens.
        says_zero: a name that is present when nothing was drafted, and the others are not.
    """

    json_path: tuple[str, ...]
    drafted: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    passes: str = ""
    all_passes: bool = False
    per_step: str = ""
    by_event: bool = False
    new_tokens: str = ""
    says_zero: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """An answer's counters as we define them.

    Attributes:
        steps: target passes after the prompt's.
        drafted, accepted: draft tokens; None where the server does not say.
        committed: tokens of each step, bonus included; empty where these are not known.
    """

    steps: int
    drafted: int | None = None
    accepted: int | None = None
    committed: tuple[int, ...] = ()


def plain_counts(n_new: int) -> Counts:
    """Count plain decoding: a step for each token after the first."""
    return Counts(n_new - 1, 0, 0, (1,) * (n_new - 1))


def convert(
    names: CounterNames, counters: ServerJson, n_new: int, per_event: Sequence[int] = ()
) -> Counts | None:
    """Convert a server's counters of one answer to ours.

    Steps are the server's count where it counts all of them. Otherwise each step committed one
    token more than it accepted, so there were ``n_new - 1`` less the accepted ones. A server may
    also count draft tokens accepted after an answer's end, so there were at least as many steps
    as had a draft, and as brought tokens.

    Args:
        counters: the object at ``names.json_path``.
        n_new: new tokens of the answer, the first included.
        per_event: how many of them each event brought, where the server gives their ids.

    Returns:
        None where the counters are missing, or contradict themselves or the answer.
    """
    drafted, accepted = _first(counters, names.drafted), _first(counters, names.accepted)
    passes = whole(counters.get(names.passes))
    if names.says_zero in counters and not {*names.drafted, *names.accepted} & counters.keys():
        drafted = accepted = 0
    steps = passes
    if not names.all_passes:
        if accepted is None or drafted is None:
            return None
        steps = max(n_new - 1 - accepted, passes or 0, len(per_event) - 1 if names.by_event else 0)
    if steps is None or not min(1, n_new - 1) <= steps <= n_new - 1:
        return None
    if accepted is not None and drafted is not None and accepted > drafted:
        return None
    if accepted is not None and steps + accepted < n_new - 1:
        return None  # a step commits one token more than it accepts: these made fewer
    committed = _committed(names, counters, n_new, steps, per_event)
    return Counts(steps, drafted, accepted, committed)


def _committed(
    names: CounterNames, counters: ServerJson, n_new: int, steps: int, per_event: Sequence[int]
) -> tuple[int, ...]:
    """Derive the tokens of each step where the counters allow it, else return ()."""
    if steps == n_new - 1:
        return (1,) * steps
    per_step = counters.get(names.per_step) if names.per_step else None
    if not isinstance(per_step, list) or any(whole(n) is None for n in per_step):
        return ()
    if len(per_step) == steps and sum(per_step) + steps == n_new - 1:
        return tuple(1 + n for n in per_step)
    # Steps without a draft came between these: the events show where, if they show these, too.
    sizes = (len(per_event), sum(per_event), *per_event[:1])
    if not names.by_event or sizes != (steps + 1, n_new, 1):
        return ()
    accepted, seen = [n for n in per_step if n], [n - 1 for n in per_event[1:] if n > 1]
    cut = seen[-1:] + accepted[-1:]  # by the answer's end
    agrees = seen in (accepted, accepted[:-1]) or (
        len(cut) == 2 and seen[:-1] == accepted[:-1] and cut[0] < cut[1]
    )
    return tuple(per_event[1:]) if agrees else ()


def find_counts(
    table: Iterable[CounterNames], answer: ServerJson, n_new: int, per_event: Sequence[int] = ()
) -> Counts | None:
    """Convert an answer's counters by the first row of its engine's table that fits."""
    counts = (convert(row, _at(answer, row.json_path), n_new, per_event) for row in table)
    return next((count for count in counts if count is not None), None)


def drafts(table: Iterable[CounterNames], answer: ServerJson) -> bool:
    """Tell whether an answer's counters show that the server drafted."""
    return any(
        whole(_at(answer, row.json_path).get(name))
        for row in table
        for name in (*row.drafted, row.passes)
    )


def _at(answer: ServerJson, json_path: tuple[str, ...]) -> ServerJson:
    node: object = answer
    for key in json_path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def difference(
    names: CounterNames, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, int] | None:
    """Subtract a server's counters before and after; None where one is missing or fell."""
    keys = [*names.drafted, *names.accepted, names.passes, names.new_tokens]
    if any(key not in after for key in keys):
        return None
    # A counter that nothing has touched yet may not be there at first.
    risen = {key: whole(after[key] - before.get(key, 0.0)) for key in keys}
    return None if None in risen.values() else {key: n or 0 for key, n in risen.items()}


def read_metrics(text: str) -> dict[str, float]:
    """Read Prometheus' text format: values by name, added up over a name's labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+\S+)?", line.strip())
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        values[match[1]] = values.get(match[1], 0.0) + value
    return values


def _first(counters: ServerJson, names: tuple[str, ...]) -> int | None:
    values = (whole(counters.get(name)) for name in names)
    return next((value for value in values if value is not None), None)


def whole(value: object) -> int | None:
    """Return a server's count as an int; None where it is not a whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < _MOST and value == int(value) else None
