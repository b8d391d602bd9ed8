"""HTTP statuses of errors, and the body they travel in. One table, for whole responses and for replies inside frames."""

from __future__ import annotations

import json
from typing import Any

import pydantic
from starlette.responses import Response

from arctic_core import errors as e
from arctic_core.protocol import ErrorInfo
from arctic_core.server.observe import REQUEST_ID

STATUS_OF: dict[type[e.ArcticError], int] = {
    e.ArcticError: 500,
    e.AuthenticationError: 401,
    e.PermissionDeniedError: 403,
    e.JobNotFoundError: 404,
    e.ModelNotFoundError: 404,
    e.ConfigError: 400,
    e.DataError: 400,
    e.WireError: 400,
    e.ProtocolError: 400,
    e.PayloadTooLargeError: 413,
    e.QueueFullError: 429,
    e.InvalidStateError: 409,
    e.WeightSyncError: 409,
    e.CheckpointError: 409,
    e.NonFiniteError: 409,
    e.UnsupportedOperation: 501,
    e.UnsupportedModelError: 501,
    e.UnsupportedVersionError: 501,
    e.MissingExtraError: 501,
    e.PluginError: 501,
    e.EngineStartError: 502,
    e.EngineDiedError: 502,
    e.PlacementError: 503,
    e.TransportError: 503,
    e.DeadlineExceeded: 504,
}
"""A class that is not here has its parent's status."""

RETRY_AFTER_S = 1


class ErrorBody(pydantic.BaseModel):
    """An error as JSON."""

    kind: str
    """Class name."""
    message: str
    where: str
    remedy: str
    request_id: str


class ErrorEnvelope(pydantic.BaseModel):
    """Body of every response that reports an error outside a frame."""

    error: ErrorBody


def status_of(error: e.ArcticError | str) -> int:
    """The status of an error, or of an error's class name as it is on the wire."""
    cls = e.error_types().get(error, e.ArcticError) if isinstance(error, str) else type(error)
    return next(STATUS_OF[parent] for parent in cls.__mro__ if parent in STATUS_OF)


def error_body(error: e.ArcticError | ErrorInfo) -> ErrorBody:
    """What a client is told."""
    info = error if isinstance(error, ErrorInfo) else ErrorInfo.of(error)
    return ErrorBody(kind=info.kind, message=info.message, where=info.where, remedy=info.remedy, request_id=REQUEST_ID.get())


def headers_of(status: int) -> dict[str, str]:
    """Headers that go with a status."""
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}


def error_response(error: e.ArcticError, status: int | None = None) -> Response:
    """The JSON response for an error; the status is the table's unless given."""
    status = status_of(error) if status is None else status
    return json_response({"error": error_body(error).model_dump()}, status, headers_of(status))


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Plain values as JSON."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, headers, media_type="application/json")
