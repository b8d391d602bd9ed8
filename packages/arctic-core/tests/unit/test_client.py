"""The client's core, seen through both skins: arguments, keys, retries, deadlines, streams, closing."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from arctic_core import protocol as p
from arctic_core.client import ArcticRLClient, AsyncArcticRLClient, create_arctic_rl_client, create_async_arctic_rl_client
from arctic_core.client import core as client_core
from arctic_core.config import ArcticRLClientConfig, ConfigModel
from arctic_core.config.losses import GRPOLossConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import (
    ArcticError,
    DataError,
    DeadlineExceeded,
    EngineDiedError,
    NonFiniteError,
    ProtocolError,
    TransportClosedError,
    TransportError,
    UnsupportedOperation,
)
from arctic_core.transports.base import Transport
from arctic_core.transports.mock import MockTransport

CONFIG = ArcticRLClientConfig(model_name="m", training_gpus=1)
SAMPLES = [
    Sample(token_ids=[1, 2, 3], prompt_length=1, advantages=[1.0, -1.0]),
    Sample(token_ids=[4], prompt_length=1, advantages=[]),
]
TOPK = [
    SAMPLES[0].replace(topk_ids=[[1, 2, 3], [4, 5, 6]]),
    SAMPLES[1].replace(topk_ids=np.zeros((0, 3), np.int32)),
]
STEPPED = p.Stepped(grad_norm=1.0, lr=0.1, step=1, policy_version=1)


class Odd(ConfigModel):
    """Options of a loss that do not fit into a message."""

    name: str = "odd"
    weights: tuple[float, ...]


def completion(token: int = 1) -> p.Completion:
    return p.Completion(
        token_ids=np.array([token], np.int32),
        logprobs=np.array([-1.0], np.float32),
        text=str(token),
        finish_reason="length",
        policy_version=3,
    )


def answer(request: p.Request) -> p.Result:
    """A plausible result for every operation."""
    operation = request.operation
    if isinstance(operation, p.Generate):
        rows = [[completion(10 * i + j) for j in range(operation.n)] for i in range(len(operation.prompts))]
        return p.Generated(completions=tuple(tuple(row) for row in rows))
    results: dict[type, p.Result] = {
        p.Forward: p.Scores(logprobs=np.zeros(2, np.float32), entropy=None),
        p.ForwardBackward: p.Gradients(metrics={"loss": p.Metric(sum=1.0, count=2.0)}),
        p.Step: STEPPED,
        p.SyncWeights: p.SyncReport(version=1, tensors=1, bytes=4, seconds=0.1, carrier="file", verified=()),
        p.SaveCheckpoint: p.CheckpointRef(path="/x/step-1", step=1, policy_version=1),
        p.LoadCheckpoint: p.CheckpointRef(path="/x/step-1", step=1, policy_version=1),
        p.ExportHF: p.ExportRef(path="/x", tensors=1, bytes=4),
        p.GetInfo: p.Info(
            protocol_version=1,
            job="j",
            model="m",
            engines=(),
            placement=(),
            packages={},
            capabilities=(),
            policy_version=0,
            step=0,
        ),
    }
    return results.get(type(operation), p.Done())


@pytest.fixture
def mock() -> MockTransport:
    return MockTransport(answer)


@pytest.fixture
def client(mock: MockTransport):
    with create_arctic_rl_client(CONFIG, transport=mock) as client:
        yield client


# --- twins ----------------------------------------------------------------------------------------------------------------


def surface(cls: type) -> dict[str, Any]:
    return {name: item for name, item in vars(cls).items() if not name.startswith("_")}


def test_the_two_clients_are_twins() -> None:
    ours, theirs = surface(ArcticRLClient), surface(AsyncArcticRLClient)
    assert list(ours) == list(theirs)
    for name, item in ours.items():
        if isinstance(item, property):
            assert isinstance(theirs[name], property)
            continue
        one, other = inspect.signature(item), inspect.signature(theirs[name])
        assert one.parameters == other.parameters, name
        assert one.return_annotation == str(other.return_annotation).removeprefix("Async"), name
        assert inspect.iscoroutinefunction(theirs[name]) == (name not in ("generate_stream", "reconnect_config")), name


def test_the_two_factories_are_twins() -> None:
    one, other = inspect.signature(create_arctic_rl_client), inspect.signature(create_async_arctic_rl_client)
    assert one.parameters == other.parameters
    assert f"Async{one.return_annotation}" == other.return_annotation


# --- every operation ------------------------------------------------------------------------------------------------------

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    ("info", (), {}, {}),
    (
        "forward",
        (SAMPLES,),
        {"model": "reference", "entropy": True, "temperature": 2},
        {"model": "reference", "temperature": 2.0},
    ),
    ("forward", (SAMPLES,), {"topk": np.int64(3)}, {"topk": 3, "given_topk": False}),
    ("forward", (TOPK,), {"given_topk": True}, {"topk": 0, "given_topk": True}),
    ("forward", ([],), {"given_topk": True}, {"given_topk": True}),
    ("forward_backward", (SAMPLES, "grpo"), {}, {"temperature": None}),
    ("forward_backward", (Batch.from_samples(SAMPLES), p.NamedLoss(name="sft")), {"temperature": 0.5}, {"temperature": 0.5}),
    ("backward", (SAMPLES, [1, 2]), {}, {"grad_entropy": None}),
    ("backward", (SAMPLES, [1, 2], np.ones(2)), {}, {"temperature": None}),
    ("backward", (TOPK, [1, 2], np.ones(2)), {"grad_topk_logprobs": [[1, 2, 3]] * 2}, {"temperature": None}),
    ("step", (), {"lr": 1, "max_grad_norm": np.float32(0.5)}, {"lr": 1.0, "max_grad_norm": 0.5}),
    ("zero_grad", (), {}, {}),
    ("sync_weights", (), {"probe": [[1, 2]], "force": True}, {"force": True}),
    ("sleep", ("sampler",), {"level": 2}, {"engine": "sampler", "level": 2}),
    ("wake", ("sampler",), {}, {"engine": "sampler"}),
    ("reset_prefix_cache", (), {}, {}),
    ("pause", (), {}, {"mode": "drain"}),
    ("resume", (), {}, {}),
    ("abort", (["a"],), {}, {"request_ids": ("a",)}),
    ("save_checkpoint", ("/x",), {"keep_last": 2, "extra": {"a": "b"}}, {"keep_last": 2, "extra": {"a": "b"}}),
    ("load_checkpoint", ("/x",), {"restore": ["weights"]}, {"restore": ("weights",)}),
    ("load_checkpoint", ("/x",), {}, {"restore": p.RESTORE_ALL}),
    ("export_hf", ("/x",), {}, {"path": "/x"}),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "fields"), CALLS, ids=[f"{i}-{call[0]}" for i, call in enumerate(CALLS)])
def test_both_clients_send_the_same_operation(name: str, args: Any, kwargs: Any, fields: dict[str, Any]) -> None:
    async def asynchronous() -> tuple[Any, p.Operation]:
        transport = MockTransport(answer)
        async with await create_async_arctic_rl_client(CONFIG, transport=transport) as client:
            return await getattr(client, name)(*args, **kwargs), transport.operations[0]

    transport = MockTransport(answer)
    with create_arctic_rl_client(CONFIG, transport=transport) as client:
        result = getattr(client, name)(*args, **kwargs)
    other, operation = asyncio.run(asynchronous())
    assert type(result) is type(other)
    assert repr(transport.operations[0]) == repr(operation)
    assert operation.op() == name
    for field, value in fields.items():
        assert getattr(operation, field) == value
    expected = answer(transport.requests[0])
    assert repr(result) == ("None" if isinstance(expected, p.Done) else repr(expected))


def test_gradients_arrive_as_float32_in_order(client: ArcticRLClient, mock: MockTransport) -> None:
    client.backward(SAMPLES, np.array([0.5, -0.25]), [True, False])
    operation = mock.operations[0]
    assert isinstance(operation, p.Backward)
    assert operation.grad_logprobs.dtype == operation.grad_entropy.dtype == np.float32
    assert (operation.grad_logprobs.tolist(), operation.grad_entropy.tolist()) == ([0.5, -0.25], [1.0, 0.0])


def test_a_loss_is_given_whole_by_name_or_by_its_options(client: ArcticRLClient, mock: MockTransport) -> None:
    config = GRPOLossConfig(clip_high=0.28, kl_coef=0.5)
    whole = p.NamedLoss(name="sft", normalization="sequence")
    for loss in ("sapo", whole, config):
        client.forward_backward(SAMPLES, loss)
    by_name, given, by_options = (operation.loss for operation in mock.operations)  # type: ignore[attr-defined]
    assert (by_name.name, by_name.options, by_name.normalization) == ("sapo", {}, None)
    assert (given.name, given.normalization) == ("sft", "sequence")
    assert (by_options.name, by_options.normalization) == ("grpo", None)
    assert GRPOLossConfig.parse(dict(by_options.options)) == config
    assert "name" not in by_options.options


def test_generate_returns_lists_in_the_callers_order(client: ArcticRLClient, mock: MockTransport) -> None:
    rows = client.generate(
        [[1], np.array([2, 3])], p.SamplingParams(max_tokens=1), n=2, group=("a", np.int64(4)), request_id="mine"
    )
    assert [[c.text for c in row] for row in rows] == [["0", "1"], ["10", "11"]]
    operation = mock.operations[0]
    assert isinstance(operation, p.Generate)
    assert [prompt.tolist() for prompt in operation.prompts] == [[1], [2, 3]]
    assert all(prompt.dtype == np.int32 for prompt in operation.prompts)
    assert (operation.groups, operation.request_id, operation.n) == (("a", 4), "mine", 2)
    client.generate([])
    client.generate([])
    assert mock.operations[1].request_id != mock.operations[2].request_id


BAD_CALLS: list[tuple[Callable[[ArcticRLClient], Any], str, str]] = [
    (lambda c: c.generate("text"), "generate.prompts", "expected a sequence"),
    (lambda c: c.generate([1, 2]), "prompt 0", "one dimension"),
    (lambda c: c.generate([[1], []]), "prompt 1", "no tokens"),
    (lambda c: c.generate([[1], [-1]]), "prompt 1", "negative"),
    (lambda c: c.generate([[0.5]]), "prompt 0", "float64"),
    (lambda c: c.generate([[1]], n=0), "generate.n", "below 1"),
    (lambda c: c.generate([[1]], n=1.0), "generate.n", "expected an integer"),
    (lambda c: c.generate([[1]], group=[1, 2]), "generate.group", "2 group ids for 1"),
    (lambda c: c.generate([[1]], group="a"), "generate.group", "expected a sequence"),
    (lambda c: c.generate([[1]], {"n": 1}), "generate.sampling", "expected a SamplingParams"),
    (lambda c: c.generate([[1]], request_id="a/b"), "generate.request_id", "slash"),
    (lambda c: c.generate_stream([[]]), "prompt 0", "no tokens"),
    (lambda c: c.forward(3), "forward.batch", "expected a sequence"),
    (lambda c: c.forward([SAMPLES[0], "x"]), "forward.batch[1]", "expected a Sample"),
    (lambda c: c.forward(SAMPLES, model="critic"), "forward.model", "'policy', 'reference'"),
    (lambda c: c.forward(SAMPLES, temperature=0), "forward.temperature", "positive"),
    (lambda c: c.forward(SAMPLES, topk=-1), "forward.topk", "below 0"),
    (lambda c: c.forward(SAMPLES, topk=2.0), "forward.topk", "expected an integer"),
    (lambda c: c.forward(TOPK, topk=2, given_topk=True), "forward.topk", "different tokens"),
    (lambda c: c.forward(SAMPLES, given_topk=True), "forward.given_topk", "no topk_ids"),
    (lambda c: c.forward_backward(SAMPLES, 3), "forward_backward.loss", "expected a NamedLoss"),
    (lambda c: c.forward_backward(SAMPLES, CONFIG), "forward_backward.loss", "expected a NamedLoss"),
    (lambda c: c.forward_backward(SAMPLES, Odd(weights=(1.0, 2.0))), "forward_backward.loss", "'weights' is a tuple"),
    (lambda c: c.forward_backward(SAMPLES, "grpo", temperature=-1), "forward_backward.temperature", "positive"),
    (lambda c: c.backward(SAMPLES, [1.0]), "backward.grad_logprobs", r"\(1,\), the batch has 2 response tokens"),
    (lambda c: c.backward(SAMPLES, [[1.0, 2.0]]), "backward.grad_logprobs", "response tokens"),
    (lambda c: c.backward(SAMPLES, ["a", "b"]), "backward.grad_logprobs", "expected numbers"),
    (lambda c: c.backward(SAMPLES, [1, 2], [1, 2, 3]), "backward.grad_entropy", "2 response tokens"),
    (lambda c: c.backward(SAMPLES, [1, 2], grad_topk_logprobs=[[1], [2]]), "backward.grad_topk_logprobs", "no topk_ids"),
    (
        lambda c: c.backward(TOPK, [1, 2], grad_topk_logprobs=[[1, 2]] * 2),
        "backward.grad_topk_logprobs",
        r"\(2, 2\), the batch's topk_ids have \(2, 3\)",
    ),
    (
        lambda c: c.backward(TOPK, [1, 2], grad_topk_logprobs=[["a"] * 3] * 2),
        "backward.grad_topk_logprobs",
        "expected numbers",
    ),
    (lambda c: c.step(lr=-1), "step.lr", "non-negative"),
    (lambda c: c.step(lr=float("nan")), "step.lr", "non-negative"),
    (lambda c: c.step(max_grad_norm="1"), "step.max_grad_norm", "expected a number"),
    (lambda c: c.sync_weights(probe=[[1]]), "sync_weights.probe", "at least two"),
    (lambda c: c.sleep("critic"), "sleep.engine", "'trainer', 'sampler', 'log_prob'"),
    (lambda c: c.sleep("sampler", level=3), "sleep.level", "neither 1 nor 2"),
    (lambda c: c.wake("all"), "wake.engine", "'all'"),
    (lambda c: c.pause("now"), "pause.mode", "'drain', 'keep', 'abort'"),
    (lambda c: c.abort("id"), "abort.request_ids", "expected a sequence"),
    (lambda c: c.abort([1]), "abort.request_ids", "expected a str"),
    (lambda c: c.save_checkpoint("/x", keep_last=0), "save_checkpoint.keep_last", "below 1"),
    (lambda c: c.save_checkpoint("/x", extra={"a": 1}), "save_checkpoint.extra['a']", "expected a str"),
    (lambda c: c.load_checkpoint("/x", restore=["soul"]), "load_checkpoint.restore", "'soul'"),
    (lambda c: c.load_checkpoint("/x", restore="weights"), "load_checkpoint.restore", "expected a sequence"),
    (lambda c: c.load_checkpoint("/x", restore=()), "load_checkpoint.restore", "nothing to restore"),
]


@pytest.mark.parametrize(("call", "where", "message"), BAD_CALLS)
def test_what_cannot_be_right_is_not_sent(
    client: ArcticRLClient, mock: MockTransport, call: Callable[[ArcticRLClient], Any], where: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        call(client)
    assert caught.value.where == where
    assert mock.requests == []


# --- errors, keys, retries, deadlines ---------------------------------------------------------------------------------------


def test_the_services_error_arrives_as_itself() -> None:
    transport = MockTransport(lambda request: NonFiniteError("NaN", where="trainer[0]", remedy="lower the rate"))
    with create_arctic_rl_client(CONFIG, transport=transport) as client, pytest.raises(NonFiniteError) as caught:
        client.step()
    assert (caught.value.message, caught.value.where, caught.value.remedy) == ("NaN", "trainer[0]", "lower the rate")


def test_an_answer_of_another_type_or_to_another_request_is_refused() -> None:
    for wrong, message in (
        (p.Done(), "expected Stepped, got Done"),
        (p.Reply(sequence=99, body=STEPPED), "got the answer to 99"),
    ):
        transport = MockTransport(lambda request, wrong=wrong: wrong)
        with create_arctic_rl_client(CONFIG, transport=transport) as client, pytest.raises(ProtocolError, match=message):
            client.step()


def test_keys_are_unique_over_threads_and_sessions() -> None:
    def work(client: ArcticRLClient) -> None:
        for _ in range(25):
            client.zero_grad()

    keys = []
    for _ in range(2):
        transport = MockTransport(answer)
        with create_arctic_rl_client(CONFIG, transport=transport) as client:
            threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        keys += [(request.session, request.sequence) for request in transport.requests]
    assert len(keys) == len(set(keys)) == 400
    assert len({session for session, _ in keys}) == 2


class Flaky:
    """Fails the first ``failures`` times with an error of the transport."""

    def __init__(self, failures: int, error: ArcticError) -> None:
        self.left, self.error = failures, error

    def __call__(self, request: p.Request) -> p.Result:
        if self.left:
            self.left -= 1
            raise self.error
        return answer(request)


@pytest.mark.parametrize("call", ["info", "step"])
def test_a_request_is_sent_once_more_with_its_own_key(call: str) -> None:
    transport = MockTransport(Flaky(1, TransportError("lost")))
    with create_arctic_rl_client(CONFIG, transport=transport) as client:
        getattr(client, call)()
    first, second = transport.requests
    assert (first.session, first.sequence) == (second.session, second.sequence)
    assert type(first.operation) is type(second.operation)


@pytest.mark.parametrize(
    ("failures", "error", "sent"),
    [(2, TransportError("lost"), 2), (1, TransportClosedError("closed"), 1), (1, EngineDiedError("gone"), 1)],
)
def test_no_other_failure_is_retried(failures: int, error: ArcticError, sent: int) -> None:
    transport = MockTransport(Flaky(failures, error))
    with create_arctic_rl_client(CONFIG, transport=transport) as client, pytest.raises(type(error)):
        client.step()
    assert len(transport.requests) == sent


def config_with(request_s: float) -> ArcticRLClientConfig:
    return ArcticRLClientConfig(model_name="m", training_gpus=1, deadlines={"request": request_s})


class Silence:
    """Never answers; knows when it was told to stop waiting."""

    def __init__(self) -> None:
        self.entered, self.cancelled = threading.Event(), threading.Event()

    async def __call__(self, request: p.Request) -> p.Result:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


def test_a_silent_service_runs_into_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_core, "GRACE_S", 0.05)
    silence = Silence()
    transport = MockTransport(silence)
    with create_arctic_rl_client(config_with(0.1), transport=transport) as client:
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0.1 s") as caught:
            client.step()
        assert caught.value.where == "step"
        assert silence.cancelled.wait(5)
        with pytest.raises(DeadlineExceeded):
            list(client.generate_stream([[1]]))
    assert transport.requests[0].deadline_s == 0.1


def test_cancelling_a_coroutine_reaches_the_transport() -> None:
    async def main() -> None:
        silence = Silence()
        async with await create_async_arctic_rl_client(CONFIG, transport=MockTransport(silence)) as client:
            task = asyncio.create_task(client.generate([[1]]))
            while not silence.entered.is_set():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert silence.cancelled.is_set()

    asyncio.run(main())


# --- streams --------------------------------------------------------------------------------------------------------------


class Scripted(Transport):
    """Streams what it is told to; an exception in the script is raised, ``...`` waits for ever."""

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.ended = threading.Event()

    async def open(self) -> None: ...

    async def send(self, request: p.Request) -> p.Reply:
        return p.Reply(sequence=request.sequence, body=answer(request))  # type: ignore[arg-type]

    async def stream(self, request: p.Request) -> AsyncIterator[p.Reply]:
        try:
            for item in self.script:
                if item is ...:
                    await asyncio.Event().wait()
                if isinstance(item, BaseException):
                    raise item
                yield p.Reply(sequence=request.sequence, body=item)
        finally:
            self.ended.set()

    async def close(self, shutdown: bool) -> None: ...

    def reconnect_config(self) -> ArcticRLClientConfig | None:
        return CONFIG


def ready(i: int) -> p.CompletionReady:
    return p.CompletionReady(prompt=i, index=0, completion=completion(i))


def drain(transport: Transport) -> tuple[list[int], ArcticError | None]:
    """What a synchronous and an asynchronous caller see of a stream; both must see the same."""

    async def asynchronous() -> tuple[list[int], ArcticError | None]:
        seen: list[int] = []
        async with await create_async_arctic_rl_client(CONFIG, transport=transport) as client:
            try:
                async for item in client.generate_stream([[1]]):
                    seen.append(item.prompt)  # noqa: PERF401 - keeps what came before an error
            except ArcticError as error:
                return seen, error
        return seen, None

    seen: list[int] = []
    error = None
    with create_arctic_rl_client(CONFIG, transport=transport) as client:
        try:
            for item in client.generate_stream([[1]]):
                seen.append(item.prompt)  # noqa: PERF401
        except ArcticError as caught:
            error = caught
    others, other = asyncio.run(asynchronous())
    assert (seen, str(error)) == (others, str(other))
    return seen, error


def test_a_stream_yields_items_as_they_come() -> None:
    assert drain(Scripted(ready(2), ready(0), p.Done())) == ([2, 0], None)
    assert drain(Scripted(p.Done())) == ([], None)


def test_a_stream_that_fails_gives_what_it_had() -> None:
    seen, error = drain(Scripted(ready(0), p.ErrorInfo.of(EngineDiedError("gone"))))
    assert (seen, type(error)) == ([0], EngineDiedError)
    seen, error = drain(Scripted(ready(0), TransportError("lost")))
    assert (seen, type(error)) == ([0], TransportError)


def test_a_stream_without_an_end_is_an_error() -> None:
    seen, error = drain(Scripted(ready(0)))
    assert (seen, type(error)) == ([0], TransportError)


def test_leaving_a_stream_early_ends_it_at_the_other_end() -> None:
    transport = Scripted(ready(0), ...)
    with create_arctic_rl_client(CONFIG, transport=transport) as client:
        stream = client.generate_stream([[1]])
        assert next(iter(stream)).prompt == 0
        assert not transport.ended.is_set()
        stream.close()  # type: ignore[attr-defined]
        assert transport.ended.wait(5)
        assert client.step().step == 1


def test_leaving_an_asynchronous_stream_early_ends_it_too() -> None:
    async def main() -> None:
        transport = Scripted(ready(0), ...)
        async with await create_async_arctic_rl_client(CONFIG, transport=transport) as client:
            stream = client.generate_stream([[1]])
            assert (await anext(stream)).prompt == 0
            await stream.aclose()  # type: ignore[attr-defined]
            assert transport.ended.is_set()

    asyncio.run(main())


def test_the_mock_streams_what_generate_would_return() -> None:
    with create_arctic_rl_client(CONFIG, transport=MockTransport(answer)) as client:
        items = list(client.generate_stream([[1], [2]], n=2))
    assert [(item.prompt, item.index, item.completion.text) for item in items] == [
        (0, 0, "0"),
        (0, 1, "1"),
        (1, 0, "10"),
        (1, 1, "11"),
    ]


def test_closing_the_client_ends_a_stream() -> None:
    async def main() -> None:
        transport = Scripted(ready(0), ...)
        client = await create_async_arctic_rl_client(CONFIG, transport=transport)
        stream = client.generate_stream([[1]])
        await anext(stream)
        await client.close()
        assert transport.ended.is_set()
        with pytest.raises(TransportClosedError):
            await anext(stream)

    asyncio.run(main())


# --- life -----------------------------------------------------------------------------------------------------------------


def test_a_closed_client_refuses_everything(mock: MockTransport) -> None:
    with create_arctic_rl_client(CONFIG, transport=mock) as client:
        assert mock.is_open
        assert not client.closed
    assert client.closed
    assert (mock.is_open, mock.was_shut_down) == (False, False)
    for call in (client.info, client.step, client.reconnect_config, lambda: list(client.generate_stream([[1]]))):
        with pytest.raises(TransportClosedError):
            call()
    client.close()
    client.shutdown()
    assert not mock.was_shut_down


def test_shutdown_is_told_to_the_transport(mock: MockTransport) -> None:
    client = create_arctic_rl_client(CONFIG, transport=mock)
    client.shutdown()
    client.close()
    assert mock.was_shut_down
    assert client.closed


def test_only_some_transports_can_be_reconnected_to(client: ArcticRLClient) -> None:
    with pytest.raises(UnsupportedOperation) as caught:
        client.reconnect_config()
    assert caught.value.where == "MockTransport"
    with create_arctic_rl_client(CONFIG, transport=Scripted()) as other:
        assert other.reconnect_config() is CONFIG


def test_a_handler_may_be_a_coroutine_and_must_return_a_result() -> None:
    async def handler(request: p.Request) -> p.Result:
        await asyncio.sleep(0)
        return STEPPED

    with create_arctic_rl_client(CONFIG, transport=MockTransport(handler)) as client:
        assert client.step().lr == 0.1
    transport = MockTransport(lambda request: 3)  # type: ignore[arg-type,return-value]
    with create_arctic_rl_client(CONFIG, transport=transport) as client, pytest.raises(ArcticError, match="returned 3"):
        client.step()


def test_an_assertion_in_a_handler_reaches_the_test() -> None:
    def handler(request: p.Request) -> p.Result:
        raise AssertionError("not this one")

    transport = MockTransport(handler)
    with create_arctic_rl_client(CONFIG, transport=transport) as client, pytest.raises(AssertionError, match="not this one"):
        client.step()
