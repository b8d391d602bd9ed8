"""Connections that break in the middle of calls: everything is carried out once, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arctic_core import (
    ArcticRLClientConfig,
    Batch,
    QueueFullError,
    Sample,
    SamplingParams,
    TransportError,
    create_arctic_rl_client,
    create_async_arctic_rl_client,
)
from arctic_core.transports import http, http_api
from arctic_core.transports.http_server import OwnedServer

from .http_support import Cut, Proxy, http_settings, running_server

SHORT = SamplingParams(max_tokens=5, ignore_eos=True, seed=3)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=4)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "FIRST_PAUSE_S", 0.02)


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[OwnedServer]:
    with running_server(tiny_model) as server:
        yield server


@pytest.fixture
def proxy(server: OwnedServer) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def config(tiny_model: str, server: OwnedServer, proxy: Proxy) -> ArcticRLClientConfig:
    return ArcticRLClientConfig(
        model_name=tiny_model,
        comm_protocol="http",
        training_gpus=1,
        sampling_gpus=1,
        device="cpu",
        dtype="float32",
        max_seq_len=512,
        http=http_settings(server) | {"url": proxy.url},
    )


def batch(seed: int, *, count: int = 6) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.from_samples(
        Sample(
            token_ids=rng.integers(0, 512, 3 + size),
            prompt_length=3,
            advantages=rng.normal(size=size),
            old_logprobs=rng.normal(-6, 0.1, size),
            sampler_logprobs=rng.normal(-6, 0.1, size),
        )
        for size in rng.integers(1, 30, count)
    )


def writes(client: Any, folder: Path) -> list[Callable[[], Any]]:
    """Every kind of call that changes something, in an order in which each matters for the parameters in the end."""
    gradient = np.random.default_rng(5).normal(size=len(batch(1).old_logprobs))
    return [
        lambda: client.forward_backward(batch(0), "grpo"),
        lambda: client.step(lr=1e-2),
        lambda: client.forward_backward(batch(1), "sft"),
        client.zero_grad,
        lambda: client.backward(batch(1), gradient),
        lambda: client.step(lr=1e-2),
        lambda: client.save_checkpoint(folder / "run"),
        client.sync_weights,
        lambda: client.load_checkpoint(folder / "run"),
        lambda: client.forward_backward(batch(2), "sft"),
        lambda: client.forward_backward(batch(3), "sft"),
        lambda: client.step(lr=1e-2),
        lambda: client.pause("keep"),
        client.resume,
        client.reset_prefix_cache,
        lambda: client.abort(["nobody"]),
        client.sync_weights,
    ]


def outcome(client: Any, folder: Path) -> tuple[Any, ...]:
    """Parameters to the last bit, counters, and what the sampler makes of them."""
    exported = Path(client.export_hf(folder / "export").path)
    parameters = {file.name: file.read_bytes() for file in sorted(exported.glob("*.safetensors"))}
    assert parameters
    info = client.info()
    (row,) = client.generate([[1, 2, 3]], SHORT)[0]
    return parameters, info.step, info.policy_version, row.token_ids.tolist(), row.policy_version


@pytest.fixture(scope="module")
def undisturbed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("undisturbed")
    values = {"training_gpus": 1, "sampling_gpus": 1, "device": "cpu", "dtype": "float32", "max_seq_len": 512}
    with create_arctic_rl_client(ArcticRLClientConfig(model_name=tiny_model, **values)) as client:
        for call in writes(client, folder):
            call()
        return outcome(client, folder)


CUTS = [
    pytest.param("request", 30, 1, id="in-the-request-line"),
    pytest.param("request", 0.5, 1, id="half-a-request"),
    pytest.param("request", 0.999, 1, id="before-its-last-byte"),
    pytest.param("request", 0.9, 3, id="thrice"),
    pytest.param("response", 0, 1, id="before-the-answer"),
    pytest.param("response", 40, 1, id="in-the-answers-headers"),
    pytest.param("response", 240, 2, id="in-the-answers-body-twice"),
]


@pytest.mark.parametrize(("side", "at", "times"), CUTS)
def test_a_write_that_is_cut_is_applied_once(
    config: ArcticRLClientConfig,
    proxy: Proxy,
    tmp_path: Path,
    undisturbed: tuple[Any, ...],
    side: str,
    at: float,
    times: int,
) -> None:
    with create_arctic_rl_client(config) as client:
        calls = writes(client, tmp_path)
        for call in calls:
            proxy.cut = Cut(side, at, times=times)
            call()
        assert proxy.cuts == times * len(calls)
        proxy.cut = None
        assert outcome(client, tmp_path) == undisturbed


@pytest.mark.parametrize(("side", "at"), [("request", 0.5), ("response", 0), ("response", 240)])
def test_reads_and_generations_come_through_cuts(config: ArcticRLClientConfig, proxy: Proxy, side: str, at: float) -> None:
    with create_arctic_rl_client(config) as client:
        scores, rows = client.forward(batch(0)).logprobs, client.generate([[1, 2, 3], [4]], SHORT, n=2)
        proxy.cut = Cut(side, at)
        assert np.array_equal(client.forward(batch(0)).logprobs, scores)
        proxy.cut = Cut(side, at)
        again = client.generate([[1, 2, 3], [4]], SHORT, n=2)
        assert proxy.cuts == 2
        for row, other in zip(rows, again, strict=True):
            assert [one.token_ids.tolist() for one in row] == [one.token_ids.tolist() for one in other]


def test_a_long_operation_is_asked_after_and_survives_every_connection(
    config: ArcticRLClientConfig, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_arctic_rl_client(config) as client:
        monkeypatch.setattr(http, "WAIT_S", 0.05)
        proxy.requests.clear()
        proxy.cut = Cut("response", 20, only=lambda head: head.startswith(b"GET") and b"/results/" in head, times=3)
        (rows,) = client.generate([[1, 2, 3]], LONG, n=4)
        assert [len(row.token_ids) for row in rows] == [400] * 4
        asked = [line for line in proxy.requests if line.startswith("GET") and "/results/" in line]
        assert proxy.cuts == 3
        assert len(asked) > 2
        assert {line.partition("?")[0] for line in asked} == {asked[0].partition("?")[0]}


def test_a_result_that_the_server_forgot_is_not_computed_twice(
    config: ArcticRLClientConfig, proxy: Proxy, server: OwnedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a step is lost on its way and dropped at the server; the step was still taken once."""
    monkeypatch.setattr(http, "WAIT_S", 0.0)
    asked: list[str] = []
    exchange = http.HttpApi.exchange

    async def forgetting(api: http.HttpApi, method: str, path: str, *args: Any, **options: Any) -> http.Answer:
        if method == "GET" and "/results/" in path and "3?" in path and not asked:
            asked.append(path)
            await asyncio.sleep(1.0)  # the step is done by now
            await exchange(api, "DELETE", path.partition("?")[0])
        return await exchange(api, method, path, *args, **options)

    with create_arctic_rl_client(config) as client:
        client.forward_backward(batch(0), "sft")
        client.forward_backward(batch(1), "sft")
        monkeypatch.setattr(http.HttpApi, "exchange", forgetting)
        stepped = client.step(lr=1e-2)
        assert asked
        assert (stepped.step, client.info().step) == (1, 1)
        assert sum("/call" in line for line in proxy.requests) == 5


