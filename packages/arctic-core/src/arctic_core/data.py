"""Samples and batches: ragged, typed, validated, without padding.

Suffix legend: ``_T`` token axis of a packed batch, ``_R`` response-token axis of a packed batch, ``_B`` samples.

A :class:`Sample` is one prompt and one response. A :class:`Batch` is samples laid end to end with the offsets of each.
Per-token fields (log-probs, advantages, masks) live on the response axis: entry ``j`` belongs to response token ``j``,
whose score comes from the logits one position earlier *inside the same sample*. Padding, alignment and "shifted"
conventions are unknown here; adapters convert at their border.

This module needs numpy and msgspec only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from arctic_core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["TOKEN_FIELDS", "TOPK_FIELDS", "Batch", "Group", "Sample", "token_array"]

Group = int | str
"""A caller's id for the rollouts of one prompt. Never inferred from text or tokens."""

TOKEN_FIELDS = ("loss_mask", "advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs")
"""Optional float32 fields with one entry per response token."""

TOPK_FIELDS = ("topk_ids", "teacher_topk_logprobs")
"""Optional fields with ``K`` entries per response token, ``[R, K]``: int32 token ids, and float32."""

_RESPONSE_FIELDS = (*TOKEN_FIELDS, *TOPK_FIELDS)


