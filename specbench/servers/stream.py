"""From a streamed answer to its tokens, times and counters, whichever server wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specbench.servers.client import NoAnswer
from specbench.servers.counters import Said, whole
from specbench.storage.jsonl import parse_json

_MOST_ID = 2**31
_SILENT = 4  # tokens without text that an answer may have: its end, marks of reasoning
_TOGETHER_S = 1e-3  # a pass of a model takes longer
_REASONS = {"stop": "eos", "eos": "eos", "length": "length", "limit": "length", "word": "eos"}


@dataclass(slots=True)
class Answer:
    """What a server answered.

    Attributes:
        text: as it was streamed, a model's reasoning first.
        output_ids, prompt_ids: where the server gives them, else empty.
        n_new, n_prompt: tokens, as the server counts them.
        finish_reason: ``eos`` or ``length``.
        ttft_s: from the request to the first token; ``last_s``: to the last one, which may be an
            end token without text.
        bursts: seconds from the request to each arrival of tokens; what arrives within a
            millisecond is one, as the accepted tokens of a step are.
        arrived: ids of each event that brought some.
        counters: the events' parts that hold counters, in the server's words.
    """

    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    n_new: int = 0
    n_prompt: int = 0
    finish_reason: str = ""
    ttft_s: float = 0.0
    last_s: float = 0.0
    bursts: list[float] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    counters: dict[str, object] = field(default_factory=dict)

    @property
    def decode_s(self) -> float:
        return self.last_s - self.ttft_s


# Parts of events that hold counters; see `specbench.servers.counters.TABLE`.
_COUNTERS = ("metrics", "sglext", "meta_info", "timings")


def read_answer(events: Iterable[tuple[float, object]], longest: int = _MOST_ID) -> Answer:
    """Put an answer's events together: of OpenAI's chat interface, or llama.cpp's own.

    Args:
        longest: new tokens that were asked for at most.

    Raises:
        NoAnswer: the stream ended without saying why, is not an answer, or counts what cannot be.
    """
    answer = Answer()
    parts: list[str] = []
    reasoning: list[str] = []
    arrivals, pieces, ended = 0, 0, 0.0
    thinks: bool | None = None
    for at, event in events:
        if not isinstance(event, Mapping):
            raise NoAnswer("malformed", f"an event is {event!r:.60}, not an object", again=True)
        if event.get("error"):
            raise NoAnswer("error", f"the server broke off: {event['error']!r:.200}", again=True)
        for name in _COUNTERS:
            if isinstance(event.get(name), Mapping):
                answer.counters[name] = event[name]
        _take_usage(answer, event.get("usage"))
        _take_ids(answer.prompt_ids, event.get("prompt_token_ids"), replace=True)
        choice = _choice(event)
        if choice is None:
            continue
        if isinstance(choice.get("meta_info"), Mapping):
            answer.counters["meta_info"] = choice["meta_info"]
        delta = choice.get("delta") if isinstance(choice.get("delta"), Mapping) else choice
        assert isinstance(delta, Mapping)
        said = _text(delta, "content")
        thought = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        before = len(answer.output_ids)
        _take_ids(answer.output_ids, choice.get("token_ids", choice.get("tokens")))
        if brought := len(answer.output_ids) - before:
            answer.arrived.append(brought)
        if said or thought or brought:
            answer.ttft_s = answer.ttft_s or at
            if not answer.bursts or at - answer.last_s > _TOGETHER_S:
                answer.bursts.append(at)
            answer.last_s = at
            arrivals += 1
            if said or thought:
                # One token may end the reasoning in one event and begin the answer in the next.
                pieces += thinks in (None, not said)
                thinks = not said
            parts.append(said)
            reasoning.append(thought)
        reason = choice.get("finish_reason") or choice.get("stop_type")
        if isinstance(reason, str) and reason not in ("", "none"):
            answer.finish_reason = _REASONS.get(reason, reason)
            ended = at
        _take_own(answer, choice)
    answer.text = "".join([*reasoning, *parts])
    if answer.ttft_s and answer.finish_reason == "eos" and len(answer.output_ids) < answer.n_new:
        answer.last_s = ended  # of an end token without text and id only the end is seen
    _check(answer, arrivals)
    _check_counts(answer, pieces, longest)
    try:
        parse_json(json.dumps([answer.text, answer.counters]).encode())
    except (ValueError, RecursionError) as error:
        raise NoAnswer("malformed", f"no file can hold the answer: {error}", again=True) from None
    return answer


def _choice(event: Said) -> Said | None:
    choices = event.get("choices")
    if choices is None:  # llama.cpp's own interface has one answer, at the top
        return event if "content" in event or "stop" in event else None
    if not isinstance(choices, list):
        raise NoAnswer("malformed", f"choices is {choices!r:.60}, not a list", again=True)
    first = choices[0] if choices else None
    return first if isinstance(first, Mapping) else None


def _take_usage(answer: Answer, usage: object) -> None:
    if isinstance(usage, Mapping):
        answer.n_new = _tokens(usage, "completion_tokens", answer.n_new)
        answer.n_prompt = _tokens(usage, "prompt_tokens", answer.n_prompt)


def _take_own(answer: Answer, event: Said) -> None:
    """The counts of llama.cpp's own interface."""
    answer.n_new = _tokens(event, "tokens_predicted", answer.n_new)
    answer.n_prompt = _tokens(event, "tokens_evaluated", answer.n_prompt)