def test_a_stream_that_is_cut_says_so(config: ArcticRLClientConfig, proxy: Proxy) -> None:
    def is_stream(head: bytes) -> bool:
        return b"/stream HTTP" in head.partition(b"\r\n")[0]

    with create_arctic_rl_client(config) as client:
        proxy.cut = Cut("request", 0.5, only=is_stream)
        assert len(list(client.generate_stream([[1], [2]], SHORT))) == 2
        proxy.cut = Cut("response", 1200, only=is_stream)
        seen: list[Any] = []
        with pytest.raises(TransportError, match="broke off") as caught:
            seen.extend(client.generate_stream([[1]] * 8, SHORT))
        assert caught.value.remedy == "generate again"
        assert 0 < len(seen) < 8
        assert proxy.cuts == 2
        started = time.monotonic()
        client.pause("drain")  # what was cut runs no more
        assert time.monotonic() - started < 5


def test_what_cannot_be_delivered_is_a_typed_error(config: ArcticRLClientConfig, proxy: Proxy) -> None:
    settings = config.model_copy(update={"http": config.http.model_copy(update={"retries": 1})})
    with create_arctic_rl_client(settings) as client:
        proxy.cut = Cut("request", 0.5, times=100)
        started = time.monotonic()
        with pytest.raises(TransportError, match="did not answer") as caught:
            client.step()
        assert time.monotonic() - started < 10
        assert "healthz" in caught.value.remedy
        assert proxy.cuts == 4  # twice, and the client's own repetition
        proxy.cut = None
        assert client.info().step == 0


def test_a_large_call_is_answered_where_it_was_posted(config: ArcticRLClientConfig, proxy: Proxy) -> None:
    """Large bodies take a way of their own through the server; the request must still be seen as open behind it."""
    ids = np.tile(np.arange(512), (100, 1))
    teacher = np.full(ids.shape, -7.0)
    large = Batch.from_samples([Sample(token_ids=range(101), prompt_length=1, topk_ids=ids, teacher_topk_logprobs=teacher)])
    assert sum(array.nbytes for array in (ids, teacher)) > 2**19
    with create_arctic_rl_client(config) as client:
        proxy.requests.clear()
        for _ in range(2):
            assert client.forward(large).logprobs.shape == (100,)
        assert len(proxy.requests) == 2, proxy.requests


def test_a_connection_that_is_slow_in_both_directions_only_takes_longer(config: ArcticRLClientConfig, proxy: Proxy) -> None:
    with create_arctic_rl_client(config) as client:
        expected = client.forward(batch(0, count=200)).logprobs
        proxy.pause_s, proxy.piece = 0.002, 999
        assert np.array_equal(client.forward(batch(0, count=200)).logprobs, expected)


def test_a_full_queue_is_the_callers_business(config: ArcticRLClientConfig) -> None:
    few = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_waiting": 2})})

    async def main() -> None:
        async with await create_async_arctic_rl_client(few) as client:
            running = asyncio.create_task(client.generate([[1]], LONG, n=2))
            await asyncio.sleep(0.3)
            with pytest.raises(QueueFullError, match="at most 2"):
                await client.generate([[1]], SHORT)
            await running

    asyncio.run(main())
