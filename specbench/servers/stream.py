"""From a streamed answer to its tokens, times and counters, whichever server wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specbench.servers.client import NoAnswer
from specbench.servers.counters import Said

_MOST_ID = 2**31
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
    counters: dict[str, object] = field(default_factory=dict)

    @property
    def decode_s(self) -> float:
        return self.last_s - self.ttft_s


# Parts of events that hold counters; see `specbench.servers.counters.TABLE`.
_COUNTERS = ("metrics", "sglext", "meta_info", "timings")


def read_answer(events: Iterable[tuple[float, object]]) -> Answer:
    """Put an answer's events together: of OpenAI's chat interface, or llama.cpp's own.

    Raises:
        NoAnswer: the stream ended without saying why, or is not an answer.
    """
    answer = Answer()
    parts: list[str] = []
    reasoning: list[str] = []
    arrivals, ended = 0, 0.0
    for at, event in events:
        if not isinstance(event, Mapping):
            raise NoAnswer("malformed", f"an event is {event!r:.60}, not an object", again=True)
        if "error" in event:
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
        if said or thought or len(answer.output_ids) > before:
            answer.ttft_s = answer.ttft_s or at
            answer.last_s = at
            arrivals += 1
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
        answer.n_new = _tokens(usage.get("completion_tokens")) or answer.n_new
        answer.n_prompt = _tokens(usage.get("prompt_tokens")) or answer.n_prompt


def _take_own(answer: Answer, event: Said) -> None:
    """The counts of llama.cpp's own interface."""
    answer.n_new = _tokens(event.get("tokens_predicted")) or answer.n_new
    answer.n_prompt = _tokens(event.get("tokens_evaluated")) or answer.n_prompt


def _take_ids(into: list[int], ids: object, *, replace: bool = False) -> None:
    if not isinstance(ids, list) or not ids:
        return
    if not all(type(i) is int and 0 <= i < _MOST_ID for i in ids):
        raise NoAnswer("malformed", f"token ids are {ids!r:.60}", again=True)
    into[:] = ids if replace else [*into, *ids]


def _text(node: Said, key: str) -> str:
    value = node.get(key)
    return value if isinstance(value, str) else ""


def _tokens(value: object) -> int:
    return value if type(value) is int and 0 <= value < _MOST_ID else 0


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
    # An end token has no text, and some servers give no id for it either.
    if answer.output_ids and not answer.n_new - 1 <= len(answer.output_ids) <= answer.n_new:
        words = f"{len(answer.output_ids)} token ids for {answer.n_new} tokens"
        raise NoAnswer("malformed", words, again=True)
    if answer.prompt_ids and len(answer.prompt_ids) != answer.n_prompt:
        answer.n_prompt = len(answer.prompt_ids)
