"""What servers count, in our words: one converter for all of them. Free of torch.

Ours: a step is a target pass after the prompt's; it commits the accepted draft tokens and one more.
MAT is (new tokens - 1) / steps, and steps without a draft count. Their acceptance lengths differ
from it in three ways, which docs/servers.md shows: some leave out steps without a draft, some count
the prompt's token, some leave out the token that every step adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MOST = 2**31
Said = Mapping[str, object]  # an object of JSON that a server wrote


@dataclass(frozen=True, slots=True)
class Words:
    """How a server says, in one place, what a step did; "" and (): it does not say.

    Attributes:
        place: keys that lead to the counters in an answer; (): Prometheus counters.
        drafted, accepted: its words for draft tokens and for those accepted, no bonus; the first
            that is there.
        passes: its word for steps; ``all_passes``: whether that counts every step after the
            prompt's pass, also without a draft.
        per_step: its word for the accepted draft tokens of each step with a draft.
        by_event: whether a step's tokens arrive in one event, so that there were no fewer steps.
        new_tokens: its word for new tokens.
        says_zero: a word that is there also where nothing was drafted, and the others are not.
    """

    place: tuple[str, ...]
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
    """An answer's counters in our words.

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
    """Plain decoding: a step for each token after the first."""
    return Counts(n_new - 1, 0, 0, (1,) * (n_new - 1))


def convert(words: Words, said: Said, n_new: int, arrived: Sequence[int] = ()) -> Counts | None:
    """A server's counters of one answer in our words.

    Steps are its own count where it counts all of them. Else each step committed one token more
    than it accepted, so that they are what is left of ``n_new - 1`` without the accepted ones. A
    server may count draft tokens that it accepted behind an answer's end, too: there were no fewer
    steps than had a draft, or than brought tokens.

    Args:
        said: the object at the row's ``place``.
        n_new: new tokens of the answer, the first included.
        arrived: how many of them each event brought, where the server gives their ids.

    Returns:
        None where the counters are not there, or contradict themselves or the answer.
    """
    drafted, accepted = _first(said, words.drafted), _first(said, words.accepted)
    passes = whole(said.get(words.passes))
    if words.says_zero in said and not {*words.drafted, *words.accepted} & said.keys():
        drafted = accepted = 0
    steps = passes
    if not words.all_passes:
        if accepted is None or drafted is None:
            return None
        steps = max(n_new - 1 - accepted, passes or 0, len(arrived) - 1 if words.by_event else 0)
    if steps is None or not min(1, n_new - 1) <= steps <= n_new - 1:
        return None
    if accepted is not None and drafted is not None and accepted > drafted:
        return None
    if accepted is not None and steps + accepted < n_new - 1:
        return None  # a step commits one token more than it accepts: these made fewer
    committed = _committed(words, said, n_new, steps, arrived)
    return Counts(steps, drafted, accepted, committed)


def _committed(
    words: Words, said: Said, n_new: int, steps: int, arrived: Sequence[int]
) -> tuple[int, ...]:
    """Tokens of each step where they follow from the counters, else nothing."""
    if steps == n_new - 1:
        return (1,) * steps
    each = said.get(words.per_step) if words.per_step else None
    if not isinstance(each, list) or any(whole(n) is None for n in each):
        return ()
    if len(each) == steps and sum(each) + steps == n_new - 1:
        return tuple(1 + n for n in each)
    # Steps without a draft came between these: the events show where, if they show these, too.
    if not words.by_event or len(arrived) != steps + 1 or sum(arrived) != n_new or arrived[0] != 1:
        return ()
    accepted, shown = [n for n in each if n], [n - 1 for n in arrived[1:] if n > 1]
    cut = shown[-1:] + accepted[-1:]  # by the answer's end
    agrees = shown in (accepted, accepted[:-1]) or (
        len(cut) == 2 and shown[:-1] == accepted[:-1] and cut[0] < cut[1]
    )
    return tuple(arrived[1:]) if agrees else ()


def find_counts(
    table: Iterable[Words], answer: Said, n_new: int, arrived: Sequence[int] = ()
) -> Counts | None:
    """The counters in an answer, by the first row of its engine's table that fits."""
    counts = (convert(words, _at(answer, words.place), n_new, arrived) for words in table)
    return next((found for found in counts if found is not None), None)


def drafts(table: Iterable[Words], answer: Said) -> bool:
    """Whether an answer's counters say that the server drafted."""
    return any(
        whole(_at(answer, words.place).get(name))
        for words in table
        for name in (*words.drafted, words.passes)
    )


def _at(answer: Said, place: tuple[str, ...]) -> Said:
    node: object = answer
    for key in place:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def difference(
    words: Words, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, int] | None:
    """What a server's counters of a row rose by; None where one is missing or fell."""
    names = [*words.drafted, *words.accepted, words.passes, words.new_tokens]
    if any(name not in after for name in names):
        return None
    # A counter that nothing has touched yet may not be there at first.
    risen = {name: whole(after[name] - before.get(name, 0.0)) for name in names}
    return None if None in risen.values() else {name: n or 0 for name, n in risen.items()}


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format: values by name, added up over a name's labels."""
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


def _first(said: Said, names: tuple[str, ...]) -> int | None:
    found = (whole(said.get(name)) for name in names)
    return next((value for value in found if value is not None), None)


def whole(value: object) -> int | None:
    """A number of things as a server may say it, or None: it is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < _MOST and value == int(value) else None
