"""The jobs of a server: named, owned, leased. Each is one transport to one service, started and stopped as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pydantic

from arctic_core.config.base import ConfigModel
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.config.server import ServerConfig
from arctic_core.errors import (
    ArcticError,
    ConfigError,
    EngineDiedError,
    InvalidStateError,
    JobNotFoundError,
    QueueFullError,
    TransportError,
)
from arctic_core.protocol import ErrorInfo
from arctic_core.server.auth import Principal
from arctic_core.server.observe import REQUEST_ID, TRACEPARENT, CallEvent, JobEvent, Observer
from arctic_core.server.policy import Policy
from arctic_core.server.status import ErrorBody, error_body
from arctic_core.transports.base import Transport

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopping", "stopped"]
ENDED: tuple[State, ...] = ("failed", "stopped")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SWEEP_S = 0.25


class JobRequest(ConfigModel):
    """Body of ``POST /arctic/v1/jobs``."""

    name: str | None = None
    """Absent: the server makes one up."""
    config: dict[str, Any]
    """An ``ArcticRLClientConfig`` as plain values; ``comm_protocol`` is the server's."""
    lease_s: float | None = pydantic.Field(None, gt=0)
    """Absent: the server's default."""


class LeaseRequest(ConfigModel):
    """Body of ``POST /arctic/v1/jobs/{job}/lease``."""

    lease_s: float | None = pydantic.Field(None, gt=0)
    """Seconds from now; absent: as long as before."""


class JobView(pydantic.BaseModel):
    """What a client is told of a job."""

    name: str
    state: State
    owner: str
    created: float
    """Seconds since 1970."""
    lease_expires: float
    """Seconds since 1970; any call moves it."""
    error: ErrorBody | None
    """What ended a failed job."""
    operations_in_flight: int
    last_operation: str | None


