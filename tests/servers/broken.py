"""Ways in which a server can be broken, each under a name: what it writes instead of an answer."""

import gzip
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from tests.servers.fake import KEY

ANSWER = "/v1/chat/completions"
_PAUSE_S = 0.01
_CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Broken:
    """One way.

    Attributes:
        kind: of the error that the answer becomes; None: it is answered all the same.
        change: of a sound stream's events, each an object, or bytes as they are sent.
        raw: the bytes written instead of anything else; ``pause_s`` lies between them.
        path: where; all others answer soundly.
        wait_s: what is waited before the question is asked again; None: it is not asked again.
        engine: which one it pretends to be.
    """

    kind: str | None
    change: Callable | None = None
    raw: Callable | None = None
    path: str = ANSWER
    pause_s: float = 0.0
    wait_s: float | None = None
    engine: str = "vllm"
    accepted: tuple | None = None


def last_usage(**said):
    def change(events):
        return [{**e, "usage": {**e["usage"], **said}} if "usage" in e else e for e in events]

    return change


def third(new):
    """The third event is another one, or what a function makes of it."""
    return lambda events: [
        (new(e) if callable(new) else new) if i == 3 else e for i, e in enumerate(events)
    ]


def of_choice(**said):
    return third(lambda event: {**event, "choices": [{**event["choices"][0], **said}]})


def delta(text):
    return of_choice(delta={"content": text})


def of_reason(written):
    return lambda events: [
        json.loads(json.dumps(event).replace('"length"', written)) for event in events
    ]


def without_ids(events):
    for event in events:
        event.pop("prompt_token_ids", None)
        for choice in event["choices"]:
            choice.pop("token_ids", None)
    return events


def counted(place, **said):
    """Counters of the drafts in the last event."""

    def change(events):
        return [*events[:-1], {**events[-1], **{place: said}}]

    return change


def response(status, body=b"", *headers):
    lines = [f"HTTP/1.1 {status}".encode(), *headers, b"Content-Length: %d" % len(body), b"", body]
    return lambda: [b"\r\n".join(lines)]


def endless(start, again):
    return lambda: itertools.chain([start], itertools.repeat(again))


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


TOKEN = event({"choices": [{"index": 0, "delta": {"content": "w1 "}, "finish_reason": None}]})
_HEAD = b"HTTP/1.1 200 OK\r\n"
_JSON = _HEAD + b"Content-Type: application/json\r\n"
_BOMB = gzip.compress(bytes(1 << 24))
_SPLIT = [KEY[i : i + 3] for i in range(0, len(KEY), 3)]
_DRAFTED = {"num_spec_steps": 3, "num_draft_tokens": 12, "num_accepted_draft_tokens": 7}


def echoed(how):
    return response("400 Bad", json.dumps({"error": {"message": how}}).encode())


COUNTS = {
    f"{name}={value!r:.20}": Broken("bad_count", last_usage(**{name: value}))
    for name in ("completion_tokens", "prompt_tokens")
    for value in (
        *(-1, 2**31, 2**63, 10**400, 11.5, float("nan"), float("inf"), float("-inf"), 1e300),
        *(True, "12", [12], {"n": 12}),
    )
} | {
    "more than asked": Broken("bad_count", last_usage(completion_tokens=100)),
    "fewer than ids": Broken("bad_count", last_usage(completion_tokens=5)),
    "more than ids": Broken("bad_count", last_usage(completion_tokens=15)),
    "other than the prompt's ids": Broken("bad_count", last_usage(prompt_tokens=6)),
    "fewer than pieces": Broken(
        "bad_count", lambda events: last_usage(completion_tokens=5)(without_ids(events))
    ),
    "no count": Broken("no_count", last_usage(completion_tokens=None)),
    "none at all": Broken("no_count", last_usage(completion_tokens=0)),
    "falling counts": Broken(
        "bad_count", lambda events: [{**events[0], "usage": {"completion_tokens": 16}}, *events[1:]]
    ),
    "1e999": Broken(
        "bad_count",
        lambda events: [*events[:-1], event(events[-1]).replace(b'tokens": 12', b'tokens": 1e999')],
    ),
}

