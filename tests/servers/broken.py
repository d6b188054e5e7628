"""Ways in which a server can be broken, each under a name, with its output."""

import gzip
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

from tests.servers.fake import KEY

ANSWER = "/v1/chat/completions"
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
        accepted: draft tokens accepted, where it drafts.
    """

    kind: str | None
    change: Callable | None = None
    raw: Callable | None = None
    path: str = ANSWER
    pause_s: float = 0.0
    wait_s: float | None = None
    accepted: tuple | None = None


def usage(**counts):
    return lambda events: [
        {**e, "usage": {**e["usage"], **counts}} if "usage" in e else e for e in events
    ]


def third(new):
    """Replace the third event, or change it by a function."""
    return lambda events: [
        (new(e) if callable(new) else new) if i == 3 else e for i, e in enumerate(events)
    ]


def of_choice(**fields):
    return third(lambda event: {**event, "choices": [{**event["choices"][0], **fields}]})


def of_reason(written):
    return lambda events: [
        json.loads(json.dumps(event).replace('"length"', written)) for event in events
    ]


def of_text(text):
    """Set every event's text by a function of its index."""

    def change(events):
        for i, event in enumerate(events):
            for choice in event["choices"]:
                choice["delta"] = {"content": text(i)}
                choice.pop("token_ids", None)
        return events

    return change


def counted(**counters):
    return lambda events: [*events[:-1], {**events[-1], "metrics": counters}]


def response(status, body=b"", *headers):
    lines = [f"HTTP/1.1 {status}".encode(), *headers, b"Content-Length: %d" % len(body), b"", body]
    return lambda: [b"\r\n".join(lines)]


def endless(start, again):
    return lambda: itertools.chain([start], itertools.repeat(again))


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def echoed(how):
    return response("400 Bad", json.dumps({"error": {"message": how}}).encode())


TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "w1 "}}]}\n\n'
_DRAFTED = {"num_spec_steps": 3, "num_draft_tokens": 12, "num_accepted_draft_tokens": 7}

STREAMS = {
    **{
        f"{name}={value!r:.20}": Broken("bad_count", usage(**{name: value}))
        for name in ("completion_tokens", "prompt_tokens")
        for value in (-1, 2**31, 11.5, float("nan"), 1e300, True, "12", [12])
    },
    "more than asked": Broken("bad_count", usage(completion_tokens=100)),
    "fewer than ids": Broken("bad_count", usage(completion_tokens=5)),
    "more than ids": Broken("bad_count", usage(completion_tokens=15)),
    "more than bytes": Broken("bad_count", of_text(lambda i: "a" if i < 3 else "")),
    "no count": Broken("no_count", usage(completion_tokens=None)),
    **{
        f"id {value!r:.20}": Broken("malformed", of_choice(token_ids=[value]))
        for value in (-1, 2**31, 1.5, True, "7", None, float("nan"))
    },
    **{f"event {value!r}": Broken("malformed", third(value)) for value in (None, [], 7, "x", True)},
    "choices no list": Broken("malformed", third({"choices": {"0": {}}})),
    "not json": Broken("malformed", third(b'data: {"choices": [{\n\n')),
    "half a character": Broken("malformed", of_choice(delta={"content": "\ud83d"})),
    "deep": Broken("malformed", third(b"data: " + b"[" * 100_000 + b"\n\n")),
    "error": Broken("error", third({"error": {"message": "engine died"}})),
    "unended": Broken("cut", lambda events: events[:5]),
    "empty": Broken("cut", lambda events: []),
    "no text": Broken("empty", of_text(lambda i: "")),
    "other reason": Broken("ended", of_reason('"content_filter"')),
    "reason is a number": Broken("cut", of_reason("7")),
    "answer after the end": Broken(None, lambda events: [*events, b"data: [DONE]\n\n", TOKEN]),
    "a line's end in a text": Broken(None, of_text(lambda i: "a\u2028b\x85")),
}

