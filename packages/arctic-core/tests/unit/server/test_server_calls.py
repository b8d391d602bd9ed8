"""Calls outlive connections: known by key, carried out once, cancelled when nobody wants them. Real engines throughout."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import httpx
import numpy as np
import pytest

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.errors import InvalidStateError
from arctic_core.server.body import FRAME_TYPE
from arctic_core.server.observe import Observer

from .support import TRAINING, batch, done, generate, listening, request, serving, until

LONG = 400  # tokens; about a second on one core
GRPO = p.NamedLoss(name="grpo")


class Seen(Observer):
    """Remembers what it is told."""

    def __init__(self):
        self.started, self.finished, self.jobs, self.expired = [], [], [], []

    def call_started(self, call):
        self.started.append((call.operation, call.sequence))

    def call_finished(self, call, *, error, seconds, reply_bytes):
        self.finished.append((call.operation, call.sequence, error))
        assert seconds >= 0

    def job_changed(self, job):
        self.jobs.append(job.state)

    def lease_expired(self, job):
        self.expired.append(job.job)


@contextlib.asynccontextmanager
async def job(tiny_model, tmp_path, **settings):
    """A server with one job of real engines, named ``a``."""
    async with serving(tmp_path, model_roots=(tiny_model,), **settings) as api:
        view = await api.start("a", {"model_name": tiny_model, **TRAINING})
        assert view["state"] == "ready", view
        yield api


def reply(response):
    assert response.headers["content-type"] == FRAME_TYPE, response.text
    return wire.decode(response.content, p.Reply)


def test_a_call_that_ends_in_time_is_answered_by_its_frame(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with job(tiny_model, tmp_path, observer=seen) as api:
            response = await api.post("a", request(generate(4, n=2), 7))
            assert response.status_code == 200
            assert len(reply(response).unwrap().completions[0]) == 2
            view = await api.job("a")
            assert (view["operations_in_flight"], view["last_operation"]) == (0, "generate")
            assert (seen.started, seen.finished) == ([("generate", 7)], [("generate", 7, "")])
        assert seen.jobs == ["starting", "ready", "stopping", "stopped"]

    asyncio.run(main())


def test_a_long_call_is_asked_after_and_answers_as_a_short_one(tiny_model, tmp_path):
    async def main():
        async with job(tiny_model, tmp_path) as api:
            posted = request(generate(LONG, seed=3), 1)
            response = await api.post("a", posted, wait=0)
            assert (response.status_code, response.json()) == (202, {"session": "s", "sequence": 1})
            assert (await api.result("a", 1)).status_code == 202
            assert (await api.job("a"))["operations_in_flight"] == 1
            late = reply(await api.result("a", 1, wait=30)).unwrap()
            again = reply(await api.result("a", 1)).unwrap()
            direct = reply(await api.post("a", request(generate(LONG, seed=3), 2))).unwrap()
            for other in (again, direct):
                assert np.array_equal(other.completions[0][0].token_ids, late.completions[0][0].token_ids)
            assert (await api.forget("a", 1)).status_code == 204
            unknown = await api.result("a", 1)
            assert (unknown.status_code, unknown.json()["error"]["kind"]) == (404, "JobNotFoundError")
            assert unknown.json()["error"]["message"] == "unknown result"
            assert (await api.forget("a", 1)).status_code == 404

    asyncio.run(main())


def test_a_repeated_post_attaches_to_the_running_call_and_to_the_finished_one(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with job(tiny_model, tmp_path, observer=seen) as api:
            posted = request(generate(LONG), 1)
            responses = await asyncio.gather(*(api.post("a", posted) for _ in range(4)))
            responses.append(await api.post("a", posted))
            assert {response.status_code for response in responses} == {200}
            assert len({response.content for response in responses}) == 1
            assert seen.started == [("generate", 1)]

    asyncio.run(main())


def test_the_same_key_with_other_bytes_is_refused_and_runs_nothing(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with job(tiny_model, tmp_path, observer=seen) as api:
            large = np.zeros(200_000, np.float32)  # its digest is made in a thread
            frames = [
                p.Backward(batch=batch(), grad_logprobs=large),
                p.Backward(batch=batch(), grad_logprobs=np.append(large[1:], np.float32(1))),
            ]
            first = await api.post("a", request(frames[0], 1))
            other = await api.post("a", request(frames[1], 1))
            assert (other.status_code, other.json()["error"]["kind"]) == (409, "InvalidStateError")
            assert (await api.post("a", request(frames[0], 1))).content == first.content
            assert (await api.post("a", request(frames[1], 1, session="t"))).status_code == first.status_code
            assert len(seen.started) == 2
            assert api.app.state.budget.used == 0

    asyncio.run(main())


def test_deleting_a_running_generation_cancels_it_in_the_engine(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with job(tiny_model, tmp_path, observer=seen) as api:
            posting = asyncio.create_task(api.post("a", request(generate(LONG, n=32), 1)))
            await until(lambda: bool(seen.started))
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            assert (await api.forget("a", 1)).status_code == 204
            with pytest.raises(InvalidStateError, match="cancelled"):
                reply(await posting).unwrap()
            assert (await api.call("a", generate(1), 2)).completions
            assert time.monotonic() - begin < 3.0  # of a generation that takes far longer
            assert seen.finished[0] == ("generate", 1, "Cancelled")

    asyncio.run(main())


def test_a_generation_that_nobody_waits_for_is_cancelled_and_a_write_is_not(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with job(tiny_model, tmp_path, observer=seen, orphan_s=0.3) as api:
            # Polling keeps it alive well past the limit ...
            await api.post("a", request(generate(LONG), 1), wait=0)
            assert (await api.call("a", generate(LONG), 1)).completions
            # ... and without it ends.
            assert (await api.post("a", request(generate(LONG, n=48), 2), wait=0)).status_code == 202
            await until(lambda: ("generate", 2, "Cancelled") in seen.finished)
            assert (await api.result("a", 2)).status_code == 404
            posted = request(p.ForwardBackward(batch=batch(64, 100), loss=GRPO), 3)
            assert (await api.post("a", posted, wait=0)).status_code == 202
            assert (await api.forget("a", 3)).status_code == 202  # a write is not cancelled
            await until(lambda: any(sequence == 3 for _, sequence, _ in seen.finished), 60)
            assert seen.finished[-1] == ("forward_backward", 3, "")
            assert "loss" in (await api.call("a", posted.operation, 3)).metrics

    asyncio.run(main())


def test_a_write_survives_its_connection_and_is_applied_once(tiny_model, tmp_path):
    """Cut right after the request and repeated twice: the parameters are those of an undisturbed run, bit for bit."""
    gradient = p.ForwardBackward(batch=batch(16, 60), loss=GRPO)

    async def undisturbed():
        async with job(tiny_model, tmp_path) as api:
            metrics = (await api.call("a", gradient, 1)).metrics
            stepped = await api.call("a", p.Step(), 2)
            return metrics["loss"], stepped, (await api.call("a", p.Forward(batch=batch()), 3)).logprobs

    async def disturbed():
        seen = Seen()
        async with listening(tmp_path, model_roots=(tiny_model,), observer=seen) as (api, port):
            await api.start("a", {"model_name": tiny_model, **TRAINING})
            for sequence, operation in ((1, gradient), (2, p.Step())):
                frame = wire.encode(request(operation, sequence))
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    sock.sendall(head("a", len(frame)) + frame)
                    await until(lambda sequence=sequence: any(number == sequence for _, number in seen.started))
                answers = await asyncio.gather(*(api.post("a", frame) for _ in range(2)))
                assert answers[0].content == answers[1].content
                result = reply(answers[0]).unwrap()
                if sequence == 1:
                    metrics = result.metrics
                assert (await api.forget("a", sequence)).status_code == 204
                assert reply(await api.post("a", frame)).unwrap() is not None  # forgotten here, known to the ledger
            return metrics["loss"], result, (await api.call("a", p.Forward(batch=batch()), 3)).logprobs

    loss, stepped, logprobs = asyncio.run(undisturbed())
    loss_again, stepped_again, logprobs_again = asyncio.run(disturbed())
    assert (loss.sum, loss.count) == (loss_again.sum, loss_again.count)
    assert (stepped.grad_norm, stepped.step) == (stepped_again.grad_norm, stepped_again.step)
    assert np.array_equal(logprobs, logprobs_again)


def head(name, length):
    return (
        f"POST /arctic/v1/jobs/{name}/call HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FRAME_TYPE}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_a_stream_brings_each_completion_and_ends_with_done(tiny_model, tmp_path):
    async def main():
        async with listening(tmp_path, model_roots=(tiny_model,)) as (api, _):
            await api.start("a", {"model_name": tiny_model, **TRAINING})
            response = await api.post("a", request(generate(6, n=5), 1), path="stream")
            assert response.status_code == 200
            replies = frames(response.content)
            assert isinstance(replies[-1].body, p.Done)
            assert sorted(reply.body.index for reply in replies[:-1]) == list(range(5))
            wrong = await api.post("a", request(p.GetInfo(), 2), path="stream")
            assert (wrong.status_code, wrong.json()["error"]["kind"]) == (501, "UnsupportedOperation")
            broken = await api.post("a", request(generate(6, n=0), 3), path="stream")
            assert frames(broken.content)[-1].body.kind == "DataError"
            await until(lambda: api.app.state.budget.used == 0)

    asyncio.run(main())


def frames(content):
    found = []
    while content:
        length = int.from_bytes(content[:8], "little")
        found.append(wire.decode(content[8 : 8 + length], p.Reply))
        content = content[8 + length :]
    return found


def test_a_reader_that_leaves_cancels_its_stream(tiny_model, tmp_path):
    async def main():
        seen = Seen()
        async with listening(tmp_path, model_roots=(tiny_model,), observer=seen) as (api, _):
            await api.start("a", {"model_name": tiny_model, **TRAINING})
            frame = wire.encode(request(generate(LONG, n=48), 1))
            sending = api.http.stream("POST", "/arctic/v1/jobs/a/stream", content=frame, headers={"content-type": FRAME_TYPE})
            async with sending:
                await until(lambda: bool(seen.started))
            await until(lambda: bool(seen.finished), 5)
            assert seen.finished[0][2] == "Cancelled"
            assert (await api.call("a", generate(1), 2)).completions
            await until(lambda: api.app.state.budget.used == 0)

    asyncio.run(main())


def test_a_slow_reader_holds_its_stream_back(tmp_path):
    """The server does not take from the job what its reader does not take from it."""
    drawn = 0
    completion = p.Completion(
        token_ids=np.zeros(2**15, np.int32),
        logprobs=np.zeros(2**15, np.float32),
        text="",
        finish_reason="stop",
        policy_version=0,
    )

    async def endless(self, request):
        nonlocal drawn
        while drawn < 2000:
            drawn += 1
            yield p.Reply(sequence=request.sequence, body=p.CompletionReady(prompt=0, index=drawn, completion=completion))
        yield p.Reply(sequence=request.sequence, body=p.Done())

    from arctic_core.transports.mock import MockTransport

    class Endless(MockTransport):
        stream = endless

    async def main():
        async with listening(tmp_path, connect=lambda config: Endless(done)) as (api, port):
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            frame = wire.encode(request(generate(4), 1))
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
            writer.write(head("a", len(frame)).replace(b"/call", b"/stream") + frame)
            await until(lambda: drawn > 0)
            await asyncio.sleep(1.0)
            held = drawn
            assert held < 200  # of 2000 pieces of 256 KiB: what sockets hold, and no more
            while drawn < held + 100:
                assert await reader.read(2**20)
            writer.close()
            await until(api.app.state.jobs.idle)

    asyncio.run(main())


def test_results_are_dropped_by_age_and_by_size(tmp_path):
    async def main():
        answer = p.Scores(logprobs=np.zeros(25_000, np.float32), entropy=None)
        async with serving(tmp_path, answer=lambda request: answer, max_result_bytes=250_000, result_ttl_s=0.6) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            for sequence in range(4):
                assert (await api.post("a", request(p.Forward(batch=batch()), sequence))).status_code == 200
            statuses = [(await api.result("a", sequence)).status_code for sequence in range(4)]
            assert statuses == [404, 404, 200, 200]
            await asyncio.sleep(1.2)
            assert (await api.result("a", 3)).status_code == 404

    asyncio.run(main())


def test_a_read_that_failed_is_tried_again_and_a_write_is_not(tmp_path):
    from arctic_core.errors import QueueFullError

    answers = []

    def answer(request):
        answers.append(request.operation.op())
        return QueueFullError("full") if len(answers) < 3 else p.Done()

    async def main():
        async with serving(tmp_path, answer=answer) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            read, write = request(generate(2), 1), request(p.ZeroGrad(), 2)
            assert [(await api.post("a", write)).status_code for _ in range(2)] == [429, 429]
            assert [(await api.post("a", read)).status_code for _ in range(2)] == [429, 200]
            assert answers == ["zero_grad", "generate", "generate"]

    asyncio.run(main())


def test_more_calls_than_may_run_or_wait_are_refused_for_the_time_being(tmp_path):
    gate = asyncio.Event()

    async def answer(request):
        await gate.wait()
        return p.Done()

    async def main():
        async with serving(tmp_path, answer=answer, max_inflight_calls=2, max_waiting=1) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            for sequence in (1, 2):
                assert (await api.post("a", request(p.ZeroGrad(), sequence), wait=0)).status_code == 202
            third = await api.post("a", request(p.ZeroGrad(), 3), wait=0)
            assert (third.status_code, third.json()["error"]["kind"], third.headers["retry-after"]) == (
                429,
                "QueueFullError",
                "1",
            )
            waiting = asyncio.create_task(api.result("a", 1, wait=20))
            await until(lambda: api.app.state.jobs.waiting.used == 1)
            assert (await api.result("a", 2, wait=20)).status_code == 429
            assert (await api.result("a", 2)).status_code == 202
            gate.set()
            assert (await waiting).status_code == 200
            await until(api.app.state.jobs.idle)
            assert (await api.post("a", request(p.ZeroGrad(), 3))).status_code == 200

    asyncio.run(main())


def test_health_is_answered_in_milliseconds_while_engines_work(tiny_model, tmp_path):
    async def main():
        async with listening(tmp_path, model_roots=(tiny_model,)) as (api, port):
            await api.start("a", {"model_name": tiny_model, **TRAINING})
            working = asyncio.create_task(api.call("a", p.ForwardBackward(batch=batch(64, 100), loss=GRPO), 1))
            await until(lambda: not api.app.state.jobs.idle())
            slowest, count = 0.0, 0
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as other:
                while not working.done():
                    begin = time.monotonic()
                    assert (await other.get("/healthz")).status_code == 200
                    slowest, count = max(slowest, time.monotonic() - begin), count + 1
                    await asyncio.sleep(0.005)
            await working
            assert count > 5
            assert slowest < 0.5  # in ms where a core is free; the tests share two

    asyncio.run(main())
