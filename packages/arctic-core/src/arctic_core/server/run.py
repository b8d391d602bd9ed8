"""A server as a process: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fastapi
import uvicorn

from arctic_core.config.server import ServerConfig
from arctic_core.errors import ConfigError
from arctic_core.server.app import create_app
from arctic_core.server.calls import Calls
from arctic_core.server.connection import connections
from arctic_core.server.jobs import Jobs
from arctic_core.server.observe import Observer

logger = logging.getLogger(__name__)

GOODBYE_S = 5
"""What connections get to take their last answers."""
TICK_S = 0.05


def serve(
    config: ServerConfig,
    *,
    observer: Observer | None = None,
    port_file: Path | None = None,
    announce: Callable[[str], None] = lambda url: None,
    watch_stdin: bool = False,
) -> None:
    """Run a server until SIGTERM or SIGINT; returns when it has ended in good order.

    Args:
        config: The server.
        observer: Told what happens.
        port_file: Gets the port once requests are answered.
        announce: Called with the address at that time.
        watch_stdin: End at once, without draining, when standard input ends: for a server that belongs to another process.

    Raises:
        ConfigError: The address cannot be listened on, a certificate or a token cannot be read.
        ArcticError: The Ray cluster could not be joined or started.
    """
    with contextlib.closing(_bind(config)) as sock:
        app = create_app(config, observer=observer)
        process = _Process(config, app, http_server(config, app), watch_stdin=watch_stdin)
        # Not uvloop: it gives large bodies to the socket, and takes them, at half the speed.
        asyncio.run(process.run(sock, port_file, announce))


def http_server(config: ServerConfig, app: fastapi.FastAPI) -> uvicorn.Server:
    """uvicorn as the server runs it, without the application's lifespan.

    Raises:
        ConfigError: The certificate or its key cannot be used.
    """
    settings = uvicorn.Config(
        app,
        http=connections(config.max_header_bytes, config.header_timeout_s),
        loop="asyncio",
        lifespan="off",  # entered by our caller, where its errors keep their types
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GOODBYE_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate or its key cannot be used: {error}", where="tls_cert, tls_key") from None
    return _Uvicorn(settings)


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to us: the jobs have to end first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    def __init__(self, config: ServerConfig, app: fastapi.FastAPI, http: uvicorn.Server, *, watch_stdin: bool) -> None:
        self._config = config
        self._app = app
        self._http = http
        self._watch_stdin = watch_stdin
        self._told = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, sock: socket.socket, port_file: Path | None, announce: Callable[[str], None]) -> None:
        async with self._app.router.lifespan_context(self._app):
            listening = asyncio.create_task(self._http.serve(sockets=[sock]))
            while not self._http.started and not listening.done():
                await asyncio.sleep(0.01)
            self._catch_signals()  # after Ray, which puts a handler of its own in place
            if not listening.done():
                self._announce(sock, port_file, announce)
                await asyncio.wait({listening, asyncio.create_task(self._stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
                await self._drain()
            self._http.should_exit = True
            await listening

    def _announce(self, sock: socket.socket, port_file: Path | None, announce: Callable[[str], None]) -> None:
        port = sock.getsockname()[1]
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        url = f"{'https' if self._config.tls_cert else 'http'}://{host}:{port}"
        logger.info("listening on %s, %s", url, f"{len(self._config.tokens)} tokens" if self._config.tokens else "no tokens")
        if port_file is not None:
            draft = port_file.with_name(f"{port_file.name}.{os.getpid()}")
            draft.write_text(f"{port}\n", encoding="ascii")
            draft.replace(port_file)
        announce(url)

    async def _drain(self) -> None:
        """Let running calls end, then stop the jobs."""
        jobs: Jobs = self._app.state.jobs
        calls: Calls = self._app.state.calls
        jobs.draining = True
        end = time.monotonic() + self._config.drain_s
        while not jobs.idle() and time.monotonic() < end and not self._hurry.is_set():
            await asyncio.sleep(TICK_S)
        if not jobs.idle():
            logger.warning("%d calls still run and are ended", sum(job.in_flight for job in jobs))
        await calls.close()
        await jobs.close()

    # --- signals --------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        if self._watch_stdin:
            threading.Thread(target=self._read_stdin, args=(loop,), name="stdin", daemon=True).start()

    def _signalled(self, number: int) -> None:
        self._told += 1
        if self._told > 2:
            os._exit(1)  # whoever asks three times wants it gone
        logger.warning("%s: %s", signal.Signals(number).name, "draining" if self._told == 1 else "ending at once")
        self._stop.set()
        if self._told == 2:
            self._hurry.set()

    def _read_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(self._orphaned)

    def _orphaned(self) -> None:
        logger.warning("standard input has ended: ending at once")
        self._stop.set()
        self._hurry.set()


def _bind(config: ServerConfig) -> socket.socket:
    """A socket that keeps its port from here on."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error}",
            where="host, port",
            remedy="choose another port; 0 takes a free one",
        ) from None
    return sock
