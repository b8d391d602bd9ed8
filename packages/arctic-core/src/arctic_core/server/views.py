"""What the server says about itself."""

from __future__ import annotations

import pydantic

from arctic_core.protocol import PROTOCOL_VERSION
from arctic_core.server.jobs import ENDED, Jobs
from arctic_core.service.core import installed_packages


class Limits(pydantic.BaseModel):
    """What the server takes; see :class:`arctic_core.config.server.ServerConfig`."""

    max_body_bytes: int
    max_jobs: int
    max_inflight_calls: int
    max_waiting: int
    max_wait_s: float
    """Longest wait for an answer that one request may ask for."""
    default_lease_s: float
    max_lease_s: float
    max_deadline_s: float
    result_ttl_s: float


class ServerView(pydantic.BaseModel):
    """Answer of ``GET /arctic/v1/server``."""

    protocol: int
    packages: dict[str, str]
    """Installed versions of the packages that compute."""
    engines: str
    """Where jobs run: ``ray`` or ``local``."""
    limits: Limits
    uptime_s: float
    draining: bool
    jobs: int
    """Jobs that start, run or stop."""


def server_view(jobs: Jobs, uptime_s: float, max_wait_s: float) -> ServerView:
    """The server at this moment."""
    config = jobs.config
    limits = {name: getattr(config, name) for name in Limits.model_fields if name != "max_wait_s"}
    return ServerView(
        protocol=PROTOCOL_VERSION,
        packages=installed_packages(),
        engines=config.engines,
        limits=Limits(**limits, max_wait_s=max_wait_s),
        uptime_s=uptime_s,
        draining=jobs.draining,
        jobs=sum(job.state not in ENDED for job in jobs),
    )
