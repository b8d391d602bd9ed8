"""The wire format: one message is one safetensors buffer. No pickle.

A frame is laid out as the safetensors format prescribes (8 bytes of header length, a JSON header, raw tensor bytes), so
any safetensors reader can open it. Its tensors are named ``"0"``, ``"1"``, ... and its metadata has two entries:
``protocol``, the protocol version, and ``message``, the typed message as JSON in which ``{"$tensor": 3}`` stands for
tensor ``"3"`` as a numpy array and ``{"$raw": 3}`` for the same as a :class:`RawTensor`.

Arrays come back bit for bit, as read-only views on the frame where alignment allows. Floats in the JSON are written by
``repr``, so they come back exactly, NaN and infinities included. Whatever cannot be carried raises :class:`WireError`
with the path of the culprit, e.g. ``$.operation.batch.token_ids``.

The format is read and written here rather than through the ``safetensors`` package because its Python interface copies
every tensor on reading. This module needs numpy and msgspec only.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from arctic_core.errors import ProtocolError, WireError
from arctic_core.protocol import PROTOCOL_VERSION

__all__ = ["Buffer", "RawTensor", "decode", "encode", "encode_large", "encode_parts"]

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Type names (numpy's, or torch's where numpy has none) and the format's codes for them."""

_NAMES = {code: name for name, code in _CODES.items()}
_NOT_NUMPY = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1}
_ITEM_BYTES = {name: _NOT_NUMPY.get(name) or np.dtype(name).itemsize for name in _CODES}
_MAX_HEADER = 100_000_000  # what other readers of the format accept
_MAX_INT_BITS = 1024
_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>\$.*)`$", re.DOTALL)


class RawTensor:
    """A tensor as bytes, for types numpy does not have (``bfloat16``, ``float8_*``). Little-endian, C order.

    Args:
        dtype: Torch's name without the prefix, e.g. ``"bfloat16"``.
        shape: Sizes, any number of them.
        data: Contiguous bytes.

    Raises:
        WireError: The type is unknown or the number of bytes does not fit the shape.
    """

    # Not a dataclass: those msgspec would take apart by itself.
    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Buffer) -> None:
        self.dtype = dtype
        self.shape = tuple(operator.index(size) for size in shape)
        self.data = data
        if dtype not in _CODES:
            raise WireError(f"unknown tensor type {dtype!r}", remedy=f"known: {', '.join(_CODES)}")
        view = memoryview(data)
        expected = math.prod(self.shape) * _ITEM_BYTES[dtype]
        if any(size < 0 for size in self.shape) or expected != view.nbytes or not view.c_contiguous:
            raise WireError(f"{view.nbytes} bytes do not make a {dtype} tensor of shape {self.shape}")

    def __repr__(self) -> str:
        return f"RawTensor({self.dtype!r}, {self.shape})"


# --- encoding -----------------------------------------------------------------------------------------------------------


def encode(message: msgspec.Struct) -> bytes:
    """One frame with the message.

    Raises:
        WireError: A value inside cannot be carried; the error's ``where`` is its path.
    """
    return b"".join(encode_parts(message))


def encode_large(message: msgspec.Struct) -> memoryview:
    """The same frame, read-only, in memory that is faster to fill where there is much of it: in huge pages, if any.

    Raises:
        WireError: As :func:`encode`.
    """
    parts = encode_parts(message)
    frame = np.empty(sum(memoryview(part).nbytes for part in parts), np.uint8)
    end = 0
    for part in parts:
        piece = np.frombuffer(part, np.uint8)
        frame[end : end + len(piece)] = piece
        end += len(piece)
    return frame.data.toreadonly()


def encode_parts(message: msgspec.Struct) -> list[Buffer]:
    """The same frame in parts, the arrays in it where they are: for sending without a copy. They must not change meanwhile.

    Raises:
        WireError: As :func:`encode`.
    """
    tensors: list[RawTensor] = []
    try:
        text = json.dumps(_lower(message, "$", tensors), separators=(",", ":"))
    except RecursionError:
        raise WireError("the message is nested too deeply", where="$") from None
    return _pack(tensors, {"protocol": str(PROTOCOL_VERSION), "message": text})


def _lower(value: Any, path: str, tensors: list[RawTensor]) -> Any:
    """The value as plain JSON values, its arrays moved to ``tensors``."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
        return value
    if isinstance(value, (np.ndarray, RawTensor)):
        tensors.append(value if isinstance(value, RawTensor) else _raw(value, path))
        return {"$raw" if isinstance(value, RawTensor) else "$tensor": len(tensors) - 1}
    if isinstance(value, msgspec.Struct):
        return _lower_struct(value, path, tensors)
    if isinstance(value, (list, tuple)):
        return [_lower(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(k, path): _lower(v, f"{path}[{k!r}]", tensors) for k, v in value.items()}
    raise WireError(
        f"this {type(value).__module__}.{type(value).__qualname__} cannot be sent",
        where=path,
        remedy="send numbers, strings, lists, dictionaries with string keys, and numpy arrays",
    )


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise WireError(f"the key {key!r} is not a string", where=path)
    return f"${key}" if key.startswith("$") else key  # "$" marks tensor references: double the caller's own


def _lower_struct(value: msgspec.Struct, path: str, tensors: list[RawTensor]) -> dict[str, Any]:
    config = value.__struct_config__
    tree: dict[str, Any] = {} if config.tag_field is None else {config.tag_field: config.tag}
    for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
        tree[key] = _lower(getattr(value, name), f"{path}.{name}", tensors)
    return tree


def _raw(array: np.ndarray, path: str) -> RawTensor:
    if type(array) not in (np.ndarray, np.memmap):
        raise WireError(f"a {type(array).__name__} is more than its values; send a plain array", where=path)
    if array.dtype.name not in _CODES or array.dtype.name in _NOT_NUMPY or not array.dtype.isnative:
        remedy = "send it as a RawTensor" if array.dtype.name in _NOT_NUMPY else f"convert it to one of {', '.join(_CODES)}"
        raise WireError(f"an array of type {array.dtype!r} cannot be sent", where=path, remedy=remedy)
    flat = np.asarray(array, order="C").reshape(-1)
    return RawTensor(array.dtype.name, array.shape, flat.view(np.uint8).data if flat.size else b"")


def _pack(tensors: list[RawTensor], metadata: dict[str, str]) -> list[Buffer]:
    # Wide types first keeps every tensor aligned to its item size without gaps, which the format forbids.
    order = sorted(range(len(tensors)), key=lambda i: -_ITEM_BYTES[tensors[i].dtype])
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for i in order:
        end = offset + memoryview(tensors[i].data).nbytes
        header[str(i)] = {"dtype": _CODES[tensors[i].dtype], "shape": tensors[i].shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise WireError(f"the message takes {len(text)} bytes beside its arrays; {_MAX_HEADER} are allowed", where="$")
    return [struct.pack("<Q", len(text)), text, *(tensors[i].data for i in order)]


# --- decoding -----------------------------------------------------------------------------------------------------------


def decode(frame: Buffer, type_: type[T]) -> T:
    """The message in a frame, validated against its type. Arrays are views on the frame where alignment allows.

    Args:
        frame: What :func:`encode` returned.
        type_: The message's type, e.g. :class:`arctic_core.protocol.Request`.

    Raises:
        WireError: The frame is damaged or its content does not fit the type; ``where`` is the path.
        ProtocolError: The frame is of another protocol version, or holds a message unknown to this one.
    """
    tensors, metadata = _unpack(memoryview(frame).cast("B"))
    version = metadata.get("protocol")
    if version != str(PROTOCOL_VERSION):
        raise ProtocolError(
            f"the frame is of protocol version {version}, this side speaks {PROTOCOL_VERSION}",
            remedy="install the same version of arctic-core on both sides",
        )
    used: set[int] = set()
    hook = functools.partial(_resolve, tensors=tensors, used=used)
    try:
        tree = json.loads(metadata.get("message", ""), object_pairs_hook=hook)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"the message is not valid JSON ({error})", where="$") from None
    if len(used) != len(tensors):
        raise WireError(f"the frame has {len(tensors)} tensors, the message refers to {len(used)}", where="$")
    try:
        return msgspec.convert(tree, type_, dec_hook=_check_custom)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explain(error) from None


def _explain(error: Exception) -> WireError | ProtocolError:
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"]) if match else (str(error), "$")
    if what.startswith("Invalid value") and path.endswith(".type"):
        return ProtocolError(
            f"unknown message: {what}", where=path, remedy="install the same version of arctic-core on both sides"
        )
    return WireError(what, where=path)


def _check_custom(expected: type, value: object) -> object:
    if isinstance(value, expected):
        return value
    raise TypeError(f"Expected a {expected.__name__}, got {type(value).__name__}")


def _resolve(pairs: Iterable[tuple[str, Any]], *, tensors: list[RawTensor], used: set[int]) -> Any:
    """A JSON object as what it stands for: an array, a raw tensor or a dictionary."""
    pairs = list(pairs)
    if len(pairs) == 1 and pairs[0][0] in ("$tensor", "$raw"):
        mark, number = pairs[0]
        if type(number) is not int or not 0 <= number < len(tensors) or number in used:
            raise WireError(f"{number!r} does not refer to one of {len(tensors)} tensors, or not for the first time", where="$")
        used.add(number)
        return tensors[number] if mark == "$raw" else _array(tensors[number], str(number))
    values = {key[1:] if key.startswith("$") else key: value for key, value in pairs}
    if len(values) != len(pairs):
        raise WireError("a JSON object has the same key twice", where="$")
    return values


def _array(raw: RawTensor, name: str) -> np.ndarray:
    if raw.dtype in _NOT_NUMPY:
        raise WireError(f"numpy has no {raw.dtype}; the tensor must travel as a RawTensor", where=f"tensor {name}")
    try:
        flat = np.frombuffer(raw.data, np.uint8)
        if raw.dtype == "bool" and flat.size and flat.max() > 1:
            raise WireError("a bool tensor holds a byte other than 0 and 1", where=f"tensor {name}")
        array = flat.view(raw.dtype).reshape(raw.shape)
    except (ValueError, OverflowError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"shape {raw.shape} is not possible: {error}", where=f"tensor {name}") from None
    return array if array.flags.aligned else array.copy()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's line in the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _unpack(frame: memoryview) -> tuple[list[RawTensor], dict[str, str]]:
    """Tensors in order of their numbers, and metadata. Every byte of the frame must be accounted for."""
    if len(frame) < 8:
        raise WireError(f"{len(frame)} bytes are too few for a frame", where="frame")
    size = struct.unpack("<Q", frame[:8])[0]
    if size > min(_MAX_HEADER, len(frame) - 8):
        raise WireError(f"a header of {size} bytes does not fit a frame of {len(frame)}", where="frame")
    lines = _header(frame[8 : 8 + size], dict[str, msgspec.Raw], "header")
    metadata = _header(lines.pop("__metadata__", msgspec.Raw(b"{}")), dict[str, str], "header.__metadata__")
    entries = {name: _header(line, _Entry, f"header[{name!r}]") for name, line in lines.items()}
    body = frame[8 + size :]
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != expected or entry.data_offsets[1] < expected:
            raise WireError(f"tensors overlap or leave gaps at byte {expected}", where=f"tensor {name}")
        expected = entry.data_offsets[1]
    if expected != len(body):
        raise WireError(f"the header describes {expected} bytes of tensors, the frame has {len(body)}", where="frame")
    return [_tensor(entries, str(i), body) for i in range(len(entries))], metadata


def _header(text: Any, type_: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(text, type=type_)
    except (ValueError, RecursionError) as error:
        raise WireError(f"damaged header: {error}", where=where) from None


def _tensor(entries: dict[str, _Entry], name: str, body: memoryview) -> RawTensor:
    entry = entries.get(name)
    if entry is None:
        raise WireError(f"tensors are not numbered 0 to {len(entries) - 1}", where=f"tensor {name}")
    if entry.dtype not in _NAMES:
        raise WireError(f"unknown tensor type {entry.dtype!r}", where=f"tensor {name}")
    try:
        return RawTensor(_NAMES[entry.dtype], entry.shape, body[slice(*entry.data_offsets)])
    except WireError as error:
        raise WireError(error.message, where=f"tensor {name}") from None
