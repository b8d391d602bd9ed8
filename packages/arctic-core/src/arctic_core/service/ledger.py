"""Remembers the outcome of mutating requests, so that a repeated key returns the first result and changes nothing."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from arctic_core.protocol import Reply

Key = tuple[str, int]


class Ledger:
    """Replies by ``(session, sequence)``.

    Args:
        capacity: Finished replies kept per ledger; the oldest go first. A key that was dropped would run again, so the
            capacity must exceed what a client can have in flight.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Key, asyncio.Task[Reply]] = OrderedDict()

    async def once(self, key: Key, work: Callable[[], Awaitable[Reply]]) -> Reply:
        """Run ``work`` for a new key, or wait for (and return) what the key's first call gave.

        A caller that is cancelled does not cancel the work: it may be half done, and its result belongs to the key.
        """
        task = self._entries.get(key)
        if task is None:
            task = asyncio.ensure_future(_as_task(work))
            self._entries[key] = task
            self._trim()
        return await asyncio.shield(task)

    def _trim(self) -> None:
        for key in list(self._entries):
            if len(self._entries) <= self._capacity:
                return
            if self._entries[key].done():
                del self._entries[key]


async def _as_task(work: Callable[[], Awaitable[Reply]]) -> Reply:
    return await work()
