"""The Ray cluster of a server, which all of its jobs share."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator

from arctic_core.config.server import ServerConfig
from arctic_core.errors import MissingExtraError

CPUS_PER_JOB = 8


def require_ray() -> None:
    """Raise :class:`MissingExtraError` unless Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "engines='ray' needs the package 'ray'", remedy='pip install "arctic-core[rl]", or set engines to "local"'
        )


@contextlib.asynccontextmanager
async def cluster(config: ServerConfig) -> AsyncIterator[None]:
    """Connected to the cluster that ``config.ray`` names, or to a private one that ends with the block.

    Raises:
        TransportError: It could not be reached or started.
    """
    if config.engines != "ray":
        yield
        return
    from arctic_core.service import ray_front

    opened = await asyncio.to_thread(ray_front.open_cluster, config.ray, config.ray_cpus or CPUS_PER_JOB * config.max_jobs)
    try:
        yield
    finally:
        if opened:
            await asyncio.to_thread(ray_front.close_cluster)
