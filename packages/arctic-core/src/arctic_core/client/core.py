"""What both clients share: sessions, keys, deadlines, retries and the stream of a generation."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import (
    DeadlineExceeded,
    ProtocolError,
    TransportClosedError,
    TransportError,
    UnsupportedOperation,
)
from arctic_core.protocol import CompletionReady, Done, Generate, Operation, Reply, Request, Result
from arctic_core.transports.base import Transport

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Result)
T = TypeVar("T")

GRACE_S = 5.0
"""What the client waits past a request's deadline for the service's own answer that it was missed."""
RETRY_PAUSE_S = 0.2


class ClientCore:
    """One session with a service. All coroutines run on one event loop; :meth:`next_request_id` is safe anywhere.

    Every request has its own sequence number, which makes ``(session, sequence)`` the idempotency key of a write. A
    request that fails in the transport is sent once more *unchanged*: a read may simply run twice, and a service that
    knows the key of a write answers with the first result.
    """

    def __init__(self, config: ArcticRLClientConfig, transport: Transport) -> None:
        self.config = config
        self.session = uuid.uuid4().hex
        self._transport = transport
        self._sequence = itertools.count(1)  # next() on it is atomic
        self._inflight: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def next_request_id(self) -> str:
        """A new handle for a generation."""
        return f"{self.session[:12]}-{next(self._sequence)}"

    async def open(self) -> None:
        """Start or find the service; a failure leaves nothing half started."""
        await self._transport.open()

    async def close(self, *, shutdown: bool) -> None:
        """End what is in flight and let go of the service. Idempotent."""
        if self._closed:
            return
        self._closed = True
        running = list(self._inflight)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=GRACE_S)
        await self._transport.close(shutdown)

    def reconnect_config(self) -> ArcticRLClientConfig:
        """See :meth:`ArcticRLClient.reconnect_config`."""
        self._require_open()
        config = self._transport.reconnect_config()
        if config is None:
            raise UnsupportedOperation(
                "nobody else can connect to this job",
                where=type(self._transport).__name__,
                remedy="use comm_protocol='ray' or 'http'",
            )
        return config

    async def call(self, operation: Operation, expected: type[R]) -> R:
        """Carry out one operation.

        Raises:
            ArcticError: Whatever the service or the transport answered.
            DeadlineExceeded: No answer within ``config.deadlines.request``.
            TransportClosedError: The client is closed, or was closed meanwhile.
        """
        request = self._request(operation)
        reply = await self._bounded(self._send(request), request)
        return _unwrap(reply, request, expected)

    async def stream(self, operation: Generate) -> AsyncGenerator[CompletionReady, None]:
        """Yield completions as they finish. Closing the generator aborts the rest."""
        request = self._request(operation)
        replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        finished = False

        async def pump() -> None:
            try:
                async for reply in self._transport.stream(request):
                    replies.put_nowait(reply)
            finally:
                replies.put_nowait(None)

        # One task owns the transport's iterator, whichever tasks the caller drains this generator from.
        task = asyncio.create_task(self._bounded(pump(), request))
        try:
            while (reply := await replies.get()) is not None:
                result = _unwrap(reply, request, CompletionReady, Done)
                if isinstance(result, CompletionReady):
                    yield result
                else:
                    finished = True
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()  # seen, or asyncio would report it as lost
        if not finished:
            raise TransportError("the stream broke off", where="generate", remedy="generate again")

    def _request(self, operation: Operation) -> Request:
        self._require_open()
        return Request(
            session=self.session,
            sequence=next(self._sequence),
            operation=operation,  # type: ignore[arg-type] - every Operation is one of AnyOperation
            deadline_s=self.config.deadlines.request,
        )

    async def _send(self, request: Request) -> Reply:
        try:
            return await self._transport.send(request)
        except TransportClosedError:
            raise
        except TransportError as error:
            logger.warning("%s: trying once more after: %s", request.operation.op(), error)
        await asyncio.sleep(RETRY_PAUSE_S)
        return await self._transport.send(request)

    async def _bounded(self, work: Coroutine[Any, Any, T], request: Request) -> T:
        """Run work under the request's deadline, as a task that :meth:`close` can end."""
        task = asyncio.create_task(work)
        self._inflight.add(task)
        task.add_done_callback(self._inflight.discard)
        timeout = asyncio.timeout(request.deadline_s + GRACE_S)
        try:
            async with timeout:
                return await task
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(
                f"no answer within {request.deadline_s:g} s",
                where=request.operation.op(),
                remedy="raise deadlines.request, or ask info() whether the engines are alive",
            ) from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and not (caller and caller.cancelling()):
                raise self._closed_error() from None
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    @staticmethod
    def _closed_error() -> TransportClosedError:
        return TransportClosedError("the client is closed", remedy="create a new one, or use it inside its `with` block")


def _unwrap(reply: Reply, request: Request, *expected: type[R]) -> R:
    where = request.operation.op()
    result = reply.unwrap()
    if reply.sequence != request.sequence:
        raise ProtocolError(f"asked request {request.sequence}, got the answer to {reply.sequence}", where=where)
    if not isinstance(result, expected):
        names = " or ".join(type_.__name__ for type_ in expected)
        raise ProtocolError(f"expected {names}, got {type(result).__name__}", where=where)
    return result
