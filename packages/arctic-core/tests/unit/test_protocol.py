"""Messages: every one crosses the wire, and nothing unknown is accepted."""

from __future__ import annotations

import json
import struct
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from arctic_core import protocol as p
from arctic_core.data import Batch, Sample
from arctic_core.errors import ArcticError, DataError, ProtocolError, WireError
from arctic_core.wire import decode, encode

BATCH = Batch.from_samples(
    [
        Sample(token_ids=[1, 2, 3], prompt_length=1, group="a", advantages=[0.5, np.nan], policy_version=3),
        Sample(token_ids=[4], prompt_length=1, group=2, advantages=[], policy_version=4),
    ]
)
COMPLETION = p.Completion(
    token_ids=np.array([1, 2], np.int32),
    logprobs=np.array([-0.5, -np.inf], np.float32),
    text="é\ud800",
    finish_reason="stop",
    policy_version=7,
)

TOPK = BATCH.replace(topk_ids=np.arange(3 * BATCH.num_response_tokens).reshape(-1, 3))

OPERATIONS: list[p.Operation] = [
    p.GetInfo(),
    p.Generate(
        prompts=(np.array([1], np.int32), np.array([2, 3], np.int32)),
        sampling=p.SamplingParams(max_tokens=3, temperature=0.0, stop=("x", "ü"), stop_token_ids=(4,), seed=5),
        n=2,
        groups=(1, "b"),
        request_id="r",
    ),
    p.Forward(batch=BATCH, model="reference", entropy=True, temperature=0.7),
    p.Forward(batch=BATCH, topk=5),
    p.Forward(batch=TOPK, given_topk=True),
    p.ForwardBackward(
        batch=BATCH,
        loss=p.NamedLoss(
            name="grpo", options={"a": 1, "b": 0.1, "c": True, "d": None, "e": "x"}, normalization="constant", constant=8.0
        ),
    ),
    p.Backward(batch=BATCH, grad_logprobs=np.ones(2, np.float32), grad_entropy=np.zeros(2, np.float32)),
    p.Backward(batch=TOPK, grad_logprobs=np.ones(2, np.float32), grad_topk_logprobs=np.ones((2, 3), np.float32)),
    p.Step(lr=1e-6, max_grad_norm=0.5),
    p.ZeroGrad(),
    p.SyncWeights(probe=(np.array([1, 2], np.int32),), force=True),
    p.Sleep(engine="sampler", level=2),
    p.Wake(engine="trainer"),
    p.ResetPrefixCache(),
    p.Pause(mode="keep"),
    p.Resume(),
    p.Abort(request_ids=("a", "b")),
    p.SaveCheckpoint(path="/x/ü", keep_last=2, extra={"a.b": "c", "$tensor": "d"}),
    p.LoadCheckpoint(path="/x", restore=("weights", "rng")),
    p.ExportHF(path="/y"),
    p.Shutdown(),
]

ENGINE = p.EngineInfo(
    name="sampler",
    implementation="vllm",
    ranks=2,
    device="cpu",
    dtype="float32",
    state="awake",
    policy_version=3,
    memory_bytes=2**40,
    capabilities=("generate",),
)
RESULTS: list[p.Result | p.ErrorInfo] = [
    p.Done(),
    p.Info(
        protocol_version=1,
        job="j",
        model="m",
        engines=(ENGINE,),
        placement=(p.Place(engine="sampler", rank=0, node="n", pid=1, device="cpu", share=0.5),),
        packages={"torch": "2.13.0+cpu"},
        capabilities=("generate",),
        policy_version=3,
        step=2,
    ),
    p.Generated(completions=((COMPLETION,), ())),
    p.CompletionReady(prompt=0, index=1, completion=COMPLETION),
    p.Scores(logprobs=np.array([-1.0, np.nan], np.float32), entropy=None),
    p.Scores(
        logprobs=np.zeros(2, np.float32),
        entropy=None,
        topk_ids=np.arange(6, dtype=np.int32).reshape(2, 3),
        topk_logprobs=np.full((2, 3), -np.inf, np.float32),
    ),
    p.Gradients(metrics={"loss/pg": p.Metric(sum=float("nan"), count=3.0)}),
    p.Stepped(grad_norm=float("inf"), lr=0.1, step=1, policy_version=1),
    p.SyncReport(version=1, tensors=2, bytes=3, seconds=0.1, carrier="file", verified=("names",), probe_max_abs_diff=1e-7),
    p.CheckpointRef(path="/x/step-1", step=1, policy_version=1, extra={"a": "b"}),
    p.ExportRef(path="/x", tensors=3, bytes=12),
    p.ErrorInfo(kind="DataError", message="m", where="w", remedy="r"),
]


def request(operation: p.Operation, **changes: Any) -> p.Request:
    fields: dict[str, Any] = {"session": "s", "sequence": 9, "operation": operation, "deadline_s": 2.5} | changes
    return p.Request(**fields)


