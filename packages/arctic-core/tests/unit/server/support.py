"""Servers for the tests: in this process, with real engines or an answering function behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.config.server import ServerConfig
from arctic_core.data import Batch, Sample
from arctic_core.server.app import create_app
from arctic_core.server.body import FRAME_TYPE
from arctic_core.server.run import http_server
from arctic_core.transports.base import Transport
from arctic_core.transports.mock import MockTransport

FRAME = {"content-type": FRAME_TYPE}
TRAINING = {"training_gpus": 1, "sampling_gpus": 1, "training": {"optimizer": {"lr": 1e-3}}}
Answer = Callable[[p.Request], Any]


class Api:
    """A client of one server, by bare HTTP."""

    def __init__(self, app: Any, http: httpx.AsyncClient) -> None:
        self.app = app
        self.http = http

    async def start(self, name: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Start a job and wait until it is ready or failed."""
        response = await self.post_job(name, config, **more)
        assert response.status_code == 202, response.text
        return await self.job(name, wait=30)

    async def post_job(self, name: str | None, config: dict[str, Any], *, headers: Any = None, **more: Any) -> httpx.Response:
        body = {"name": name, "config": config, **more}
        return await self.http.post("/arctic/v1/jobs", json=body, headers=headers)

    async def job(self, name: str, wait: float = 0) -> dict[str, Any]:
        response = await self.http.get(f"/arctic/v1/jobs/{name}", params={"wait": wait})
        assert response.status_code == 200, response.text
        return response.json()

    async def post(self, job: str, request: p.Request | bytes, *, wait: float = 25, path: str = "call") -> httpx.Response:
        frame = request if isinstance(request, bytes) else wire.encode(request)
        headers = {**FRAME, "Arctic-Wait": str(wait)}
        return await self.http.post(f"/arctic/v1/jobs/{job}/{path}", content=frame, headers=headers)

    async def call(self, job: str, operation: p.Operation, sequence: int, session: str = "s") -> Any:
        """Carry an operation out, however long it takes; returns its result or raises its error."""
        response = await self.post(job, request(operation, sequence, session))
        while response.status_code == 202:
            response = await self.result(job, sequence, session, wait=25)
        assert response.headers["content-type"] == FRAME_TYPE, response.text
        return wire.decode(response.content, p.Reply).unwrap()

    async def result(self, job: str, sequence: int, session: str = "s", *, wait: float = 0) -> httpx.Response:
        return await self.http.get(f"/arctic/v1/jobs/{job}/results/{session}/{sequence}", params={"wait": wait})

    async def forget(self, job: str, sequence: int, session: str = "s") -> httpx.Response:
        return await self.http.delete(f"/arctic/v1/jobs/{job}/results/{session}/{sequence}")


def request(operation: p.Operation, sequence: int, session: str = "s", deadline_s: float = 60.0) -> p.Request:
    return p.Request(session=session, sequence=sequence, operation=operation, deadline_s=deadline_s)  # type: ignore[arg-type]


def generate(max_tokens: int, n: int = 1, seed: int = 0) -> p.Generate:
    sampling = p.SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)
    return p.Generate(prompts=(np.arange(3, 9, dtype=np.int32),), sampling=sampling, n=n, request_id="r")


def batch(count: int = 2, length: int = 12) -> Batch:
    rng = np.random.default_rng(count)
    samples = [
        Sample(
            token_ids=rng.integers(3, 500, length),
            prompt_length=length // 3,
            group=i,
            advantages=rng.normal(size=length - length // 3).astype(np.float32),
            old_logprobs=np.full(length - length // 3, -5.0, np.float32),
        )
        for i in range(count)
    ]
    return Batch.from_samples(samples)


def answering(answer: Answer) -> Callable[[ArcticRLClientConfig], Transport]:
    """Jobs whose service is a function: for faults that real engines do not have on demand."""
    return lambda config: MockTransport(answer)


@contextlib.asynccontextmanager
async def serving(root: Path | str, *, answer: Answer | None = None, **settings: Any) -> AsyncIterator[Api]:
    """A server without sockets, its jobs in ``root``; engines are real unless there is an ``answer``."""
    options = {name: settings.pop(name) for name in ("connect", "observer") if name in settings}
    if answer is not None:
        options["connect"] = answering(answer)
    config = ServerConfig(engines="local", data_root=str(root), **settings)
    app = create_app(config, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            yield Api(app, http)


@contextlib.asynccontextmanager
async def listening(root: Path | str, *, answer: Answer | None = None, **settings: Any) -> AsyncIterator[tuple[Api, int]]:
    """The same with a real socket; yields its port, too."""
    async with serving(root, answer=answer, **settings) as api:
        config: ServerConfig = api.app.state.jobs.config
        server = http_server(config, api.app)
        server.config.port = 0
        task = asyncio.create_task(server.serve())
        while not server.started:
            assert not task.done(), task
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            yield Api(api.app, http), port
        server.should_exit = True
        await task


def done(request: p.Request) -> p.Result:
    """An answer for any operation."""
    return p.Done()


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until something is so, or fail."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
