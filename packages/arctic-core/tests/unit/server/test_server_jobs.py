"""Jobs of a server: started as a whole or not at all, named, leased, and stopped with it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from arctic_core import protocol as p
from arctic_core.errors import EngineStartError, ModelNotFoundError
from arctic_core.transports.mock import MockTransport

from .support import TRAINING, done, generate, request, serving, until
from .test_server_calls import Seen

ANY = {"model_name": "hub/any", "training_gpus": 1}


def test_a_job_starts_in_the_background_and_stops_on_demand(tiny_model, tmp_path):
    async def main():
        async with serving(tmp_path, model_roots=(tiny_model,)) as api:
            response = await api.post_job("a", {"model_name": tiny_model, **TRAINING})
            assert (response.status_code, response.json()["state"]) == (202, "starting")
            early = await api.post("a", request(p.GetInfo(), 1))
            assert (early.status_code, early.json()["error"]["kind"]) == (409, "InvalidStateError")
            assert (await api.job("a", wait=30))["state"] == "ready"
            info = await api.call("a", p.GetInfo(), 2)
            assert (info.job, {engine.name for engine in info.engines}) == ("a", {"trainer", "sampler"})
            stopped = await api.http.delete("/arctic/v1/jobs/a", params={"wait": 30})
            assert (stopped.status_code, stopped.json()["state"]) == (202, "stopped")
            late = await api.post("a", request(p.GetInfo(), 3))
            assert (late.status_code, late.json()["error"]["kind"]) == (409, "InvalidStateError")
            again = await api.start("a", {"model_name": tiny_model, "training_gpus": 1})
            assert again["state"] == "ready"

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_name": "no-such-model-here", "training_gpus": 1}, "ModelNotFoundError"),
        ({"model_name": "./missing", "training_gpus": 1}, "ModelNotFoundError"),
        ({"model_name": "broken", "training_gpus": 1, "sampling_gpus": 1}, "UnsupportedModelError"),
    ],
)
def test_a_start_that_fails_leaves_nothing_but_its_error(tmp_path, config, kind):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")

    async def main():
        async with serving(tmp_path, max_jobs=1, job_ttl_s=0.5) as api:
            view = await api.start("a", config)
            assert (view["state"], view["error"]["kind"]) == ("failed", kind)
            assert view["error"]["message"]
            assert api.app.state.jobs.get("a").transport._service is None
            assert (await api.post_job("b", ANY)).status_code == 202  # the failed one takes no place
            await until(lambda: not any(job.name == "a" for job in api.app.state.jobs))

    asyncio.run(main())


def test_a_start_that_is_called_off_is_undone(tmp_path):
    events = []

    class Slow(MockTransport):
        async def open(self):
            try:
                await asyncio.sleep(60)
            finally:
                events.append("undone")

    async def main():
        async with serving(tmp_path, connect=lambda config: Slow(done)) as api:
            await api.post_job("a", ANY)
            await asyncio.sleep(0.05)
            view = (await api.http.delete("/arctic/v1/jobs/a", params={"wait": 10})).json()
            assert (view["state"], events) == ("stopped", ["undone"])

    asyncio.run(main())


def test_an_engine_that_does_not_start_is_told_with_its_type(tmp_path):
    class Broken(MockTransport):
        async def open(self):
            raise EngineStartError("rank 1 ended", where="trainer[1]", remedy="look at its log")

    class Buggy(MockTransport):
        async def open(self):
            raise RuntimeError("nobody expected this")

    async def main():
        async with serving(tmp_path, connect=lambda config: (Broken if config.job == "a" else Buggy)(done)) as api:
            error = (await api.start("a", ANY))["error"]
            assert (error["kind"], error["where"], error["remedy"]) == ("EngineStartError", "trainer[1]", "look at its log")
            assert (await api.start("b", ANY))["error"]["kind"] == "EngineError"
            info = (await api.http.get("/arctic/v1/server")).json()
            assert info["jobs"] == 0

    asyncio.run(main())


def test_a_job_is_started_once_for_a_key(tmp_path):
    async def main():
        async with serving(tmp_path, answer=done) as api:
            key = {"Idempotency-Key": "k"}
            names = {(await api.post_job(None, ANY, headers=key)).json()["name"] for _ in range(3)}
            assert len(names) == 1
            other = await api.post_job(None, {**ANY, "seed": 1}, headers=key)
            assert (other.status_code, other.json()["error"]["kind"]) == (409, "InvalidStateError")
            assert (await api.post_job(None, ANY)).json()["name"] not in names
            taken = await api.post_job(names.pop(), ANY)
            assert (taken.status_code, taken.json()["error"]["kind"]) == (409, "InvalidStateError")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"config": {"model_name": "a/b"}}, "ConfigError"),
        ({"config": {"model_name": "a/b", "training_gpus": 1, "no_such_key": 1}}, "ConfigError"),
        ({"config": {"model_name": "a/b", "training_gpus": -1}}, "ConfigError"),
        ({"config": ANY, "name": "a/b"}, "ConfigError"),
        ({"config": ANY, "name": "../a"}, "ConfigError"),
        ({"config": ANY, "name": ""}, "ConfigError"),
        ({"config": ANY, "lease_s": 0}, "ConfigError"),
        ({"config": ANY, "lease_s": 1e9}, "ConfigError"),
        ({"config": ANY, "lease_s": "soon"}, "ConfigError"),
        ({"config": ANY, "more": 1}, "ConfigError"),
        ({"config": []}, "ConfigError"),
        ({}, "ConfigError"),
        ([], "WireError"),
    ],
)
def test_a_wrong_request_for_a_job_is_refused_with_the_key_that_is_wrong(tmp_path, body, kind):
    async def main():
        async with serving(tmp_path, answer=done) as api:
            response = await api.http.post("/arctic/v1/jobs", json=body)
            assert (response.status_code, response.json()["error"]["kind"]) == (400, kind)
            assert not list(api.app.state.jobs)

    asyncio.run(main())


def test_more_jobs_than_may_run_are_refused_for_the_time_being(tmp_path):
    async def main():
        async with serving(tmp_path, answer=done, max_jobs=2) as api:
            await api.start("a", ANY)
            await api.start("b", ANY)
            full = await api.post_job("c", ANY)
            assert (full.status_code, full.json()["error"]["kind"], full.headers["retry-after"]) == (429, "QueueFullError", "1")
            await api.http.delete("/arctic/v1/jobs/a", params={"wait": 10})
            assert (await api.post_job("c", ANY)).status_code == 202

    asyncio.run(main())


def test_a_job_whose_client_falls_silent_is_stopped_and_calls_keep_it(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with serving(tmp_path, model_roots=(tiny_model,), observer=seen) as api:
            await api.start("a", {"model_name": tiny_model, **TRAINING}, lease_s=1.0)
            end = time.monotonic() + 2.0
            for sequence in range(1, 1000):  # calls renew it ...
                await api.call("a", generate(1), sequence)
                if time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
            for _ in range(15):  # ... and so do heartbeats
                response = await api.http.post("/arctic/v1/jobs/a/lease", json={"lease_s": 0.5})
                assert (response.status_code, response.json()["state"]) == (200, "ready")
                await asyncio.sleep(0.1)
            assert seen.expired == []
            begin = time.monotonic()
            await until(lambda: seen.expired == ["a"], 5)
            assert time.monotonic() - begin < 2.0
            view = await api.job("a", wait=20)
            assert view["state"] == "stopped"
            assert api.app.state.jobs.get("a").transport._service is None
            assert (await api.http.post("/arctic/v1/jobs/a/lease", json={"lease_s": 5})).status_code == 409

    asyncio.run(main())


def test_a_lease_that_expires_during_a_call_ends_the_call(tmp_path):
    async def answer(request):
        await asyncio.sleep(60)

    async def main():
        async with serving(tmp_path, answer=answer, orphan_s=60) as api:
            await api.start("a", ANY, lease_s=0.5)
            assert (await api.post("a", request(p.ZeroGrad(), 1), wait=0)).status_code == 202
            await until(lambda: api.app.state.jobs.get("a").state == "stopped", 10)
            await until(api.app.state.jobs.idle, 10)
            response = await api.result("a", 1)
            assert response.status_code == 409

    asyncio.run(main())


def test_shutdown_by_a_call_stops_the_job(tiny_model, tmp_path):
    async def main():
        async with serving(tmp_path, model_roots=(tiny_model,)) as api:
            await api.start("a", {"model_name": tiny_model, "training_gpus": 1})
            assert isinstance(await api.call("a", p.Shutdown(), 1), p.Done)
            assert (await api.job("a", wait=20))["state"] == "stopped"

    asyncio.run(main())


def test_while_the_server_drains_only_what_runs_goes_on(tmp_path):
    gate = asyncio.Event()

    async def answer(request):
        await gate.wait()
        return p.Done()

    async def main():
        async with serving(tmp_path, answer=answer) as api:
            await api.start("a", ANY)
            running = request(p.ZeroGrad(), 1)
            await api.post("a", running, wait=0)
            assert (await api.http.get("/readyz")).status_code == 200
            api.app.state.jobs.draining = True
            ready = await api.http.get("/readyz")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
            assert (await api.http.get("/healthz")).status_code == 200
            for response in (
                await api.post_job("b", ANY),
                await api.post("a", request(p.ZeroGrad(), 2)),
                await api.post("a", request(generate(2), 3), path="stream"),
            ):
                assert (response.status_code, response.json()["error"]["kind"]) == (503, "TransportError")
            assert (await api.post("a", running, wait=0)).status_code == 202  # attaches
            gate.set()
            assert (await api.result("a", 1, wait=10)).status_code == 200
            assert (await api.http.get("/arctic/v1/server")).json()["draining"] is True

    asyncio.run(main())


def test_the_end_of_the_server_is_the_end_of_its_jobs(tmp_path):
    made = []

    class Kept(MockTransport):
        async def open(self):
            await super().open()
            made.append(self)

    async def main():
        async with serving(tmp_path, connect=lambda config: Kept(done)) as api:
            await api.start("a", ANY)
            await api.start("b", ANY)
        assert [transport.was_shut_down for transport in made] == [True, True]

    asyncio.run(main())


def test_a_job_that_does_not_stop_is_reported(tmp_path):
    class Stuck(MockTransport):
        async def close(self, shutdown):
            raise ModelNotFoundError("cannot let go")

    async def main():
        async with serving(tmp_path, connect=lambda config: Stuck(done)) as api:
            await api.start("a", ANY)
            view = (await api.http.delete("/arctic/v1/jobs/a", params={"wait": 10})).json()
            assert (view["state"], view["error"]["message"]) == ("failed", "cannot let go")

    asyncio.run(main())