IDS = {
    f"id {value!r:.20}": Broken("malformed", of_choice(token_ids=[value]))
    for value in (-1, 2**31, 1.5, True, "7", None, [7], float("nan"))
}

STREAMS = {
    **{f"event {value!r}": Broken("malformed", third(value)) for value in (None, [], 7, "x", True)},
    "choices no list": Broken("malformed", third({"choices": {"0": {}}})),
    "not json": Broken("malformed", third(b'data: {"choices": [{\n\n')),
    "not utf-8": Broken("malformed", third(b'data: {"choices": "\xff\xfe"}\n\n')),
    "half a character": Broken("malformed", delta("\ud83d")),
    "half a character in counters": Broken(
        "malformed", counted("metrics", **{"\ud83d": 1}), accepted=(2, 0, 5)
    ),
    "deep": Broken("malformed", third(b"data: " + b"[" * 100_000 + b"\n\n")),
    "deep counters": Broken(
        "malformed",
        lambda events: [
            *events[:-1],
            event({**events[-1], "metrics": "DEEP"}).replace(
                b'"DEEP"', b'{"a":' * 300 + b"1" + b"}" * 300
            ),
        ],
    ),
    "error": Broken("error", third({"error": {"message": "engine died"}})),
    "unended": Broken("cut", lambda events: events[:5]),
    "empty": Broken("cut", lambda events: []),
    "no text": Broken("empty", lambda events: without_ids([delta_gone(e) for e in events])),
    "other reason": Broken(
        "ended",
        of_reason('"content_filter"'),
    ),
    "reason is a number": Broken("cut", of_reason("7")),
    "answer after the end": Broken(None, lambda events: [*events, b"data: [DONE]\n\n", TOKEN]),
    "all at once": Broken(
        "not_streamed",
        lambda events: [
            without_ids(events)[0]
            | {"choices": [{"delta": {"content": "all of it"}, "finish_reason": "length"}]},
            events[-1],
        ],
    ),
}


def delta_gone(event):
    return {**event, "choices": [{**choice, "delta": {}} for choice in event["choices"]]}


ENDLESS = {
    "silent": Broken("timeout", raw=lambda: itertools.repeat(b""), pause_s=_PAUSE_S),
    "dripping status": Broken("timeout", raw=endless(b"HTTP/1.1 ", b""), pause_s=_PAUSE_S),
    "dripping header": Broken("timeout", raw=endless(_HEAD + b"X: ", b"x"), pause_s=_PAUSE_S),
    "dripping headers": Broken("timeout", raw=endless(_HEAD, b"X: x\r\n"), pause_s=_PAUSE_S),
    "dripping body": Broken("timeout", raw=endless(_CHUNKED, b"1\r\nd\r\n"), pause_s=_PAUSE_S),
    "dripping tokens": Broken("timeout", raw=endless(_CHUNKED, chunk(TOKEN)), pause_s=_PAUSE_S),
    "dripping comments": Broken(
        "timeout", raw=endless(_CHUNKED, chunk(b": ping\n\n")), pause_s=_PAUSE_S
    ),
    "dripping refusal": Broken(
        "http_500",
        raw=endless(_CHUNKED.replace(b"200 OK", b"500 No"), b"1\r\nd\r\n"),
        pause_s=_PAUSE_S,
    ),
    "dripping continues": Broken(
        "timeout", raw=endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), pause_s=_PAUSE_S
    ),
    "dripping chunk extension": Broken(
        "timeout", raw=endless(_CHUNKED + b"5;", b"x"), pause_s=_PAUSE_S
    ),
    "dripping trailers": Broken(
        "timeout", raw=endless(_CHUNKED + b"0\r\n", b"X: x\r\n"), pause_s=_PAUSE_S
    ),
    "endless header": Broken("cut", raw=endless(_HEAD + b"X: ", b"x" * 4096)),
    "endless headers": Broken("cut", raw=endless(_HEAD, b"X: x\r\n" * 512)),
    "endless continues": Broken(
        "too_large", raw=endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 512)
    ),
    "endless line": Broken(
        "too_large", raw=endless(_CHUNKED + chunk(b"data: "), chunk(b"x" * 60_000))
    ),
    "endless tokens": Broken("too_large", raw=endless(_CHUNKED, chunk(TOKEN * 100))),
    "endless comments": Broken("too_large", raw=endless(_CHUNKED, chunk(b": ping\n\n" * 1000))),
    "endless until closed": Broken("too_large", raw=endless(_HEAD + b"\r\n", TOKEN * 100)),
    "endless trailers": Broken("cut", raw=endless(_CHUNKED + b"0\r\n", b"X: x\r\n" * 512)),
    "endless refusal": Broken(
        "http_500", raw=endless(_CHUNKED.replace(b"200 OK", b"500 No"), chunk(b"x" * 60_000))
    ),
}

