"""The routes that carry frames: calls, their results, streams."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

import fastapi
from fastapi import Header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.errors import DataError, UnsupportedOperation
from arctic_core.server.body import FRAME_TYPE, Body, Budget, read_frame
from arctic_core.server.calls import Call, Calls
from arctic_core.server.routes import ERRORS, JOB, MAX_WAIT_S, RESULT, Wait, job_of, jobs_of
from arctic_core.server.status import headers_of, json_response, status_of
from arctic_core.server.streams import STREAM_TYPE, FrameStream, disconnected, frames_of

_INLINE = 2**20
_PIECE = 2**20
_SESSION = re.compile(r"[A-Za-z0-9._~-]{1,64}")
_MAX_SEQUENCE = 2**63 - 1
_FRAME = {"schema": {"type": "string", "format": "binary"}}
_PENDING = {
    "type": "object",
    "required": ["session", "sequence"],
    "properties": {"session": {"type": "string"}, "sequence": {"type": "integer"}},
}
_REQUEST_FRAME = {"requestBody": {"required": True, "content": {FRAME_TYPE: _FRAME}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The reply.", "content": {FRAME_TYPE: _FRAME}},
    202: {"description": "It still runs.", "content": {"application/json": {"schema": _PENDING}}},
    "4XX": ERRORS["4XX"] | {"content": {FRAME_TYPE: _FRAME}},
    "5XX": ERRORS["5XX"] | {"content": {FRAME_TYPE: _FRAME}},
}
ArcticWait = Annotated[
    float,
    Header(alias="Arctic-Wait", ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for the reply."),
]

router = fastapi.APIRouter(tags=["calls"])


@router.post(JOB + "/call", responses=_ANSWERS, openapi_extra=_REQUEST_FRAME, response_class=Response)
async def call(request: Request, job: str, arctic_wait: ArcticWait = 25.0) -> Response:
    """Carry out one operation. A key that is known attaches to its call; nothing runs twice."""
    found = job_of(request, job)
    body, message = await _read(request)
    running = await _calls(request).submit(found, message, body)
    return await _answer(request, running, arctic_wait)


@router.get(RESULT, responses=_ANSWERS, response_class=Response)
async def result(request: Request, job: str, session: str, sequence: int, wait: Wait = 0.0) -> Response:
    """The reply to a call that took longer than its request waited."""
    return await _answer(request, _calls(request).find(job_of(request, job), session, sequence), wait)


@router.delete(
    RESULT,
    status_code=204,
    responses={202: {"description": "A write; it runs to its end."}, **ERRORS},
    response_class=Response,
)
async def forget(request: Request, job: str, session: str, sequence: int) -> Response:
    """Cancel a read or generation that runs; drop a reply that was received."""
    calls = _calls(request)
    done = calls.forget(calls.find(job_of(request, job), session, sequence))
    return Response(status_code=204 if done else 202)


@router.post(
    JOB + "/stream",
    responses={200: {"description": "Length-prefixed frames.", "content": {STREAM_TYPE: _FRAME}}, **ERRORS},
    openapi_extra=_REQUEST_FRAME,
    response_class=Response,
)
async def stream(request: Request, job: str) -> Response:
    """Generate, completion by completion: frames with 8 bytes of little-endian length before each."""
    jobs, found = jobs_of(request), job_of(request, job)
    body, message = await _read(request)
    try:
        jobs.require_open()
        found.require_ready()
        if not isinstance(message.operation, p.Generate):
            raise UnsupportedOperation(f"{message.operation.op()} does not stream", remedy="only generate does")
        _calls(request).require_room()
        allowed = jobs.policy.request(message)
    except BaseException:
        body.release()
        raise
    return FrameStream(frames_of(jobs, found, allowed, body.view), body)


async def _read(request: Request) -> tuple[Body, p.Request]:
    """The request's frame and the message in it, whose arrays are views on the frame."""
    config = jobs_of(request).config
    budget: Budget = request.app.state.budget
    body = await read_frame(request, budget, limit=config.max_body_bytes, pause_s=config.body_timeout_s)
    try:
        inline = len(body.view) <= _INLINE
        message = wire.decode(body.view, p.Request) if inline else await asyncio.to_thread(wire.decode, body.view, p.Request)
        if not _SESSION.fullmatch(message.session):
            raise DataError("a session is 1 to 64 letters, digits, '.', '_', '~', '-'", where="request.session")
        if not 0 <= message.sequence <= _MAX_SEQUENCE:
            raise DataError(f"a sequence is 0 to {_MAX_SEQUENCE}", where="request.sequence")
    except BaseException:
        body.release()
        raise
    return body, message


async def _answer(request: Request, call: Call, wait_s: float) -> Response:
    async with _leaving(request) as gone:
        done = await _calls(request).wait(call, wait_s, gone)
    if not done:
        _, session, sequence = call.key
        return json_response({"session": session, "sequence": sequence}, 202)
    answer = call.answer
    status = status_of(answer.error) if answer.error else 200
    return FrameResponse(answer.frame, status, headers_of(status))


@contextlib.asynccontextmanager
async def _leaving(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client goes away."""
    task = asyncio.create_task(disconnected(request.receive))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class FrameResponse(Response):
    """A frame as it is."""

    media_type = FRAME_TYPE

    def __init__(self, frame: wire.Buffer, status: int, headers: dict[str, str]) -> None:
        super().__init__(None, status, {**headers, "content-length": str(len(frame))})
        self._frame = memoryview(frame)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # In pieces, because what the socket does not take at once is copied.
        for start in range(0, len(self._frame), _PIECE):
            piece = self._frame[start : start + _PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": start + _PIECE < len(self._frame)})


def _calls(request: Request) -> Calls:
    return request.app.state.calls
