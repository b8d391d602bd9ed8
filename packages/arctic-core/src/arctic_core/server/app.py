"""The application: routes, the gate before them, and the jobs behind them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.config.server import ServerConfig
from arctic_core.errors import ArcticError, DataError
from arctic_core.server import call_routes, routes
from arctic_core.server.auth import Tokens
from arctic_core.server.body import Budget
from arctic_core.server.calls import Calls
from arctic_core.server.cluster import cluster, require_ray
from arctic_core.server.gate import Gate
from arctic_core.server.jobs import Jobs
from arctic_core.server.observe import Observer
from arctic_core.server.openai_errors import response_for
from arctic_core.server.openai_routes import mount_openai
from arctic_core.transports.base import Transport


def create_app(
    config: ServerConfig,
    *,
    observer: Observer | None = None,
    connect: Callable[[ArcticRLClientConfig], Transport] | None = None,
) -> fastapi.FastAPI:
    """The ASGI application of one server. Its jobs start and end with the application's lifespan.

    Args:
        config: The server's configuration; tokens are read now.
        observer: Told what happens.
        connect: Makes a job's transport from its configuration; by ``config.engines`` where absent.

    Raises:
        ConfigError: A token cannot be read.
        MissingExtraError: Jobs are to run over Ray, which is not installed.
    """
    if config.engines == "ray" and connect is None:
        require_ray()
    jobs = Jobs(config, observer=observer, connect=connect)
    calls = Calls(config, jobs)

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        async with cluster(config), jobs, calls:
            yield

    app = fastapi.FastAPI(
        title="Arctic",
        version=version("arctic-core"),
        description="Jobs of Arctic over HTTP. Frames are described in the documentation.",
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    app.state.jobs = jobs
    app.state.calls = calls
    app.state.budget = Budget(config.max_buffered_bytes)
    app.state.started = time.monotonic()
    app.include_router(routes.router)
    app.include_router(call_routes.router)
    mount_openai(app, jobs)
    app.add_exception_handler(ArcticError, _ours)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_middleware(
        Gate,  # type: ignore[arg-type] - an ASGI class
        tokens=Tokens(config),
        permissions=routes.PERMISSIONS,
        frame_routes=routes.FRAME_ROUTES,
        max_body_bytes=config.max_body_bytes,
    )
    app.openapi = lambda: _openapi(app)
    return app


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, ArcticError)
    return response_for(error, request.scope)


async def _http(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and methods, or a body that it could not read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ArcticError):
        return response_for(error.__cause__, request.scope)
    wrong = {404: "there is no such path", 405: f"this path does not take {request.method}"}.get(error.status_code)
    response = response_for(
        ArcticError(wrong or str(error.detail), where=request.url.path, remedy="see /openapi.json"),
        request.scope,
        error.status_code,
    )
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: Exception) -> Response:
    """A parameter in the path, the query or the headers that is not what the route declares."""
    assert isinstance(error, RequestValidationError)
    lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    return response_for(DataError("; ".join(lines), where=request.url.path), request.scope)


def _openapi(app: fastapi.FastAPI) -> dict[str, Any]:
    """The description of the API, with the token, and without the status that the framework adds and the server never gives."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schema.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in schema["paths"].items():
            for method, operation in methods.items():
                operation["responses"].pop("422", None)
                permission = routes.PERMISSIONS.get((method.upper(), path), "read")
                if permission != "public":
                    operation["security"] = [{"token": []}]
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"].get("schemas", {}).pop(unused, None)
        app.openapi_schema = schema
    return app.openapi_schema
