"""A server of one's own: started by a client as a subprocess, on a free loopback port, and gone when the client is."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import EngineStartError, MissingExtraError

logger = logging.getLogger(__name__)

MODULE = "arctic_core.server.owned"
START_S = 120.0
"""What the server may take to listen; it loads no model before that."""
_SETTLE_S = 5.0


class OwnedServer:
    """A subprocess that serves one client. Files that go between the two lie in a private temporary folder.

    It ends when its standard input is closed, which the system does for a client that dies, or when its parent process is
    another; so it needs no farewell.

    Args:
        process: The server.
        folder: Its folder, removed at the end.
        url: Its address.
        token_file: File with its token, readable by this user only.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, url: str, token_file: Path) -> None:
        self.url = url
        self.token_file = token_file
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, config: ArcticRLClientConfig) -> OwnedServer:
        """Start a server and wait until it listens.

        Raises:
            MissingExtraError: The server's packages are not installed.
            EngineStartError: It ended, or did not listen in time.
        """
        _require_packages()
        folder = Path(tempfile.mkdtemp(prefix="arctic-server-"))  # created with mode 0700
        token_file, port_file = folder / "token", folder / "port"
        with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32))
        process = _spawn(folder, _settings(config, token_file))
        server = cls(process, folder, "", token_file)
        try:
            end = time.monotonic() + min(START_S, config.deadlines.start)
            while not port_file.exists():
                if process.poll() is not None:
                    raise EngineStartError(f"the server {server.last_words()}", where="http server")
                if time.monotonic() > end:
                    raise EngineStartError(f"the server does not listen yet: {server.last_words()}", where="http server")
                await asyncio.sleep(0.05)
        except BaseException:
            await asyncio.shield(server.stop(0.0))
            raise
        server.url = f"http://127.0.0.1:{int(port_file.read_text(encoding='ascii'))}"
        logger.info("started a server at %s, pid %d, log %s", server.url, process.pid, folder / "log")
        return server

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """How the process ended, if it did, and the end of its log."""
        status = self._process.poll()
        state = "runs" if status is None else f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        with contextlib.suppress(OSError):
            lines = (self._folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            return "\n".join([state, *lines])
        return state

    async def stop(self, deadline_s: float) -> None:
        """Let the server end by itself, and kill it (and all it started) after so many seconds. Idempotent."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if not await self._gone(deadline_s):
            logger.warning("the server did not stop within %g s and is killed", deadline_s)
        # Even where the server is gone: what it started shares its process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await self._gone(_SETTLE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _gone(self, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while self.alive and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.alive


def _settings(config: ArcticRLClientConfig, token_file: Path) -> dict[str, Any]:
    """What the server gets as its configuration: whoever owns it may do what a local client may."""
    return {
        "host": "127.0.0.1",
        "port": 0,
        "engines": config.http.engines,
        "tokens": [{"name": "owner", "role": "admin", "file": str(token_file)}],
        "drain_s": 0,  # who closes the client waits for nothing any more
        "max_lease_s": max(config.http.lease_s, 86_400.0),
        "unrestricted_paths": True,
        "allow_loss_import": config.training.allow_loss_import,
        "vllm_arguments": sorted(config.sampling.vllm),
    }


def _spawn(folder: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the client, which then ends the server
        )


def _require_packages() -> None:
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(
                f"comm_protocol='http' without http.url starts a server, which needs the package {package!r}",
                remedy='pip install "arctic-core[server]", or set http.url to a server that runs',
            )
