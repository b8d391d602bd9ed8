"""The wire format: everything comes back bit for bit, or is refused with its path."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from arctic_core.errors import ProtocolError, WireError
from arctic_core.protocol import Metric, Request, Scores, Step
from arctic_core.wire import RawTensor, decode, encode, encode_large, encode_parts

INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
DTYPES = (*INTEGERS, "float16", "float32", "float64", "complex64")
FOREIGN = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1}


class Tree(msgspec.Struct, frozen=True, eq=False, kw_only=True, forbid_unknown_fields=True, tag="tree"):
    """A message with every kind of place a value can be in."""

    array: np.ndarray | None = None
    raw: RawTensor | None = None
    arrays: dict[str, list[np.ndarray]] = {}
    anything: Any = None
    number: float = 0.0
    text: str = ""
    child: Tree | None = None
    pairs: tuple[tuple[int, str], ...] = ()


def round_trip(tree: Tree) -> Tree:
    return decode(encode(tree), Tree)


def assert_same(got: object, want: object) -> None:
    """Equal in type, shape and every bit."""
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()
        assert got.flags.aligned
    elif isinstance(want, RawTensor):
        assert (got.dtype, got.shape, bytes(got.data)) == (want.dtype, want.shape, bytes(want.data))
    elif isinstance(want, float):
        assert struct.pack("<d", got) == struct.pack("<d", want) or (math.isnan(got) and math.isnan(want))
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    elif isinstance(want, msgspec.Struct):
        for name in want.__struct_fields__:
            assert_same(getattr(got, name), getattr(want, name))
    else:
        assert got == want


arrays = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(
        np.dtype(name),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        elements={"allow_nan": True} if np.dtype(name).kind in "fc" else None,
    )
)
raws = st.tuples(st.sampled_from(sorted(FOREIGN)), st.lists(st.integers(0, 3), max_size=3), st.randoms()).map(
    lambda t: RawTensor(t[0], tuple(t[1]), t[2].randbytes(math.prod(t[1]) * FOREIGN[t[0]]))
)
keys = st.one_of(st.text(max_size=6), st.sampled_from(["$tensor", "$raw", "$", "$$x", "a.b", "ü.$"]))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), arrays, raws)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        Tree,
        array=st.none() | arrays,
        raw=st.none() | raws,
        arrays=st.dictionaries(keys, st.lists(arrays, max_size=3), max_size=3),
        anything=values,
        number=st.floats(),
        text=st.text(),
        pairs=st.lists(st.tuples(st.integers(), st.text()), max_size=3).map(tuple),
    )
)
def test_any_tree_comes_back_bit_for_bit(tree: Tree) -> None:
    assert_same(round_trip(Tree(child=tree)), Tree(child=tree))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_array_in_every_layout(dtype: str) -> None:
    base = np.arange(24).reshape(4, 6).astype(dtype)
    for array in (base, base.T, base[::2, ::-1], base[1:1], base[2, 3, ...], np.broadcast_to(base[0], (3, 6)), base[:, None]):
        assert_same(round_trip(Tree(array=array)).array, np.asarray(array, order="C"))


def test_nan_payloads_and_signed_zeros_survive() -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 0x00000001], np.uint32)
    assert round_trip(Tree(array=bits.view(np.float32))).array.view(np.uint32).tolist() == bits.tolist()
    for number in (float("nan"), float("inf"), -float("inf"), -0.0, 0.1, 5e-324, 1.7976931348623157e308):
        assert_same(round_trip(Tree(number=number)).number, number)


def test_a_metric_of_nan_is_not_null() -> None:
    metric = decode(encode(Metric(sum=float("nan"), count=float("inf"))), Metric)
    assert math.isnan(metric.sum)
    assert metric.count == float("inf")


def test_strings_of_any_kind_survive() -> None:
    for text in ("", "\x00", 'a"b\\c\n', "…日本語🙂", "\ud800 lone surrogate", "a" * 100_000):
        assert round_trip(Tree(text=text, anything={text: [text]})).anything == {text: [text]}


def test_decoded_arrays_are_views_on_the_frame() -> None:
    frame = encode(Tree(array=np.arange(1000, dtype=np.float64), arrays={"b": [np.ones(3, np.bool_)]}))
    tree = decode(frame, Tree)
    buffer = np.frombuffer(frame, np.uint8)
    assert np.shares_memory(tree.array, buffer)
    assert np.shares_memory(tree.arrays["b"][0], buffer)
    assert not tree.array.flags.writeable


def test_a_frame_at_an_odd_address_gives_aligned_arrays() -> None:
    frame = encode(Tree(array=np.arange(10, dtype=np.float64)))
    shifted = memoryview(b"x" + frame)[1:]
    assert_same(decode(shifted, Tree).array, np.arange(10, dtype=np.float64))


def test_other_readers_of_the_format_can_open_a_frame() -> None:
    frame = encode(Tree(array=np.arange(6, dtype=np.int16).reshape(2, 3), arrays={"k": [np.zeros(0), np.array(2.5)]}))
    tensors = safetensors.numpy.load(frame)
    assert sorted(tensors) == ["0", "1", "2"]
    assert tensors["0"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["2"] == 2.5


# --- refusals -----------------------------------------------------------------------------------------------------------


class NotPlain(np.ndarray):
    """A subclass that means more than its values."""


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([object()]),
        np.array([1 + 2j]),
        np.array([1], ">i4"),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1.0], [True]),
        np.zeros(2).view(NotPlain),
        np.float32(1.0),
        np.int64(1),
        b"bytes",
        {1, 2},
        object(),
        {3: "x"},
        2**2000,
    ],
    ids=repr,
)
def test_what_cannot_be_sent_is_named_by_its_path(value: object) -> None:
    with pytest.raises(WireError) as caught:
        encode(Tree(child=Tree(anything={"a.b": [0, value]})))
    assert caught.value.where.startswith("$.child.anything['a.b'][1]")


def test_endless_nesting_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(WireError, match="nested too deeply"):
        encode(Tree(anything=loop))


def test_a_raw_tensor_must_fit_its_shape() -> None:
    with pytest.raises(WireError, match="3 bytes do not make a bfloat16 tensor"):
        RawTensor("bfloat16", (2,), b"abc")
    with pytest.raises(WireError, match="unknown tensor type"):
        RawTensor("float4", (2,), b"a")
    with pytest.raises(WireError):
        RawTensor("bfloat16", (-1, -1), b"ab")


def repack(frame: bytes, change: Any) -> bytes:
    """The frame with its header, as a dictionary, changed."""
    size = struct.unpack("<Q", frame[:8])[0]
    header = json.loads(frame[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + frame[8 + size :]


def set_message(**changes: object) -> Any:
    def change(header: dict[str, Any]) -> None:
        message = json.loads(header["__metadata__"]["message"])
        header["__metadata__"]["message"] = json.dumps(message | changes)

    return change


FRAME = encode(Tree(array=np.arange(4, dtype=np.int32), arrays={"k": [np.ones(3, np.bool_)]}, number=2.0))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (set_message(number="two"), "$.number"),
        (set_message(unknown=1), "$"),
        (set_message(child={"type": "tree", "number": [1]}), "$.child.number"),
        (set_message(array=None), "$"),
        (set_message(array={"$tensor": 2}), "$"),
        (set_message(array={"$tensor": 1}), "$"),
        (set_message(array={"$tensor": True}), "$"),
        (set_message(array={"$raw": 0}), "$.array"),
        (lambda h: h["0"].update(dtype="F99"), "tensor 0"),
        (lambda h: h["0"].update(shape=[5]), "tensor 0"),
        (lambda h: h["0"].update(shape=[-4]), "tensor 0"),
        (lambda h: h["0"].update(shape=[2**62, 2**62]), "tensor 0"),
        (lambda h: h["0"].update(shape=[1] * 70 + [4]), "tensor 0"),
        (lambda h: h["0"].update(dtype="BF16", shape=[8]), "tensor 0"),
        (lambda h: h["0"].update(data_offsets=[4, 16]), "tensor 0"),
        (lambda h: h["0"].update(more=1), "header['0']"),
        (lambda h: h.update({"7": h.pop("1")}), "tensor 1"),
        (lambda h: h.pop("1"), "frame"),
        (lambda h: h["__metadata__"].update(message="{"), "$"),
        (lambda h: h["__metadata__"].update(message="[" * 100_000), "$"),
        (lambda h: h["__metadata__"].update(message='{"a":1,"a":2}'), "$"),
        (lambda h: h["__metadata__"].pop("message"), "$"),
    ],
)
def test_a_tampered_frame_is_refused_with_the_place(change: Any, where: str) -> None:
    decode(repack(FRAME, lambda header: None), Tree)
    with pytest.raises(WireError) as caught:
        decode(repack(FRAME, change), Tree)
    assert caught.value.where == where


def test_a_bool_that_is_neither_is_refused() -> None:
    frame = bytearray(FRAME)
    frame[-1] = 2
    with pytest.raises(WireError, match="other than 0 and 1"):
        decode(frame, Tree)


def test_another_protocol_version_is_refused_by_name() -> None:
    frame = repack(FRAME, lambda header: header["__metadata__"].update(protocol="2"))
    with pytest.raises(ProtocolError, match="version 2, this side speaks 1"):
        decode(frame, Tree)


def test_another_message_type_is_refused() -> None:
    with pytest.raises(WireError):
        decode(FRAME, Request)


@pytest.mark.parametrize("length", range(0, len(FRAME), 7))
def test_a_truncated_frame_is_refused(length: int) -> None:
    with pytest.raises(WireError):
        decode(FRAME[:length], Tree)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data, Request)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(FRAME) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_crashes(position: int, flip: int) -> None:
    frame = bytearray(FRAME)
    frame[position] ^= flip
    try:
        tree = decode(frame, Tree)
    except (WireError, ProtocolError):
        return
    assert isinstance(tree, Tree)


@settings(max_examples=300, deadline=None)
@given(values)
def test_a_message_of_any_json_is_accepted_or_refused(value: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"]["message"] = json.dumps(value, default=repr)

    frame = repack(encode(Request(session="s", sequence=1, operation=Step(), deadline_s=1.0)), change)
    with pytest.raises(WireError):
        decode(frame, Request)


def test_a_frame_is_the_same_however_it_is_put_together() -> None:
    message = Scores(logprobs=np.arange(5, dtype=np.float32), entropy=None, topk_ids=np.zeros((0, 3), np.int32))
    frame = encode(message)
    large = encode_large(message)
    assert (bytes(large), large.readonly) == (frame, True)
    assert b"".join(encode_parts(message)) == frame
    assert decode(large, Scores).logprobs.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
