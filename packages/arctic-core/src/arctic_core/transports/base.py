"""The seam between a client and the service: a :class:`Transport` carries requests there and replies back."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from arctic_core import wire
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.protocol import Reply, Request


class Transport(abc.ABC):
    """Carries messages; knows nothing of what they mean.

    All methods run on one event loop. Cancelling :meth:`send`, or closing the iterator of :meth:`stream`, cancels the
    work at the other end. Errors of the service come back inside replies; a transport raises only its own:
    :class:`TransportError` where the service cannot be reached (the client may send the same request once more),
    :class:`EngineDiedError` where it is gone for good. The client bounds :meth:`send` and :meth:`stream` by the request's
    deadline; :meth:`open` and :meth:`close` bound themselves.
    """

    @abc.abstractmethod
    async def open(self) -> None:
        """Start or find the service. Leaves nothing behind where it raises or is cancelled."""

    @abc.abstractmethod
    async def send(self, request: Request) -> Reply:
        """Carry one request and return its reply."""

    @abc.abstractmethod
    def stream(self, request: Request) -> AsyncIterator[Reply]:
        """Carry one request and yield its replies, the last of which holds ``Done`` or an error."""

    async def relay(self, request: Request, frame: wire.Buffer) -> wire.Buffer:
        """Like :meth:`send`, from frame to frame, for those who got the request as a frame and answer with one.

        Args:
            request: What ``frame`` holds.
            frame: The encoded request; it must not change before the answer is there. A transport that sends frames hands it
                on as it is.
        """
        return await asyncio.to_thread(wire.encode_large, await self.send(request))

    async def relay_stream(self, request: Request, frame: wire.Buffer) -> AsyncGenerator[wire.Buffer, None]:
        """Like :meth:`stream`, from frame to frames."""
        async with contextlib.aclosing(self.stream(request)) as replies:  # type: ignore[type-var] - all are generators
            async for reply in replies:
                yield wire.encode(reply)

    @abc.abstractmethod
    async def close(self, shutdown: bool) -> None:
        """Let go of the service. Idempotent.

        Args:
            shutdown: Stop the service even where this transport only connected to it. A service this transport started
                is stopped in any case.
        """

    @abc.abstractmethod
    def reconnect_config(self) -> ArcticRLClientConfig | None:
        """The configuration with which another process reaches the same service; ``None`` where none can."""
