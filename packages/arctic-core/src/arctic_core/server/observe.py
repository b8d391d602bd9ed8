"""What the server tells about itself while it works: hooks for metrics and traces, and the id of the request at hand."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

REQUEST_ID: ContextVar[str] = ContextVar("arctic_request_id", default="")
"""Id of the HTTP request that the running code works for; log records and errors carry it. Tasks inherit it."""
TRACEPARENT: ContextVar[str] = ContextVar("arctic_traceparent", default="")
"""The request's ``traceparent`` header, as it came."""


@dataclass(frozen=True)
class CallEvent:
    """One operation on its way through a job."""

    job: str
    operation: str
    """Name on the wire, e.g. ``"forward_backward"``."""
    session: str
    sequence: int
    request_bytes: int
    """Bytes of the request's frame; 0 where it did not come as one."""
    request_id: str
    traceparent: str


@dataclass(frozen=True)
class JobEvent:
    """A job at the moment of a change."""

    job: str
    owner: str
    state: str
    """``starting``, ``ready``, ``failed``, ``stopping`` or ``stopped``."""
    error: str
    """Class name of the error that ended it, else empty."""


class Observer:
    """Told what happens, on the event loop: the methods must be quick and must not raise. Does nothing by itself."""

    def call_started(self, call: CallEvent) -> None:
        """An operation goes to its job (a repeated key that attaches to a running one does not count)."""

    def call_finished(self, call: CallEvent, *, error: str, seconds: float, reply_bytes: int) -> None:
        """It is over. ``error`` is the class name of the error it was answered with, ``"Cancelled"``, or empty."""

    def job_changed(self, job: JobEvent) -> None:
        """A job has a new state."""

    def lease_expired(self, job: JobEvent) -> None:
        """A job's client fell silent; the job is about to be stopped."""
