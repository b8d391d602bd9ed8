"""What tests of the OpenAI-compatible routes share: a real server on a thread, and jobs in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from arctic_core.config.server import ServerConfig
from arctic_core.server.app import create_app

TOKENS = {role: f"{role}-token-of-the-tests" for role in ("admin", "job", "infer", "read")}


class RunningServer:
    """uvicorn on a thread of this process, so that tests can look at what engines do."""

    def __init__(self, config: ServerConfig) -> None:
        self.app = create_app(config)
        self._http = uvicorn.Server(uvicorn.Config(self.app, port=0, log_config=None, access_log=False))
        self._thread = threading.Thread(target=self._http.run, daemon=True)
        self.url = ""

    def __enter__(self) -> RunningServer:
        self._thread.start()
        end = time.monotonic() + 60
        while not self._http.started:
            assert time.monotonic() < end
            assert self._thread.is_alive()
            time.sleep(0.02)
        port = self._http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._http.should_exit = True
        self._thread.join(60)

    def call(self, method: str, path: str, body: Any = None, token: str = TOKENS["admin"]) -> Any:
        """One request with a JSON body, and its answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def start_job(self, name: str, config: dict[str, Any], *, wait: bool = True) -> None:
        """Start a job, and wait until it is ready."""
        self.call("POST", "/arctic/v1/jobs", {"name": name, "config": config})
        while wait:
            view = self.call("GET", f"/arctic/v1/jobs/{name}?wait=30")
            if view["state"] != "starting":
                assert view["state"] == "ready", view
                return

    def samplers_work(self, job: str) -> int:
        """How many completions run in a job's embedded sampler now."""
        service = self.app.state.jobs.get(job).transport._service
        (rank,) = service._engines.get("sampler", "generate").group._ranks
        return rank.engine._decoder.running


@contextlib.contextmanager
def openai_server(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    """A server whose tokens are :data:`TOKENS`."""
    for role, token in TOKENS.items():
        os.environ[f"ARCTIC_TEST_{role.upper()}"] = token
    config = {
        "port": 0,
        "engines": "local",
        "tokens": [{"name": role, "role": role, "env": f"ARCTIC_TEST_{role.upper()}"} for role in TOKENS],
        "data_root": str(folder),
        **settings,
    }
    with RunningServer(ServerConfig.model_validate(config)) as server:
        yield server


def run(work: Any, *, seconds: float = 60) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(asyncio.wait_for(work, seconds))
