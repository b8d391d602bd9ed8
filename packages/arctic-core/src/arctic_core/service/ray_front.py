"""The service as a Ray actor, and the functions that start, find and stop it. Imported only where Ray is wanted.

A job is one named actor; its engines are actors below it. A private cluster (no address given) lives and dies with the
process that started it. In a joined cluster the job ends with its owner too, because none of its actors is detached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from arctic_core import tracing
from arctic_core.config.client import ArcticRLClientConfig, RayConfig
from arctic_core.errors import ArcticError, EngineStartError, TransportError
from arctic_core.protocol import ErrorInfo, Reply, Request
from arctic_core.service.core import ArcticService
from arctic_core.service.placement import plan_placement
from arctic_core.service.ray_launch import RayLauncher
from arctic_core.wire import decode, encode

NAMESPACE = "arctic"

logger = logging.getLogger(__name__)


class ServiceActor:
    """One job's service behind frames."""

    def __init__(self, config: ArcticRLClientConfig, name: str) -> None:
        tracing.configure("arctic-service")
        self._service = ArcticService(config, launcher=RayLauncher(config), name=name)

    async def start(self) -> ErrorInfo | None:
        """Bring the engines up; answers what went wrong."""
        try:
            await self._service.start()
        except Exception as error:  # the border of the actor: whatever happens becomes a typed answer
            return ErrorInfo.of(error, where="start")
        return None

    async def handle(self, frame: Any, traceparent: str = "") -> bytes:
        """One request, one reply. The frame is any buffer."""
        try:
            request = decode(frame, Request)
        except ArcticError as error:
            return encode(Reply(sequence=-1, body=ErrorInfo.of(error)))
        with tracing.carried(traceparent):
            return encode(await self._service.handle(request))

    async def stream(self, frame: Any, traceparent: str = "") -> AsyncIterator[bytes]:
        """One request, many replies."""
        replies = tracing.carried_items(traceparent, self._service.stream(decode(frame, Request)))
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield encode(reply)

    async def stop(self) -> None:
        """Stop the engines."""
        await self._service.stop()
        await asyncio.to_thread(tracing.flush)  # the process is killed next


@dataclass(frozen=True)
class RayJob:
    """A handle on a running job."""

    actor: Any
    name: str
    """Name of the service actor in the namespace ``arctic``."""
    owned: bool
    """Whether this process started the job, and so ends it."""
    owns_cluster: bool
    """Whether this process started the cluster for it."""


def start_job(config: ArcticRLClientConfig, *, given_up: threading.Event | None = None) -> RayJob:
    """Start a job and wait until its engines are up; a failure leaves no actor and no private cluster behind.

    Args:
        config: The job.
        given_up: Set by another thread when nobody waits for the job any more; the start then fails.

    Raises:
        ArcticError: What kept the engines from starting.
        TransportError: The cluster could not be reached or started.
    """
    owns_cluster = _join_cluster(config)
    name = f"{config.job}-{uuid.uuid4().hex[:8]}"
    actor = None
    try:
        actor = (
            ray.remote(ServiceActor)
            .options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000, max_restarts=0)
            .remote(config, name)
        )
        _start(actor, config.deadlines.start, given_up or threading.Event())
    except BaseException:
        if actor is not None:
            _kill(actor, config.deadlines.stop)
        if owns_cluster:
            ray.shutdown()
        raise
    return RayJob(actor, name, owned=True, owns_cluster=owns_cluster)


def _start(actor: Any, deadline_s: float, given_up: threading.Event) -> None:
    started = actor.start.remote()
    end = time.monotonic() + deadline_s + 90.0
    try:
        while not ray.wait([started], timeout=0.5)[0]:
            if given_up.is_set():
                raise EngineStartError("the start was given up", where="start")
            if time.monotonic() > end:
                raise EngineStartError(f"the service did not answer within {deadline_s + 90:g} s", where="start")
        error: Any = ray.get(started)
    except RayActorError as died:
        raise EngineStartError(f"the service's process ended while starting: {died}", where="start") from None
    if error is not None:
        raise error.to_exception()


def connect_job(config: ArcticRLClientConfig) -> RayJob:
    """Find the running job ``config.connect_to``.

    Raises:
        TransportError: There is no such job in the cluster.
    """
    assert config.connect_to is not None
    owns_cluster = _join_cluster(config) if config.ray.address else _join_cluster(_with_address(config, "auto"))
    try:
        actor = ray.get_actor(config.connect_to, namespace=NAMESPACE)
    except ValueError:
        if owns_cluster:
            ray.shutdown()
        raise TransportError(
            f"no job named {config.connect_to!r} runs in this Ray cluster",
            remedy="check ray.address; a job ends with the process that started it",
        ) from None
    return RayJob(actor, config.connect_to, owned=False, owns_cluster=owns_cluster)


def stop_job(job: RayJob, *, deadline_s: float) -> None:
    """Stop a job's engines (gracefully, then by force) and the private cluster it ran in. Idempotent."""
    if ray.is_initialized():
        _kill(job.actor, deadline_s)
        if job.owns_cluster:
            ray.shutdown()


def leave_job(job: RayJob) -> None:
    """Let go of a job without ending it."""
    if job.owns_cluster and ray.is_initialized():
        ray.shutdown()


def _kill(actor: Any, deadline_s: float) -> None:
    try:
        ray.get(actor.stop.remote(), timeout=deadline_s)
    except (RayError, GetTimeoutError) as error:
        logger.warning("the service did not stop by itself: %s", error)
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor)


def _with_address(config: ArcticRLClientConfig, address: str) -> ArcticRLClientConfig:
    return config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})


def _join_cluster(config: ArcticRLClientConfig) -> bool:
    """Connect to Ray for one job; returns whether this call opened the connection (and so closes it)."""
    return open_cluster(config.ray, 0 if ray.is_initialized() or config.ray.address else _declared_cpus(config))


def open_cluster(config: RayConfig, cpus: int) -> bool:
    """Connect this process to its cluster, or start a private one.

    Args:
        config: Which cluster.
        cpus: CPUs that a private one declares.

    Returns:
        Whether this call opened the connection; who did that closes it by :func:`close_cluster`.

    Raises:
        TransportError: The cluster could not be reached or started.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        if config.address is not None:
            ray.init(address=config.address, **common)
        else:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=config.dashboard,
                object_store_memory=config.object_store_bytes,
                **common,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise TransportError(
            f"Ray could not be started or joined: {error}", where=f"ray.address={config.address}", remedy="try `ray status`"
        ) from error
    return True


def close_cluster() -> None:
    """Leave the cluster; a private one ends. Idempotent."""
    if ray.is_initialized():
        ray.shutdown()


def _declared_cpus(config: ArcticRLClientConfig) -> int:
    """CPU ranks take turns on the cores, so a private cluster declares as many CPUs as the ranks ask for."""
    plan = plan_placement(config, device="cpu", gpus=0)
    return max(os.cpu_count() or 1, math.ceil(plan.bundles * plan.cpus_per_bundle))