def _take_ids(into: list[int], ids: object, *, replace: bool = False) -> None:
    if not isinstance(ids, list) or not ids:
        return
    if not all(type(i) is int and 0 <= i < _MOST_ID for i in ids):
        raise NoAnswer("malformed", f"token ids are {ids!r:.60}", again=True)
    into[:] = ids if replace else [*into, *ids]


def _text(node: Said, key: str) -> str:
    value = node.get(key)
    return value if isinstance(value, str) else ""


def _tokens(said: Said, name: str, before: int) -> int:
    """A number of tokens as an event says it, or what was said ``before`` where it does not.

    Raises:
        NoAnswer: there cannot be so many.
    """
    if said.get(name) is None:
        return before
    count = whole(said[name])
    if count is None:
        raise _miscounted(f"{name} is {said[name]!r:.60}, which is no number of tokens")
    if 0 < count < before:
        raise _miscounted(f"{name} was {before}, and then {count}")
    return count or before


def _miscounted(words: str) -> NoAnswer:
    return NoAnswer("bad_count", words, again=False)


def _check(answer: Answer, arrivals: int) -> None:
    """Refuse what cannot be measured.

    Args:
        arrivals: events that brought tokens.

    Raises:
        NoAnswer: says what is missing.
    """
    if not answer.finish_reason:
        raise NoAnswer("cut", "the stream ended without a finish_reason", again=True)
    if answer.finish_reason not in _REASONS.values():
        words = f"the answer ended with finish_reason={answer.finish_reason!r}"
        raise NoAnswer("ended", words, again=False)
    if not answer.last_s:
        raise NoAnswer("empty", "the answer has no text", again=False)
    if not answer.n_new:
        raise NoAnswer("no_count", "the server does not say how many tokens it made", again=False)
    # Of two tokens the second may be the end token, which comes without text.
    at_once = arrivals == 1 and answer.n_new > 2
    if answer.n_new > 1 and (at_once or not answer.decode_s > 0):
        words = f"all {answer.n_new} tokens came at once: the server does not stream"
        raise NoAnswer("not_streamed", words, again=False)


def _check_counts(answer: Answer, pieces: int, longest: int) -> None:
    """Refuse counts that the server cannot have made.

    Args:
        pieces: events that brought text, each of one token or more.

    Raises:
        NoAnswer: says which.
    """
    n_new, n_ids = answer.n_new, len(answer.output_ids)
    if n_new > longest:
        raise _miscounted(f"the server says {n_new} tokens, and was asked for {longest} at most")
    # An end token has no text, and some servers give no id for it either.
    if n_ids and not n_new - 1 <= n_ids <= n_new:
        raise _miscounted(f"{n_ids} token ids for {n_new} tokens")
    # Text that was held back may come by itself in the end.
    if pieces > n_new + 1:
        raise _miscounted(
            f"the server says {n_new} tokens, and sent {pieces} pieces of text. Where a proxy cuts "
            "the stream anew, ask the server itself: server.url=..."
        )
    # Each token writes a byte at least, but for an end token and the few that have no text.
    most = len(answer.text.encode(errors="replace")) + _SILENT
    if not n_ids and n_new > most:
        raise _miscounted(
            f"the server says {n_new} tokens for a text of {most - _SILENT} bytes: it counts what "
            "the answer does not show"
        )
    check_prompt(answer, len(answer.prompt_ids))


def check_prompt(answer: Answer, n_ids: int) -> None:
    """Take the number of a prompt's ids, where these are known, as its number of tokens.

    Raises:
        NoAnswer: the server says another one.
    """
    if n_ids and answer.n_prompt not in (0, n_ids):
        raise _miscounted(f"the server says {answer.n_prompt} prompt tokens, of {n_ids} ids")
    answer.n_prompt = n_ids or answer.n_prompt
