"""Running and finished calls by key, so that no operation depends on one connection staying open.

A call is known by ``(job, session, sequence)``. Asking again for a known key attaches to it; nothing runs twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field

import numpy as np

from arctic_core import wire
from arctic_core.config.server import ServerConfig
from arctic_core.errors import (
    ArcticError,
    DeadlineExceeded,
    EngineDiedError,
    InvalidStateError,
    JobNotFoundError,
    QueueFullError,
)
from arctic_core.protocol import ErrorInfo, Reply, Request
from arctic_core.protocol import Shutdown as ShutdownOperation
from arctic_core.server.body import Body
from arctic_core.server.jobs import ENDED, SWEEP_S, Job, Jobs

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""What a service gets past a request's deadline to say so itself."""
_INLINE = 64 * 2**10
_MAX_ERROR = 2**20

Key = tuple[Job, str, int]


@dataclass(frozen=True)
class Answer:
    """A finished call."""

    frame: wire.Buffer
    error: str = ""
    """Class name of the error inside, else empty."""


@dataclass(eq=False)
class Call:
    """One call, running or finished."""

    key: Key
    mutates: bool
    digest: asyncio.Task[bytes]
    """Of the request's frame, to tell a repetition from another request under the same key."""
    task: asyncio.Task[Answer] | None = None
    waiting: int = 0
    """Requests that wait for the answer now."""
    wanted_at: float = field(default_factory=time.monotonic)
    """When somebody last waited."""
    finished_at: float | None = None
    verdict: ErrorInfo | None = None
    """Why it was cancelled."""

    @property
    def done(self) -> bool:
        return self.finished_at is not None

    @property
    def answer(self) -> Answer:
        """The answer of a finished call."""
        assert self.task is not None
        return self.task.result()

    def cancel(self, verdict: ErrorInfo) -> None:
        """End it; whoever still waits gets the verdict."""
        if self.task is not None and not self.task.done():
            self.verdict = self.verdict or verdict
            self.task.cancel()


