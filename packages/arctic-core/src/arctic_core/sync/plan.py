"""The agreement that precedes a weight sync: which tensors, of what shape and type, in which buckets, with which ties.

Names are those of the Hugging Face checkpoint. A tied weight travels once, under the name the model saves it by;
``ties`` lists its other names, so that the receiver can tell "tied" from "missing". Needs numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int64": 8,
    "int32": 4,
}


@dataclass(frozen=True)
class TensorMeta:
    """One tensor of a plan."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the prefix, e.g. ``"bfloat16"``."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightPlan:
    """What a sync will send."""

    tensors: tuple[TensorMeta, ...]
    ties: tuple[tuple[str, str], ...]
    """``(other name, name it is tied to)``."""
    buckets: tuple[tuple[int, ...], ...]
    """Indices into ``tensors`` per bucket, in order; every tensor is in exactly one."""

    @classmethod
    def build(cls, tensors: Iterable[TensorMeta], ties: Iterable[tuple[str, str]], bucket_bytes: int) -> WeightPlan:
        """Fill buckets in order up to ``bucket_bytes``; a larger tensor has a bucket of its own."""
        metas = tuple(tensors)
        buckets: list[tuple[int, ...]] = []
        current: list[int] = []
        size = 0
        for i, meta in enumerate(metas):
            if current and size + meta.nbytes > bucket_bytes:
                buckets.append(tuple(current))
                current, size = [], 0
            current.append(i)
            size += meta.nbytes
        if current:
            buckets.append(tuple(current))
        return cls(tensors=metas, ties=tuple(ties), buckets=tuple(buckets))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(meta.nbytes for meta in self.tensors)


@dataclass(frozen=True)
class BucketRef:
    """Where a published bucket lies."""

    index: int
    carrier: str
    """Registered carrier that can open it."""
    locator: str
    """The carrier's own address, e.g. a shared-memory name or a path."""
    nbytes: int
    checksums: tuple[int, ...] | None
    """CRC-32 per tensor in plan order, or ``None`` when not asked for."""
