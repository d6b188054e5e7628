"""One server over HTTP: what went wrong in one word, and whether asking again may help."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specbench.errors import CaseFailed, ConfigurationError, first_line

_LONGEST_LINE = 1 << 20
_LONGEST_MESSAGE = 300
_QUICK_S = 10.0  # for what needs no model
# Everything that a connection can throw; ValueError: a header or URL that cannot be sent.
_BROKEN = (OSError, http.client.HTTPException, ValueError)


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
        with _Exchange(self, "GET", self._root + path, None, _QUICK_S) as exchange:
            return exchange.body()

    def get_json(self, path: str) -> Any:
        return _parsed(self.get(path))

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON; for quick questions."""
        with _Exchange(self, "POST", self._root + path, body, self.timeout_s) as exchange:
            return _parsed(exchange.body())

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, Any]]:
        """Server-sent events with the seconds since the request was sent.

        Ends behind ``[DONE]``, or where the server closes the stream.

        Raises:
            NoAnswer: it broke off, took too long, or said what is no JSON.
        """
        with _Exchange(self, "POST", self._root + path, body, self.timeout_s) as exchange:
            yield from read_events(exchange.lines())

    @property
    def _root(self) -> str:
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")


def read_events(lines: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    """The JSON of server-sent events, up to ``[DONE]``, each with its line's time.

    Raises:
        NoAnswer: an event is no JSON.
    """
    for at, line in lines:
        if not line.startswith(b"data:"):
            continue  # comments keep the connection open; event names say nothing
        said = line[len(b"data:") :].strip()
        if said == b"[DONE]":
            return
        yield at, _parsed(said)


class _Exchange:
    """A request and its response; every way to fail becomes a `NoAnswer`."""

    def __init__(
        self,
        client: Client,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._start = time.perf_counter()
        parts = urlsplit(client.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if client.key:
            headers["Authorization"] = f"Bearer {client.key}"
        sent = None if body is None else json.dumps(body).encode()
        try:
            self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start = time.perf_counter()
            self._connection.request(method, path, sent, headers)
            self._response = self._connection.getresponse()
        except _BROKEN as error:
            self._close()
            raise self._broken(error) from None
        if self._response.status != 200:
            try:
                raise self._refusal()
            finally:
                self._close()

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def body(self) -> bytes:
        try:
            return self._response.read()
        except _BROKEN as error:
            raise self._broken(error) from None

    def lines(self) -> Iterator[tuple[float, bytes]]:
        while True:
            try:
                line = self._response.readline(_LONGEST_LINE)
            except _BROKEN as error:
                raise self._broken(error) from None
            at = time.perf_counter() - self._start
            if not line:
                return
            if at > self._timeout_s:
                raise self._broken(TimeoutError())
            if len(line) >= _LONGEST_LINE:
                raise NoAnswer("malformed", "the server sent a line without an end", again=True)
            yield at, line.strip()

    def _close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    def _broken(self, error: Exception) -> NoAnswer:
        where = self._client.url
        if isinstance(error, TimeoutError):
            words = f"{where} took longer than server.timeout_s={self._timeout_s:g}"
            return NoAnswer("timeout", words, again=True)
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return NoAnswer("refused", f"no server answers at {where}", again=True)
        said = first_line(error).replace(self._client.key or "\0", "…")
        return NoAnswer("cut", f"the answer of {where} broke off: {said}", again=True)

    def _refusal(self) -> NoAnswer:
        status = self._response.status
        try:
            said = self._response.read(_LONGEST_LINE)
        except _BROKEN:
            said = b""
        message = _message(said).replace(self._client.key or "\0", "…")
        return NoAnswer(
            f"http_{status}",
            f"{self._client.url} answered {status}: {message}",
            again=status == 429 or status >= 500 or status == 408,
            wait_s=_seconds(self._response.headers.get("Retry-After")),
        )


def _parsed(said: bytes) -> Any:
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
