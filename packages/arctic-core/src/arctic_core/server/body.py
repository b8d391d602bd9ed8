"""Bodies of requests: each is read once into one buffer, and all buffers together are bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request

from arctic_core.errors import DeadlineExceeded, PayloadTooLargeError, QueueFullError, WireError
from arctic_core.server.connection import BODY_PORT, BodyPort

FRAME_TYPE = "application/vnd.arctic.frame"
_FIRST = 64 * 2**10
_DIRECT = 256 * 2**10
"""Longer bodies go from the socket into their buffer without a detour."""


class Budget:
    """Bytes of bodies in memory, of all requests together.

    Args:
        limit: Most bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, count: int) -> None:
        """Count bytes, or raise :class:`QueueFullError`."""
        if self.used + count > self.limit:
            raise QueueFullError(
                f"{self.used} bytes of requests are in memory, {count} more would exceed {self.limit}",
                remedy="wait until running calls end, or raise max_buffered_bytes",
            )
        self.used += count


class Body:
    """A body in memory. Whoever holds it calls :meth:`release` once it is used up."""

    def __init__(self, budget: Budget) -> None:
        self.view = memoryview(b"")
        self._budget = budget
        self._taken = 0

    def grow(self, size: int) -> memoryview:
        """A writable buffer of that size, with what was in the old one at its beginning."""
        self._budget.take(size - self._taken)
        self._taken = size
        buffer = np.empty(size, np.uint8).data  # takes memory only as it is written to
        buffer[: len(self.view)] = self.view
        self.view = buffer
        return buffer

    def release(self) -> None:
        """Give the bytes back to the budget. Idempotent."""
        self._budget.used -= self._taken
        self._taken = 0


async def read_frame(request: Request, budget: Budget, *, limit: int, pause_s: float) -> Body:
    """The body of a request whose content type says that it is a frame.

    Raises:
        WireError: It is of another type.
        PayloadTooLargeError: It is longer than the limit.
        QueueFullError: There is no room for it now.
        DeadlineExceeded: It came too slowly.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != FRAME_TYPE:
        raise WireError(f"the content type is {content_type!r}", where="Content-Type", remedy=f"send a frame as {FRAME_TYPE}")
    body = Body(budget)
    try:
        await _fill(request, body, limit, pause_s)
    except BaseException:
        body.release()
        raise
    return body


async def _fill(request: Request, body: Body, limit: int, pause_s: float) -> None:
    declared = request.headers.get("content-length")  # the gate has looked at it
    buffer = body.grow(int(declared) if declared else min(_FIRST, limit))
    port: BodyPort | None = request.scope.get(BODY_PORT)
    if port is not None and declared and len(buffer) > _DIRECT:
        try:
            complete = await port.read_into(buffer, pause_s)
        except TimeoutError:
            raise _too_slow(pause_s) from None
        if not complete:
            raise ClientDisconnect
        body.view = buffer.toreadonly()
        return
    end, more = 0, True
    while more:
        message = await _next(request, pause_s)
        piece, more = message.get("body", b""), message.get("more_body", False)
        if end + len(piece) > len(buffer):
            if end + len(piece) > limit:
                raise PayloadTooLargeError(f"a body of more than {limit} bytes", remedy="send less at once")
            body.view = buffer[:end]
            buffer = body.grow(min(limit, max(2 * len(buffer), end + len(piece))))
        buffer[end : end + len(piece)] = piece
        end += len(piece)
    body.view = buffer[:end].toreadonly()


async def _next(request: Request, pause_s: float) -> Any:
    try:
        async with asyncio.timeout(pause_s):
            message = await request.receive()
    except TimeoutError:
        raise _too_slow(pause_s) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


def _too_slow(pause_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"nothing of the body came for {pause_s:g} s", where="body", remedy="send it again")


async def read_json(request: Request, *, pause_s: float) -> dict[str, Any]:
    """The body of a request as a JSON object; the gate bounds its size.

    Raises:
        WireError: It is of another type, or no JSON object.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise WireError(f"the content type is {content_type!r}", where="Content-Type", remedy="send application/json")
    pieces, more = [], True
    while more:
        message = await _next(request, pause_s)
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    try:
        value = json.loads(b"".join(pieces))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not valid JSON: {error}", where="body") from None
    if not isinstance(value, dict):
        raise WireError("the body is not a JSON object", where="body")
    return value