class Sample(msgspec.Struct, frozen=True, eq=False, kw_only=True, forbid_unknown_fields=True):
    """One prompt with one response.

    Raises:
        DataError: A field has the wrong rank, length or range; the message names the field and both lengths.
    """

    token_ids: np.ndarray
    """Prompt followed by response, int32 ``[T]``."""
    prompt_length: int
    """Number of leading prompt tokens, at least 1 (the first response token needs a predecessor)."""
    group: Group = 0
    """Which group of rollouts this sample belongs to."""
    loss_mask: np.ndarray | None = None
    """1 where a response token is trained on, 0 elsewhere, float32 ``[R]``; absent means all ones."""
    advantages: np.ndarray | None = None
    """Float32 ``[R]``."""
    old_logprobs: np.ndarray | None = None
    """Log-probs (nats) under the policy that the importance ratio is taken against, float32 ``[R]``."""
    ref_logprobs: np.ndarray | None = None
    """Log-probs (nats) under the reference model, float32 ``[R]``."""
    sampler_logprobs: np.ndarray | None = None
    """Log-probs (nats) reported by the sampler, float32 ``[R]``."""
    teacher_logprobs: np.ndarray | None = None
    """Log-probs (nats) of the response tokens under a teacher, float32 ``[R]``."""
    topk_ids: np.ndarray | None = None
    """``K`` token ids per response token, scored beside it, e.g. those a teacher finds most likely there, int32 ``[R, K]``.
    Distinct in each row."""
    teacher_topk_logprobs: np.ndarray | None = None
    """Log-probs (nats) of ``topk_ids`` under a teacher, float32 ``[R, K]``."""
    policy_version: int | None = None
    """Policy version that produced the response."""
    temperature: float = 1.0
    """Temperature the response was sampled at; scoring divides logits by it. Above 0."""

    def __post_init__(self) -> None:
        force_setattr(self, "token_ids", token_array(self.token_ids, "sample.token_ids"))
        force_setattr(self, "prompt_length", _integer(self.prompt_length, "sample.prompt_length"))
        if not isinstance(self.group, str):
            force_setattr(self, "group", _integer(self.group, "sample.group"))
        if self.policy_version is not None:
            force_setattr(self, "policy_version", _integer(self.policy_version, "sample.policy_version"))
        total = len(self.token_ids)
        if not 1 <= self.prompt_length <= total:
            raise DataError(
                f"prompt_length {self.prompt_length} is outside 1..{total} (the number of token ids)",
                where="sample.prompt_length",
                remedy="give every sample at least one prompt token (a BOS token will do)",
            )
        force_setattr(self, "temperature", _temperature(self.temperature, "sample"))
        _check_response_fields(self, self.response_length, "sample")

    @property
    def response_length(self) -> int:
        """Number of response tokens; 0 is valid."""
        return len(self.token_ids) - self.prompt_length

    @property
    def response_ids(self) -> np.ndarray:
        """The response's token ids, int32 ``[R]``."""
        return self.token_ids[self.prompt_length :]

    def replace(self, **changes: Any) -> Sample:
        """A validated copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


class Batch(msgspec.Struct, frozen=True, eq=False, kw_only=True, forbid_unknown_fields=True):
    """Samples laid end to end. Build one with :meth:`from_samples`; an empty batch is valid.

    Raises:
        DataError: Offsets, lengths or fields do not fit together; the message names the field and the sample.
    """

    token_ids: np.ndarray
    """All samples' tokens, int32 ``[T]``."""
    cu_seqlens: np.ndarray
    """Offsets of the samples into ``token_ids``, int64 ``[B + 1]``, starting at 0."""
    prompt_lengths: np.ndarray
    """Prompt tokens per sample, int64 ``[B]``."""
    groups: tuple[Group, ...]
    """Group id per sample."""
    temperatures: np.ndarray
    """Sampling temperature per sample, float32 ``[B]``."""
    policy_versions: np.ndarray | None = None
    """Policy version per sample, int64 ``[B]``."""
    loss_mask: np.ndarray | None = None
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    sampler_logprobs: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    teacher_topk_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "token_ids", token_array(self.token_ids, "batch.token_ids"))
        for name in ("cu_seqlens", "prompt_lengths"):
            force_setattr(self, name, _vector(getattr(self, name), np.int64, f"batch.{name}"))
        size = len(self.prompt_lengths)
        offsets = self.cu_seqlens
        lengths = np.diff(offsets)
        if len(offsets) != size + 1 or offsets[0] != 0 or offsets[-1] != len(self.token_ids) or (lengths < 0).any():
            raise DataError(
                f"{len(offsets)} offsets do not cut {len(self.token_ids)} tokens into {size} samples",
                where="batch.cu_seqlens",
            )
        bad = np.flatnonzero((self.prompt_lengths < 1) | (self.prompt_lengths > lengths))
        if bad.size:
            i = int(bad[0])
            raise DataError(
                f"sample {i} has prompt_length {self.prompt_lengths[i]} and {lengths[i]} tokens",
                where="batch.prompt_lengths",
            )
        force_setattr(self, "groups", tuple(g if isinstance(g, str) else _integer(g, "batch.groups") for g in self.groups))
        if len(self.groups) != size:
            raise DataError(f"{len(self.groups)} group ids for {size} samples", where="batch.groups")
        self._check_per_sample(size)
        _check_response_fields(self, self.num_response_tokens, "batch")

    def _check_per_sample(self, size: int) -> None:
        force_setattr(self, "temperatures", _field(self.temperatures, size, "temperatures", "batch"))
        for i, temperature in enumerate(self.temperatures.tolist()):
            _temperature(temperature, f"batch sample {i}")
        if self.policy_versions is not None:
            versions = _vector(self.policy_versions, np.int64, "batch.policy_versions")
            if len(versions) != size:
                raise DataError(f"{len(versions)} versions for {size} samples", where="batch.policy_versions")
            force_setattr(self, "policy_versions", versions)

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> Batch:
        """Concatenate samples in the order given.

        Raises:
            DataError: A field is set on some samples and missing on others; the message names field and sample.
        """
        rows = list(samples)
        fields: dict[str, np.ndarray | None] = {name: _concat_field(rows, name) for name in _RESPONSE_FIELDS}
        lengths = [len(row.token_ids) for row in rows]
        return cls(
            token_ids=_concat([row.token_ids for row in rows], np.int32),
            cu_seqlens=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            prompt_lengths=np.asarray([row.prompt_length for row in rows], np.int64),
            groups=tuple(row.group for row in rows),
            temperatures=np.asarray([row.temperature for row in rows], np.float32),
            policy_versions=_policy_versions(rows),
            **fields,
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` as a view on the batch's arrays."""
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"sample {index} of a batch of {size}")
        return self._sample(index % size, self.cu_responses)

    def _sample(self, index: int, cu: np.ndarray) -> Sample:
        start, stop = self.cu_seqlens[index], self.cu_seqlens[index + 1]
        span = slice(cu[index], cu[index + 1])
        fields = {name: None if (v := getattr(self, name)) is None else v[span] for name in _RESPONSE_FIELDS}
        versions = self.policy_versions
        return Sample(
            token_ids=self.token_ids[start:stop],
            prompt_length=int(self.prompt_lengths[index]),
            group=self.groups[index],
            temperature=float(self.temperatures[index]),
            policy_version=None if versions is None else int(versions[index]),
            **fields,
        )

    def samples(self) -> list[Sample]:
        """The batch as a list of samples."""
        cu = self.cu_responses
        return [self._sample(i, cu) for i in range(len(self))]

    def select(self, indices: Sequence[int]) -> Batch:
        """The batch made of the given samples, in the given order; samples may repeat, and negative indices count from the end.

        Copies the samples' spans and checks nothing but the indices: what a valid batch holds is valid.

        Raises:
            IndexError: An index is outside the batch.
            DataError: The indices are not integers in one dimension.
        """
        size = len(self)
        chosen = _vector(indices, np.int64, "batch.select")
        if (outside := chosen[(chosen < -size) | (chosen >= size)]).size:
            raise IndexError(f"sample {outside[0]} of a batch of {size}")
        chosen = chosen % max(size, 1)
        selected = copy.copy(self)  # runs no checks
        cu = self.cu_responses
        offsets = np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int64)
        force_setattr(selected, "token_ids", _spans(self.token_ids, self.cu_seqlens, chosen))
        force_setattr(selected, "cu_seqlens", offsets)
        force_setattr(selected, "groups", tuple(self.groups[i] for i in chosen.tolist()))
        for name in ("prompt_lengths", "temperatures", "policy_versions"):
            if (value := getattr(self, name)) is not None:
                force_setattr(selected, name, value[chosen])
        for name in _RESPONSE_FIELDS:
            if (value := getattr(self, name)) is not None:
                force_setattr(selected, name, _spans(value, cu, chosen))
        return selected

    def replace(self, **changes: Any) -> Batch:
        """A validated copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sample, int64 ``[B]``."""
        return np.diff(self.cu_seqlens)

    @property
    def response_lengths(self) -> np.ndarray:
        """Response tokens per sample, int64 ``[B]``."""
        return self.lengths - self.prompt_lengths

    @property
    def cu_responses(self) -> np.ndarray:
        """Offsets of the samples on the response axis, int64 ``[B + 1]``."""
        return np.concatenate([[0], np.cumsum(self.response_lengths)]).astype(np.int64)

    @property
    def num_response_tokens(self) -> int:
        """Length of the response axis."""
        return int(len(self.token_ids) - self.prompt_lengths.sum())

    @property
    def mask(self) -> np.ndarray:
        """``loss_mask``, or ones where there is none, float32 ``[R]``."""
        return np.ones(self.num_response_tokens, np.float32) if self.loss_mask is None else self.loss_mask

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut a ``[R]`` or ``[R, K]`` array into one view per sample."""
        if len(values) != self.num_response_tokens:
            raise DataError(f"{len(values)} values for {self.num_response_tokens} response tokens", where="batch.split")
        return np.split(values, self.cu_responses[1:-1]) if len(self) else []


def _spans(values: np.ndarray, offsets: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """``values[offsets[i] : offsets[i + 1]]`` of the chosen ``i``, end to end; slices, as an index per token costs more."""
    bounds = zip(offsets[chosen].tolist(), offsets[chosen + 1].tolist(), strict=True)
    return np.concatenate([values[:0], *(values[start:stop] for start, stop in bounds)])


def token_array(value: ArrayLike, where: str) -> np.ndarray:
    """Token ids as int32 ``[T]``.

    Raises:
        DataError: They are not one-dimensional, not integers, or outside 0..2³¹-1.
    """
    if isinstance(value, str):
        raise DataError("is text, not token ids", where=where, remedy="encode it with the model's tokenizer")
    array = _vector(value, np.int32, where)
    if array.size and array.min() < 0:
        raise DataError(
            f"token id {array.min()} is negative", where=where, remedy="mask tokens with loss_mask, not with -100 or the like"
        )
    return array


def _as_array(value: ArrayLike, where: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors of other devices
        raise DataError(f"is no array: {error}", where=where) from None


def _vector(value: ArrayLike, dtype: type, where: str) -> np.ndarray:
    array = _as_array(value, where)
    if array.ndim != 1:
        raise DataError(f"expected one dimension, got shape {array.shape}", where=where)
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"expected integers, got {array.dtype}", where=where)
    if array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise DataError(f"a value does not fit {np.dtype(dtype).name}", where=where)
    return array.astype(dtype, copy=False)


def _field(value: ArrayLike, length: int, name: str, where: str) -> np.ndarray:
    where = f"{where}.{name}"
    array = _as_array(value, where)
    if array.ndim != 1 or len(array) != length:
        raise DataError(f"has shape {array.shape}, expected ({length},)", where=where)
    if array.dtype.kind not in "fiub":
        raise DataError(f"expected numbers, got {array.dtype}", where=where)
    return array.astype(np.float32, copy=False)


def _topk_field(value: ArrayLike, length: int, name: str, where: str) -> np.ndarray:
    where = f"{where}.{name}"
    array = _as_array(value, where)
    if array.ndim != 2 or len(array) != length or not array.shape[1]:
        raise DataError(f"has shape {array.shape}, expected ({length}, K) with K of at least 1", where=where)
    if name == "topk_ids":
        return token_array(array.reshape(-1), where).reshape(array.shape)
    if array.dtype.kind not in "fiub":
        raise DataError(f"expected numbers, got {array.dtype}", where=where)
    return array.astype(np.float32, copy=False)


def _check_response_fields(value: Sample | Batch, length: int, where: str) -> None:
    for names, check in ((TOKEN_FIELDS, _field), (TOPK_FIELDS, _topk_field)):
        for name in names:
            field = getattr(value, name)
            if field is not None:
                force_setattr(value, name, check(field, length, name, where))
    ids, teacher = value.topk_ids, value.teacher_topk_logprobs
    if teacher is not None and (ids is None or ids.shape != teacher.shape):
        raise DataError(
            f"has shape {teacher.shape}, topk_ids {'is absent' if ids is None else f'has {ids.shape}'}",
            where=f"{where}.teacher_topk_logprobs",
            remedy="give both, entry for entry",
        )
    if ids is not None and (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        raise DataError("a row names a token twice", where=f"{where}.topk_ids")


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DataError(f"expected an integer, got {value!r}", where=where)
    return int(value)


def _temperature(value: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating) or not 0 < value < float("inf"):
        raise DataError(
            f"temperature {value!r} is not a positive number",
            where=f"{where}.temperature",
            remedy="greedy responses are scored at temperature 1",
        )
    return float(value)


def _concat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _concat_field(rows: list[Sample], name: str) -> np.ndarray | None:
    values = [getattr(row, name) for row in rows]
    missing = [i for i, value in enumerate(values) if value is None]
    if len(missing) == len(rows):
        return None
    if missing:
        raise DataError(f"sample {missing[0]} has no {name}, other samples have it", where=f"batch.{name}")
    widths = {value.shape[1:] for value in values}
    if len(widths) > 1:
        raise DataError(f"samples differ in width: {sorted(shape[0] for shape in widths)}", where=f"batch.{name}")
    return _concat(values, np.float32)


def _policy_versions(rows: list[Sample]) -> np.ndarray | None:
    versions = [row.policy_version for row in rows]
    missing = [i for i, version in enumerate(versions) if version is None]
    if len(missing) == len(rows):
        return None
    if missing:
        raise DataError(f"sample {missing[0]} has no policy_version, others have one", where="batch.policy_versions")
    return np.asarray(versions, np.int64)
