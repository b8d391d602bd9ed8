"""A transport without a service, for tests of code that uses a client."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable

from arctic_core import wire
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import ArcticError, TransportClosedError
from arctic_core.protocol import (
    AnyOperation,
    CompletionReady,
    Done,
    ErrorInfo,
    Generated,
    Reply,
    Request,
    Result,
)
from arctic_core.transports.base import Transport

Answer = Result | BaseException | Reply
Handler = Callable[[Request], Answer | Awaitable[Answer]]


class MockTransport(Transport):
    """Answers requests with a function of yours, and records them.

    Requests and answers pass through the wire format, so what works here can be sent to a real service too. A streamed
    generation is answered by the completions of the returned :class:`Generated`, prompt by prompt.

    Args:
        handler: Called with each request; returns (or is a coroutine that returns) a result, a whole :class:`Reply`, or
            an exception, which reaches the caller the way a service's error does. What it *raises* is taken for an error of
            the transport: a :class:`TransportError` makes the client try once more, anything else passes through.

    Example:
        >>> from arctic_core import ArcticRLClientConfig, MockTransport, Stepped, create_arctic_rl_client
        >>> mock = MockTransport(lambda request: Stepped(grad_norm=1.0, lr=0.1, step=1, policy_version=1))
        >>> config = ArcticRLClientConfig(model_name="any", training_gpus=1)
        >>> with create_arctic_rl_client(config, transport=mock) as client:
        ...     client.step().policy_version
        1
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[Request] = []
        """Every request, in order of arrival, retries included."""
        self.is_open = False
        self.was_shut_down = False

    @property
    def operations(self) -> list[AnyOperation]:
        """The operations of :attr:`requests`."""
        return [request.operation for request in self.requests]

    async def open(self) -> None:
        self.is_open = True

    async def send(self, request: Request) -> Reply:
        reply = await self._answer(request)
        return wire.decode(wire.encode(reply), Reply)

    async def stream(self, request: Request) -> AsyncIterator[Reply]:
        reply = await self.send(request)
        if not isinstance(reply.body, Generated):
            yield reply
            return
        for i, completions in enumerate(reply.body.completions):
            for j, completion in enumerate(completions):
                yield Reply(sequence=reply.sequence, body=CompletionReady(prompt=i, index=j, completion=completion))
        yield Reply(sequence=reply.sequence, body=Done())

    async def close(self, shutdown: bool) -> None:
        self.is_open = False
        self.was_shut_down = self.was_shut_down or shutdown

    def reconnect_config(self) -> ArcticRLClientConfig | None:
        return None

    async def _answer(self, request: Request) -> Reply:
        if not self.is_open:
            raise TransportClosedError("the mock transport is closed")
        request = wire.decode(wire.encode(request), Request)
        self.requests.append(request)
        answer = self._handler(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Reply):
            return answer
        if isinstance(answer, BaseException):
            return Reply(sequence=request.sequence, body=ErrorInfo.of(answer))
        if not isinstance(answer, Result):
            raise ArcticError(f"the handler returned {answer!r}, which is no result, reply or exception", where="MockTransport")
        return Reply(sequence=request.sequence, body=answer)  # type: ignore[arg-type] - checked on the way through the wire
