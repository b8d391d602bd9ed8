"""A generation as a stream of frames. The reader sets the pace; a reader that leaves cancels what still runs."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arctic_core import wire
from arctic_core.protocol import Reply, Request
from arctic_core.server.body import Body
from arctic_core.server.calls import GRACE_S, describe, error_in
from arctic_core.server.jobs import Job, Jobs

STREAM_TYPE = "application/vnd.arctic.frames"


async def frames_of(jobs: Jobs, job: Job, request: Request, frame: wire.Buffer) -> AsyncGenerator[wire.Buffer, None]:
    """The replies to a streamed request, each as a frame; the last holds ``Done`` or an error."""
    op = f"{request.operation.op()}_stream"
    with job.working(op, session=request.session, sequence=request.sequence, request_bytes=len(frame)) as outcome:
        try:
            async with (
                asyncio.timeout(request.deadline_s + GRACE_S),
                contextlib.aclosing(job.transport.relay_stream(request, frame)) as replies,
            ):
                async for reply in replies:
                    outcome.reply_bytes += len(reply)
                    outcome.error = error_in(reply)
                    job.renew()
                    yield reply
        except Exception as error:
            info = describe(jobs, job, request, error)
            outcome.error = info.kind
            yield wire.encode(Reply(sequence=request.sequence, body=info))


class FrameStream(Response):
    """Frames with 8 bytes of little-endian length before each.

    Args:
        frames: Closed at the end, whatever the end is.
        body: The request's; released at the end.
    """

    media_type = STREAM_TYPE

    def __init__(self, frames: AsyncGenerator[wire.Buffer, None], body: Body) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._frames = frames
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pumping = asyncio.create_task(self._pump(send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({pumping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not pumping.done():
                pumping.cancel()
            await asyncio.wait({pumping, leaving})
            self._body.release()
        if not pumping.cancelled():
            pumping.result()

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for frame in frames:
                # Waits while the reader lags behind, and so the engine's replies wait, too.
                piece = b"".join((struct.pack("<Q", len(frame)), frame))
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return once the client is gone. Only after its request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
