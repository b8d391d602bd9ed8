"""Sockets for httpx that move large bodies without buffers in between.

httpx's own stream copies a body several times on its way to the socket, and reads it in small pieces. These hand memory to
the socket as it is and read what the socket has. Plain HTTP only: TLS goes through httpx's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpcore
import httpx

READ_BYTES = 2**20
"""Most bytes of one read."""


class SocketTransport(httpx.AsyncBaseTransport):
    """A pool of plain HTTP/1.1 connections over :class:`SocketBackend`."""

    def __init__(self, limits: httpx.Limits) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=SocketBackend(),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        forwarded = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _as_httpx(request):
            response = await self._pool.handle_async_request(forwarded)
        return httpx.Response(
            response.status, headers=response.headers, stream=_Body(response, request), extensions=response.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response, request: httpx.Request) -> None:
        self._response = response
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx(self._request):
            async for piece in self._response.aiter_stream():
                yield piece

    async def aclose(self) -> None:
        await self._response.aclose()


_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.PoolTimeout, httpx.PoolTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.ReadError, httpx.ReadError),
    (httpcore.WriteError, httpx.WriteError),
    (httpcore.LocalProtocolError, httpx.LocalProtocolError),
    (httpcore.ProtocolError, httpx.RemoteProtocolError),
    (httpcore.NetworkError, httpx.NetworkError),
    (httpcore.UnsupportedProtocol, httpx.UnsupportedProtocol),
)


@contextlib.contextmanager
def _as_httpx(request: httpx.Request) -> Any:
    try:
        yield
    except tuple(theirs for theirs, _ in _ERRORS) as error:
        cls = next(ours for theirs, ours in _ERRORS if isinstance(error, theirs))
        raise cls(str(error) or type(error).__name__, request=request) from error


class SocketBackend(httpcore.AsyncNetworkBackend):
    """Connects on the running asyncio loop."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        with _timed(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                return SocketStream(await _connect(host, port, socket_options or ()))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _connect(host: str, port: int, options: Iterable[Any]) -> socket.socket:
    """The first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    failed: OSError | None = None
    for family, kind, proto, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in options:
                sock.setsockopt(*option)
            await loop.sock_connect(sock, address)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failed = error
    raise failed or OSError(f"{host} has no address")


class SocketStream(httpcore.AsyncNetworkStream):
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        # More than asked for is fine here: the parser takes pieces of any size, and small ones cost it most.
        with _timed(httpcore.ReadTimeout, httpcore.ReadError):
            async with asyncio.timeout(timeout):
                return await self._loop.sock_recv(self._sock, max(max_bytes, READ_BYTES))

    async def read_into(self, buffer: memoryview, request: httpx.Request) -> None:
        """Fill a buffer with what comes, all of it, past the parser of HTTP.

        Raises:
            httpx.TransportError: The connection ended before, or nothing came for the request's read timeout.
        """
        timeout = request.extensions.get("timeout", {}).get("read")
        with _as_httpx(request), _timed(httpcore.ReadTimeout, httpcore.ReadError):
            end = 0
            while end < len(buffer):
                async with asyncio.timeout(timeout):
                    count = await self._loop.sock_recv_into(self._sock, buffer[end:])
                if count == 0:
                    raise httpcore.ReadError(f"the connection ended {len(buffer) - end} bytes before the answer did")
                end += count

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _timed(httpcore.WriteTimeout, httpcore.WriteError):
            async with asyncio.timeout(timeout):
                await self._loop.sock_sendall(self._sock, buffer)

    async def aclose(self) -> None:
        # The selector forgets a socket's number before another may get it.
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError, NotImplementedError, RuntimeError):
                self._loop.remove_reader(self._sock)
                self._loop.remove_writer(self._sock)
            self._sock.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return self._readable()
        return {"socket": lambda: self._sock, "server_addr": self._sock.getpeername}.get(info, lambda: None)()

    def _readable(self) -> bool:
        """Whether an idle connection was closed by the other side."""
        if self._sock.fileno() < 0:
            return True
        if not hasattr(select, "poll"):
            return bool(select.select([self._sock], [], [], 0)[0])
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))


@contextlib.contextmanager
def _timed(late: type[Exception], failed: type[Exception]) -> Any:
    try:
        yield
    except TimeoutError as error:
        raise late(str(error) or "timed out") from error
    except OSError as error:
        raise failed(str(error)) from error
