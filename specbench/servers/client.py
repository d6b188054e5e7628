"""One server over HTTP: what went wrong in one word, and whether asking again may help."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from specbench.errors import CaseFailed, ConfigurationError, first_line

_LONGEST_LINE = 1 << 20
_LONGEST_MESSAGE = 300
_QUICK_S = 10.0  # for what needs no model
# Everything that a connection can throw; ValueError: a header or URL that cannot be sent.
_BROKEN = (OSError, httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError)


class NoAnswer(CaseFailed):
    """A question has no whole answer.

    Attributes:
        kind: ``refused``, ``cut``, ``timeout``, ``http_<status>``, ``malformed``, ``empty``, …
        again: whether asking again may help.
        wait_s: how long the server asked to wait, if it did.
    """

    def __init__(self, kind: str, message: str, *, again: bool, wait_s: float = 0.0) -> None:
        super().__init__(kind, message)
        self.again, self.wait_s = again, wait_s


@dataclass(frozen=True, slots=True)
class Client:
    """Asks the server at ``url`` (with or without the ``/v1`` of OpenAI's interface).

    Attributes:
        key: sent as a bearer token where there is one; it is part of no message.
        timeout_s: longest that one answer may take, from the request on.
    """

    url: str
    timeout_s: float
    key: str = ""
    _http: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        http = httpx.Client(
            # A connection for each request: none is found closed when the next one is sent.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # no proxy stands between the clock and the server
            verify=ssl.create_default_context() if self.url.startswith("https") else False,
        )
        object.__setattr__(self, "_http", http)

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def local(self) -> bool:
        """Whether the server is on this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def get(self, path: str) -> bytes:
        """The body at a path of the server, OpenAI's prefix left out.

        Raises:
            NoAnswer: it cannot be had.
        """
        return b"".join(chunk for _, chunk in self._receive("GET", path, _QUICK_S))

    def get_json(self, path: str) -> object:
        return _parsed(self.get(path))

    def post_json(self, path: str, body: Mapping[str, object]) -> object:
        """The answer's JSON; for quick questions."""
        chunks = self._receive("POST", path, self.timeout_s, body)
        return _parsed(b"".join(chunk for _, chunk in chunks))

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[tuple[float, object]]:
        """Server-sent events with the seconds since the request was sent.

        Ends behind ``[DONE]``, or where the server closes the stream.

        Raises:
            NoAnswer: it broke off, took too long, or said what is not JSON.
        """
        return read_events(_lines(self._receive("POST", path, self.timeout_s, body)))

    def _receive(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, object] | None = None
    ) -> Iterator[tuple[float, bytes]]:
        """When the request was sent, and a part of the answer's body; failures are `NoAnswer`."""
        sent = time.perf_counter()

        def note(event: str, _: object) -> None:
            nonlocal sent
            if event.endswith("send_request_headers.started"):  # the connection stands
                sent = time.perf_counter()

        parts = urlsplit(self.url)
        root = parts.path.rstrip("/").removesuffix("/v1")
        headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        try:
            if self.key:
                headers[b"Authorization"] = f"Bearer {self.key}".encode("latin-1")
            with self._http.stream(
                method,
                f"{parts.scheme}://{parts.netloc}{root}{path}",
                content=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout_s,
                extensions={"trace": note},
            ) as response:
                if response.status_code != 200:
                    raise self._refusal(response)
                for chunk in response.iter_raw():
                    if time.perf_counter() - sent > timeout_s:
                        raise TimeoutError
                    yield sent, chunk
        except _BROKEN as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> NoAnswer:
        if isinstance(error, TimeoutError | httpx.TimeoutException):
            words = f"{self.url} took longer than server.timeout_s={self.timeout_s:g}"
            return NoAnswer("timeout", words, again=True)
        cause: BaseException = error
        while before := cause.__cause__ or cause.__context__:
            cause = before
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return NoAnswer("refused", f"no server answers at {self.url}", again=True)
        why = self._without_key(first_line(error))
        return NoAnswer("cut", f"the answer of {self.url} broke off: {why}", again=True)

    def _refusal(self, response: httpx.Response) -> NoAnswer:
        status, body = response.status_code, b""
        with contextlib.suppress(*_BROKEN):
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _LONGEST_LINE:
                    break
        return NoAnswer(
            f"http_{status}",
            f"{self.url} answered {status}: {self._without_key(_message(body))}",
            again=status == 429 or status >= 500 or status == 408,
            wait_s=_seconds(response.headers.get("Retry-After")),
        )

    def _without_key(self, message: str) -> str:
        for shown in (self.key, repr(self.key)[1:-1]):
            message = message.replace(shown or "\0", "…")
        return message


def _lines(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The lines of a body, with the seconds from the request until each was there."""
    rest, sent = b"", 0.0
    for sent, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield time.perf_counter() - sent, line.strip()
        if len(rest) >= _LONGEST_LINE:
            raise NoAnswer("malformed", "the server sent a line without an end", again=True)
    if rest:
        yield time.perf_counter() - sent, rest.strip()


def read_events(lines: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, object]]:
    """The JSON of server-sent events, up to ``[DONE]``, each with its line's time.

    Raises:
        NoAnswer: an event is not JSON.
    """
    for at, line in lines:
        if not line.startswith(b"data:"):
            continue  # comments keep the connection open; event names say nothing
        said = line[len(b"data:") :].strip()
        if said == b"[DONE]":
            return
        yield at, _parsed(said)


def _parsed(said: bytes) -> object:
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        start = said[:40].decode(errors="replace")
        raise NoAnswer(
            "malformed", f"the server's answer is not JSON: {start!r}", again=True
        ) from None


def _message(said: bytes) -> str:
    """What a server says is wrong, whichever way it says it."""
    try:
        node = json.loads(said)
    except (ValueError, RecursionError):
        node = said.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(node, dict) and key in node:
            node = node[key]
    return " ".join(str(node).split())[:_LONGEST_MESSAGE] or "nothing"


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 0.0), 0.0), 60.0)
    except ValueError:
        return 0.0  # a date: our own waiting has to do


def check_url(key: str, url: str | None) -> str:
    """An address that can be asked, and that may be written down.

    Raises:
        ConfigurationError: it is none, or holds a name and password.
    """
    parts = urlsplit(url or "")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(
            f"{key}={url} must be a server's address. Type e.g. {key}=http://127.0.0.1:8000/v1."
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(
            f"{key} holds more than an address, and would be written into the results. Put the "
            "key into an environment variable and type server.api_key_env=NAME."
        )
    return (url or "").rstrip("/")
