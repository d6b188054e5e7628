"""Reads a streamed answer of any server: its tokens, times and counters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from specbench.servers.client import NoAnswer
from specbench.servers.counters import ServerJson, whole
from specbench.storage.jsonl import parse_json

_MOST_ID = 2**31
_SILENT = 4  # tokens without text that an answer may have: its end, marks of reasoning
_TOGETHER_S = 1e-3  # a pass of a model takes longer
_REASONS = {"stop": "eos", "eos": "eos", "length": "length", "limit": "length", "word": "eos"}
# Parts of events that have counters; see `specbench.servers.counters`.
_COUNTERS = ("metrics", "sglext", "meta_info", "timings")


@dataclass(slots=True)
class Answer:
    """A server's answer.

    Attributes:
        thoughts, reply: a model's reasoning where the server keeps it apart, and its answer.
        output_ids, prompt_ids: where the server gives them, else empty.
        n_new, n_prompt: tokens, as the server counts them.
        n_first: tokens that came together first. Where neither ids nor running counts tell, and
            events have several tokens each, as many as their part of the text.
        finish_reason: ``eos`` or ``length``.
        ttft_s: from the request until the first ones had come; ``last_s``: to the last token, which
            may be an end token without text. Equal where all came together.
        bursts: seconds from the request to each arrival of tokens; what arrives within a
            millisecond is one, as the accepted tokens of a step are.
        per_event: number of ids of each event that brought some.
        counters: the events' parts that hold counters, as the server names them.
    """

    thoughts: str = ""
    reply: str = ""
    output_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    n_new: int = 0
    n_prompt: int = 0
    n_first: int = 0
    finish_reason: str = ""
    ttft_s: float = 0.0
    last_s: float = 0.0
    bursts: list[float] = field(default_factory=list)
    per_event: list[int] = field(default_factory=list)
    counters: dict[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.thoughts + self.reply


class _Arrival(NamedTuple):
    """An event with tokens; ``so_far``: tokens of the answer up to it, 0 if unknown."""

    at: float
    n_ids: int
    n_characters: int
    so_far: int


def read_answer(events: Iterable[tuple[float, object]], longest: int = _MOST_ID) -> Answer:
    """Assemble an answer from its events: of OpenAI's chat interface, or llama.cpp's own.

    ``longest``: requested new tokens at most.

    Raises:
        NoAnswer: the stream ended without a reason, is not an answer, or has impossible counts.
    """
    answer, arrivals, ended = Answer(), list[_Arrival](), 0.0
    for at, event in events:
        if not isinstance(event, Mapping):
            raise NoAnswer("malformed", f"an event is {event!r:.60}, not an object", again=True)
        if event.get("error"):
            raise NoAnswer("error", f"the server broke off: {event['error']!r:.200}", again=True)
        choice = _choice(event)
        for name in _COUNTERS:
            if isinstance(counters := event.get(name, choice.get(name)), Mapping):
                answer.counters[name] = counters
        so_far = _count(event, "completion_tokens", "tokens_predicted")
        answer.n_new = so_far or answer.n_new
        answer.n_prompt = _count(event, "prompt_tokens", "tokens_evaluated") or answer.n_prompt
        answer.prompt_ids = _ids(event.get("prompt_token_ids")) or answer.prompt_ids
        ids = _ids(choice.get("token_ids", choice.get("tokens")))
        delta = choice.get("delta")
        delta = delta if isinstance(delta, Mapping) else choice
        reply, thought = _text(delta, "content"), _text(delta, "reasoning_content", "reasoning")
        answer.output_ids += ids
        answer.reply += reply
        answer.thoughts += thought
        if reply or thought or ids:
            arrivals.append(_Arrival(at, len(ids), len(reply + thought), so_far))
        reason = choice.get("finish_reason") or choice.get("stop_type")
        if isinstance(reason, str) and reason not in ("", "none"):
            answer.finish_reason, ended = _REASONS.get(reason, reason), at
    _check(answer, longest)
    _time(answer, arrivals, ended)
    return answer


def _choice(event: ServerJson) -> ServerJson:
    choices = event.get("choices")
    if choices is None:  # llama.cpp's own interface has one answer, at the top
        return event
    if not isinstance(choices, list):
        raise NoAnswer("malformed", f"choices is {choices!r:.60}, not a list", again=True)
    return choices[0] if choices and isinstance(choices[0], Mapping) else {}


def _ids(ids: object) -> list[int]:
    if not isinstance(ids, list):
        return []
    if not all(type(i) is int and 0 <= i < _MOST_ID for i in ids):
        raise NoAnswer("malformed", f"token ids are {ids!r:.60}", again=True)
    return ids


def _text(node: ServerJson, *keys: str) -> str:
    texts = (node.get(key) for key in keys)
    return next((text for text in texts if text and isinstance(text, str)), "")


def _count(event: ServerJson, in_usage: str, in_event: str) -> int:
    """Read a token count, from OpenAI's ``usage`` or llama.cpp's field; 0 where there is none."""
    usage = event.get("usage")
    value = usage.get(in_usage) if isinstance(usage, Mapping) else event.get(in_event)
    if value is None:
        return 0
    if (count := whole(value)) is None:
        message = f"{in_usage} is {value!r:.60}, not a number of tokens"
        raise NoAnswer("bad_count", message, again=False)
    return count


def _check(answer: Answer, longest: int) -> None:
    n_new, n_ids = answer.n_new, len(answer.output_ids)
    n_bytes = len(answer.text.encode(errors="replace"))
    reason = answer.finish_reason
    for wrong, kind, message in (
        (not reason, "cut", "the stream ended without a finish_reason"),
        (reason not in _REASONS.values(), "ended", f"the answer ended with {reason!r}"),
        (not n_bytes and not n_ids, "empty", "the answer has no text"),
        (not n_new, "no_count", "the server does not say how many tokens it made"),
        (n_new > longest, "bad_count", f"{n_new} tokens, and was asked for {longest} at most"),
        # An end token has no text, and some servers give no id for it either.
        (n_ids and not n_new - 1 <= n_ids <= n_new, "bad_count", f"{n_ids} ids for {n_new} tokens"),
        # Each token writes a byte at least, but for an end token and the few that have no text.
        (
            not n_ids and n_new > n_bytes + _SILENT,
            "bad_count",
            f"{n_new} tokens for a text of {n_bytes} bytes: it counts what the answer does not "
            "show",
        ),
    ):
        if wrong:
            text = f"the server says {message}" if kind == "bad_count" else message
            raise NoAnswer(kind, text, again=kind == "cut")
    try:
        parse_json(json.dumps([answer.text, answer.counters]).encode())
    except (ValueError, RecursionError) as error:
        raise NoAnswer("malformed", f"no file can hold the answer: {error}", again=True) from None


def _time(answer: Answer, arrivals: list[_Arrival], ended: float) -> None:
    """Set the answer's times, and the number of tokens that came before its decoding was seen.

    A server may send its first tokens together, when the last of them is made: what they took
    cannot be separated from the prompt's time, so they do not count in a decode speed.
    """
    for arrival in arrivals:
        if not answer.bursts or arrival.at - answer.bursts[-1] > _TOGETHER_S:
            answer.bursts.append(arrival.at)
    answer.per_event = [arrival.n_ids for arrival in arrivals if arrival.n_ids]
    first = [a for a in arrivals if a.at - answer.bursts[0] <= _TOGETHER_S]
    answer.ttft_s, answer.last_s = first[-1].at, arrivals[-1].at
    if answer.finish_reason == "eos" and len(answer.output_ids) < answer.n_new:
        # An end token without text and id is seen only by the end.
        answer.last_s = max(ended, answer.last_s)
    n_new = answer.n_new
    n_first = sum(a.n_ids for a in first) or first[-1].so_far
    if not n_first and len(arrivals) >= n_new - 1:  # an event for each token
        n_first = len(first)
    if not n_first:
        share = sum(a.n_characters for a in first) / len(answer.text)
        n_first = max(len(first), round(n_new * share))
    answer.n_first = min(n_first, n_new)
    together = answer.last_s - answer.bursts[0] <= _TOGETHER_S
    if together or answer.n_first == n_new or (len(answer.bursts) == 1 and answer.n_first > 1):
        answer.n_first, answer.ttft_s = n_new, answer.last_s
