"""The service behind a server: frames over HTTP, one pool of connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from arctic_core import wire
from arctic_core.config.client import ArcticRLClientConfig, HttpConfig
from arctic_core.errors import (
    ArcticError,
    DeadlineExceeded,
    EngineDiedError,
    EngineStartError,
    JobNotFoundError,
    ProtocolError,
    TransportClosedError,
    TransportError,
)
from arctic_core.protocol import PROTOCOL_VERSION, ErrorInfo, Reply, Request
from arctic_core.tracing import client_span
from arctic_core.transports.base import Transport
from arctic_core.transports.http_api import FRAME, REQUEST_ID, Answer, HttpApi, read_frames, read_token
from arctic_core.transports.http_lease import Heartbeat
from arctic_core.transports.http_server import OwnedServer

logger = logging.getLogger(__name__)

WAIT_S = 25.0
"""How long the server holds a request before it says that the work goes on."""
REPOSTS = 3
"""How often a call is posted again whose result the server no longer knows."""
FORGET_BYTES = 2**16
"""A larger answer is deleted at the server as soon as it is here, not when its time is over."""
GOODBYE_S = 5.0
"""What is left to say may take that long."""
_CLOSED = "not connected to the job's server"


class HttpTransport(Transport):
    """Talks to a job on a server: one that runs (``http.url``), or one of its own that it starts as a subprocess.

    A call is posted once, and then asked after until it has ended, so no operation depends on one connection. Whatever is
    repeated carries the request's key, which the server carries out once.
    """

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self._config = config
        self._server: OwnedServer | None = None
        self._api: HttpApi | None = None
        self._heartbeat: Heartbeat | None = None
        self._job = config.connect_to or f"{config.job}-{uuid.uuid4().hex[:8]}"
        self._posted = False
        self._asides: set[asyncio.Task[None]] = set()

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        limit_s = self._config.deadlines.start + 30.0  # the server knows the deadline, and says more when it is missed
        try:
            async with asyncio.timeout(limit_s):
                await self._open()
        except BaseException as error:
            with contextlib.suppress(ArcticError):
                await self.close(shutdown=False)
            if isinstance(error, TimeoutError) and not isinstance(error, ArcticError):
                raise DeadlineExceeded(
                    f"the job was not up after {limit_s:g} s", where="http transport", remedy="raise deadlines.start"
                ) from None
            raise

    async def _open(self) -> None:
        config = self._config.http
        if config.url is None:
            self._server = await OwnedServer.start(self._config)
            config = config.model_copy(update={"url": self._server.url, "token_file": str(self._server.token_file)})
        assert config.url is not None
        self._api = HttpApi(config, config.url, read_token(config))
        self._check_version(await self._api.json("GET", "/server"))
        if self._config.connect_to is None:
            await self._start_job()
        view = await self._api.json("GET", f"/jobs/{self._job}")
        while view.get("state") == "starting":
            view = await self._api.json("GET", f"/jobs/{self._job}?wait={WAIT_S:g}", wait_s=WAIT_S)
        self._check_ready(view)
        self._heartbeat = Heartbeat(
            self._api, self._job, lease_s=config.lease_s, timeout_s=config.connect_timeout_s + GOODBYE_S
        )

    async def _start_job(self) -> None:
        body = {
            "name": self._job,
            "config": self._config.model_dump(mode="json", exclude_defaults=True, exclude={"http", "connect_to"}),
            "lease_s": self._config.http.lease_s,
        }
        self._posted = True  # from here on there may be something to stop
        await self._running().json("POST", "/jobs", body, headers={"Idempotency-Key": uuid.uuid4().hex})

    def _check_version(self, server: Mapping[str, Any]) -> None:
        if server.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the server speaks protocol {server.get('protocol')}, this client {PROTOCOL_VERSION}",
                where=self._running().url,
                remedy="install the same version of arctic-core on both sides",
            )

    def _check_ready(self, view: Mapping[str, Any]) -> None:
        if view.get("state") == "ready":
            return
        found = view.get("error")
        if isinstance(found, dict):
            parts = {name: str(found.get(name) or "") for name in ("kind", "message", "where", "remedy")}
            raise ErrorInfo(**parts).to_exception()
        if self._config.connect_to is not None:
            raise JobNotFoundError(f"job {self._job!r} is {view.get('state')}", remedy="start a new one")
        raise EngineStartError(f"job {self._job!r} is {view.get('state')} before it was ready", where="start")

    async def close(self, shutdown: bool) -> None:
        api, self._api = self._api, None
        server, self._server = self._server, None
        if self._heartbeat is not None:
            self._heartbeat.stop()
        try:
            if api is not None:
                if self._asides:
                    await asyncio.wait(self._asides, timeout=GOODBYE_S)
                if (shutdown or self._posted) and (server is None or server.alive):
                    await self._stop_job(api, server)
        finally:
            if api is not None:
                await api.close()
            if server is not None:
                await server.stop(self._config.deadlines.stop + GOODBYE_S)

    async def _stop_job(self, api: HttpApi, server: OwnedServer | None) -> None:
        limit_s = 2 * self._config.deadlines.stop + 10.0
        try:
            async with asyncio.timeout(limit_s):
                view = await api.json("DELETE", f"/jobs/{self._job}?wait={WAIT_S:g}", wait_s=WAIT_S)
                while view.get("state") in ("starting", "ready", "stopping"):
                    view = await api.json("GET", f"/jobs/{self._job}?wait={WAIT_S:g}", wait_s=WAIT_S)
        except TimeoutError:
            if server is None:  # a server of ours is about to be killed anyhow
                raise DeadlineExceeded(f"the job did not stop within {limit_s:g} s", where=f"job {self._job}") from None
        except JobNotFoundError:
            logger.debug("job %s had ended before", self._job)
        except TransportError as error:
            logger.warning("job %s could not be stopped, its lease will end it: %s", self._job, error)

    def reconnect_config(self) -> ArcticRLClientConfig:
        self._running()
        http = self._config.http
        if self._server is not None:
            http = HttpConfig(
                **http.model_dump(exclude={"engines"}) | {"url": self._server.url, "token_file": str(self._server.token_file)}
            )
        return self._config.model_copy(update={"connect_to": self._job, "http": http})

    # --- messages -----------------------------------------------------------------------------------------------------

    async def send(self, request: Request) -> Reply:
        with client_span(request) as headers:
            try:
                answer = await self._call(request, headers)
            except asyncio.CancelledError:
                self._aside(self._forget(request))
                raise
            except TransportError as error:
                raise self._explained(error) from error
        if len(answer.body) > FORGET_BYTES:
            self._aside(self._forget(request))
        return wire.decode(answer.body, Reply)

    async def _call(self, request: Request, headers: Mapping[str, str]) -> Answer:
        api = self._running()
        frame = wire.encode_parts(request)
        result = f"/jobs/{self._job}/results/{request.session}/{request.sequence}?wait={WAIT_S:g}"
        headers = {**headers, REQUEST_ID: _request_id(request)}
        posting = {**headers, "Content-Type": FRAME, "Arctic-Wait": f"{WAIT_S:g}"}
        for _ in range(1 + REPOSTS):
            answer = await api.exchange("POST", f"/jobs/{self._job}/call", frame, headers=posting, wait_s=WAIT_S)
            attached = answer.status == 202
            while answer.status == 202:
                answer = await api.exchange("GET", result, headers=headers, wait_s=WAIT_S)
            if answer.kind == FRAME:
                return answer
            if not (attached and answer.status == 404):
                raise api.refusal(answer, f"/jobs/{self._job}/call")
            # The result is not known any more. Its key makes it safe to post again, which also tells whether the job is.
        raise TransportError(f"the server lost the result {1 + REPOSTS} times", where=f"job {self._job}")

    async def _forget(self, request: Request) -> None:
        """Tell the server that nobody waits for a result: reads and generations end, and what is kept is dropped."""
        with contextlib.suppress(ArcticError):
            await self._running().exchange("DELETE", f"/jobs/{self._job}/results/{request.session}/{request.sequence}")

    async def stream(self, request: Request) -> AsyncIterator[Reply]:
        with client_span(request) as headers:
            streaming = self._running().streaming(
                f"/jobs/{self._job}/stream",
                wire.encode_parts(request),
                headers={**headers, REQUEST_ID: _request_id(request), "Content-Type": FRAME},
                silence_s=request.deadline_s,
            )
            try:
                async with streaming as response:
                    async for frame in read_frames(response):
                        yield wire.decode(frame, Reply)
            except TransportError as error:
                raise self._explained(error) from error

    def _explained(self, error: TransportError) -> ArcticError:
        """A server of ours that is gone for good is another matter than one that cannot be reached."""
        if self._server is None or self._server.alive or isinstance(error, TransportClosedError):
            return error
        return EngineDiedError(
            f"the server that this client started {self._server.last_words()}",
            where=self._server.url,
            remedy="start a new job and load its latest checkpoint",
        )

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    def _running(self) -> HttpApi:
        if self._api is None:
            raise TransportClosedError(_CLOSED, remedy="create a new client")
        return self._api


def _request_id(request: Request) -> str:
    """Names the request in the logs of both sides."""
    return f"{request.session[:12]}-{request.sequence}"
