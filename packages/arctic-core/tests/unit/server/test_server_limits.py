"""Bodies and headers that are too large, lie about their length or never end: refused early, at little memory."""

from __future__ import annotations

import asyncio
import resource
import time

import numpy as np
import pytest

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.server.body import FRAME_TYPE

from .support import FRAME, batch, done, listening, request, serving, until

ANY = {"model_name": "hub/any", "training_gpus": 1}
LIMIT = 2**20


def head(length="", *, path="call", extra="", kind=FRAME_TYPE):
    declared = f"Content-Length: {length}\r\n" if length != "" else ""
    return (
        f"POST /arctic/v1/jobs/a/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{declared}{extra}\r\n".encode()
    )


async def status_of(reader, within_s=10.0):
    """The status of the next response; 0 where the connection was closed instead."""
    async with asyncio.timeout(within_s):
        line = await reader.readline()
    return int(line.split()[1]) if line else 0


def test_a_declared_length_above_the_limit_is_refused_before_the_body_comes(tmp_path):
    async def main():
        async with listening(tmp_path, answer=done, max_body_bytes=LIMIT) as (api, port):
            await api.start("a", ANY)
            for path in ("call", "stream"):
                for length in (LIMIT + 1, 10**18):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(head(length, path=path))
                    assert await status_of(reader) == 413
                    writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(10**19, extra="Expect: 100-continue\r\n"))
            assert await status_of(reader) in (400, 413)  # and no 100 before
            writer.close()
            large = await api.http.post(
                "/arctic/v1/jobs", content=b"x" * (5 * LIMIT), headers={"content-type": "application/json"}
            )
            assert (large.status_code, large.json()["error"]["kind"]) == (413, "PayloadTooLargeError")
            assert api.app.state.budget.used == 0

    asyncio.run(main())


def test_a_chunked_body_without_end_is_cut_off_at_the_limit(tmp_path):
    async def main():
        async with listening(tmp_path, answer=done, max_body_bytes=LIMIT) as (api, port):
            await api.start("a", ANY)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(extra="Transfer-Encoding: chunked\r\n"))
            chunk = b"%x\r\n" % 2**16 + b"\0" * 2**16 + b"\r\n"
            answered = asyncio.create_task(status_of(reader))
            sent = 0
            while not answered.done() and sent < 200 * LIMIT:
                writer.write(chunk)
                await writer.drain()
                sent += 2**16
            assert await answered == 413
            for _ in range(500):  # what still comes is not kept
                writer.write(chunk)
                await writer.drain()
            assert api.app.state.budget.used == 0
            writer.close()
            assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 50 * 1024  # KiB

    asyncio.run(main())


def test_a_chunked_body_within_the_limit_is_read(tmp_path):
    async def main():
        async with listening(tmp_path, answer=done) as (api, _):
            await api.start("a", ANY)
            frame = wire.encode(request(p.Backward(batch=batch(), grad_logprobs=np.zeros(300_000, np.float32)), 1))

            async def pieces():
                for start in range(0, len(frame), 50_000):
                    yield frame[start : start + 50_000]

            response = await api.http.post("/arctic/v1/jobs/a/call", content=pieces(), headers=FRAME)
            assert response.status_code == 200, response.text
            await until(lambda: api.app.state.budget.used == 0)

    asyncio.run(main())


@pytest.mark.parametrize("declared", ["-1", "1e3", "0x10", "abc", "9" * 30, "٣"])
def test_a_length_that_is_no_number_is_refused(tmp_path, declared):
    async def main():
        async with serving(tmp_path, answer=done) as api:
            scope_headers = [
                (b"content-length", declared.encode()),
                (b"content-type", FRAME_TYPE.encode()),
                (b"host", b"localhost"),
            ]
            assert await bare(api, scope_headers, [b"x"]) == 400

    asyncio.run(main())


@pytest.mark.parametrize("pieces", [[b"x" * 5], [b"x" * 11], [b"x" * 6, b"x" * 6], [b""], [b"x" * 9, b""]])
def test_a_body_of_another_length_than_declared_is_refused(tmp_path, pieces):
    async def main():
        async with serving(tmp_path, answer=done) as api:
            await api.start("a", ANY)
            headers = [(b"content-length", b"10"), (b"content-type", FRAME_TYPE.encode()), (b"host", b"localhost")]
            assert await bare(api, headers, pieces) == 400
            assert api.app.state.budget.used == 0

    asyncio.run(main())


async def bare(api, headers, pieces, path="/arctic/v1/jobs/a/call"):
    """One request as a server hands it to the application, whatever is in it; returns the status."""
    messages = [{"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)]
    sent = []

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }
    await api.app(scope, receive, send)
    return sent[0]["status"]


def test_a_body_that_stops_coming_gives_its_memory_back(tmp_path):
    async def main():
        async with listening(tmp_path, answer=done, body_timeout_s=0.3) as (api, port):
            await api.start("a", ANY)
            for size, sent in ((1000, 10), (2**24, 10), (2**24, 2**20)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head(size) + b"x" * sent)
                await writer.drain()
                assert await status_of(reader) == 504
                writer.close()
                await until(lambda: api.app.state.budget.used == 0)

    asyncio.run(main())


@pytest.mark.parametrize("sent", [0, 100, 2**20])
def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(tmp_path, sent):
    async def main():
        async with listening(tmp_path, answer=done) as (api, port):
            await api.start("a", ANY)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(2**23) + b"x" * sent)
            await writer.drain()
            await until(lambda: api.app.state.budget.used == 2**23)
            writer.transport.abort()
            await until(lambda: api.app.state.budget.used == 0)
            assert api.app.state.jobs.get("a").last_operation is None

    asyncio.run(main())


