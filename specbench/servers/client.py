"""One server over HTTP: its errors by kind, and whether a retry may help."""

from __future__ import annotations

import functools
import json
import math
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping

import httpx

from specbench.errors import CaseFailed, ConfigurationError, first_line

_HIDDEN = "…"
_SHORTEST_KEY = 8  # shorter ones (EMPTY, none, x) are not secret, and occur in answers
_LONGEST_LINE = 1 << 20
_LONGEST_MESSAGE = 300
_QUICK_S = 10.0  # for what needs no model
_MB = 1e6


class NoAnswer(CaseFailed):
    """A request got no complete answer.

    Attributes:
        kind: ``refused``, ``cut``, ``timeout``, ``too_large``, ``http_<status>``, ``malformed``,
            ``bad_count``, ``empty``, …
        again: whether a retry may help.
        wait_s: the delay that the server requested, if any.
    """

    def __init__(self, kind: str, message: str, *, again: bool, wait_s: float = 0.0) -> None:
        super().__init__(kind, message)
        self.again, self.wait_s = again, wait_s


@functools.cache
def _tls() -> ssl.SSLContext:
    """Read the machine's certificates, which takes 20 ms, once for all clients."""
    return ssl.create_default_context()


class Client:
    """Asks the server at ``url`` (with or without the ``/v1`` of OpenAI's interface).

    Args:
        timeout_s: longest that an answer may take as a whole, or be silent.
        answer_mb: megabytes that the body of an answer may have.
        key: sent as a bearer token where there is one, and hidden in all texts of the server.
    """

    def __init__(self, url: str, timeout_s: float, answer_mb: float, key: str = "") -> None:
        self.url, self.timeout_s, self.answer_mb, self._key = url, timeout_s, answer_mb, key
        self._root = url.rstrip("/").removesuffix("/v1")
        host = httpx.URL(url).host
        self.local = host in ("localhost", "::1") or host.startswith("127.")
        self._http = httpx.Client(
            verify=_tls(),
            trust_env=False,  # a proxy would be measured, too
            # A connection for each request: none is closed when the next one is sent.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def hide(self, text: str) -> str:
        return text.replace(self._key, _HIDDEN) if len(self._key) >= _SHORTEST_KEY else text

    def get(self, path: str) -> str:
        """Get the body at a path of the server, OpenAI's prefix left out (NoAnswer without one)."""
        return self._body(self._receive("GET", path, min(_QUICK_S, self.timeout_s)))

    def get_json(self, path: str) -> object:
        return _parsed(self.get(path))

    def post_json(self, path: str, body: Mapping[str, object]) -> object:
        return _parsed(self._body(self._receive("POST", path, self.timeout_s, body)))

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[tuple[float, object]]:
        """Yield server-sent events with the seconds since the request was sent.

        Ends after ``[DONE]``, or when the server closes the stream.

        Raises:
            NoAnswer: it broke off, took too long, is too large, or sent something that is not JSON.
        """
        chunks = self._receive("POST", path, self.timeout_s, body)
        return read_events((at, self.hide(line)) for at, line in _lines(chunks))

    def _body(self, chunks: Iterable[tuple[float, bytes]]) -> str:
        return self.hide(b"".join(chunk for _, chunk in chunks).decode(errors="replace"))

    def _receive(
        self, method: str, path: str, limit_s: float, body: Mapping[str, object] | None = None
    ) -> Iterator[tuple[float, bytes]]:
        """Yield the parts of an answer's body with the seconds since the request was sent."""
        start = sent = time.perf_counter()

        def trace(event: str, _: object) -> None:
            nonlocal sent
            if event.endswith("send_request_headers.started"):  # there is a connection now
                sent = time.perf_counter()

        headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        refusal, size = bytearray(), 0
        try:
            if self._key:
                headers[b"Authorization"] = f"Bearer {self._key}".encode("latin-1")
            with self._http.stream(
                method,
                self._root + path,
                content=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=limit_s,
                extensions={"trace": trace},
            ) as response:
                # Raw: httpx's lines end at characters that may occur inside JSON, and a
                # decompressed part has no limit of size.
                for chunk in response.iter_raw():
                    now, size = time.perf_counter(), size + len(chunk)
                    if now - start > limit_s:
                        raise httpx.ReadTimeout("as a whole")
                    if size > self.answer_mb * _MB:
                        limit = f"{self.answer_mb:g} MB (server.answer_mb)"
                        message = f"{self.url} sent more than {limit}"
                        raise NoAnswer("too_large", message, again=False)
                    if response.status_code == 200:
                        yield now - sent, chunk
                    else:
                        refusal += chunk
                if response.status_code != 200:
                    raise self._refusal(response, refusal.decode(errors="replace"))
        except httpx.TimeoutException:
            hint = " (server.timeout_s)" if limit_s == self.timeout_s else ""
            message = f"{self.url} took longer than {limit_s:g} s{hint}"
            raise NoAnswer("timeout", message, again=True) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            refused, reason = isinstance(error, httpx.ConnectError), self._clean(first_line(error))
            begin = "no server answers at {}" if refused else "the answer of {} broke off"
            message = f"{begin.format(self.url)}: {reason}"
            raise NoAnswer("refused" if refused else "cut", message, again=True) from None

    def _clean(self, text: str) -> str:
        return printable(self.hide(text))

    def _refusal(self, response: httpx.Response, text: str) -> NoAnswer:
        status = response.status_code
        reason = self._clean(_message(text))[:_LONGEST_MESSAGE] or "nothing"
        return NoAnswer(
            f"http_{status}",
            f"{self.url} answered {status}: {reason}",
            again=status in (408, 429) or status >= 500,
            wait_s=_seconds(response.headers.get("retry-after", "")),
        )


def printable(text: str) -> str:
    """Put a server's text in one line that a terminal can show and a file can hold."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _lines(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    rest, at = b"", 0.0
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield at, line.decode(errors="replace")
        if len(rest) > _LONGEST_LINE:
            raise NoAnswer("malformed", "the server sent a line without an end", again=True)
    yield at, rest.decode(errors="replace")


def read_events(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[float, object]]:
    """Read the JSON of server-sent events, up to ``[DONE]``, each with its line's time.

    Raises:
        NoAnswer: an event is not JSON.
    """
    for at, line in lines:
        if line.startswith("data:"):  # comments keep the connection open; names say nothing
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield at, _parsed(data)


def _parsed(text: str) -> object:
    """Parse a JSON text; numbers that no file can hold (NaN, 1e999) stay texts."""
    try:
        return json.loads(text, parse_constant=str, parse_float=_number)
    except (ValueError, RecursionError):
        message = f"the server's answer is not JSON: {text[:_LONGEST_MESSAGE]!r}"
        raise NoAnswer("malformed", message, again=True) from None


def _number(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text


def _message(text: str) -> str:
    """Extract the error message from a server's reply, whichever field has it."""
    try:
        node = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for key in ("error", "message", "detail"):
        if isinstance(node, dict):
            node = node.get(key, node)
    return node if isinstance(node, str) else json.dumps(node, ensure_ascii=False)


def _seconds(text: str) -> float:
    """Parse the seconds of ``Retry-After``; 0 for a date or nonsense: our own wait then applies."""
    try:
        return max(0.0, float(text))  # NaN is not above 0
    except ValueError:
        return 0.0


def check_url(key: str, url: str | None) -> str:
    """Check that an address is usable, and holds nothing secret.

    Raises:
        ConfigurationError: it is not an address, or holds a name and password.
    """
    try:
        parts = httpx.URL(url or "")
        usable = parts.scheme in ("http", "https") and bool(parts.host) and parts.port != 0
    except httpx.InvalidURL:
        usable = False
    if url is None or not usable or not url.isascii() or " " in url:
        raise ConfigurationError(
            f"{key} must be a server's address, got {url}. Type e.g. "
            f"{key}=http://127.0.0.1:8000/v1."
        )
    if parts.userinfo or parts.query or parts.fragment:
        raise ConfigurationError(
            f"{key} holds more than an address, and would be written into the results. Put the "
            "key into an environment variable and type server.api_key_env=NAME."
        )
    return url.rstrip("/")
