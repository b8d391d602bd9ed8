"""The routes of the service itself and of its jobs; which permission each route of the server wants."""

from __future__ import annotations

import time
from typing import Annotated, Any

import fastapi
from fastapi import Header, Query
from starlette.requests import Request

from arctic_core.errors import TransportError
from arctic_core.server.auth import Permission, Principal
from arctic_core.server.body import read_json
from arctic_core.server.gate import PRINCIPAL
from arctic_core.server.jobs import Job, JobRequest, Jobs, JobView, LeaseRequest
from arctic_core.server.status import ErrorEnvelope, error_response
from arctic_core.server.views import ServerView, server_view

PREFIX = "/arctic/v1"
MAX_WAIT_S = 30.0
JOB = PREFIX + "/jobs/{job}"
RESULT = JOB + "/results/{session}/{sequence}"

PERMISSIONS: dict[tuple[str, str], Permission] = {
    ("GET", "/healthz"): "public",
    ("GET", "/readyz"): "public",
    ("GET", "/openapi.json"): "read",
    ("GET", "/docs"): "read",
    ("GET", PREFIX + "/server"): "read",
    ("GET", PREFIX + "/jobs"): "read",
    ("POST", PREFIX + "/jobs"): "job",
    ("GET", JOB): "read",
    ("DELETE", JOB): "job",
    ("POST", JOB + "/lease"): "job",
    ("POST", JOB + "/call"): "job",
    ("POST", JOB + "/stream"): "job",
    ("GET", RESULT): "job",
    ("DELETE", RESULT): "job",
    ("GET", "/v1/models"): "infer",
    ("GET", "/v1/models/{model}"): "infer",
    ("POST", "/v1/completions"): "infer",
    ("POST", "/v1/chat/completions"): "infer",
}
"""By method and path. A route that is missing here cannot be reached; a test compares both."""

FRAME_ROUTES = frozenset({JOB + "/call", JOB + "/stream"})

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorEnvelope, "description": "Refused; the body says why."},
    "5XX": {"model": ErrorEnvelope, "description": "Failed; the body says why."},
}
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for a change.")]
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", max_length=128, description="The same key gives the same job again.")
]

router = fastapi.APIRouter(responses=ERRORS)


def principal(request: Request) -> Principal:
    """Who asks."""
    return request.scope[PRINCIPAL]


def jobs_of(request: Request) -> Jobs:
    """The server's jobs."""
    return request.app.state.jobs


def job_of(request: Request, name: str) -> Job:
    """A job that exists for whoever asks."""
    return jobs_of(request).get(name, principal(request))


def json_body(model: type[Any]) -> dict[str, Any]:
    """The description of a JSON body that the route reads by itself, within limits."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


# --- the server -----------------------------------------------------------------------------------------------------------


@router.get("/healthz", tags=["server"], responses={})
async def healthz() -> dict[str, str]:
    """The process lives and its event loop turns."""
    return {"status": "ok"}


@router.get("/readyz", tags=["server"], response_model=dict[str, str])
async def readyz(request: Request) -> Any:
    """The server takes new work; 503 while it shuts down."""
    if jobs_of(request).draining:
        return error_response(TransportError("the server is shutting down"))
    return {"status": "ok"}


@router.get(PREFIX + "/server", tags=["server"])
async def server(request: Request) -> ServerView:
    """Versions, limits and state of the server."""
    return server_view(jobs_of(request), time.monotonic() - request.app.state.started, MAX_WAIT_S)


# --- jobs ------------------------------------------------------------------------------------------------------------------


@router.post(PREFIX + "/jobs", tags=["jobs"], status_code=202, response_model=JobView, openapi_extra=json_body(JobRequest))
async def create_job(request: Request, idempotency_key: IdempotencyKey = None) -> Any:
    """Start a job. Answers at once; ``GET`` the job with ``wait`` until it is ready or failed."""
    jobs = jobs_of(request)
    values = await read_json(request, pause_s=jobs.config.body_timeout_s)
    wanted = JobRequest.parse(values, where="body")
    return jobs.create(principal(request), wanted, idempotency_key).view()


@router.get(PREFIX + "/jobs", tags=["jobs"])
async def list_jobs(request: Request) -> list[JobView]:
    """All jobs that exist for the caller."""
    return [job.view() for job in jobs_of(request).visible(principal(request))]


@router.get(JOB, tags=["jobs"])
async def get_job(request: Request, job: str, wait: Wait = 0.0) -> JobView:
    """One job; waits for a state other than ``starting`` and ``stopping``."""
    found = job_of(request, job)
    await jobs_of(request).settled(found, wait)
    return found.view()


@router.delete(JOB, tags=["jobs"], status_code=202)
async def delete_job(request: Request, job: str, wait: Wait = 0.0) -> JobView:
    """Stop a job."""
    found = job_of(request, job)
    jobs_of(request).stop(found)
    await jobs_of(request).settled(found, wait)
    return found.view()


@router.post(JOB + "/lease", tags=["jobs"], response_model=JobView, openapi_extra=json_body(LeaseRequest))
async def renew_lease(request: Request, job: str) -> Any:
    """Count the job's lease from now. Any call to the job does the same."""
    jobs = jobs_of(request)
    found = job_of(request, job)
    values = await read_json(request, pause_s=jobs.config.body_timeout_s)
    wanted = LeaseRequest.parse(values, where="body")
    found.require_ready()
    found.renew(jobs.lease(wanted.lease_s, found.lease_s))
    return found.view()
