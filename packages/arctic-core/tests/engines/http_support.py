"""What tests of the HTTP client stand between client and server, and on the other side."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from arctic_core import ArcticRLClientConfig
from arctic_core.transports.http_server import OwnedServer


@contextlib.contextmanager
def running_server(model: str) -> Iterator[OwnedServer]:
    """A real server in a process of its own, with engines inside it."""
    config = ArcticRLClientConfig(model_name=model, comm_protocol="http", training_gpus=1, http={"engines": "local"})
    server = asyncio.run(OwnedServer.start(config))
    try:
        yield server
    finally:
        asyncio.run(server.stop(20.0))


def is_call(head: bytes) -> bool:
    """Whether a request carries an operation."""
    return b"/call HTTP" in head.partition(b"\r\n")[0]


@dataclass
class Cut:
    """Where a connection breaks."""

    side: str
    """``"request"`` or ``"response"``: of which the bytes are counted, from the first of its headers."""
    at: float
    """So many of its bytes are passed on, then both sides are closed. Below 1: that part of the request."""
    only: Callable[[bytes], bool] = is_call
    """Looks at the headers of a request; others pass."""
    times: int = 1
    """How many connections are cut."""


class Proxy:
    """A TCP proxy that breaks connections as told. It has each connection carry one request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut: Cut | None = None
        self.cuts = 0
        """How many connections were cut."""
        self.requests: list[str] = []
        """Method and path of each request that came."""
        self.piece = 2**16
        """Most bytes passed on at once."""
        self.pause_s = 0.0
        """How long each piece waits."""
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(2**16)
            if not piece:
                client.close()
                return
            head += piece
        self.requests.append(" ".join(head.decode("latin-1").split(" ", 2)[:2]))
        cut = self.cut if self.cut is not None and self.cut.times > 0 and self.cut.only(head) else None
        if cut is not None:
            cut.times -= 1
        with contextlib.suppress(OSError):
            server = socket.create_connection(self._target)
            limits = {
                side: _limit(cut, head) if cut is not None and cut.side == side else None for side in ("request", "response")
            }
            back = threading.Thread(target=self._pump, args=(server, client, limits["response"], b""), daemon=True)
            back.start()
            head = head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
            self._pump(client, server, limits["request"], head)

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None, piece: bytes) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece or (piece := source.recv(self.piece)):
                if limit is not None and passed + len(piece) >= limit:
                    sink.sendall(piece[: limit - passed])
                    self.cuts += 1
                    time.sleep(0.05)  # what passes shall arrive
                    break
                time.sleep(self.pause_s)
                sink.sendall(piece)
                passed, piece = passed + len(piece), b""
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it


def _limit(cut: Cut, head: bytes) -> int:
    size = (
        len(head.partition(b"\r\n\r\n")[0]) + 4 + int(re.search(rb"(?i)content-length: (\d+)", head + b"content-length: 0")[1])
    )  # type: ignore[index]
    return int(cut.at * size) if cut.side == "request" and cut.at < 1 else int(cut.at)


def http_settings(server: OwnedServer, **more: Any) -> dict[str, Any]:
    """The ``http`` block of a client of that server."""
    return {"url": server.url, "token_file": str(server.token_file), **more}
