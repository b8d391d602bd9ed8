"""Errors of the OpenAI-compatible routes, in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from arctic_core import errors as e
from arctic_core.server.observe import REQUEST_ID
from arctic_core.server.status import error_response, headers_of, json_response, status_of

PREFIX = "/v1/"
"""Paths whose errors have this shape."""

_CODES: dict[type[e.ArcticError], str] = {
    e.AuthenticationError: "invalid_api_key",
    e.JobNotFoundError: "model_not_found",
    e.QueueFullError: "rate_limit_exceeded",
    e.DataError: "invalid_value",
    e.ConfigError: "invalid_value",
    e.WireError: "invalid_json",
    e.TransportError: "service_unavailable",
    e.DeadlineExceeded: "timeout",
}
_STATUS_CODES = {404: "unknown_url", 405: "method_not_allowed"}


class Refused(Exception):
    """What an OpenAI-compatible route does not do.

    Args:
        message: Why, in one sentence.
        status: HTTP status.
        param: The field it is about.
        code: OpenAI's word for it, or one of ours.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


def response_for(error: e.ArcticError, scope: Scope, status: int | None = None) -> Response:
    """The response for an error of any route, in the shape its clients know; the status is the table's unless given."""
    if scope["path"].startswith(PREFIX):
        return openai_error(error, status)
    return error_response(error, status)


def openai_error(error: e.ArcticError | Refused, status: int | None = None) -> Response:
    """An error as a whole response."""
    if status is None:
        status = error.status if isinstance(error, Refused) else status_of(error)
    headers = headers_of(status) | openai_headers()
    return json_response({"error": openai_error_body(error, status)}, status, headers)


def openai_error_body(error: e.ArcticError | Refused, status: int | None = None) -> dict[str, Any]:
    """What is under ``"error"``."""
    if isinstance(error, Refused):
        return _body(error.message, error.status, error.param, error.code)
    status = status_of(error) if status is None else status
    message = f"{error.message} ({error.remedy})" if error.remedy else error.message
    return _body(message, status, _param(error), _code(error, status))


def openai_headers() -> dict[str, str]:
    """Headers of every response: the id that OpenAI's clients show as ``_request_id``."""
    return {"x-request-id": REQUEST_ID.get()}


def _body(message: str, status: int, param: str | None, code: str) -> dict[str, Any]:
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def _code(error: e.ArcticError, status: int) -> str:
    if type(error) is e.ArcticError:
        return _STATUS_CODES.get(status, "internal_error")
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()


def _param(error: e.ArcticError) -> str | None:
    """The field of the request behind the place that the service or an engine names."""
    if isinstance(error, e.JobNotFoundError):
        return "model"
    if not isinstance(error, e.DataError):
        return None
    if error.where.startswith("sampling."):
        return error.where.removeprefix("sampling.")
    if error.where.startswith(("job ", "generate.prompts")):
        return "prompt"
    return error.where if error.where.isidentifier() else None
