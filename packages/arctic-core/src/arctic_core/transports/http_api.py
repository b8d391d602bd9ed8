"""One server's HTTP interface: a pool of connections, retries, and errors as their own types."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np

from arctic_core.config.client import HttpConfig
from arctic_core.errors import ArcticError, AuthenticationError, ConfigError, TransportError
from arctic_core.protocol import ErrorInfo
from arctic_core.transports.http_stream import SocketStream, SocketTransport
from arctic_core.wire import Buffer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Content = Buffer | Sequence[Buffer]

PREFIX = "/arctic/v1"
FRAME = "application/vnd.arctic.frame"
REQUEST_ID = "Arctic-Request-Id"

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
ANSWER_GRACE_S = 15.0
"""What a server may take beyond the wait it was asked for."""
WRITE_TIMEOUT_S = 60.0
"""Longest time in which a piece of a body does not move."""
KEEPALIVE_S = 4.0
"""Idle connections are closed before the server does it, which by its default is after 5 s."""
PIECE_BYTES = 2**19
"""Bytes of a large body that are handed over at a time."""
DIRECT_BYTES = 2**23
"""More of an answer than this goes from the socket into its place, at the price of a new connection for the next request."""


@dataclass(frozen=True)
class Answer:
    """A response, read to its end."""

    status: int
    kind: str
    """Media type without its parameters."""
    body: memoryview
    """Read-only."""
    headers: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; empty where it is none."""
        with contextlib.suppress(ValueError):
            value = json.loads(bytes(self.body)) if self.kind == "application/json" else None
            if isinstance(value, dict):
                return value
        return {}

    @property
    def passing(self) -> bool:
        """Whether the same request may do better later: a full queue, or a proxy that has lost its server."""
        return self.kind != FRAME and (self.status == 429 or (self.status in (502, 503, 504) and self.error() is None))

    @property
    def retry_after_s(self) -> float:
        """Seconds the server asks for; 0 where it does not say."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() else 0.0

    def error(self) -> ArcticError | None:
        """The error that the server reports, as its own type; ``None`` where the response is none of ours, or no error."""
        found = self.json().get("error")
        if self.status < 400 or not isinstance(found, dict) or not isinstance(found.get("kind"), str):
            return None
        parts = {name: str(found.get(name) or "") for name in ("message", "where", "remedy")}
        return ErrorInfo(kind=found["kind"], **parts).to_exception()


class HttpApi:
    """Requests to one server. All coroutines run on one event loop.

    Every request of Arctic's protocol may be sent twice: reads run again, and what changes something carries a key. So
    whatever fails before its answer is complete is repeated, ``retries`` times.

    Args:
        config: Retries, timeouts and certificates.
        url: Address of the server.
        token: Bearer token; empty sends none.
    """

    def __init__(self, config: HttpConfig, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self.headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self.certificates = _certificates(config.ca_file) if self.url.startswith("https:") else False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
        transport: httpx.AsyncBaseTransport = SocketTransport(limits)
        if self.certificates:
            transport = httpx.AsyncHTTPTransport(verify=self.certificates, limits=limits, trust_env=False)
        # Proxies and passwords that the environment names are for the open internet, not for a compute backend.
        self._client = httpx.AsyncClient(headers=self.headers, trust_env=False, transport=transport)
        if token and self.url.startswith("http:") and not is_loopback(self.url):
            logger.warning("the token travels unencrypted to %s: use https", self.url)

    def __repr__(self) -> str:
        return f"HttpApi({self.url!r})"

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def json(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """A request of plain values, answered by a JSON object.

        Raises:
            ArcticError: What the server reported.
            TransportError: There was no answer, or not one of ours.
        """
        content = b"" if body is None else json.dumps(body).encode()
        headers = {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}
        answer = await self.exchange(method, path, content, headers=headers, wait_s=wait_s)
        if not 200 <= answer.status < 300 or answer.kind != "application/json":
            raise self.refusal(answer, path)
        return answer.json()

    async def exchange(
        self,
        method: str,
        path: str,
        content: Content = b"",
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        """One request, repeated until it is answered: by a result, or by an error that a repetition would not change.

        Args:
            method: HTTP method.
            path: Path below ``/arctic/v1``, with its query.
            content: Body, or its parts in order.
            headers: Additional headers.
            wait_s: Seconds the server was asked to wait for.

        Raises:
            QueueFullError: The server is too busy, and remained so.
            TransportError: No answer came, however often it was tried.
        """

        async def once() -> Answer:
            async with self._send(method, path, content, headers or {}, wait_s + ANSWER_GRACE_S) as response:
                answer = await _read(response)
            if answer.passing:
                raise _PassingError(answer)
            return answer

        return await self._repeating(once, f"{method} {path}")

    @contextlib.asynccontextmanager
    async def streaming(
        self, path: str, content: Content, *, headers: Mapping[str, str], silence_s: float
    ) -> AsyncIterator[httpx.Response]:
        """A response whose body the caller reads as it comes. Opening it is repeated like any request, reading is not.

        Args:
            path: Path below ``/arctic/v1``.
            content: Body of the ``POST``.
            headers: Additional headers.
            silence_s: Longest time without a byte.

        Raises:
            ArcticError: What the server reported instead of a stream.
            TransportError: The connection failed, here or while the caller read.
        """
        async with contextlib.AsyncExitStack() as stack:

            async def once() -> httpx.Response:
                async with contextlib.AsyncExitStack() as attempt:
                    response = await attempt.enter_async_context(self._send("POST", path, content, headers, silence_s))
                    if response.status_code != 200:
                        answer = await _read(response)
                        raise _PassingError(answer) if answer.passing else self.refusal(answer, path)
                    stack.push_async_exit(attempt.pop_all())
                    return response

            response = await self._repeating(once, f"POST {path}")
            try:
                yield response
            except httpx.HTTPError as error:
                raise TransportError(
                    f"the stream broke off: {_words(error)}", where=self.url + path, remedy="generate again"
                ) from error

    def refusal(self, answer: Answer, path: str) -> ArcticError:
        """The error that a response stands for."""
        where = f"{self.url}{PREFIX}{path}"
        error = answer.error()
        if isinstance(error, AuthenticationError) and not error.remedy:
            error.remedy = "check the token (http.token_env, http.token_file)"
        return error or TransportError(
            f"status {answer.status} with {answer.kind or 'no type'}, which is no answer of an Arctic server",
            where=where,
            remedy="check http.url, and what stands between here and the server",
        )

    async def _repeating(self, once: Callable[[], Awaitable[T]], what: str) -> T:
        for attempt in itertools.count():
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                return await once()
            except httpx.HTTPError as error:
                failure: ArcticError = self._unreachable(error)
                cause: Exception | None = error
            except _PassingError as error:
                failure, cause = self.refusal(error.answer, what.partition(" ")[2]), None
                pause_s = max(pause_s, min(LONGEST_PAUSE_S, error.answer.retry_after_s))
            if attempt >= self._config.retries:
                raise failure from cause
            logger.info("%s: trying again in %.1f s after: %s", what, pause_s, failure.message)
            await asyncio.sleep(pause_s)
        raise AssertionError("counting does not end")

    def _send(
        self, method: str, path: str, content: Content, headers: Mapping[str, str], silence_s: float
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        parts = [memoryview(part).cast("B") for part in ([content] if isinstance(content, Buffer) else content)]
        size = sum(map(len, parts))
        timeout = httpx.Timeout(silence_s, connect=self._config.connect_timeout_s, write=WRITE_TIMEOUT_S, pool=None)
        return self._client.stream(
            method,
            f"{self.url}{PREFIX}{path}",
            content=_pieces(parts) if size > PIECE_BYTES else b"".join(parts),
            headers={**headers, "Content-Length": str(size)},
            timeout=timeout,
        )

    def _unreachable(self, error: httpx.HTTPError) -> TransportError:
        return TransportError(
            f"the server did not answer: {_words(error)}",
            where=self.url,
            remedy=f"see whether it runs ({self.url}/healthz), and check http.url",
        )


class _PassingError(Exception):
    """A response to which one comes back later."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def read_token(config: HttpConfig) -> str:
    """The token that a configuration names; empty where there is none.

    Raises:
        ConfigError: The file cannot be read, or the token is not one line of visible ASCII.
    """
    where, text = f"environment variable {config.token_env}", os.environ.get(config.token_env, "")
    if config.token_file is not None:
        where = "http.token_file"
        try:
            text = Path(config.token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token cannot be read: {error}", where=where) from error
    token = text.strip()
    if config.token_file is not None and not token:
        raise ConfigError(f"{config.token_file} is empty", where=where)
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError("a token is one line of visible ASCII characters", where=where)
    return token


def is_loopback(url: str) -> bool:
    """Whether an address leads to this very machine."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _certificates(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file} cannot be used: {error}", where="http.ca_file") from error


async def _pieces(parts: Iterable[memoryview]) -> AsyncIterator[Any]:
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]


async def _read(response: httpx.Response) -> Answer:
    """The response with its body in one piece of memory, which is filled as it comes."""
    headers = response.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    size = headers.get("content-length", "")
    if not size.isdecimal():
        body = memoryview(b"".join([piece async for piece in response.aiter_raw()]))
    else:
        buffer = np.empty(int(size), np.uint8)
        filled, end = buffer.data, 0
        socket = response.extensions.get("network_stream")
        async for piece in response.aiter_raw():
            filled[end : end + len(piece)] = piece
            end += len(piece)
            if isinstance(socket, SocketStream) and len(filled) - end > DIRECT_BYTES:
                # What the parser had is here. The rest goes past it, so the connection cannot be used again.
                await socket.read_into(filled[end:], response.request)
                end = len(filled)
                break
        body = filled[:end].toreadonly()
    return Answer(response.status_code, kind, body, headers)


async def read_frames(response: httpx.Response) -> AsyncIterator[bytes]:
    """The frames of a stream, as they come; each has 8 bytes of little-endian length before it.

    Raises:
        TransportError: It ends inside a frame.
    """
    buffer = bytearray()
    async for piece in response.aiter_raw():
        buffer += piece
        start = 0
        while len(buffer) - start >= 8:
            end = start + 8 + int.from_bytes(buffer[start : start + 8], "little")
            if len(buffer) < end:
                break
            if end > start + 8:  # an empty one only says that the server is still there
                yield bytes(buffer[start + 8 : end])
            start = end
        del buffer[:start]
    if buffer:
        raise TransportError("the stream ends inside a frame", where=str(response.url), remedy="generate again")


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
