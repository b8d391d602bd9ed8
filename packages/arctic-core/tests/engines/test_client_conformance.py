"""What every transport has in common: the same calls with real engines, whatever carries them.

Each test gets a client over each transport. Numbers must be those of the local transport, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arctic_core import (
    ArcticRLClientConfig,
    AsyncArcticRLClient,
    Batch,
    DataError,
    GRPOLossConfig,
    InvalidStateError,
    ModelNotFoundError,
    NamedLoss,
    Sample,
    SamplingParams,
    TransportClosedError,
    UnsupportedOperation,
    create_arctic_rl_client,
    create_async_arctic_rl_client,
)
from arctic_core.errors import CheckpointError, ConfigError
from arctic_core.transports.http_server import OwnedServer

from .http_support import http_settings, running_server

SHORT = SamplingParams(max_tokens=5, ignore_eos=True, seed=3)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
Configure = Callable[..., ArcticRLClientConfig]


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[OwnedServer]:
    with running_server(tiny_model) as server:
        yield server


@pytest.fixture(params=["local", "http", pytest.param("ray", marks=[pytest.mark.e2e, pytest.mark.timeout(600)])])
def configure(request: pytest.FixtureRequest, tiny_model: str) -> Configure:
    """Makes the configuration of a tiny job over the transport at hand, with the embedded engines."""
    transport = request.param

    def make(**changes: Any) -> ArcticRLClientConfig:
        values: dict[str, Any] = {"model_name": tiny_model, "comm_protocol": transport, "device": "cpu", "dtype": "float32"}
        values |= {"training_gpus": 1, "sampling_gpus": 1} | changes
        values["deadlines"] = {"start": 240, "request": 60, "stop": 15} | changes.get("deadlines", {})
        if values["sampling_gpus"]:
            values.setdefault("max_seq_len", 512)
        if transport == "http":
            values["http"] = http_settings(request.getfixturevalue("server"))
        if transport == "ray":
            for block, engine, count in (("training", "torch", "training_gpus"), ("sampling", "transformers", "sampling_gpus")):
                if values[count]:
                    values[block] = {"engine": engine} | values.get(block, {})
        return ArcticRLClientConfig.parse(values)

    return make


@pytest.fixture
def client(configure: Configure) -> Iterator[Any]:
    with create_arctic_rl_client(configure()) as client:
        yield client


def batch(seed: int = 0, *, count: int = 3) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.from_samples(
        Sample(
            token_ids=rng.integers(0, 512, 3 + size),
            prompt_length=3,
            advantages=rng.normal(size=size),
            old_logprobs=rng.normal(-6, 0.1, size),
            sampler_logprobs=rng.normal(-6, 0.1, size),
        )
        for size in rng.integers(1, 12, count)
    )


def train(client: Any, steps: int = 2) -> list[float]:
    """Some optimizer steps; what they report and the scores after them."""
    seen: list[float] = []
    for step in range(steps):
        metrics = client.forward_backward(batch(step), GRPOLossConfig()).metrics
        stepped = client.step(lr=1e-2)
        seen += [metrics["loss"].sum, stepped.grad_norm, float(stepped.policy_version)]
    return [*seen, *client.forward(batch(9), entropy=True).logprobs.tolist()]


@pytest.fixture(scope="module")
def expected(tiny_model: str) -> list[float]:
    """What :func:`train` gives in this process."""
    config = ArcticRLClientConfig(model_name=tiny_model, training_gpus=1, device="cpu", dtype="float32")
    with create_arctic_rl_client(config) as client:
        return train(client)


# --- what engines do ------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_local_transport(configure: Configure, expected: list[float]) -> None:
    with create_arctic_rl_client(configure(sampling_gpus=0)) as client:
        assert train(client) == expected


def test_from_sampling_to_a_verified_sync(client: Any) -> None:
    (rows,) = client.generate([[1, 2, 3]], SHORT, n=2)
    streamed = {item.index: item.completion for item in client.generate_stream([[1, 2, 3]], SHORT, n=2)}
    assert [streamed[j].token_ids.tolist() for j in range(2)] == [row.token_ids.tolist() for row in rows]
    samples = [Sample(token_ids=[1, 2, 3, *row.token_ids], prompt_length=3, advantages=np.ones(5)) for row in rows]
    packed = Batch.from_samples(
        sample.replace(old_logprobs=row.logprobs, sampler_logprobs=row.logprobs)
        for sample, row in zip(samples, rows, strict=True)
    )
    np.testing.assert_allclose(client.forward(packed).logprobs, packed.sampler_logprobs, rtol=0, atol=1e-4)
    client.forward_backward(packed, "grpo")
    assert client.step(lr=1e-3).policy_version == 1
    report = client.sync_weights(probe=[[1, 2, 3]])
    assert (report.version, "probe" in report.verified) == (1, True)
    assert client.generate([[1, 2]], SHORT)[0][0].policy_version == 1
    assert client.sync_weights().skipped


def test_info_says_what_runs(client: Any) -> None:
    info = client.info()
    assert {engine.name for engine in info.engines} == {"trainer", "sampler"}
    assert {place.device for place in info.placement} == {"cpu"}
    assert {"generate", "forward_backward", "sync_weights"} <= set(info.capabilities)
    assert info.packages["arctic-core"]


def test_a_loss_on_the_clients_side(client: Any) -> None:
    packed = batch(1)
    client.forward_backward(packed, NamedLoss(name="sft"))
    norm = client.step(lr=0.0).grad_norm
    client.backward(packed, -np.ones(len(packed.old_logprobs)) / len(packed.old_logprobs))
    assert client.step(lr=0.0).grad_norm == pytest.approx(norm, rel=1e-5)
    client.forward_backward(packed, "sft")
    client.zero_grad()
    with pytest.raises(InvalidStateError, match="no accumulated gradient"):
        client.step()


def test_checkpoints_and_exports(client: Any, tmp_path: Path) -> None:
    before = client.forward(batch(9)).logprobs
    ref = client.save_checkpoint(tmp_path / "run", extra={"note": "ä"})
    train(client, steps=1)
    assert not np.array_equal(client.forward(batch(9)).logprobs, before)
    loaded = client.load_checkpoint(tmp_path / "run")
    assert (loaded.path, loaded.extra) == (ref.path, {"note": "ä"})
    assert np.array_equal(client.forward(batch(9)).logprobs, before)
    assert (Path(client.export_hf(tmp_path / "hf").path) / "config.json").exists()
    with pytest.raises(CheckpointError):
        client.load_checkpoint(tmp_path / "nothing")


def test_values_arrive_as_they_were_sent(client: Any) -> None:
    empty = client.forward(Batch.from_samples([]))
    assert empty.logprobs.shape == (0,)
    scores = client.forward(batch(0, count=40), entropy=True, topk=7)
    assert (scores.topk_ids.shape, scores.topk_ids.dtype) == ((len(scores.logprobs), 7), np.int32)
    assert scores.entropy.dtype == np.float32


# --- errors, states, cancelling -------------------------------------------------------------------------------------------


def test_errors_arrive_as_themselves(client: Any) -> None:
    with pytest.raises(DataError, match="max_seq_len") as caught:
        client.generate([range(512)], SHORT)
    assert caught.value.where == "generate.prompts"
    with pytest.raises(DataError, match="max_seq_len"):
        list(client.generate_stream([range(512)], SHORT))
    with pytest.raises(DataError) as caught:
        client.forward_backward(Batch.from_samples([Sample(token_ids=[1, 2], prompt_length=1)]), "grpo")
    assert "set it on every sample" in caught.value.remedy
    with pytest.raises(UnsupportedOperation, match="reference"):
        client.forward(batch(), model="reference")
    with pytest.raises(ConfigError):
        client.forward_backward(batch(), NamedLoss(name="no_such_loss"))


def test_pause_holds_and_abort_ends(configure: Configure) -> None:
    async def main() -> None:
        async with await create_async_arctic_rl_client(configure(training_gpus=0)) as client:
            running = asyncio.create_task(client.generate([[1]], LONG, request_id="mine"))
            await asyncio.sleep(0.3)
            await client.abort(["mine"])
            assert (await running)[0][0].finish_reason == "abort"
            await client.pause()
            waiting = asyncio.create_task(client.generate([[1, 2]], SHORT))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await client.resume()
            assert len(await waiting) == 1
            await client.reset_prefix_cache()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def idle_again(client: AsyncArcticRLClient) -> AsyncIterator[None]:
    """Cancelled work must leave the sampler: a drain that had to wait for it would take many seconds."""
    yield
    started = time.monotonic()
    await client.pause("drain")
    assert time.monotonic() - started < 5.0
    await client.resume()
    assert len(await client.generate([[1]], SHORT)) == 1


def test_cancelling_reaches_the_engine(configure: Configure) -> None:
    async def main() -> None:
        async with await create_async_arctic_rl_client(configure(training_gpus=0)) as client:
            async with idle_again(client):
                task = asyncio.create_task(client.generate([[1]] * 16, LONG, n=4))
                await asyncio.sleep(0.5)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async with idle_again(client):
                stream = client.generate_stream([[1]] * 16, LONG, n=4)
                first = asyncio.create_task(anext(aiter(stream)))
                await asyncio.sleep(0.5)
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
                await stream.aclose()  # type: ignore[attr-defined] - it is a generator

    asyncio.run(main())


def test_many_at_once_get_their_own(configure: Configure) -> None:
    async def main() -> None:
        async with await create_async_arctic_rl_client(configure(training_gpus=0)) as client:
            prompts = [[1 + i, 2, 3 + i] for i in range(24)]
            alone = [await client.generate([prompt], SHORT) for prompt in prompts[:6]]
            together = await asyncio.gather(*(client.generate([prompt], SHORT) for prompt in prompts))
            for one, other in zip(alone, together, strict=False):
                assert one[0][0].token_ids.tolist() == other[0][0].token_ids.tolist()

    asyncio.run(main())


# --- life -----------------------------------------------------------------------------------------------------------------


def test_a_start_that_fails_says_why(configure: Configure) -> None:
    with pytest.raises(ModelNotFoundError):
        create_arctic_rl_client(configure(model_name="/no/such/model"))


def test_a_closed_client_is_closed(configure: Configure) -> None:
    client = create_arctic_rl_client(configure(training_gpus=0))
    stream = client.generate_stream([[1]], SHORT)
    client.close()
    client.close()
    for call in (client.info, lambda: list(stream)):
        with pytest.raises(TransportClosedError):
            call()