HTTP = {
    "silent": Broken("timeout", raw=lambda: itertools.repeat(b""), pause_s=0.01),
    "dripping tokens": Broken("timeout", raw=endless(_CHUNKED, chunk(TOKEN)), pause_s=0.01),
    "dripping comments": Broken("timeout", raw=endless(_CHUNKED, chunk(b": x\n\n")), pause_s=0.01),
    "endless tokens": Broken("too_large", raw=endless(_CHUNKED, chunk(TOKEN * 100))),
    "endless refusal": Broken(
        "too_large", raw=endless(_CHUNKED.replace(b"200 OK", b"500 No"), chunk(b"x" * 60_000))
    ),
    "gzip bomb": Broken(
        "cut", raw=response("200 OK", gzip.compress(bytes(1 << 24)), b"Content-Encoding: gzip")
    ),
    "redirect to itself": Broken(
        "http_302", raw=response("302 Found", b"", b"Location: " + ANSWER.encode())
    ),
    "not http": Broken("cut", raw=lambda: [b"220 mail.example ESMTP\r\n"]),
    "closed at once": Broken("cut", raw=lambda: []),
    "length too long": Broken(
        "cut", raw=lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", TOKEN]
    ),
    "bad chunk": Broken("cut", raw=lambda: [_CHUNKED + b"xyz\r\n"]),
    "html": Broken("cut", raw=response("200 OK", b"<html>" * 99, b"Content-Type: text/html")),
    **{
        f"Retry-After: {wait}": Broken(
            "http_429", raw=response("429 No", b"", b"Retry-After: " + wait.encode()), wait_s=wait_s
        )
        for wait, wait_s in {
            "nan": 0.0, "inf": 60.0, "-5": 0.0, "9" * 400: 60.0, "2.5": 2.5,
            "Wed, 21 Oct 2037 07:28:00 GMT": 0.0,
        }.items()
    },
}  # fmt: skip

# Contradictory counters of drafts do not fail the answer.
COUNTERS = {
    **{
        f"counters {value!r:.12}": Broken(
            None,
            counted(speculative_decoding={**_DRAFTED, "num_draft_tokens": value}),
            accepted=(2, 0, 5),
        )
        for value in (float("nan"), float("inf"), -1, "12", None)
    },
    **{
        f"metrics {value}": Broken(
            None,
            raw=response("200 OK", f"vllm:generation_tokens_total {value}\n".encode() * 2),
            path="/metrics",
            accepted=(2, 0, 5),
        )
        for value in ("NaN", "-1", "1e999", "")
    },
}

# Where these show the key, the run must hide it.
ECHOES = {
    "key in a refusal": Broken("http_400", raw=echoed(f"wrong key {KEY}")),
    "key cut by us": Broken("http_400", raw=echoed("x" * 285 + KEY)),
    "key in an event": Broken("error", third({"error": {"message": f"no such key {KEY}"}})),
    "key in a broken line": Broken("malformed", third(f'data: {{"{KEY}\n\n'.encode())),
    "key in a reason": Broken("ended", of_reason(json.dumps(KEY))),
    "key as a count": Broken("bad_count", usage(completion_tokens=KEY)),
    "key as a status": Broken("cut", raw=lambda: [f"HTTP/1.1 {KEY}\r\n\r\n".encode()]),
    "key in the text": Broken(None, of_choice(delta={"content": f"my key is {KEY}"})),
    "key in pieces": Broken(None, of_text(lambda i: KEY[3 * i : 3 * i + 3])),
    "key in counters": Broken(None, counted(**{KEY: [KEY, {"a": f"x{KEY}"}]})),
}

ALL = STREAMS | HTTP | COUNTERS | ECHOES
# A server's descriptions of itself, before the first request.
DESCRIPTIONS = {
    "endless models": endless(_CHUNKED, chunk(b"x" * 60_000)),
    "models in a redirect": response("302 Found", b"", b"Location: /v1/models"),
    "models no json": response("200 OK", b"<html>"),
    "models of half a character": response("200 OK", b'{"data": [{"id": "\\ud800"}]}'),
    "several models": response("200 OK", b'{"data": [{"id": "a"}, {"id": "b"}]}'),
    "models refused with the key": echoed(f"Bearer {KEY}"),
    "models of numbers": response("200 OK", b'{"data": [{"id": 7}, 7, null]}'),
}