class Calls:
    """All calls of a server. Used in ``async with``; all methods run on one event loop."""

    def __init__(self, config: ServerConfig, jobs: Jobs) -> None:
        self._config = config
        self._jobs = jobs
        self._calls: dict[Key, Call] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Calls:
        self._sweeper = asyncio.create_task(self._sweep_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls; whoever waits is told so. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        running = [call.task for call in self.running() if call.task is not None]
        for call in self.running():
            call.cancel(_verdict("the server is shutting down"))
        if running:
            await asyncio.wait(running, timeout=GRACE_S)

    def running(self) -> list[Call]:
        """Calls without an answer yet."""
        return [call for call in self._calls.values() if not call.done]

    def require_room(self) -> None:
        """Raise :class:`QueueFullError` when as many calls and streams run as may."""
        if sum(job.in_flight for job in self._jobs) >= self._config.max_inflight_calls:
            raise QueueFullError(
                f"{self._config.max_inflight_calls} calls run, which is the most",
                remedy="wait until some end, or raise max_inflight_calls",
            )

    # --- one call -------------------------------------------------------------------------------------------------------

    async def submit(self, job: Job, request: Request, body: Body) -> Call:
        """Begin a call, or attach to the one of the same key. The body is the call's from here on.

        Raises:
            InvalidStateError: The key came with another frame before, or the job is not ready.
            QueueFullError: Too many calls run.
            PermissionDeniedError: The request asks for what clients may not have.
            TransportError: The server is shutting down.
        """
        key = (job, request.session, request.sequence)
        try:
            if (known := self._calls.get(key)) is not None:
                digest = await _digest(body.view)
                if digest != await known.digest:
                    raise InvalidStateError(
                        "this session and sequence came with another frame before",
                        where=f"{request.session}/{request.sequence}",
                        remedy="give every request of a session a sequence number of its own",
                    )
                # A read that failed is simply tried again; what failed may have been a full queue.
                if known.mutates or not known.done or not known.answer.error:
                    body.release()
                    return known
            self._jobs.require_open()
            job.require_ready()
            allowed = self._jobs.policy.request(request)
            self.require_room()
        except BaseException:
            body.release()
            raise
        call = Call(key, type(request.operation).mutates(), asyncio.ensure_future(_digest(body.view)))
        self._calls[key] = call
        call.task = asyncio.create_task(self._run(call, job, request, allowed, body))
        call.task.add_done_callback(lambda task: self._finished(call, task))
        return call

    async def _run(self, call: Call, job: Job, request: Request, allowed: Request, body: Body) -> Answer:
        frame = body.view if allowed is request else memoryview(wire.encode(allowed))
        op = allowed.operation.op()
        try:
            with job.working(op, session=request.session, sequence=request.sequence, request_bytes=len(body.view)) as outcome:
                answer = await relay(self._jobs, job, allowed, frame)
                outcome.error, outcome.reply_bytes = answer.error, len(answer.frame)
        except asyncio.CancelledError:
            if call.verdict is None:
                raise
            return _failed(request, call.verdict)
        finally:
            await asyncio.shield(call.digest)  # it reads the body
            body.release()
        if isinstance(allowed.operation, ShutdownOperation) and not answer.error:
            self._jobs.stop(job)
        return answer

    def _finished(self, call: Call, task: asyncio.Task[Answer]) -> None:
        call.finished_at = time.monotonic()
        if task.cancelled() or task.exception() is not None:
            self._calls.pop(call.key, None)
        self._trim(call.key[0])

    async def wait(self, call: Call, seconds: float, gone: asyncio.Task[None]) -> bool:
        """Wait for the answer, at most so long, and not once the caller is gone; returns whether it is there.

        Raises:
            QueueFullError: Too many requests wait.
        """
        assert call.task is not None
        call.key[0].renew()
        if not call.task.done() and seconds > 0:
            with self._jobs.waiting.place():
                call.waiting += 1
                try:
                    await asyncio.wait({call.task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    call.waiting -= 1
        call.wanted_at = time.monotonic()
        return call.task.done()

    def find(self, job: Job, session: str, sequence: int) -> Call:
        """The call of that key.

        Raises:
            JobNotFoundError: There is none; posting the request again is safe.
        """
        call = self._calls.get((job, session, sequence))
        if call is None:
            raise JobNotFoundError(
                "unknown result", where=f"{session}/{sequence}", remedy="post the request again; its key keeps that safe"
            )
        return call

    def forget(self, call: Call) -> bool:
        """Drop an answer, or cancel a read; returns False for a write that still runs, which goes on."""
        if not call.done and call.mutates:
            return False
        call.cancel(_verdict("the request was cancelled"))
        self._calls.pop(call.key, None)
        return True

    # --- time and room ------------------------------------------------------------------------------------------------

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.sweep()
            except Exception:
                logger.exception("sweeping failed")

    def sweep(self) -> None:
        """Cancel what nobody waits for, drop answers that nobody collected, end the calls of jobs that ended."""
        now = time.monotonic()
        for call in list(self._calls.values()):
            job = call.key[0]
            if call.finished_at is not None:
                if now - call.finished_at > self._config.result_ttl_s:
                    self._calls.pop(call.key, None)
            elif job.state in ENDED:
                call.cancel(_verdict(f"the job {job.name!r} was stopped"))
            elif not call.mutates and not call.waiting and now - call.wanted_at > self._config.orphan_s:
                logger.info("job %s: %s/%d is cancelled, nobody waits for it", job.name, *call.key[1:])
                self._calls.pop(call.key, None)
                call.cancel(_verdict("nobody waited for the answer"))

    def _trim(self, job: Job) -> None:
        """Keep a job's answers within the bound; a write's repetition is still answered by the service's own ledger."""
        finished = [c for c in self._calls.values() if c.key[0] is job and c.task is not None and c.task.done()]
        total = sum(len(call.answer.frame) for call in finished)
        for call in sorted(finished, key=lambda c: c.finished_at or 0.0):
            if total <= self._config.max_result_bytes:
                return
            total -= len(call.answer.frame)
            self._calls.pop(call.key, None)


async def relay(jobs: Jobs, job: Job, request: Request, frame: wire.Buffer) -> Answer:
    """One request to the job's service. Errors of the transport become replies, too."""
    try:
        async with asyncio.timeout(request.deadline_s + GRACE_S):
            reply = await job.transport.relay(request, frame)
    except Exception as error:
        return _failed(request, describe(jobs, job, request, error))
    return Answer(reply, error_in(reply))


def describe(jobs: Jobs, job: Job, request: Request, error: Exception) -> ErrorInfo:
    """What a transport raised, for the client; a service that is gone takes its job with it."""
    op = request.operation.op()
    if isinstance(error, EngineDiedError):
        jobs.lost(job, error)
    if isinstance(error, TimeoutError) and not isinstance(error, ArcticError):
        error = DeadlineExceeded(f"{op} did not finish within {request.deadline_s:g} s", remedy="raise deadlines.request")
    if not isinstance(error, ArcticError):
        logger.error("job %s: %s failed", job.name, op, exc_info=error)
    return ErrorInfo.of(error, where=op)


def error_in(frame: wire.Buffer) -> str:
    """Class name of the error in a reply's frame; empty where there is a result."""
    if len(frame) > _MAX_ERROR:
        return ""
    body = wire.decode(frame, Reply).body
    return body.kind if isinstance(body, ErrorInfo) else ""


def _failed(request: Request, error: ErrorInfo) -> Answer:
    return Answer(wire.encode(Reply(sequence=request.sequence, body=error)), error.kind)


def _verdict(message: str) -> ErrorInfo:
    return ErrorInfo.of(InvalidStateError(message))


async def _digest(frame: memoryview) -> bytes:
    if len(frame) <= _INLINE:
        return hashlib.sha256(frame).digest()
    return await asyncio.to_thread(_fingerprint, frame)


def _fingerprint(frame: memoryview) -> bytes:
    """Tells a large frame from another by its ends, which hold the message, and by sums over the rest.

    It guards against mistakes of a client in its own session, at the speed of memory: hashing everything would take longer
    than sending it.
    """
    edge, row = _INLINE // 2, 1024
    words = np.frombuffer(frame, np.uint64, len(frame) // (8 * row) * row).reshape(-1, row)
    return hashlib.sha256(bytes(frame[:edge]) + bytes(frame[-edge:]) + words.sum(0).tobytes()).digest()
