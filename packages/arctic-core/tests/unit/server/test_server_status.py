"""Each error has the status of the table, wherever it comes from, and arrives as its own type."""

from __future__ import annotations

import asyncio

import pytest

from arctic_core import errors as e
from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.server.status import STATUS_OF, status_of

from .support import request, serving

CONTRACT = {
    "AuthenticationError": 401,
    "PermissionDeniedError": 403,
    "JobNotFoundError": 404,
    "ModelNotFoundError": 404,
    "DataError": 400,
    "ConfigError": 400,
    "WireError": 400,
    "ProtocolError": 400,
    "RewardError": 400,
    "PayloadTooLargeError": 413,
    "QueueFullError": 429,
    "InvalidStateError": 409,
    "WeightSyncError": 409,
    "CheckpointError": 409,
    "NonFiniteError": 409,
    "UnsupportedOperation": 501,
    "UnsupportedModelError": 501,
    "UnsupportedVersionError": 501,
    "MissingExtraError": 501,
    "PluginError": 501,
    "EngineStartError": 502,
    "EngineDiedError": 502,
    "PlacementError": 503,
    "TransportError": 503,
    "TransportClosedError": 503,
    "DeadlineExceeded": 504,
    "ArcticError": 500,
    "EngineError": 500,
    "ModelError": 500,
}


def test_every_error_has_the_status_it_was_promised():
    assert {name: status_of(name) for name in e.error_types() if e.error_types()[name].__module__ == e.__name__} == CONTRACT
    assert set(STATUS_OF.values()) <= set(CONTRACT.values())
    assert status_of("AnErrorOfANewerVersion") == 500


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_an_error_of_the_service_arrives_in_its_frame_with_its_status(tmp_path, name):
    error = e.error_types()[name]("what", where="where", remedy="do this")

    async def main():
        async with serving(tmp_path, answer=lambda request: error) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            response = await api.post("a", request(p.ZeroGrad(), 1))
            assert response.status_code == CONTRACT[name]
            reply = wire.decode(response.content, p.Reply)
            assert reply.sequence == 1
            with pytest.raises(type(error), match="what") as caught:
                reply.unwrap()
            assert (type(caught.value), caught.value.remedy) == (type(error), "do this")
            assert ("retry-after" in response.headers) == (CONTRACT[name] in (429, 503))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["TransportError", "EngineError", "PlacementError"])
def test_an_error_of_the_transport_becomes_a_reply_too(tmp_path, name):
    def answer(request):
        raise e.error_types()[name]("the wire is cut")

    async def main():
        async with serving(tmp_path, answer=answer) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            response = await api.post("a", request(p.ZeroGrad(), 1))
            assert response.status_code == CONTRACT[name]
            assert wire.decode(response.content, p.Reply).body.kind == name
            assert (await api.job("a"))["state"] == "ready"

    asyncio.run(main())


def test_a_service_that_is_gone_takes_its_job_with_it(tmp_path):
    def answer(request):
        raise e.EngineDiedError("the actor is gone", remedy="start a new job")

    async def main():
        async with serving(tmp_path, answer=answer) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            assert (await api.post("a", request(p.ZeroGrad(), 1))).status_code == 502
            view = await api.job("a", wait=10)
            assert (view["state"], view["error"]["kind"]) == ("failed", "EngineDiedError")
            later = await api.post("a", request(p.ZeroGrad(), 2))
            assert (later.status_code, later.json()["error"]["kind"]) == (409, "InvalidStateError")
            assert "the actor is gone" in later.json()["error"]["message"]

    asyncio.run(main())


def test_a_bug_is_answered_without_its_details_and_the_server_goes_on(tmp_path, caplog):
    def answer(request):
        raise RuntimeError("internal detail")

    async def main():
        async with serving(tmp_path, answer=answer) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            assert (await api.post("a", request(p.ZeroGrad(), 1))).status_code == 500
            api.app.state.jobs.visible = None  # a bug in a route
            response = await api.http.get("/arctic/v1/jobs", headers={"Arctic-Request-Id": "abc-1"})
            assert response.status_code == 500
            assert response.json()["error"]["request_id"] == "abc-1" == response.headers["arctic-request-id"]
            assert "NoneType" not in response.text
            assert (await api.http.get("/healthz")).status_code == 200

    asyncio.run(main())
    assert "internal detail" in caplog.text


def test_what_the_framework_refuses_looks_like_our_errors_and_422_never_appears(tmp_path):
    async def main():
        async with serving(tmp_path, answer=lambda request: p.Done()) as api:
            for method, path, status, kind in (
                ("GET", "/nothing", 404, "ArcticError"),
                ("PUT", "/arctic/v1/jobs", 405, "ArcticError"),
                ("GET", "/arctic/v1/jobs/a?wait=soon", 400, "DataError"),
                ("GET", "/arctic/v1/jobs/a?wait=31", 400, "DataError"),
                ("GET", "/arctic/v1/jobs/a?wait=nan", 400, "DataError"),
                ("GET", "/arctic/v1/jobs/a?wait=-1", 400, "DataError"),
                ("GET", "/arctic/v1/jobs/a/results/s/one", 400, "DataError"),
                ("POST", "/arctic/v1/jobs", 400, "WireError"),
            ):
                response = await api.http.request(method, path)
                error = response.json()["error"]
                assert (response.status_code, error["kind"]) == (status, kind), response.text
                assert error["request_id"] == response.headers["arctic-request-id"]
            schema = (await api.http.get("/openapi.json")).json()
            assert "422" not in str(schema["paths"])
            assert "HTTPValidationError" not in schema["components"]["schemas"]
            call = schema["paths"]["/arctic/v1/jobs/{job}/call"]["post"]
            assert "application/vnd.arctic.frame" in call["requestBody"]["content"]

    asyncio.run(main())


@pytest.mark.parametrize("given", ["short", "a.b_c-1", "bad id", "x" * 65, "a\tb", ""])
def test_a_request_id_is_echoed_where_it_is_harmless_in_a_log(tmp_path, given):
    async def main():
        async with serving(tmp_path, answer=lambda request: p.Done()) as api:
            response = await api.http.get("/healthz", headers={"Arctic-Request-Id": given})
            echoed = response.headers["arctic-request-id"]
            assert (echoed == given) == (given in ("short", "a.b_c-1"))
            assert echoed.isprintable()
            assert 1 <= len(echoed) <= 64

    asyncio.run(main())