def plain(value: object) -> Any:
    """A comparable form; arrays by type, shape and bytes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, msgspec.Struct):
        return (type(value), *(plain(getattr(value, name)) for name in value.__struct_fields__))
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return repr(value) if isinstance(value, float) else value


def test_the_lists_above_are_complete() -> None:
    assert {type(operation) for operation in OPERATIONS} == set(get_args(p.AnyOperation)) == set(p.Operation.__subclasses__())
    assert {type(result) for result in RESULTS} == {*get_args(p.AnyResult), p.ErrorInfo}
    assert set(get_args(p.AnyResult)) == set(p.Result.__subclasses__())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.op())
def test_every_operation_crosses_the_wire(operation: p.Operation) -> None:
    sent = request(operation)
    assert plain(decode(encode(sent), p.Request)) == plain(sent)


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_every_result_crosses_the_wire(result: Any) -> None:
    sent = p.Reply(sequence=4, body=result)
    assert plain(decode(encode(sent), p.Reply)) == plain(sent)


def test_operation_names_are_pinned() -> None:
    assert list(dict.fromkeys(operation.op() for operation in OPERATIONS)) == [
        "info",
        "generate",
        "forward",
        "forward_backward",
        "backward",
        "step",
        "zero_grad",
        "sync_weights",
        "sleep",
        "wake",
        "reset_prefix_cache",
        "pause",
        "resume",
        "abort",
        "save_checkpoint",
        "load_checkpoint",
        "export_hf",
        "shutdown",
    ]
    assert {operation.op() for operation in OPERATIONS if not operation.mutates()} == {"info", "generate", "forward"}


def tampered(sent: msgspec.Struct, change: Any) -> bytes:
    """The frame of a message whose JSON was changed."""
    frame = encode(sent)
    size = struct.unpack("<Q", frame[:8])[0]
    header = json.loads(frame[8 : 8 + size])
    message = json.loads(header["__metadata__"]["message"])
    change(message)
    header["__metadata__"]["message"] = json.dumps(message)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + frame[8 + size :]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.op())
def test_an_unknown_field_of_any_operation_is_refused(operation: p.Operation) -> None:
    frame = tampered(request(operation), lambda message: message["operation"].update(surprise=1))
    with pytest.raises(WireError, match="unknown field `surprise`") as caught:
        decode(frame, p.Request)
    assert caught.value.where == "$.operation"


def test_an_unknown_field_deep_inside_is_refused() -> None:
    frame = tampered(request(OPERATIONS[2]), lambda message: message["operation"]["batch"].update(padding=1))
    with pytest.raises(WireError, match="unknown field `padding`") as caught:
        decode(frame, p.Request)
    assert caught.value.where == "$.operation.batch"


def test_an_unknown_operation_is_refused_by_name() -> None:
    frame = tampered(request(p.Step()), lambda message: message["operation"].update(type="teleport"))
    with pytest.raises(ProtocolError, match="teleport"):
        decode(frame, p.Request)


def test_an_unknown_result_is_refused_by_name() -> None:
    frame = tampered(p.Reply(sequence=1, body=p.Done()), lambda message: message["body"].update(type="maybe"))
    with pytest.raises(ProtocolError, match="maybe"):
        decode(frame, p.Reply)


@pytest.mark.parametrize(
    ("operation", "field", "value"),
    [
        (p.Pause(), "mode", "gently"),
        (p.Wake(engine="trainer"), "engine", "reward"),
        (p.LoadCheckpoint(path="x"), "restore", ["soul"]),
        (p.Step(), "lr", "high"),
        (p.Abort(), "request_ids", [1]),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(operation: p.Operation, field: str, value: object) -> None:
    frame = tampered(request(operation), lambda message: message["operation"].update({field: value}))
    with pytest.raises(WireError) as caught:
        decode(frame, p.Request)
    assert caught.value.where.startswith(f"$.operation.{field}")


def test_a_malformed_batch_is_refused_on_arrival() -> None:
    frame = tampered(request(OPERATIONS[2]), lambda message: message["operation"]["batch"].update(groups=[1]))
    with pytest.raises(WireError, match="1 group ids for 2 samples"):
        decode(frame, p.Request)


def test_the_version_travels() -> None:
    assert decode(encode(request(p.Step(), version=2)), p.Request).version == 2
    assert request(p.Step()).version == p.PROTOCOL_VERSION == 1


# --- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("stop", ("a", "")),
        ("stop", ""),
    ],
)
def test_sampling_params_refuse_what_means_nothing(field: str, value: object) -> None:
    with pytest.raises(DataError) as caught:
        p.SamplingParams(**{field: value})
    assert caught.value.where == f"sampling.{field}"


def test_one_stop_string_is_not_a_sequence_of_letters() -> None:
    assert p.SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert p.SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"normalization": "constant"},
        {"normalization": "token", "constant": 3.0},
        {"normalization": "constant", "constant": 0.0},
        {"normalization": "constant", "constant": float("nan")},
    ],
)
def test_the_constant_goes_with_its_normalization(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        p.NamedLoss(name="grpo", **fields)
    assert caught.value.where == "loss.constant"


def test_metrics_add_as_pairs() -> None:
    total = p.Metric(sum=3.0, count=2.0) + p.Metric(sum=1.0, count=6.0)
    assert (total.sum, total.count, total.mean) == (4.0, 8.0, 0.5)
    assert p.Metric(sum=1.0, count=0.0).mean == 0.0


def test_a_reply_unwraps_to_its_result_or_raises() -> None:
    done = p.Done()
    assert p.Reply(sequence=1, body=done).unwrap() is done
    with pytest.raises(DataError, match="bad"):
        p.Reply(sequence=1, body=p.ErrorInfo.of(DataError("bad"))).unwrap()


def test_a_foreign_exception_keeps_its_name() -> None:
    error = p.ErrorInfo.of(KeyError("k"), where="trainer[0]").to_exception()
    assert (type(error).__name__, error.message, error.where) == ("EngineError", "KeyError: 'k'", "trainer[0]")


def test_an_error_of_an_unknown_kind_keeps_its_name() -> None:
    error = p.ErrorInfo(kind="FutureError", message="m", where="w", remedy="r").to_exception()
    assert type(error) is ArcticError
    assert (error.message, error.where, error.remedy) == ("FutureError: m", "w", "r")
