"""The outermost layer of the application: request ids, tokens, permissions, limits of bodies, and errors as JSON.

Nothing reaches a route that is not in :data:`arctic_core.server.routes.PERMISSIONS`.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arctic_core.errors import ArcticError, PayloadTooLargeError, WireError
from arctic_core.server.auth import Permission, Tokens
from arctic_core.server.connection import BODY_PORT, BodyPort
from arctic_core.server.observe import REQUEST_ID, TRACEPARENT
from arctic_core.server.openai_errors import response_for

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 4 * 2**20
PRINCIPAL = "arctic.principal"
"""Key of the scope under which a request's :class:`~arctic_core.server.auth.Principal` is."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Gate:
    """ASGI middleware in front of all routes.

    Args:
        app: The routes.
        tokens: Who may enter.
        permissions: What each route wants, by method and path as the route has it.
        frame_routes: Those whose bodies are frames.
        max_body_bytes: Largest body of a frame; others end at :data:`MAX_JSON_BYTES`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        permissions: Mapping[tuple[str, str], Permission],
        frame_routes: frozenset[str],
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._permissions = permissions
        self._frame_routes = frame_routes
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000, "reason": "this server speaks HTTP only"})
            return
        headers = Headers(scope=scope)
        request_id = headers.get("arctic-request-id", "")
        request_id = request_id if _REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)  # each request has a context of its own
        traceparent = headers.get("traceparent", "")
        TRACEPARENT.set(traceparent if _TRACEPARENT.fullmatch(traceparent) else "")
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], (b"arctic-request-id", request_id.encode())]}
            await send(message)

        try:
            limit = self._admit(scope, headers)
            await self._app(scope, _limited(receive, scope, headers, limit), send_with_id)
        except ClientDisconnect:
            logger.info("%s %s: the client is gone", scope["method"], scope["path"])
        except Exception as error:
            if begun:  # too late to say so in any other way than by breaking off
                raise
            await respond_to(error, scope)(scope, receive, send_with_id)

    def _admit(self, scope: Scope, headers: Headers) -> int:
        """Refuse whoever may not enter; returns how large the body may be."""
        path = _route_path(scope)
        permission = self._permissions.get((scope["method"], path), "read")  # also before a 404 is given
        if permission != "public":
            query = scope.get("query_string", b"").decode("latin-1")
            who = self._tokens.identify(headers, query)
            self._tokens.check_origin(headers)
            who.require(permission)
            scope[PRINCIPAL] = who
        limit = self._max_body_bytes if path in self._frame_routes else MAX_JSON_BYTES
        declared = _declared(headers)
        if declared is not None and declared > limit:
            raise PayloadTooLargeError(f"a body of {declared} bytes; this path takes {limit}", remedy="send less at once")
        return limit


def respond_to(error: Exception, scope: Scope) -> Response:
    """The response for whatever a route raised."""
    if not isinstance(error, ArcticError):
        logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
        error = ArcticError("the server failed on this request", remedy="look for the request id in the server's log")
    return response_for(error, scope)


def _route_path(scope: Scope) -> str:
    """The path of the route that will answer, as it was declared; empty where none does."""
    routes: list[BaseRoute] = scope["app"].router.routes
    for route in routes:
        if route.matches(scope)[0] is Match.FULL:
            return getattr(route, "path", "")
    return ""


def _declared(headers: Headers) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise WireError("Content-Length is not a number of bytes", where="Content-Length")
    return int(text)


def _limited(receive: Receive, scope: Scope, headers: Headers, limit: int) -> Receive:
    """Count what comes in: not more than the limit, and exactly what was declared."""
    declared, received = _declared(headers), 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        port: BodyPort | None = scope.get(BODY_PORT)
        direct = port is not None and port.used  # it has read exactly what was declared, past this
        if message["type"] == "http.request" and not direct:
            received += len(message.get("body", b""))
            if received > limit:
                raise PayloadTooLargeError(f"a body of more than {limit} bytes", remedy="send less at once")
            more = message.get("more_body", False)
            if declared is not None and (received > declared or (received < declared and not more)):
                raise WireError(f"{received} bytes came, {declared} were announced", where="Content-Length")
        return message

    return counted