def test_large_bodies_come_through_whole_and_their_connection_lives_on(tmp_path):
    """On the short way from socket to memory: sizes around its threshold, several requests on one connection."""
    seen = []

    def answer(request):
        seen.append(request.operation.grad_logprobs)
        return p.Scores(logprobs=request.operation.grad_logprobs, entropy=None)

    async def main():
        async with listening(tmp_path, answer=answer) as (api, port):
            await api.start("a", ANY)
            rng = np.random.default_rng(0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
            for sequence, count in enumerate((10, 65_000, 65_536, 66_000, 10, 1_000_000, 3_000_000, 10)):
                values = rng.random(count, np.float32)
                frame = wire.encode(request(p.Backward(batch=batch(), grad_logprobs=values), sequence))
                writer.write(head(len(frame)))
                for start in range(0, len(frame), 700_001):
                    writer.write(frame[start : start + 700_001])
                    await writer.drain()
                headers = await reader.readuntil(b"\r\n\r\n")
                assert headers.startswith(b"HTTP/1.1 200"), headers
                length = int(headers.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                reply = wire.decode(await reader.readexactly(length), p.Reply)
                assert np.array_equal(reply.unwrap().logprobs, values)
            # Two requests in one go: the second waits until the first, which is large, is answered.
            frames = [wire.encode(request(p.Backward(batch=batch(), grad_logprobs=values), 100 + i)) for i in range(2)]
            writer.write(b"".join(head(len(frame)) + frame for frame in frames))
            for _ in range(2):
                headers = await reader.readuntil(b"\r\n\r\n")
                assert headers.startswith(b"HTTP/1.1 200"), headers
                await reader.readexactly(int(headers.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.close()
            assert len(seen) == 10
            await until(lambda: api.app.state.budget.used == 0)

    asyncio.run(main())


def test_all_bodies_together_are_bounded(tmp_path):
    gate = asyncio.Event()

    async def answer(request):
        await gate.wait()
        return p.Done()

    async def main():
        async with serving(tmp_path, answer=answer, max_body_bytes=LIMIT, max_buffered_bytes=LIMIT) as api:
            await api.start("a", ANY)
            frame = wire.encode(request(p.Backward(batch=batch(), grad_logprobs=np.zeros(150_000, np.float32)), 1))
            assert (await api.post("a", frame, wait=0)).status_code == 202
            other = wire.encode(request(p.Backward(batch=batch(), grad_logprobs=np.ones(150_000, np.float32)), 2))
            full = await api.post("a", other, wait=0)
            assert (full.status_code, full.json()["error"]["kind"]) == (429, "QueueFullError")
            gate.set()
            await until(lambda: api.app.state.budget.used == 0)
            assert (await api.post("a", other)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    "bomb",
    [
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-Y: z\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 3_000_000,
        b"x" * 200_000,
    ],
)
def test_a_header_bomb_is_refused(tmp_path, bomb):
    async def main():
        async with listening(tmp_path, answer=done) as (api, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for start in range(0, len(bomb), 2**14):
                    writer.write(bomb[start : start + 2**14])
                    await writer.drain()
                    await asyncio.sleep(0)
                assert await status_of(reader) in (400, 431)
            except ConnectionError:
                pass  # closed while we were sending
            writer.close()
            assert (await api.http.get("/healthz", headers={"X": "x" * 30_000})).status_code == 200
            assert not api.app.state.jobs.draining

    asyncio.run(main())


def test_headers_that_do_not_come_close_the_connection(tmp_path):
    async def main():
        async with listening(tmp_path, answer=done, header_timeout_s=0.3) as (api, port):
            for begun in (b"", b"GET /healthz HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: y\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begun)
                begin = time.monotonic()
                assert await status_of(reader) in (0, 408)
                assert time.monotonic() - begin < 3
                writer.close()
            assert (await api.http.get("/healthz")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["", "application/json", "application/octet-stream", "text/plain"])
def test_a_body_of_another_type_is_refused(tmp_path, kind):
    async def main():
        async with serving(tmp_path, answer=done) as api:
            await api.start("a", ANY)
            frame = wire.encode(request(p.ZeroGrad(), 1))
            response = await api.http.post("/arctic/v1/jobs/a/call", content=frame, headers={"content-type": kind})
            assert (response.status_code, response.json()["error"]["where"]) == (400, "Content-Type")
            response = await api.http.post("/arctic/v1/jobs", content=b"{}", headers={"content-type": FRAME_TYPE})
            assert (response.status_code, response.json()["error"]["where"]) == (400, "Content-Type")

    asyncio.run(main())
