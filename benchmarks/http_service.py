"""What the wire format and HTTP cost, beside a plain copy of the same bytes measured in the same run.

    .nox/cpu/bin/python benchmarks/http_service.py [--mib N] [--rounds N] [--calls N] [--json FILE]

The server is the real one in a process of its own; the service behind it answers at once, so nothing but the way there and
back is measured. Three figures:

- `codec`: encoding a message and decoding the frame, bytes of tensors per second over those of `numpy.copy`.
- `loopback`: a message with N MiB of tensors to the server, and a reply with the same tensors back, through the client's
  transport: encoded, sent, decoded, twice. Bytes in both directions per second over those of `numpy.copy`. `upload` is the
  same with an empty reply.
- `overhead`: the median time of a call with a 10 MB batch over HTTP minus that of the same call in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.config import ArcticRLClientConfig
from arctic_core.config.server import ServerConfig
from arctic_core.data import Batch, Sample
from arctic_core.transports.base import Transport
from arctic_core.transports.http import HttpTransport

COLUMNS = 1024
OVERHEAD_BYTES = 10_000_000


class Mirror(Transport):
    """A service that answers at once: `backward` with the top-k gradients it got where it got entropies' too, else nothing."""

    async def open(self) -> None: ...

    async def send(self, request: p.Request) -> p.Reply:
        operation = request.operation
        body: p.Done | p.Scores = p.Done()
        if isinstance(operation, p.Backward) and operation.grad_entropy is not None:
            body = p.Scores(logprobs=operation.grad_logprobs, entropy=None, topk_logprobs=operation.grad_topk_logprobs)
        return p.Reply(sequence=request.sequence, body=body)

    async def stream(self, request: p.Request) -> AsyncIterator[p.Reply]:
        yield await self.send(request)

    async def close(self, shutdown: bool) -> None: ...

    def reconnect_config(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="tensors of the large message")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=50, help="calls with the 10 MB batch")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder, "port")
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(port_file)])
        try:
            while not port_file.exists() and server.poll() is None:
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port_file.read_text()}"
            figures = asyncio.run(measure(url, options.mib, options.rounds, options.calls))
        finally:
            server.terminate()
            server.wait(20)
    figures |= {
        "numpy": np.__version__,
        "python": sys.version.split()[0],
        "machine": platform.processor() or platform.machine(),
    }
    for name, value in figures.items():
        print(f"{name:<28}{value:.3f}" if isinstance(value, float) else f"{name:<28}{value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


async def serve(port_file: Path) -> None:
    """The server's process."""
    from arctic_core.server.app import create_app
    from arctic_core.server.run import http_server

    config = ServerConfig(port=0, engines="local", max_body_bytes=2**33, max_buffered_bytes=2**34)
    app = create_app(config, connect=lambda job: Mirror())
    server = http_server(config, app)
    server.config.port = 0
    async with app.router.lifespan_context(app):
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        draft = port_file.with_suffix(".draft")
        draft.write_text(str(server.servers[0].sockets[0].getsockname()[1]))
        draft.rename(port_file)
        await serving


async def measure(url: str, mib: int, rounds: int, calls: int) -> dict[str, Any]:
    """All figures."""
    config = ArcticRLClientConfig(model_name="none", comm_protocol="http", training_gpus=1, http={"url": url})
    transport = HttpTransport(config)
    await transport.open()
    try:
        return await large(transport, mib, rounds) | await small(transport, calls)
    finally:
        await transport.close(shutdown=False)


async def large(transport: Transport, mib: int, rounds: int) -> dict[str, Any]:
    """Codec and loopback. What is compared takes turns, so that a machine that is busy for a while is so for all."""
    tensor = np.random.default_rng(0).random((mib * 2**20 // 4 // COLUMNS, COLUMNS), np.float32)
    few = np.zeros(1, np.float32)
    batch = Batch.from_samples([Sample(token_ids=[1, 2], prompt_length=1)])
    there = p.Backward(batch=batch, grad_logprobs=few, grad_topk_logprobs=tensor)
    back = p.Backward(batch=batch, grad_logprobs=few, grad_entropy=few, grad_topk_logprobs=tensor)

    async def copy() -> None:
        tensor.copy()

    async def codec() -> None:
        wire.decode(wire.encode_large(request(there)), p.Request)

    async def upload() -> None:
        (await transport.send(request(there))).unwrap()

    async def loopback() -> None:
        reply: Any = (await transport.send(request(back))).unwrap()
        assert reply.topk_logprobs[-1, -1] == tensor[-1, -1]

    work = {"copy": copy, "codec": codec, "upload": upload, "loopback": loopback}
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, call in work.items():
            seconds = await timed(call)
            if turn:  # the first one warms up
                times[name].append(seconds)
    moved = {"copy": 1, "codec": 1, "upload": 1, "loopback": 2}
    rates = {name: moved[name] * tensor.nbytes / statistics.median(values) / 1e9 for name, values in times.items()}
    figures: dict[str, Any] = {"tensor_mib": mib, "rounds": rounds}
    figures |= {f"{name}_gb_per_s": rate for name, rate in rates.items()}
    return figures | {f"{name}_over_copy": rates[name] / rates["copy"] for name in ("codec", "upload", "loopback")}


async def small(transport: Transport, calls: int) -> dict[str, Any]:
    """The overhead of a call with a 10 MB batch."""
    length = 1000
    rng = np.random.default_rng(0)
    samples = []
    while sum(batch_bytes(sample) for sample in samples) < OVERHEAD_BYTES:
        ids = rng.integers(0, 100_000, 2 * length)
        values = rng.normal(size=length)
        samples.append(Sample(token_ids=ids, prompt_length=length, advantages=values, old_logprobs=values))
    operation = p.ForwardBackward(batch=Batch.from_samples(samples), loss=p.NamedLoss(name="grpo"))
    mirror = Mirror()
    over_http, here = [], []
    for turn in range(calls + 3):
        seconds = await timed(lambda: transport.send(request(operation)))
        direct = await timed(lambda: mirror.send(request(operation)))
        if turn >= 3:
            over_http.append(seconds)
            here.append(direct)
    return {
        "batch_bytes": len(wire.encode(request(operation))),
        "calls": calls,
        "overhead_ms": 1e3 * (statistics.median(over_http) - statistics.median(here)),
        "overhead_p90_ms": 1e3 * (statistics.quantiles(over_http, n=10)[-1] - statistics.median(here)),
        "round_trip_of_nothing_ms": 1e3
        * statistics.median([await timed(lambda: transport.send(request(p.ZeroGrad()))) for _ in range(calls)]),
    }


def batch_bytes(sample: Sample) -> int:
    """Bytes of a sample's arrays on the wire."""
    return 4 * (len(sample.token_ids) + 2 * (len(sample.token_ids) - sample.prompt_length))


_sequence = iter(range(1, 2**31))


def request(operation: p.Operation) -> p.Request:
    """A request of its own key."""
    return p.Request(session="benchmark", sequence=next(_sequence), operation=operation, deadline_s=600.0)  # type: ignore[arg-type]


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
