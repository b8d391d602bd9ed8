"""Frames that are malformed, truncated, oversized or hostile: each is refused with a reason, nothing is carried out.

Each test sends a few hundred frames; together about a thousand. What would be carried out would be recorded.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.server.body import FRAME_TYPE

from .support import FRAME, batch, generate, request, serving

SECONDS = 60
FEW = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
OPERATIONS = (
    p.ForwardBackward(batch=batch(), loss=p.NamedLoss(name="grpo")),
    p.Backward(batch=batch(), grad_logprobs=np.ones(16, np.float32)),
    generate(4, n=2),
    p.SaveCheckpoint(path="x", extra={"k": "v"}),
    p.Step(lr=0.1),
)
FRAMES = [wire.encode(request(operation, 1)) for operation in OPERATIONS]


class Server:
    """A server on a loop of its own, kept through all examples of a test; records what reaches a job."""

    def __init__(self, root):
        self.reached = []
        self._loop = asyncio.new_event_loop()
        self._serving = serving(root, answer=self._answer, max_body_bytes=2**20)
        self.api = self._loop.run_until_complete(self._serving.__aenter__())
        self._loop.run_until_complete(self.api.start("a", {"model_name": "hub/any", "training_gpus": 1}))
        self.end = time.monotonic() + SECONDS

    def _answer(self, request):
        self.reached.append(request)
        return p.Done()

    def post(self, frame, path="call"):
        """The response to a frame; fails where the server does not answer in seconds."""
        assert time.monotonic() < self.end, "too slow"
        sending = self.api.http.post(f"/arctic/v1/jobs/a/{path}", content=frame, headers=FRAME)
        return self._loop.run_until_complete(asyncio.wait_for(sending, 10))

    def close(self):
        self._loop.run_until_complete(self._serving.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.close()


def refused(server, frame):
    """Post a frame to both routes; both say what is wrong with it."""
    for path in ("call", "stream"):
        response = server.post(frame, path)
        assert 400 <= response.status_code < 500, (path, response.status_code, response.text)
        error = response.json()["error"]
        assert error["kind"] in ("WireError", "ProtocolError", "DataError", "PayloadTooLargeError")
        assert error["message"]
    assert server.reached == []
    assert server.api.app.state.budget.used == 0
    assert server.api.app.state.calls.running() == []


@FEW
@given(frame=st.binary(max_size=400))
@example(frame=b"")
@example(frame=struct.pack("<Q", 2**64 - 1))
@example(frame=struct.pack("<Q", 2) + b"{}")
@example(frame=struct.pack("<Q", 60_000) + b"[" * 60_000)
@example(frame=b"\0" * (2**20 + 1))
def test_noise(server, frame):
    refused(server, frame)


@FEW
@given(frame=st.sampled_from(FRAMES), data=st.data())
def test_truncated_frames(server, frame, data):
    end = data.draw(st.integers(0, len(frame) - 1))
    refused(server, frame[:end])


@FEW
@given(frame=st.sampled_from(FRAMES), data=st.data())
def test_frames_with_bytes_changed(server, frame, data):
    """They may still be right, for example where a weight changed; then they are carried out as they are."""
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    before = len(server.reached)
    response = server.post(bytes(changed))
    assert response.status_code < 500, response.text
    if response.headers["content-type"] == FRAME_TYPE:
        assert wire.decode(bytes(changed), p.Request)
    else:
        assert response.status_code >= 400, response.text
        assert len(server.reached) == before
    assert server.api.app.state.budget.used == 0


def tree_of(frame):
    """The message in a frame as plain values, and the frame's tensor bytes."""
    size = struct.unpack("<Q", frame[:8])[0]
    header = json.loads(frame[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["message"]), frame[8 + size :]


def frame_of(header, message, body):
    header = {**header, "__metadata__": {**header["__metadata__"], "message": json.dumps(message)}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def places(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(2**70),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.just("../../etc/passwd"),
    st.just({"$tensor": 0}),
    st.just({"$raw": 0}),
    st.just({"$tensor": 10**9}),
    st.just({"$tensor": -1}),
    st.just({"__reduce__": ["os.system", "true"]}),
    st.just([]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@FEW
@given(frame=st.sampled_from(FRAMES), data=st.data())
def test_messages_with_a_value_replaced(server, frame, data):
    header, message, body = tree_of(frame)
    path = data.draw(st.sampled_from(sorted(places(message), key=str)))
    changed = frame_of(header, replaced(message, path, data.draw(STRANGE)), body)
    before = len(server.reached)
    response = server.post(changed)
    assert response.status_code < 500, response.text
    if response.headers["content-type"] != FRAME_TYPE:
        assert response.json()["error"]["kind"] in (
            "WireError", "ProtocolError", "DataError", "PermissionDeniedError", "InvalidStateError"
        )  # fmt: skip
        assert len(server.reached) == before
    else:
        assert wire.decode(changed, p.Request)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"session": ""},
        {"session": "a/b"},
        {"session": "../x"},
        {"session": "x" * 65},
        {"session": "a\nb"},
        {"sequence": -1},
        {"sequence": 2**63},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"deadline_s": 1e12},
        {"more": 1},
        {"operation": {"type": "exec"}},
        {"operation": {"type": "step", "lr": "1"}},
        {"operation": {"type": "step", "code": "import os"}},
    ],
)
def test_requests_that_are_well_formed_and_wrong(server, change):
    header, message, body = tree_of(wire.encode(request(p.Step(), 1)))
    response = server.post(frame_of(header, {**message, **change}, body))
    if change == {"version": 2}:  # for the service to say, which speaks the protocol
        return
    assert response.status_code == 400, response.text
    assert response.json()["error"]["kind"] in ("WireError", "ProtocolError", "DataError")
    assert server.reached == []


def test_a_frame_of_many_keys_and_one_of_deep_nesting_are_refused_quickly(server):
    header, message, body = tree_of(wire.encode(request(p.SaveCheckpoint(path="x"), 1)))
    begin = time.monotonic()
    deep = "[" * 50_000 + "]" * 50_000
    wide = {f"k{i}": i for i in range(20_000)}
    refused(server, frame_of(header, {**message, "operation": wide}, body))
    text = json.dumps({**header, "__metadata__": {**header["__metadata__"], "message": deep}}).encode()
    refused(server, struct.pack("<Q", len(text)) + text + body)
    assert time.monotonic() - begin < 10