class Job:
    """One job. Made by :class:`Jobs`."""

    def __init__(
        self,
        name: str,
        *,
        owner: str,
        config: ArcticRLClientConfig,
        transport: Transport,
        lease_s: float,
        observer: Observer,
    ) -> None:
        self.name = name
        self.owner = owner
        self.config = config
        self.transport = transport
        self.lease_s = lease_s
        self.state: State = "starting"
        self.error: ErrorInfo | None = None
        self.created = time.time()
        self.ended_at = 0.0
        self.in_flight = 0
        self.last_operation: str | None = None
        self.task: asyncio.Task[None] | None = None
        """What starts the job, or stops it."""
        self._observer = observer
        self._renewed = time.monotonic()
        self._changed = asyncio.Event()

    def renew(self, lease_s: float | None = None) -> None:
        """Count the lease from now."""
        self.lease_s = self.lease_s if lease_s is None else lease_s
        self._renewed = time.monotonic()

    @property
    def lease_left_s(self) -> float:
        """Seconds until the job is stopped; negative when it is overdue."""
        return self._renewed + self.lease_s - time.monotonic()

    def become(self, state: State, error: ErrorInfo | None = None) -> None:
        """Change the state and wake whoever waits for that."""
        self.state = state
        self.error = error or self.error
        if state in ENDED:
            self.ended_at = time.monotonic()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        logger.info("job %s of %s is %s%s", self.name, self.owner, state, f": {error.kind}: {error.message}" if error else "")
        self._observer.job_changed(self.event())

    async def settled(self, wait_s: float) -> None:
        """Wait until the job neither starts nor stops, at most this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.state in ("starting", "stopping"):
                    await self._changed.wait()

    def require_ready(self) -> None:
        """Raise :class:`InvalidStateError` unless calls can be made."""
        if self.state != "ready":
            why = f" ({self.error.kind}: {self.error.message})" if self.error else ""
            remedy = "wait for it: GET …/jobs/NAME?wait=30" if self.state == "starting" else "start a new one"
            raise InvalidStateError(f"the job {self.name!r} is {self.state}{why}", remedy=remedy)

    @contextlib.contextmanager
    def working(self, operation: str, *, session: str = "", sequence: int = 0, request_bytes: int = 0) -> Iterator[CallOutcome]:
        """Count one operation: renew the lease, tell the observer. Set ``error`` of what is yielded to report one."""
        event = CallEvent(self.name, operation, session, sequence, request_bytes, REQUEST_ID.get(), TRACEPARENT.get())
        outcome, begin = CallOutcome(), time.monotonic()
        self.in_flight += 1
        self.last_operation = operation
        self.renew()
        self._observer.call_started(event)
        try:
            yield outcome
        except BaseException as error:
            outcome.error = "Cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
            raise
        finally:
            self.in_flight -= 1
            self.renew()
            seconds = time.monotonic() - begin
            self._observer.call_finished(event, error=outcome.error, seconds=seconds, reply_bytes=outcome.reply_bytes)

    def event(self) -> JobEvent:
        """The job for an observer."""
        return JobEvent(self.name, self.owner, self.state, self.error.kind if self.error else "")

    def view(self) -> JobView:
        """The job for a client."""
        return JobView(
            name=self.name,
            state=self.state,
            owner=self.owner,
            created=self.created,
            lease_expires=time.time() + self.lease_left_s,
            error=error_body(self.error) if self.error else None,
            operations_in_flight=self.in_flight,
            last_operation=self.last_operation,
        )


class Room:
    """Bounds how many requests wait at once.

    Args:
        limit: Most of them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One place for the time of the block, or :class:`QueueFullError`."""
        if self.used >= self.limit:
            raise QueueFullError(f"{self.limit} requests wait, which is the most", remedy="wait a little, or raise max_waiting")
        self.used += 1
        try:
            yield
        finally:
            self.used -= 1


class CallOutcome:
    """How an operation ended, filled in by whoever carries it out."""

    error = ""
    reply_bytes = 0


class Jobs:
    """All jobs of a server. Used in ``async with``; all methods run on one event loop.

    Args:
        config: The server's configuration.
        observer: Told of every change.
        connect: Makes the transport of a job from its configuration.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        observer: Observer | None = None,
        connect: Callable[[ArcticRLClientConfig], Transport] | None = None,
    ) -> None:
        self.config = config
        self.policy = Policy(config)
        self.draining = False
        self.waiting = Room(config.max_waiting)
        self._observer = observer or Observer()
        self._connect = connect or make_transport
        self._jobs: dict[str, Job] = {}
        self._keys: dict[tuple[str, str], tuple[JobRequest, Job]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Jobs:
        self._sweeper = asyncio.create_task(self._sweep_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def idle(self) -> bool:
        """Whether no operation runs in any job."""
        return not any(job.in_flight for job in self)

    # --- finding --------------------------------------------------------------------------------------------------------

    def get(self, name: str, who: Principal | None = None) -> Job:
        """The job of that name.

        Raises:
            JobNotFoundError: There is none, or it is somebody else's.
        """
        job = self._jobs.get(name)
        if job is None or (who is not None and not who.sees(job.owner)):
            raise JobNotFoundError(
                f"there is no job {name!r}", remedy="list them: GET /arctic/v1/jobs; one whose lease expired is gone"
            )
        return job

    async def settled(self, job: Job, wait_s: float) -> None:
        """Wait until the job neither starts nor stops, at most this long."""
        if wait_s > 0:
            with self.waiting.place():
                await job.settled(wait_s)

    def visible(self, who: Principal) -> list[Job]:
        """All jobs that exist for this caller, in order of their start."""
        return [job for job in self._jobs.values() if who.sees(job.owner)]

    # --- life -----------------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise :class:`TransportError` when the server takes no new work."""
        if self.draining:
            raise TransportError("the server is shutting down", remedy="use another server, or wait until it is back")

    def create(self, who: Principal, request: JobRequest, key: str | None = None) -> Job:
        """Begin to start a job; the same owner's same key gives the same job again.

        Raises:
            ConfigError: The configuration is wrong.
            PermissionDeniedError: It asks for what clients may not have.
            InvalidStateError: The name is taken, or the key was used with another body.
            QueueFullError: There are too many jobs.
        """
        self.require_open()
        if key is not None and (known := self._keys.get((who.name, key))):
            if known[0] != request:
                raise InvalidStateError(
                    "this Idempotency-Key came with another request before", remedy="use a new key for a new job"
                )
            return known[1]
        name = request.name if request.name is not None else f"job-{uuid.uuid4().hex[:8]}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name for a job", where="name", remedy="letters, digits, '.', '_', '-'; at most 64"
            )
        lease_s = self.lease(request.lease_s)
        if name in self._jobs and self._jobs[name].state not in ENDED:
            raise InvalidStateError(f"a job named {name!r} runs already", where="name", remedy="choose another name")
        if sum(job.state not in ENDED for job in self._jobs.values()) >= self.config.max_jobs:
            raise QueueFullError(
                f"{self.config.max_jobs} jobs run already, which is the most", remedy="stop one, or raise max_jobs"
            )
        config = self.policy.job_config(request.config, name)
        transport = self._connect(config)
        job = Job(name, owner=who.name, config=config, transport=transport, lease_s=lease_s, observer=self._observer)
        self._jobs[name] = job
        if key is not None:
            self._keys[who.name, key] = (request, job)
        job.become("starting")
        job.task = asyncio.create_task(self._start(job))
        return job

    def lease(self, lease_s: float | None, default_s: float | None = None) -> float:
        """The lease a client gets for the one it asks for."""
        if lease_s is None:
            return self.config.default_lease_s if default_s is None else default_s
        if not 0 < lease_s <= self.config.max_lease_s:
            raise ConfigError(f"lease_s={lease_s:g} must be above 0 and at most {self.config.max_lease_s:g}", where="lease_s")
        return lease_s

    async def _start(self, job: Job) -> None:
        try:
            await job.transport.open()  # leaves nothing behind where it fails
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, ArcticError):
                logger.exception("job %s did not start", job.name)
            job.become("failed", ErrorInfo.of(error, where="start"))
        else:
            job.renew()
            job.become("ready")

    def stop(self, job: Job, error: ErrorInfo | None = None) -> None:
        """Begin to stop a job, whatever it does; with an error it ends as failed. Idempotent."""
        if job.state not in ENDED and job.state != "stopping":
            starting, job.task = job.task, None
            job.become("stopping", error)
            job.task = asyncio.create_task(self._stop(job, starting))

    async def _stop(self, job: Job, starting: asyncio.Task[None] | None) -> None:
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        try:
            async with asyncio.timeout(3 * job.config.deadlines.stop + 15.0):
                await job.transport.close(shutdown=True)
        except Exception as error:
            logger.exception("job %s did not stop by itself", job.name)
            job.become("failed", ErrorInfo.of(error, where="stop"))
        else:
            job.become("failed" if job.error else "stopped")

    async def close(self) -> None:
        """Stop all jobs and wait for that."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        for job in self._jobs.values():
            self.stop(job)
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def lost(self, job: Job, error: EngineDiedError) -> None:
        """The service behind a job is gone for good: end the job as failed."""
        self.stop(job, ErrorInfo.of(error))

    # --- time -----------------------------------------------------------------------------------------------------------

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.sweep()
            except Exception:  # one bad job must not keep the leases of all others from expiring
                logger.exception("sweeping failed")

    def sweep(self) -> None:
        """Stop jobs whose lease ran out; forget those that ended long ago."""
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.state == "ready" and job.lease_left_s < 0:
                logger.warning("job %s of %s: its lease of %g s expired", job.name, job.owner, job.lease_s)
                self._observer.lease_expired(job.event())
                self.stop(job)
            elif job.state in ENDED and now - job.ended_at > self.config.job_ttl_s:
                self._jobs.pop(job.name)
        kept = set(self._jobs.values())
        self._keys = {key: value for key, value in self._keys.items() if value[1] in kept}


def make_transport(config: ArcticRLClientConfig) -> Transport:
    """The transport between the server and a job's service."""
    if config.comm_protocol == "ray":
        from arctic_core.transports.ray import RayTransport

        return RayTransport(config)
    from arctic_core.transports.local import LocalTransport

    return LocalTransport(config)
