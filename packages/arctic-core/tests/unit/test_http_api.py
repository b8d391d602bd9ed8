"""Requests to a server that misbehaves: what is repeated, what is not, and what the caller is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from arctic_core.config import HttpConfig
from arctic_core.errors import (
    AuthenticationError,
    ConfigError,
    DataError,
    EngineDiedError,
    QueueFullError,
    TransportError,
)
from arctic_core.transports import http_api
from arctic_core.transports.http_api import FRAME, HttpApi, is_loopback, read_frames

Respond = bytes | Callable[[socket.socket], None]


class Scripted:
    """Serves one prepared response per connection, the last one again and again."""

    def __init__(self, responses: list[Respond]) -> None:
        self._responses = responses
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client:
                    self.requests.append(_request(client))
                    respond = self._responses[min(len(self.requests), len(self._responses)) - 1]
                    with contextlib.suppress(OSError):
                        respond(client) if callable(respond) else client.sendall(respond)


def _request(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(2**16)
    head, _, body = data.partition(b"\r\n\r\n")
    size = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
    while len(body) < size:
        body += client.recv(2**16)
    return head + b"\r\n\r\n" + body


def response(status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def problem(status: int, kind: str, **headers: str) -> bytes:
    body = {"error": {"kind": kind, "message": "no", "where": "there", "remedy": "do", "request_id": "1"}}
    return response(status, json.dumps(body).encode(), **headers)


OK = response(200, b'{"a": 1}')
PROXY = response(502, b"<html>", "text/html")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def serve() -> Iterator[Callable[..., Scripted]]:
    servers: list[Scripted] = []

    def start(*responses: Respond) -> Scripted:
        servers.append(Scripted(list(responses)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def use(server: Scripted, work: Callable[[HttpApi], Awaitable[Any]], *, token: str = "", **config: Any) -> Any:
    async def main() -> Any:
        api = HttpApi(HttpConfig(retries=config.pop("retries", 2), **config), server.url, token)
        try:
            async with asyncio.timeout(20):
                return await work(api)
        finally:
            await api.close()

    return asyncio.run(main())


def test_a_request_is_what_it_should_be(serve: Callable[..., Scripted]) -> None:
    server = serve(OK)
    assert use(server, lambda api: api.json("POST", "/jobs?wait=1", {"b": [1]}, headers={"X-Y": "z"}), token="secret") == {
        "a": 1
    }
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /arctic/v1/jobs?wait=1 HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert b"X-Y: z" in head
    assert json.loads(body) == {"b": [1]}


def test_a_large_body_goes_and_comes_in_one_piece(serve: Callable[..., Scripted]) -> None:
    body = bytes(range(256)) * 40_000
    server = serve(response(200, body, FRAME))
    answer = use(server, lambda api: api.exchange("POST", "/x", body))
    assert server.requests[0].partition(b"\r\n\r\n")[2] == body
    assert (bytes(answer.body), answer.kind, answer.body.readonly) == (body, FRAME, True)


def test_what_goes_past_the_parser_is_whole_and_repeated_where_it_is_cut(serve: Callable[..., Scripted]) -> None:
    body = bytes(range(256)) * 40_000
    assert len(body) > http_api.DIRECT_BYTES
    server = serve(response(200, body, FRAME)[:-1], response(200, body, FRAME), OK)

    async def both(api: HttpApi) -> tuple[bytes, dict[str, Any]]:
        parts = [body[:5], memoryview(body)[5:1000], np.frombuffer(body, np.uint8)[1000:].data, b""]
        return bytes((await api.exchange("POST", "/x", parts)).body), await api.json("GET", "/y")

    assert use(server, both) == (body, {"a": 1})
    assert [request.partition(b"\r\n\r\n")[2] == body for request in server.requests] == [True, True, False]


def test_a_body_without_a_length_is_read_to_its_end(serve: Callable[..., Scripted]) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert bytes(use(serve(chunked), lambda api: api.exchange("GET", "/x")).body) == b"abcde"


@pytest.mark.parametrize(
    "passing",
    [
        pytest.param(b"", id="closed-at-once"),
        pytest.param(b"HTTP/1.1 200", id="closed-in-the-headers"),
        pytest.param(response(200, b"0123456789")[:-3], id="closed-in-the-body"),
        pytest.param(b"\0\0\0\0 nonsense\r\n\r\n", id="no-http"),
        pytest.param(PROXY, id="bad-gateway"),
        pytest.param(response(503, b"", "text/plain"), id="unavailable"),
        pytest.param(response(504, b"[]"), id="timeout"),
        pytest.param(problem(429, "QueueFullError"), id="busy"),
    ],
)
def test_what_passes_is_tried_again(serve: Callable[..., Scripted], passing: bytes) -> None:
    server = serve(passing, passing, OK)
    assert use(server, lambda api: api.json("POST", "/x", {"k": 1})) == {"a": 1}
    assert len(server.requests) == 3
    assert len({request.partition(b"\r\n\r\n")[2] for request in server.requests}) == 1


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (problem(401, "AuthenticationError"), AuthenticationError),
        (problem(400, "DataError"), DataError),
        (problem(502, "EngineDiedError"), EngineDiedError),
        (problem(503, "TransportError"), TransportError),
        (response(404, b"<html>", "text/html"), TransportError),
        (response(307, Location="http://elsewhere/"), TransportError),
        (response(200, b"<html>", "text/html"), TransportError),
    ],
)
def test_what_would_not_change_is_raised_at_once(serve: Callable[..., Scripted], given: bytes, error: type[Exception]) -> None:
    server = serve(given)
    with pytest.raises(error) as caught:
        use(server, lambda api: api.json("GET", "/x"))
    assert type(caught.value) is error
    assert caught.value.remedy  # type: ignore[attr-defined]
    assert len(server.requests) == 1


def test_retries_end(serve: Callable[..., Scripted]) -> None:
    for responses, error, reason in (
        ([PROXY], TransportError, "status 502 with text/html"),
        ([problem(429, "QueueFullError")], QueueFullError, "no"),
        ([b""], TransportError, "did not answer"),
    ):
        server = serve(*responses)
        with pytest.raises(error, match=reason):
            use(server, lambda api: api.exchange("GET", "/x"), retries=3)
        assert len(server.requests) == 4


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main() -> None:
        api = HttpApi(HttpConfig(retries=1), f"http://127.0.0.1:{port}/", "")
        with pytest.raises(TransportError, match="did not answer") as caught:
            await api.exchange("GET", "/x")
        assert f"http://127.0.0.1:{port}/healthz" in caught.value.remedy
        await api.close()

    asyncio.run(main())


def test_the_server_says_how_long_to_wait(serve: Callable[..., Scripted]) -> None:
    server = serve(problem(429, "QueueFullError", Retry_After="1"), OK)
    started = time.monotonic()
    use(server, lambda api: api.exchange("GET", "/x"))
    assert 1.0 <= time.monotonic() - started < 3.0


def test_a_frame_with_an_error_is_an_answer(serve: Callable[..., Scripted]) -> None:
    server = serve(response(429, b"frame", FRAME))
    answer = use(server, lambda api: api.exchange("POST", "/x", b"y"))
    assert (answer.status, bytes(answer.body), len(server.requests)) == (429, b"frame", 1)


def test_silence_ends(serve: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "ANSWER_GRACE_S", 0.2)
    server = serve(lambda client: time.sleep(1.0), OK)
    started = time.monotonic()
    use(server, lambda api: api.exchange("GET", "/x", wait_s=0.1), retries=4)
    assert 0.3 <= time.monotonic() - started < 5.0


def test_a_connection_that_idled_too_long_is_not_used(serve: Callable[..., Scripted]) -> None:
    """The server closes it after its answer without having said so."""
    server = serve(OK.replace(b"Connection: close\r\n", b""))

    async def twice(api: HttpApi) -> None:
        for _ in range(2):
            await api.exchange("GET", "/x")
            await asyncio.sleep(0.1)

    use(server, twice, retries=0)
    assert len(server.requests) == 2


def test_cancelling_closes_the_connection(serve: Callable[..., Scripted]) -> None:
    closed = threading.Event()

    def wait(client: socket.socket) -> None:
        if client.recv(1) == b"":
            closed.set()

    async def cancel(api: HttpApi) -> None:
        task = asyncio.create_task(api.exchange("GET", "/x"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    use(serve(wait), cancel)
    assert closed.wait(5)


# --- streams --------------------------------------------------------------------------------------------------------------


def framed(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)


def streamed(api: HttpApi) -> Awaitable[list[bytes]]:
    async def read() -> list[bytes]:
        async with api.streaming("/stream", b"request", headers={}, silence_s=5.0) as body:
            return [frame async for frame in read_frames(body)]

    return read()


def test_frames_come_whole_however_they_are_cut(serve: Callable[..., Scripted]) -> None:
    frames = [b"a", b"bc" * 5000, b"d"]

    def drip(client: socket.socket) -> None:
        body = framed(frames[0], b"", *frames[1:])  # an empty one says that the server is still there
        client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for start in range(0, len(body), 997):
            client.sendall(body[start : start + 997])

    assert use(serve(PROXY, drip), streamed) == frames


def test_a_stream_that_ends_inside_a_frame_is_an_error(serve: Callable[..., Scripted]) -> None:
    server = serve(response(200, framed(b"whole", b"half")[:-2], "application/x"))
    with pytest.raises(TransportError, match="inside a frame"):
        use(server, streamed)


def test_a_stream_that_is_refused(serve: Callable[..., Scripted]) -> None:
    with pytest.raises(DataError):
        use(serve(problem(400, "DataError")), streamed)
    with pytest.raises(QueueFullError):
        use(serve(problem(429, "QueueFullError")), streamed)


# --- addresses and certificates -------------------------------------------------------------------------------------------


def test_which_addresses_are_this_machine() -> None:
    assert all(map(is_loopback, ("http://localhost:1", "http://127.0.0.1", "http://[::1]:8520/x")))
    assert not any(map(is_loopback, ("http://example.org", "http://10.0.0.1", "http://localhost.example.org")))


def test_a_token_over_plain_http_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    HttpApi(HttpConfig(), "http://127.0.0.1:1", "secret-token")
    assert not caplog.records
    HttpApi(HttpConfig(), "http://example.org", "secret-token")
    assert "unencrypted" in caplog.text
    assert "secret-token" not in caplog.text


def test_authorities_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="/no/such/file") as caught:
        HttpApi(HttpConfig(url="https://s", ca_file="/no/such/file"), "https://s", "")
    assert caught.value.where == "http.ca_file"


@pytest.mark.parametrize("url", ["server:8520", "ftp://server", "http://user:secret@server", "http://server/?token=x", ""])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        HttpConfig(url=url)
