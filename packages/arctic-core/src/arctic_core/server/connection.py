"""One HTTP connection: uvicorn's, with bounds on headers, and a short way for large bodies.

uvicorn copies a body four times between socket and application. A frame may have gigabytes, so :class:`BodyPort` lets the
application name the memory, and the socket writes into it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BODY_PORT = "arctic.body_port"
"""Key of the scope under which a :class:`BodyPort` is, where the server has one."""
_REFUSED = b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


class Connection(HttpToolsProtocol):
    """Bounds what comes before a body. Subclasses set the bounds; see :func:`connections`."""

    max_header_bytes = 64 * 2**10
    header_timeout_s = 10.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._between = True
        """Whether what comes belongs to a request line or headers."""
        self._header_bytes = 0
        self._body_bytes = 0
        """Bytes of the present body that came through the parser."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before, count = self._between, len(data)
        super().data_received(data)
        if before and self._between:
            self._header_bytes += count
            if self._timer is None:
                self._await_headers()
            if self._header_bytes > self.max_header_bytes:
                self._refuse(b"431 Request Header Fields Too Large", b"the headers are too large")

    def on_headers_complete(self) -> None:
        self._between = False
        self._headers_are_here()
        self._body_bytes = 0
        if sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url) > self.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too large")
            return
        declared = next((value for name, value in self.headers if name == b"content-length"), b"")
        if declared.isdigit() and not self.expect_100_continue:
            self.scope[BODY_PORT] = BodyPort(self, int(declared))  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle is not None and not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._between, self._header_bytes = True, 0
        if self.cycle is not None and not self.transport.is_closing():
            super().on_message_complete()

    def renew_parser(self) -> None:
        """Begin a new request after a body that the parser did not see to its end."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def _await_headers(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _headers_are_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self._refuse(b"408 Request Timeout", b"the headers took too long")

    def _refuse(self, status: bytes, why: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(_REFUSED % (status, len(why), why))
            self.transport.close()


class BodyPort:
    """Reads the rest of a request's body from the socket into memory of the application.

    Args:
        connection: Where it comes from.
        declared: Bytes of the whole body.
    """

    def __init__(self, connection: Connection, declared: int) -> None:
        self._connection = connection
        self._declared = declared
        self.used = False
        """Whether the body came this way."""

    async def read_into(self, buffer: memoryview, pause_s: float) -> bool:
        """Fill the buffer with the body, all of it; returns False where the client left before.

        Args:
            buffer: Writable; as long as the body.
            pause_s: Longest time in which nothing comes.

        Raises:
            TimeoutError: It was longer.
        """
        self.used = True
        http = self._connection
        cycle = http.cycle
        end = len(cycle.body)
        buffer[:end] = cycle.body
        cycle.body = bytearray()
        if cycle.disconnected:
            return False
        if cycle.more_body:
            http.flow.read_paused = False
            filling = _Filling(http, buffer[end:])
            http.transport.pause_reading()
            http.transport.set_protocol(filling)
            http.transport.resume_reading()
            try:
                await filling.wait(pause_s)
            finally:
                if not filling.lost:
                    http.transport.set_protocol(http)
            if filling.lost:
                return False
            http.renew_parser()
        cycle.message_event.clear()  # of the body; the application shall only be told of the client's leaving
        return True


class _Filling(asyncio.BufferedProtocol):
    """Stands in for the connection while a body comes."""

    def __init__(self, http: Connection, buffer: memoryview) -> None:
        self._http = http
        self._buffer = buffer
        self._filled = 0
        self._moved = asyncio.Event()
        self.lost = False

    async def wait(self, pause_s: float) -> None:
        """Until all is here, or the connection is gone."""
        while not self.lost and self._filled < len(self._buffer):
            self._moved.clear()
            async with asyncio.timeout(pause_s):
                await self._moved.wait()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self._moved.set()
        if self._filled == len(self._buffer):
            self._http.transport.pause_reading()  # the next byte is another request's
            self._http.flow.read_paused = True

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._moved.set()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


def connections(max_header_bytes: int, header_timeout_s: float) -> type[Connection]:
    """The class of connections with these bounds."""
    return type(
        "BoundedConnection", (Connection,), {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    )
