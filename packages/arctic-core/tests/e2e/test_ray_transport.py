"""The Ray transport: streaming, cancelling, reconnecting from another process, and the death of the service."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from arctic_core import SamplingParams, create_arctic_rl_client, create_async_arctic_rl_client
from arctic_core.errors import ArcticError, DataError, EngineDiedError, TransportError

from .conftest import wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SMALL = {"training": {"engine": "torch"}, "sampling": {"engine": "transformers"}}
"""The embedded engines as Ray actors: the transport is the same, and they start fast."""
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
LONG = SamplingParams(max_tokens=480, ignore_eos=True)


def test_streams_errors_and_cancelling(ray_config, marked):
    async def main() -> None:
        async with await create_async_arctic_rl_client(ray_config(max_seq_len=512, **SMALL)) as client:
            plain = await client.generate([[1, 2], [3]], SHORT, n=2)
            streamed = {
                (item.prompt, item.index): item.completion async for item in client.generate_stream([[1, 2], [3]], SHORT, n=2)
            }
            for (i, j), completion in streamed.items():
                assert completion.token_ids.tolist() == plain[i][j].token_ids.tolist()
            assert len(streamed) == 4

            with pytest.raises(DataError, match="max_seq_len"):
                await client.generate([range(512)], SHORT)
            with pytest.raises(DataError, match="max_seq_len"):
                await anext(client.generate_stream([range(512)], SHORT))

            # Cancelled work must leave the sampler: a drain that had to wait for it would take many seconds.
            task = asyncio.create_task(client.generate([[1]] * 16, LONG, n=4))
            stream = client.generate_stream([[1]] * 16, LONG, n=4)
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(1.0)
            task.cancel()
            first.cancel()
            for cancelled in (task, first):
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
            started = time.monotonic()
            await client.pause("drain")
            assert time.monotonic() - started < 5.0
            await client.resume()
            assert len(await client.generate([[1]], SHORT)) == 1

    asyncio.run(main())
    assert not wait_until_gone(marked, seconds=20)


OTHER = textwrap.dedent(
    """
    import sys
    from arctic_core import ArcticRLClientConfig, SamplingParams, create_arctic_rl_client
    config = ArcticRLClientConfig.model_validate_json(sys.argv[1])
    client = create_arctic_rl_client(config)
    rows = client.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    print(client.info().job, rows[0][0].token_ids.tolist())
    getattr(client, sys.argv[2])()
    """
)


def other_process(config, ending: str) -> str:
    command = [sys.executable, "-c", OTHER, config.model_dump_json(), ending]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout.strip()


def test_another_process_connects_leaves_and_shuts_down(ray_config, marked):
    with create_arctic_rl_client(ray_config(training_gpus=0, sampling={"engine": "transformers"})) as client:
        expected = f"{client.info().job} {client.generate([[1, 2]], SHORT)[0][0].token_ids.tolist()}"
        config = client.reconnect_config()
        assert other_process(config, "close") == expected
        assert client.info().job == config.connect_to
        with pytest.raises(TransportError, match="no job named 'nobody'"):
            create_arctic_rl_client(config.model_copy(update={"connect_to": "nobody"}))
        assert other_process(config, "shutdown") == expected
        with pytest.raises(ArcticError):
            client.generate([[1]], SHORT)
    assert not wait_until_gone(marked, seconds=20)


def test_the_death_of_the_service_is_a_typed_error(ray_config, marked):
    import ray

    with create_arctic_rl_client(ray_config(training_gpus=0, sampling={"engine": "transformers"})) as client:
        actor = ray.get_actor(client.info().job, namespace="arctic")
        stream = iter(client.generate_stream([[1]], SamplingParams(max_tokens=100, ignore_eos=True)))
        ray.kill(actor)
        for call in (client.info, client.reset_prefix_cache, lambda: list(stream)):
            started = time.monotonic()
            with pytest.raises(EngineDiedError) as caught:
                call()
            assert time.monotonic() - started < 20
            assert "load its latest checkpoint" in caught.value.remedy
    assert not wait_until_gone(marked, seconds=20)


STARTING = textwrap.dedent(
    """
    import sys
    from arctic_core import ArcticRLClientConfig, create_arctic_rl_client
    print("starting", flush=True)
    try:
        create_arctic_rl_client(ArcticRLClientConfig.model_validate_json(sys.argv[1]))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
)


@pytest.mark.parametrize("after_s", [3.0, 12.0])
def test_ctrl_c_while_the_job_starts_leaves_nothing(ray_config, marked, after_s):
    config = ray_config(**SMALL)
    process = subprocess.Popen([sys.executable, "-c", STARTING, config.model_dump_json()], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    time.sleep(after_s)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "interrupted\n")
    assert not wait_until_gone(marked, seconds=20)
