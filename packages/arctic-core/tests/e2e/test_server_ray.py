"""A server whose jobs are Ray actors of one private cluster: frames go through as they are, jobs end one by one."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.config.server import ServerConfig
from arctic_core.server.app import create_app
from arctic_core.server.body import FRAME_TYPE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SMALL = {"training": {"engine": "torch"}, "sampling": {"engine": "transformers"}, "device": "cpu", "dtype": "float32"}
LARGE = 2_000_000


def request(operation, sequence):
    return p.Request(session="s", sequence=sequence, operation=operation, deadline_s=60.0)


async def call(http, job, operation, sequence, path="call"):
    content = wire.encode(request(operation, sequence))
    response = await http.post(f"/arctic/v1/jobs/{job}/{path}", content=content, headers={"content-type": FRAME_TYPE})
    assert response.status_code != 202
    return response


def test_two_jobs_share_a_cluster_and_one_outlives_the_other(tiny_model, tmp_path, marked):
    decoded = []

    async def main():
        config = ServerConfig(engines="ray", data_root=str(tmp_path), model_roots=(tiny_model,), ray_cpus=8)
        app = create_app(config)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as http:
                body = {"model_name": tiny_model, "training_gpus": 1, "sampling_gpus": 1, **SMALL}
                for name in ("a", "b"):
                    assert (await http.post("/arctic/v1/jobs", json={"name": name, "config": body})).status_code == 202
                for name in ("a", "b"):
                    for _ in range(4):
                        view = (await http.get(f"/arctic/v1/jobs/{name}?wait=30")).json()
                        if view["state"] != "starting":
                            break
                    assert view["state"] == "ready", view
                # A failed start in the same cluster leaves the others alone.
                bad = {"name": "c", "config": {**body, "model_name": "no-such-model"}}
                await http.post("/arctic/v1/jobs", json=bad)
                failed = (await http.get("/arctic/v1/jobs/c?wait=30")).json()
                assert (failed["state"], failed["error"]["kind"]) == ("failed", "ModelNotFoundError")

                sampling = p.SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
                generate = p.Generate(prompts=(np.arange(3, 9, dtype=np.int32),), sampling=sampling, n=2, request_id="r")
                first = wire.decode((await call(http, "a", generate, 1)).content, p.Reply).unwrap()
                other = wire.decode((await call(http, "b", generate, 1)).content, p.Reply).unwrap()
                for mine, theirs in zip(first.completions[0], other.completions[0], strict=True):
                    assert np.array_equal(mine.token_ids, theirs.token_ids)
                streamed = await call(http, "a", generate, 2, "stream")
                assert streamed.status_code == 200
                assert len(streamed.content) > 3 * 8

                # A large frame is refused by the engine, which has therefore seen it; the server encodes nothing.
                from arctic_core.data import Batch, Sample

                batch = Batch.from_samples([Sample(token_ids=np.arange(3, 9), prompt_length=3)])
                large = p.Backward(batch=batch, grad_logprobs=np.zeros(LARGE, np.float32))
                refused = await call(http, "a", large, 3)
                assert (refused.status_code, wire.decode(refused.content, p.Reply).body.kind) == (400, "DataError")

                stopped = (await http.delete("/arctic/v1/jobs/a?wait=30")).json()
                assert stopped["state"] == "stopped"
                info = wire.decode((await call(http, "b", p.GetInfo(), 4)).content, p.Reply).unwrap()
                assert {engine.state for engine in info.engines} == {"awake"}

    real = wire.encode
    wire.encode = lambda message: decoded.append(type(message)) or real(message)
    try:
        asyncio.run(main())
    finally:
        wire.encode = real
    assert p.Reply not in decoded  # replies came as frames and went on as frames
