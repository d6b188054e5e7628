"""What servers count, in our words: one table, one converter. Free of torch.

Ours: a step is a target pass after the prompt's; it commits the accepted draft tokens and one more.
MAT is (new tokens - 1) / steps, and steps without a draft count. Their acceptance lengths differ
from it in three ways, which docs/metrics.md shows: some leave out steps without a draft, some count
the prompt's token, some leave out the token that every step adds.

Sources, read 2026-11: vLLM's pull request 48915 and its Prometheus counters; SGLang's pull requests
3152 and 33518 and its ``meta_info``; llama.cpp's server (``timings``, ``/metrics``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Words:
    """How one server says, in one place, what a step did.

    Attributes:
        engine: as in ``server.engine``.
        place: keys that lead to the counters in an answer; ``("/metrics",)``: Prometheus counters.
        drafted, accepted: their words for draft tokens and for those accepted, no bonus; the first
            that is there.
        passes: their word for steps, or "".
        all_passes: whether that counts every step after the prompt's pass, also without a draft.
        per_step: their word for the accepted draft tokens of each step with a draft, or "".
        new_tokens: their word for new tokens.
        says_zero: a word that is there also where nothing was drafted, and the others are not.
        length: their word for the acceptance length, and ``formula``: what it is in our words.
    """

    engine: str
    place: tuple[str, ...]
    drafted: tuple[str, ...]
    accepted: tuple[str, ...]
    passes: str = ""
    all_passes: bool = False
    per_step: str = ""
    new_tokens: str = ""
    says_zero: str = ""
    length: str = ""
    formula: str = ""


METRICS = "/metrics"
_OVER_DRAFTS = "1 + accepted / steps with a draft"
_WITH_FIRST = "new tokens / steps"

TABLE: tuple[Words, ...] = (
    Words(
        engine="vllm",
        place=("metrics", "speculative_decoding"),
        drafted=("num_draft_tokens",),
        accepted=("num_accepted_draft_tokens",),
        passes="num_spec_steps",
        per_step="per_step_accepted",
        length="mean_acceptance_length",
        formula=_OVER_DRAFTS,
    ),
    Words(
        engine="vllm",
        place=(METRICS,),
        drafted=("vllm:spec_decode_num_draft_tokens_total",),
        accepted=("vllm:spec_decode_num_accepted_tokens_total",),
        passes="vllm:spec_decode_num_drafts_total",
        new_tokens="vllm:generation_tokens_total",
        length="Mean acceptance length (its log)",
        formula=_OVER_DRAFTS,
    ),
    Words(
        engine="sglang",
        place=("sglext", "spec_tokens_details"),
        drafted=("spec_num_proposed_drafts",),
        accepted=("spec_num_correct_drafts",),
        passes="spec_verify_ct",
        all_passes=True,
        length="spec_accept_length",
        formula=_WITH_FIRST,
    ),
    Words(
        engine="sglang",
        place=("meta_info",),
        drafted=("spec_num_proposed_drafts", "spec_draft_token_num"),
        accepted=("spec_num_correct_drafts", "spec_accept_token_num"),
        passes="spec_verify_ct",
        all_passes=True,
        length="spec_accept_length",
        formula=_WITH_FIRST,
    ),
    Words(
        engine="sglang",
        place=(METRICS,),
        drafted=(),
        accepted=(),
        passes="sglang:spec_verify_calls_total",
        all_passes=True,
        new_tokens="sglang:generation_tokens_total",
        length="sglang:spec_accept_length",
        formula=_WITH_FIRST,
    ),
    Words(
        engine="llamacpp",
        place=("timings",),
        drafted=("draft_n",),
        accepted=("draft_n_accepted",),
        new_tokens="predicted_n",
        says_zero="predicted_n",
        length="mean len (its log)",
        formula=_OVER_DRAFTS,
    ),
    Words(
        engine="llamacpp",
        place=(METRICS,),
        drafted=("llamacpp:spec_decode_num_draft_tokens_total",),
        accepted=("llamacpp:spec_decode_num_accepted_tokens_total",),
        passes="llamacpp:spec_decode_num_drafts_total",
        new_tokens="llamacpp:tokens_predicted_total",
    ),
)


@dataclass(frozen=True, slots=True)
class Counts:
    """An answer's counters in our words.

    Attributes:
        steps: target passes after the prompt's.
        drafted, accepted: draft tokens; None where the server does not say.
        committed: tokens of each step, bonus included; empty where only totals are known.
    """

    steps: int
    drafted: int | None = None
    accepted: int | None = None
    committed: tuple[int, ...] = ()


def plain_counts(n_new: int) -> Counts:
    """Plain decoding: a step for each token after the first."""
    return Counts(n_new - 1, 0, 0, (1,) * (n_new - 1))


def convert(words: Words, said: Mapping[str, Any], n_new: int) -> Counts | None:
    """A server's counters of one answer in our words.

    Steps are its own count where it counts all of them. Else each step committed one token more
    than it accepted, so that they are what is left of ``n_new - 1`` without the accepted ones; a
    server that accepts draft tokens behind the end token may count those too, and no fewer steps
    than had a draft are possible.

    Args:
        words: the table's row.
        said: the object at its ``place``.
        n_new: new tokens of the answer, the first included.

    Returns:
        None where the counters are not there, or contradict themselves or the answer.
    """
    drafted, accepted = _first(said, words.drafted), _first(said, words.accepted)
    passes = _count(said.get(words.passes)) if words.passes else None
    if words.says_zero in said and not {*words.drafted, *words.accepted} & said.keys():
        drafted = accepted = 0
    if words.all_passes:
        if passes is None:
            return None
        steps = passes
    elif accepted is None or drafted is None:
        return None
    else:
        steps = max(n_new - 1 - accepted, passes or 0)
    if accepted is not None and drafted is not None and accepted > drafted:
        return None
    if not (0 < steps <= n_new - 1 if n_new > 1 else steps == 0):
        return None
    return Counts(steps, drafted, accepted, _committed(words, said, n_new, steps))


def _committed(words: Words, said: Mapping[str, Any], n_new: int, steps: int) -> tuple[int, ...]:
    """Tokens of each step where they follow from the counters, else nothing."""
    if steps == n_new - 1:
        return (1,) * steps
    each = said.get(words.per_step) if words.per_step else None
    if not isinstance(each, list) or len(each) != steps:
        return ()
    found = tuple(1 + n for n in each if _count(n) is not None)
    return found if len(found) == steps and sum(found) == n_new - 1 else ()


def find_counts(engine: str, answer: Mapping[str, Any], n_new: int) -> Counts | None:
    """The counters in an answer, by the first row of its engine (``other``: of any) that fits."""
    for words in TABLE:
        if words.place == (METRICS,) or engine not in (words.engine, "other"):
            continue
        if found := convert(words, _at(answer, words.place), n_new):
            return found
    return None


def drafts(engine: str, answer: Mapping[str, Any]) -> bool:
    """Whether an answer's counters say that the server drafted."""
    for words in TABLE:
        if words.place == (METRICS,) or engine not in (words.engine, "other"):
            continue
        said = _at(answer, words.place)
        if any(_count(said.get(name)) for name in (*words.drafted, words.passes)):
            return True
    return False


def _at(answer: Mapping[str, Any], place: tuple[str, ...]) -> Mapping[str, Any]:
    """The object at a place of an answer, or an empty one."""
    node: Any = answer
    for key in place:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def metrics_words(engine: str) -> Words | None:
    """The row about an engine's Prometheus counters."""
    rows = (w for w in TABLE if w.engine == engine and w.place == (METRICS,))
    return next(rows, None)


def difference(
    words: Words, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, int] | None:
    """What a server's counters of a row rose by; None where one is missing or fell."""
    names = [*words.drafted, *words.accepted, words.passes, words.new_tokens]
    if any(name not in after for name in names):
        return None
    # A counter that nothing has touched yet may not be there at first.
    found = {name: after[name] - before.get(name, 0.0) for name in names}
    return {name: round(value) for name, value in found.items()} if _sane(found) else None


def _sane(found: Mapping[str, float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in found.values())


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format: values by name, those of one name and other labels added up."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+\S+)?", line.strip())
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        values[match[1]] = values.get(match[1], 0.0) + value
    return values


def _first(said: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (_count(said.get(name)) for name in names)
    return next((value for value in found if value is not None), None)


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value) or value != int(value) or not 0 <= value < 2**31:
        return None
    return int(value)
