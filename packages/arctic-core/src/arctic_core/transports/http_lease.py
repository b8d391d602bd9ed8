"""Keeps a job's lease alive for as long as this process lives, however busy its event loop is."""

from __future__ import annotations

import logging
import threading

import httpx

from arctic_core.transports.http_api import PREFIX, REQUEST_ID, HttpApi

logger = logging.getLogger(__name__)


class Heartbeat:
    """Renews a lease from a thread of its own, three times per lease.

    Args:
        api: The server; its connections are not used.
        job: Name of the job.
        lease_s: What is asked for each time, seconds.
        timeout_s: What one renewal may take.
    """

    def __init__(self, api: HttpApi, job: str, *, lease_s: float, timeout_s: float) -> None:
        self._path = f"{api.url}{PREFIX}/jobs/{job}/lease"
        self._job = job
        self._lease_s = lease_s
        self._client = httpx.Client(headers=api.headers, trust_env=False, timeout=timeout_s, verify=api.certificates)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"arctic-lease-{job}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, without waiting for a renewal that is under way."""
        self._ending.set()

    def _beat(self) -> None:
        with self._client:
            count = 0
            while not self._ending.wait(self._lease_s / 3):
                count += 1
                try:
                    response = self._client.post(
                        self._path, json={"lease_s": self._lease_s}, headers={REQUEST_ID: f"{self._job}-lease-{count}"}
                    )
                except httpx.HTTPError as error:
                    problem = str(error) or type(error).__name__
                else:
                    problem = "" if response.is_success else f"status {response.status_code}"
                if problem and not self._ending.is_set():
                    logger.warning("the lease of job %s was not renewed: %s", self._job, problem)
