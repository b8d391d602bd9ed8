"""The receiving side of a weight sync: the check of a plan, and the transaction that stages its buckets.

    mapping = check_plan(plan, expected, ties)   raises naming everything that does not fit
    stage = BucketStage(plan, mapping, carriers)
    stage.push(ref)                            one per bucket, in any order
    stage.complete()                           raises naming what is missing
    for name, tensor in stage.tensors(): ...   views of the sender's bytes
    stage.close()

Nothing here touches a model: what it serves changes only when its engine loads ``tensors()``. Needs torch for
:meth:`BucketStage.tensors` alone.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from arctic_core.errors import WeightSyncError
from arctic_core.sync.carriers import WeightCarrier
from arctic_core.sync.plan import BucketRef, TensorMeta, WeightPlan

if TYPE_CHECKING:
    import torch

CHECKS = ("names", "shapes", "dtypes", "bytes")
"""What every sync verifies; ``"checksums"`` joins them where the sender sends some."""

_LISTED = 20
_REMEDY = "trainer and sampler must hold the same architecture at the same dtype"


Mapping = tuple[tuple[str, int], ...]
"""``(name the engine loads, index of the plan's tensor)``, in the plan's order so that a bucket is read in one go."""


def check_plan(plan: WeightPlan, expected: Sequence[TensorMeta], ties: Sequence[tuple[str, str]]) -> Mapping:
    """Match a plan with the weights an engine serves.

    Args:
        plan: The sender's.
        expected: Each distinct tensor once, by Hugging Face checkpoint names.
        ties: ``(other name, name in expected)`` of tied weights.

    A tied weight may travel under any of its names, as either side knows them. A plan that sends two tensors where the
    engine has one (tied) weight is refused, since only one of them could be served.

    Raises:
        WeightSyncError: Lists every missing, unexpected, mis-shaped and mis-typed tensor.
    """
    problems: list[str] = []
    sent: dict[str, int] = {}
    for i, meta in enumerate(plan.tensors):
        if meta.name in sent:
            problems.append(f"{meta.name}: sent twice")
        sent[meta.name] = i
    covered = sorted(i for bucket in plan.buckets for i in bucket)
    if covered != list(range(len(plan.tensors))):
        problems.append("the buckets do not hold every tensor exactly once")
    names = {**sent, **{other: sent[name] for other, name in plan.ties if name in sent}}
    aliases: dict[str, list[str]] = defaultdict(list)
    for other, name in ties:
        aliases[name].append(other)

    mapping: list[tuple[str, int]] = []
    used: set[int] = set()
    for want in expected:
        found = dict.fromkeys(names[name] for name in (want.name, *aliases[want.name]) if name in names)
        if not found:
            tied = f" (tied to {', '.join(aliases[want.name])})" if aliases[want.name] else ""
            problems.append(f"{want.name}: missing{tied}")
            continue
        used.update(found)
        if len(found) > 1:
            several = ", ".join(plan.tensors[i].name for i in found)
            problems.append(f"{want.name}: tied here, but sent as separate tensors {several}")
            continue
        (index,) = found
        problems.extend(_compare(plan.tensors[index], want))
        mapping.append((want.name, index))
    problems.extend(f"{meta.name}: unexpected" for i, meta in enumerate(plan.tensors) if i not in used)
    if problems:
        raise _refusal(problems)
    return tuple(sorted(mapping, key=lambda item: item[1]))


def _compare(got: TensorMeta, want: TensorMeta) -> Iterator[str]:
    if got.shape != want.shape:
        yield f"{got.name}: shape {list(got.shape)}, expected {list(want.shape)}"
    if got.dtype != want.dtype:
        yield f"{got.name}: dtype {got.dtype}, expected {want.dtype}"


def _refusal(problems: list[str]) -> WeightSyncError:
    listed = "; ".join(problems[:_LISTED])
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return WeightSyncError(f"the weights sent do not fit the weights served: {listed}{more}", remedy=_REMEDY)


class BucketStage:
    """Buckets noted and verified, not yet loaded.

    Args:
        plan: What the sender will push.
        mapping: From :func:`check_plan`.
        carriers: Finds a carrier by its registered name.
    """

    def __init__(self, plan: WeightPlan, mapping: Mapping, carriers: Callable[[str], WeightCarrier]) -> None:
        self.plan = plan
        self._mapping = mapping
        self._carriers = carriers
        self._views: dict[int, memoryview] = {}
        self._open = ExitStack()

    def push(self, ref: BucketRef) -> None:
        """Open a bucket and verify it.

        Raises:
            WeightSyncError: Unknown or repeated index, another size than planned, or a checksum that differs (named tensor).
        """
        if not 0 <= ref.index < len(self.plan.buckets):
            raise WeightSyncError(f"bucket {ref.index} is not in the plan of {len(self.plan.buckets)} buckets")
        if ref.index in self._views:
            raise WeightSyncError(f"bucket {ref.index} was pushed twice")
        metas = [self.plan.tensors[i] for i in self.plan.buckets[ref.index]]
        planned = sum(meta.nbytes for meta in metas)
        if ref.nbytes != planned:
            raise WeightSyncError(f"bucket {ref.index} has {ref.nbytes} bytes, {planned} were planned", where=ref.locator)
        view = self._open.enter_context(self._carriers(ref.carrier).open(ref))
        if ref.checksums is not None:
            _verify(view, metas, ref)
        self._views[ref.index] = view

    def complete(self) -> None:
        """Check that every bucket arrived.

        Raises:
            WeightSyncError: Names the missing buckets and their tensors.
        """
        missing = [i for i in range(len(self.plan.buckets)) if i not in self._views]
        if missing:
            names = [self.plan.tensors[i].name for bucket in missing for i in self.plan.buckets[bucket]]
            listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
            raise WeightSyncError(
                f"{len(missing)} of {len(self.plan.buckets)} buckets never arrived ({missing[:_LISTED]}), with {listed}"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of every weight the engine loads: CPU views of the sender's bytes, valid until :meth:`close`."""
        places = self._places()
        for name, index in self._mapping:
            bucket, offset = places[index]
            yield name, _tensor(self._views[bucket], offset, self.plan.tensors[index])

    def _places(self) -> dict[int, tuple[int, int]]:
        places = {}
        for number, bucket in enumerate(self.plan.buckets):
            offset = 0
            for index in bucket:
                places[index] = (number, offset)
                offset += self.plan.tensors[index].nbytes
        return places

    def close(self) -> None:
        """Unmap the buckets. Idempotent."""
        self._views.clear()
        self._open.close()


def _verify(view: memoryview, metas: Sequence[TensorMeta], ref: BucketRef) -> None:
    checksums = ref.checksums or ()
    if len(checksums) != len(metas):
        raise WeightSyncError(f"bucket {ref.index} has {len(checksums)} checksums for {len(metas)} tensors", where=ref.locator)
    offset = 0
    for meta, checksum in zip(metas, checksums, strict=True):
        actual = zlib.crc32(view[offset : offset + meta.nbytes])
        if actual != checksum:
            raise WeightSyncError(
                f"{meta.name}: CRC-32 {actual:08x}, the sender announced {checksum:08x}", where=f"bucket {ref.index}"
            )
        offset += meta.nbytes


def _tensor(view: memoryview, offset: int, meta: TensorMeta) -> torch.Tensor:
    import torch

    dtype = getattr(torch, meta.dtype)
    if not meta.nbytes:
        return torch.empty(meta.shape, dtype=dtype)
    count = meta.nbytes // dtype.itemsize
    if offset % dtype.itemsize:  # tensors lie back to back, so a wider type may follow an odd number of narrow ones
        return torch.frombuffer(bytearray(view[offset : offset + meta.nbytes]), dtype=dtype).reshape(meta.shape)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).reshape(meta.shape)
