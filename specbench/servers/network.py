"""Connections whose reads and writes share one limit of time and one of size.

A client's own time limit holds for each read. A server that sends a byte now and then keeps within
it for ever, in a header as in a body, so that here each read gets what is left of one limit.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore

_AT_ONCE = 1 << 16  # bytes of a question that are written before the time is looked at again


class TooLarge(Exception):
    """An answer has more bytes than it may have."""


class LimitedNetwork(httpcore.NetworkBackend):
    """Connects for one request.

    Args:
        seconds: longest that the request may take, from now on, the connection included.
        most_bytes: most that may be read, headers included.
    """

    def __init__(self, seconds: float, most_bytes: int) -> None:
        self.sent = time.perf_counter()  # when the request was sent, once there is a connection
        self._end, self._bytes_left = self.sent + seconds, most_bytes
        self._network = httpcore.SyncBackend()

    @property
    def seconds_left(self) -> float:
        """What is left of the time.

        Raises:
            TimeoutError: nothing is.
        """
        left = self._end - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        return left

    def take(self, n_bytes: int) -> None:
        """Count what was read.

        Raises:
            TooLarge: it is too much.
        """
        self._bytes_left -= n_bytes
        if self._bytes_left < 0:
            raise TooLarge

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        made = self._network.connect_tcp(
            host, port, self.seconds_left, local_address, socket_options
        )
        return _LimitedStream(made, self)


class _LimitedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, network: LimitedNetwork) -> None:
        self._stream, self._network = stream, network
        self._written = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, self._network.seconds_left)
        self._network.take(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not self._written:
            self._written, self._network.sent = True, time.perf_counter()
        for start in range(0, len(buffer), _AT_ONCE):
            self._stream.write(buffer[start : start + _AT_ONCE], self._network.seconds_left)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left = self._network.seconds_left
        made = self._stream.start_tls(ssl_context, server_hostname, left)
        return _LimitedStream(made, self._network)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
