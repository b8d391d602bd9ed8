"""Clients of a job, synchronous and asynchronous. Needs no engine."""

from arctic_core.client.async_client import AsyncArcticRLClient, create_async_arctic_rl_client
from arctic_core.client.sync_client import ArcticRLClient, create_arctic_rl_client

__all__ = ["ArcticRLClient", "AsyncArcticRLClient", "create_arctic_rl_client", "create_async_arctic_rl_client"]