HTTP = {
    "gzip bomb": Broken("cut", raw=response("200 OK", _BOMB, b"Content-Encoding: gzip")),
    "redirect to itself": Broken(
        "http_302", raw=response("302 Found", b"", b"Location: " + ANSWER.encode())
    ),
    "switching protocols": Broken("cut", raw=response("101 Switching Protocols")),
    "no content": Broken("http_204", raw=response("204 No Content")),
    "not http": Broken("cut", raw=lambda: [b"220 mail.example ESMTP\r\n"]),
    "closed at once": Broken("cut", raw=lambda: []),
    "length too long": Broken(
        "cut", raw=lambda: [_HEAD + b"Content-Length: 999999\r\n\r\n", TOKEN]
    ),
    "negative length": Broken("cut", raw=lambda: [_HEAD + b"Content-Length: -5\r\n\r\n"]),
    "two lengths": Broken(
        "cut", raw=lambda: [_HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n"]
    ),
    "length nan": Broken("cut", raw=lambda: [_HEAD + b"Content-Length: nan\r\n\r\n"]),
    "bad chunk": Broken("cut", raw=lambda: [_CHUNKED + b"xyz\r\n"]),
    "huge chunk": Broken("cut", raw=lambda: [_CHUNKED + b"ffffffffffffffffffff\r\n", TOKEN]),
    "negative chunk": Broken("cut", raw=lambda: [_CHUNKED + b"-5\r\n"]),
    "html": Broken("cut", raw=response("200 OK", b"<html>" * 99, b"Content-Type: text/html")),
}

RETRIES = {
    f"Retry-After: {said:.12}": Broken(
        "http_429", raw=response("429 No", b"", b"Retry-After: " + said.encode()), wait_s=wait_s
    )
    for said, wait_s in {
        "nan": 0.0,
        "-nan": 0.0,
        "inf": 60.0,
        "-inf": 0.0,
        "1e999": 60.0,
        "-5": 0.0,
        "9" * 400: 60.0,
        "Wed, 21 Oct 2037 07:28:00 GMT": 0.0,
        "soon": 0.0,
        "": 0.0,
        "2.5": 2.5,
    }.items()
}

COUNTERS = (
    {
        f"counters {value!r:.12}": Broken(
            None,
            counted("metrics", speculative_decoding={**_DRAFTED, "num_draft_tokens": value}),
            accepted=(2, 0, 5),
        )
        for value in (float("nan"), float("inf"), 1e300, 10**400, -1, "12", True, None, [12])
    }
    | {
        f"timings {value!r:.12}": Broken(
            None,
            counted("timings", predicted_ms=value, draft_n=value),
            engine="other",
            accepted=(2,),
        )
        for value in (float("nan"), float("-inf"), 10**400)
    }
    | {
        f"metrics {value}": Broken(
            None,
            raw=response("200 OK", f"vllm:generation_tokens_total {value}\n".encode() * 2),
            path="/metrics",
            accepted=(2, 0, 5),
        )
        for value in ("NaN", "+Inf", "-1", "1e999", "x", "")
    }
    | {
        "metrics endless": Broken(
            None,
            raw=endless(_CHUNKED, chunk(b"x 1\n" * 1000)),
            path="/metrics",
            accepted=(2, 0, 5),
        ),
    }
)

# What of the key these show, the run must hide.
ECHOES = {
    "key in a refusal": Broken("http_400", raw=echoed(f"wrong key {KEY}")),
    "key as a header": Broken("http_400", raw=echoed(f"Authorization: Bearer {KEY}")),
    "key in a url": Broken("http_400", raw=echoed(f"?token={quote(KEY, safe='')}")),
    "key in capitals": Broken("http_400", raw=echoed(KEY.upper())),
    "half the key": Broken("http_400", raw=echoed(f"wrong key {KEY[:14]}***")),
    "key cut by us": Broken("http_400", raw=echoed("x" * 285 + KEY)),
    "key as the body": Broken("http_400", raw=response("400 Bad", KEY.encode())),
    "key in an event": Broken("error", third({"error": {"message": f"no such key {KEY}"}})),
    "key in a broken line": Broken("malformed", third(f'data: {{"{KEY}\n\n'.encode())),
    "key in a reason": Broken("ended", of_reason(json.dumps(KEY))),
    "key in an event's place": Broken("malformed", third(KEY)),
    "key in ids": Broken("malformed", of_choice(token_ids=[KEY])),
    "key as a count": Broken("bad_count", last_usage(completion_tokens=KEY)),
    "key in a header": Broken("cut", raw=lambda: [_HEAD + f"{KEY} {KEY}\r\n\r\n".encode()]),
    "key as a status": Broken("cut", raw=lambda: [f"HTTP/1.1 {KEY}\r\n\r\n".encode()]),
    "key in the text": Broken(None, delta(f"my key is {KEY}")),
    "key in pieces": Broken(
        None,
        lambda events: [
            delta_of(e, _SPLIT[i]) if i < len(_SPLIT) else e for i, e in enumerate(events)
        ],
    ),
    "key in counters": Broken(None, counted("metrics", **{KEY: [KEY, {"a": f"x{KEY}"}]})),
}


def delta_of(event, text):
    if not event["choices"]:
        return event
    first = event["choices"][0]
    return {**event, "choices": [{**first, "delta": {**first["delta"], "content": text}}]}


ALL = {
    **COUNTS,
    **IDS,
    **STREAMS,
    **ENDLESS,
    **HTTP,
    **RETRIES,
    **COUNTERS,
    **ECHOES,
}
# What a server says of itself, before anything is asked.
DESCRIPTIONS = {
    "endless models": (endless(_CHUNKED, chunk(b"x" * 60_000)), 0.0),
    "dripping models": (
        endless(_JSON + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n"),
        0.01,
    ),
    "dripping models' header": (endless(_JSON + b"X: ", b"x"), 0.01),
    "models in a redirect": (response("302 Found", b"", b"Location: /v1/models"), 0.0),
    "models no json": (response("200 OK", b"<html>"), 0.0),
    "models deep": (response("200 OK", b"[" * 200_000), 0.0),
    "models of half a character": (response("200 OK", b'{"data": [{"id": "\\ud800"}]}'), 0.0),
    "models named by the key": (
        response("200 OK", json.dumps({"data": [{"id": KEY}, {"id": f"x{KEY}"}]}).encode()),
        0.0,
    ),
    "models refused with the key": (echoed(f"Bearer {KEY}"), 0.0),
    "models of numbers": (response("200 OK", b'{"data": [{"id": 7}, 7, null]}'), 0.0),
}
