"""The service in this very process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import DeadlineExceeded, TransportClosedError
from arctic_core.protocol import Reply, Request
from arctic_core.transports.base import Transport

if TYPE_CHECKING:
    from arctic_core.service.core import ArcticService


class LocalTransport(Transport):
    """Runs an :class:`~arctic_core.service.core.ArcticService` on the client's event loop; arrays are shared, not copied."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self._config = config
        self._service: ArcticService | None = None

    async def open(self) -> None:
        from arctic_core.service.core import ArcticService

        service = ArcticService(self._config)
        try:
            async with asyncio.timeout(self._config.deadlines.start):
                await service.start()
        except BaseException as error:
            await service.stop()
            if isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(
                    f"the engines were not up after {self._config.deadlines.start:g} s",
                    where="local transport",
                    remedy="raise deadlines.start, or look at the log for what the engines wait for",
                ) from None
            raise
        self._service = service

    async def send(self, request: Request) -> Reply:
        return await self._running().handle(request)

    async def stream(self, request: Request) -> AsyncIterator[Reply]:
        replies = self._running().stream(request)
        try:
            async for reply in replies:
                yield reply
        finally:
            # Closing at once, not when the collector comes by, is what cancels the work in the engines.
            if (aclose := getattr(replies, "aclose", None)) is not None:
                await aclose()

    async def close(self, shutdown: bool) -> None:
        service, self._service = self._service, None
        if service is not None:
            await service.stop()

    def reconnect_config(self) -> ArcticRLClientConfig | None:
        return None

    def _running(self) -> ArcticService:
        if self._service is None:
            raise TransportClosedError("the local service is not running", remedy="create a new client")
        return self._service
