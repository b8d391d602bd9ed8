"""Server-sent events. A reader that leaves cancels what still runs; one that waits long hears that the server lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arctic_core.errors import ArcticError
from arctic_core.server.openai_errors import Refused, openai_error, openai_error_body, openai_headers
from arctic_core.server.streams import disconnected

FIRST_S = 2.0
"""An error that comes earlier has a status of its own; a later one is an event, because the status is out by then."""
BEAT_S = 10.0
"""Pause between signs of life, which proxies and clients want and parsers skip."""
_BEAT = b": still working\n\n"
DONE = "[DONE]"


class EventStream(Response):
    """Events as they come.

    Args:
        events: Each is a JSON value, or :data:`DONE`. Closed at the end, whatever the end is.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **openai_headers()})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pumping = asyncio.create_task(self._pump(scope, receive, send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({pumping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not pumping.done():
                pumping.cancel()
            await asyncio.wait({pumping, leaving})
        if not pumping.cancelled():
            pumping.result()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(_with_beats(self._events)) as events:
            try:
                async for event in events:
                    if not begun:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        begun = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except (ArcticError, Refused) as error:
                if not begun:
                    await openai_error(error)(scope, receive, send)
                    return
                event = _event({"error": openai_error_body(error)})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_beats(events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    """Each event as bytes, and a comment wherever the next one takes long."""
    ready: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # so that a slow reader holds up the sampler's answers

    async def produce() -> None:  # one task from end to end, because a deadline inside belongs to a task
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    await ready.put(_event(event))
        except asyncio.CancelledError:
            raise
        except BaseException:
            await ready.put(None)
            raise
        await ready.put(None)

    producing = asyncio.create_task(produce())
    wait_s = FIRST_S
    try:
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    event = await ready.get()
            except TimeoutError:
                event = _BEAT
            if event is None:
                await producing
                return
            wait_s = BEAT_S
            yield event
    finally:
        producing.cancel()
        await asyncio.wait({producing})


def _event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"
