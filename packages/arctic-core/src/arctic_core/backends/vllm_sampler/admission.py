"""Which jobs may be inside vLLM: first come, first served, up to a limit, none while the gate is shut.

Holding the rest back here, and not in vLLM's own queue, is what makes a drain short (only what runs has to end) and lets a
waiting job be aborted, or start under new weights, without having touched the engine. One event loop; no threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class Admission:
    """The gate and the queue before it.

    Args:
        limit: Most jobs inside at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = True
        self._waiting: deque[tuple[str, asyncio.Future[bool]]] = deque()
        self._inside: set[str] = set()
        self._idle: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[bool]:
        """Wait for a place and hold it for the block's duration; yields ``False`` where the job was aborted before."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry = (request_id, admitted)
        self._waiting.append(entry)
        self._admit()
        try:
            yield await admitted
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            self._inside.discard(request_id)
            self._admit()
            self._settle()

    def close(self) -> None:
        """Admit no one."""
        self._open = False

    def open(self) -> None:
        """Admit again."""
        self._open = True
        self._admit()

    @property
    def inside(self) -> int:
        """Jobs inside."""
        return len(self._inside)

    def abort(self, prefixes: Sequence[str]) -> list[str]:
        """End waiting jobs whose id starts with a prefix; returns the ids inside that do (all where there is no prefix)."""
        chosen = tuple(prefixes) or ("",)
        for request_id, admitted in list(self._waiting):
            if request_id.startswith(chosen) and not admitted.done():
                admitted.set_result(False)
        return [request_id for request_id in self._inside if request_id.startswith(chosen)]

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in every waiting job."""
        for _, admitted in self._waiting:
            if not admitted.done():
                admitted.set_exception(error)

    async def idle(self) -> None:
        """Return once nobody is inside."""
        if self._inside:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def _admit(self) -> None:
        while self._open and self._waiting and len(self._inside) < self._limit:
            request_id, admitted = self._waiting.popleft()
            if not admitted.done():
                self._inside.add(request_id)
                admitted.set_result(True)

    def _settle(self) -> None:
        if not self._inside:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()
