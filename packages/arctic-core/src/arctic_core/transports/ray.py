"""The service in a Ray actor: every message is one frame, every wait has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from arctic_core import tracing, wire
from arctic_core.config.client import ArcticRLClientConfig, RayConfig
from arctic_core.errors import (
    ArcticError,
    DeadlineExceeded,
    EngineDiedError,
    EngineError,
    MissingExtraError,
    TransportClosedError,
    TransportError,
)
from arctic_core.protocol import Reply, Request
from arctic_core.transports.base import Transport

if TYPE_CHECKING:
    from arctic_core.service.ray_front import RayJob


class RayTransport(Transport):
    """Talks to the service actor of a job that it starts, or that runs already (``config.connect_to``)."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self._config = config
        self._job: RayJob | None = None
        self._given_up = threading.Event()

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        # Ray blocks, so it works in a thread, which cannot be cancelled: it is told, and awaited while it cleans up.
        opening = asyncio.get_running_loop().run_in_executor(None, self._open)
        try:
            self._job = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._given_up.set()
            await asyncio.wait([opening], timeout=_stop_limit(self._config))
            if opening.done() and opening.exception() is None:
                self._job = opening.result()
                await self.close(shutdown=False)
            raise

    def _open(self) -> RayJob:
        front = _front()
        with _translated("start"):
            if self._config.connect_to is not None:
                return front.connect_job(self._config)
            return front.start_job(self._config, given_up=self._given_up)

    async def close(self, shutdown: bool) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        limit_s = _stop_limit(self._config)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.to_thread(self._close, job, shutdown or job.owned)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the job did not stop within {limit_s:g} s", where="ray", remedy="look for it with `ray list actors`"
            ) from None

    def _close(self, job: RayJob, stop: bool) -> None:
        front = _front()
        if stop:
            front.stop_job(job, deadline_s=self._config.deadlines.stop)
        else:
            front.leave_job(job)

    def reconnect_config(self) -> ArcticRLClientConfig:
        import ray

        private = {"dashboard", "object_store_bytes"}
        cluster = RayConfig(
            **self._config.ray.model_dump(exclude=private | {"address"}), address=ray.get_runtime_context().gcs_address
        )
        return self._config.model_copy(update={"connect_to": self._running().name, "ray": cluster})

    # --- messages -----------------------------------------------------------------------------------------------------

    async def send(self, request: Request) -> Reply:
        with tracing.client_span(request) as headers:
            return wire.decode(await self._handle(request, wire.encode(request), headers.get("traceparent", "")), Reply)

    async def stream(self, request: Request) -> AsyncIterator[Reply]:
        with tracing.client_span(request) as headers:
            replies = self._stream(request, wire.encode(request), headers.get("traceparent", ""))
            async with contextlib.aclosing(replies) as frames:
                async for frame in frames:
                    yield wire.decode(frame, Reply)

    async def relay(self, request: Request, frame: wire.Buffer) -> wire.Buffer:
        return await self._handle(request, _as_argument(frame), tracing.traceparent())

    async def relay_stream(self, request: Request, frame: wire.Buffer) -> AsyncGenerator[wire.Buffer, None]:
        async with contextlib.aclosing(self._stream(request, _as_argument(frame), tracing.traceparent())) as frames:
            async for reply in frames:
                yield reply

    async def _handle(self, request: Request, frame: Any, traceparent: str) -> bytes:
        with _translated(request.operation.op()):
            ref = self._running().actor.handle.remote(frame, traceparent)
            with self._cancelling(ref):
                return await asyncio.wrap_future(ref.future())

    async def _stream(self, request: Request, frame: Any, traceparent: str) -> AsyncGenerator[bytes, None]:
        with _translated(request.operation.op()):
            refs = self._running().actor.stream.options(num_returns="streaming").remote(frame, traceparent)
            with self._cancelling(refs):
                async for ref in refs:
                    yield await asyncio.wrap_future(ref.future())

    def _running(self) -> RayJob:
        if self._job is None:
            raise TransportClosedError("not connected to the job's service", remedy="create a new client")
        return self._job

    @contextlib.contextmanager
    def _cancelling(self, task: Any) -> Iterator[None]:
        """Cancel the actor's task where waiting for it is given up."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            import ray

            # Not recursive: the service itself ends what it began in the engines, and lets writes finish.
            ray.cancel(task, recursive=False)
            raise


def _as_argument(frame: wire.Buffer) -> Any:
    """A frame so that Ray takes its bytes from where they are: as an array, which the actor sees in shared memory."""
    return frame if isinstance(frame, bytes) else np.frombuffer(frame, np.uint8)


def _front() -> Any:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "comm_protocol='ray' needs the package 'ray'", remedy='pip install "arctic-core[rl]"'
        ) from error
    from arctic_core.service import ray_front

    return ray_front


def _stop_limit(config: ArcticRLClientConfig) -> float:
    """Engines have ``deadlines.stop`` seconds to end well; what is left of the job is then killed, which takes a little."""
    return 2 * config.deadlines.stop + 10.0


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """Ray's errors as ours."""
    import ray.exceptions as r

    try:
        yield
    except r.ActorUnavailableError as error:
        raise TransportError(f"the service actor cannot be reached: {error}", where=where) from error
    except (r.RayActorError, r.WorkerCrashedError, r.OwnerDiedError, r.NodeDiedError) as error:
        raise EngineDiedError(
            f"the service actor is gone: {error}", where=where, remedy="start a new job and load its latest checkpoint"
        ) from error
    except r.TaskCancelledError as error:
        raise TransportError("the request was cancelled in the service actor", where=where) from error
    except r.RayTaskError as error:
        if isinstance(error.cause, ArcticError):
            raise error.cause from error
        raise EngineError(f"the service actor failed: {error.cause or error}", where=where) from error
    except r.RayError as error:
        raise TransportError(f"Ray failed: {type(error).__name__}: {error}", where=where) from error
