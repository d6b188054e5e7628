"""One server over HTTP: what went wrong in one word, and whether asking again may help."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpcore

from specbench.errors import CaseFailed, ConfigurationError, first_line
from specbench.servers.network import LimitedNetwork, TooLarge
from specbench.servers.secret import Secret

_LONGEST_LINE = 1 << 20
_LONGEST_MESSAGE = 300
_MOST_DIGITS = 18  # of a number that is kept as one
_QUICK_S = 10.0  # for what needs no model
_MB = 1e6
_TIMEOUTS = (TimeoutError, httpcore.TimeoutException)
# Everything that a connection can throw; ValueError: a header or URL that cannot be sent.
_BROKEN = (
    *_TIMEOUTS,
    *(OSError, ValueError, TooLarge),
    *(httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol),
)


class NoAnswer(CaseFailed):
    """A question has no whole answer.

    Attributes:
        kind: ``refused``, ``cut``, ``timeout``, ``too_large``, ``http_<status>``, ``malformed``,
            ``bad_count``, ``empty``, …
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
        timeout_s: longest that one answer may take as a whole, the connection included.
        answer_mb: megabytes that one answer may have as a whole, headers included.
        key: sent as a bearer token where there is one; ``secret`` hides it in what the server says.
    """

    url: str
    timeout_s: float
    answer_mb: float
    key: str = ""
    secret: Secret = field(init=False, repr=False)
    _tls: ssl.SSLContext | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        secure = ssl.create_default_context() if self.url.startswith("https") else None
        object.__setattr__(self, "_tls", secure)
        object.__setattr__(self, "secret", Secret(self.key))

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
        seconds = min(_QUICK_S, self.timeout_s)
        return b"".join(chunk for _, chunk in self._receive("GET", path, seconds))

    def get_json(self, path: str) -> object:
        """The JSON at a path, the key hidden; errors as of `get`."""
        return self._described(self.get(path))

    def post_json(self, path: str, body: Mapping[str, object]) -> object:
        """The answer's JSON, the key hidden; for quick questions."""
        chunks = self._receive("POST", path, self.timeout_s, body)
        return self._described(b"".join(chunk for _, chunk in chunks))

    def _described(self, said: bytes) -> object:
        try:
            return self.secret.hide_in(_parsed(said))
        except RecursionError:
            raise NoAnswer("malformed", "the server's answer is nested", again=True) from None
        except NoAnswer as error:
            self.secret.hide_in_error(error)
            raise

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[tuple[float, object]]:
        """Server-sent events with the seconds since the request was sent.

        Ends behind ``[DONE]``, or where the server closes the stream. The key is hidden in nothing
        yet, because what hides it takes time: ``secret`` is for the caller to use.

        Raises:
            NoAnswer: it broke off, took too long, is too large, or said what is not JSON.
        """
        return read_events(_lines(self._receive("POST", path, self.timeout_s, body)))

    def _receive(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, object] | None = None
    ) -> Iterator[tuple[float, bytes]]:
        """When the request was sent, and a part of the answer's body; failures are `NoAnswer`."""
        # A connection for each request: none is found closed when the next one is sent.
        network = LimitedNetwork(timeout_s, round(self.answer_mb * _MB))
        parts = urlsplit(self.url)
        root = parts.path.rstrip("/").removesuffix("/v1")
        headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        try:
            if self.key:
                headers[b"Authorization"] = f"Bearer {self.key}".encode("latin-1")
            with (
                httpcore.ConnectionPool(ssl_context=self._tls, network_backend=network) as pool,
                pool.stream(
                    method,
                    f"{parts.scheme}://{parts.netloc}{root}{path}",
                    content=None if body is None else json.dumps(body).encode(),
                    headers=list(headers.items()),
                ) as response,
            ):
                if response.status != 200:
                    raise self._refusal(response)
                for chunk in response.iter_stream():
                    _ = network.seconds_left  # one read may have brought many parts
                    yield network.sent, chunk
        except _BROKEN as error:
            raise self._broken(error, timeout_s) from None

    def _broken(self, error: Exception, timeout_s: float) -> NoAnswer:
        if isinstance(error, _TIMEOUTS):
            limit = " (server.timeout_s)" if timeout_s == self.timeout_s else ""
            words = f"{self.url} took longer than {timeout_s:g} s{limit}"
            return NoAnswer("timeout", words, again=True)
        if isinstance(error, TooLarge):
            words = f"{self.url} sent more than {self.answer_mb:g} MB (server.answer_mb)"
            return NoAnswer("too_large", words, again=False)
        cause: BaseException = error
        while before := cause.__cause__ or cause.__context__:
            cause = before
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return NoAnswer("refused", f"no server answers at {self.url}", again=True)
        why = printable(self.secret.hide(first_line(error)))
        return NoAnswer("cut", f"the answer of {self.url} broke off: {why}", again=True)

    def _refusal(self, response: httpcore.Response) -> NoAnswer:
        status, body = response.status, b""
        with contextlib.suppress(*_BROKEN):
            for chunk in response.iter_stream():
                body += chunk
                if len(body) > _LONGEST_LINE:
                    break
        headers = {name.lower(): value for name, value in response.headers}
        why = printable(self.secret.hide(_message(body)))[:_LONGEST_MESSAGE] or "nothing"
        return NoAnswer(
            f"http_{status}",
            f"{self.url} answered {status}: {why}",
            again=status == 429 or status >= 500 or status == 408,
            wait_s=_seconds(headers.get(b"retry-after", b"")),
        )


def printable(text: str) -> str:
    """What a server says, in one line that a terminal shows as it is and a file can hold."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _lines(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The lines of a body, with the seconds from the request until each was there."""
    rest, sent = bytearray(), 0.0
    for sent, chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield time.perf_counter() - sent, bytes(line.strip())
        if len(rest) >= _LONGEST_LINE:
            raise NoAnswer("malformed", "the server sent a line without an end", again=True)
    if rest:
        yield time.perf_counter() - sent, bytes(rest.strip())


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
    """The value of a JSON text; numbers that no file can hold (NaN, 1e999) stay the words they are.

    Raises:
        NoAnswer: it is not JSON.
    """
    try:
        return json.loads(said, parse_constant=str, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError):
        start = said[:_LONGEST_MESSAGE].decode(errors="replace")
        raise NoAnswer(
            "malformed", f"the server's answer is not JSON: {start!r}", again=True
        ) from None


def _number(text: str) -> int | float | str:
    if text.lstrip("-").isdigit():
        return int(text) if len(text) <= _MOST_DIGITS else text
    value = float(text)
    return value if math.isfinite(value) else text


def _message(said: bytes) -> str:
    """What a server says is wrong, whichever way it says it."""
    try:
        node = json.loads(said)
        for key in ("error", "message", "detail"):
            if isinstance(node, dict) and key in node:
                node = node[key]
        return node if isinstance(node, str) else json.dumps(node, ensure_ascii=False)
    except (ValueError, RecursionError):
        return said.decode(errors="replace")


def _seconds(said: bytes) -> float:
    """How long a ``Retry-After`` asks to wait; 0 for a date and nonsense: our own waiting does."""
    try:
        seconds = float(said)
    except ValueError:
        return 0.0
    return seconds if seconds > 0 else 0.0  # NaN is not above 0


def check_url(key: str, url: str | None) -> str:
    """An address that can be asked, and that may be written down.

    Raises:
        ConfigurationError: it is none, or holds a name and password.
    """
    parts = urlsplit(url or "")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable &= (url or "").isascii() and (url or "").isprintable() and " " not in (url or "")
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
