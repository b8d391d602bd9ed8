"""Between the padded matrices of RL frameworks and packed batches. Needs numpy only.

Frameworks keep prompts and responses as matrices padded to the longest row, on either side. Where padding is, only an
explicit mask says: never a token id, which may be a real token too. Nothing that stands in a padded slot reaches a batch.

Suffix legend: ``_B`` samples, ``_P`` padded prompt width, ``_W`` padded response width, ``_R`` response-token axis of a packed
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arctic_core.data import TOKEN_FIELDS, TOPK_FIELDS, Batch, Group
from arctic_core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True)
class PaddedBatch:
    """A packed batch that remembers the padded layout it came from."""

    batch: Batch
    response_mask_BW: np.ndarray
    """True where the layout holds a response token, bool ``[B, W]``."""

    def pad(self, values_R: ArrayLike, fill: float = 0.0) -> np.ndarray:
        """Results in the framework's layout: ``[R]`` → ``[B, W]`` (``[R, K]`` → ``[B, W, K]``), ``fill`` in padded slots.

        Raises:
            DataError: There are more or fewer values than response tokens.
        """
        values = np.asarray(values_R)
        self._check(len(values), self.batch.num_response_tokens, "values")
        padded = np.full((*self.response_mask_BW.shape, *values.shape[1:]), fill, values.dtype)
        padded[self.response_mask_BW] = values
        return padded

    def unpad(self, values_BW: ArrayLike) -> np.ndarray:
        """The inverse of :meth:`pad`: ``[B, W]`` → ``[R]``, ``[B, W, K]`` → ``[R, K]``.

        Raises:
            DataError: The shape is not the layout's.
        """
        values = np.asarray(values_BW)
        self._check(values.shape[:2], self.response_mask_BW.shape, "values")
        return values[self.response_mask_BW]

    @staticmethod
    def _check(got: object, expected: object, where: str) -> None:
        if got != expected:
            raise DataError(f"has {got}, the layout {expected}", where=where)


def from_padded(
    prompt_ids_BP: ArrayLike,
    prompt_mask_BP: ArrayLike,
    response_ids_BW: ArrayLike,
    response_mask_BW: ArrayLike,
    *,
    groups: Sequence[Group],
    temperature: ArrayLike = 1.0,
    policy_versions: Sequence[int] | None = None,
    fields: Mapping[str, ArrayLike] | None = None,
) -> PaddedBatch:
    """Pack padded prompts and responses.

    Args:
        prompt_ids_BP: Token ids, integers ``[B, P]``; any integer in padded slots.
        prompt_mask_BP: 1 at real tokens, 0 at padding, ``[B, P]``; padding on the left, on the right or on both sides.
        response_ids_BW: Token ids, integers ``[B, W]``.
        response_mask_BW: 1 at every token the model has read or written, 0 at padding, ``[B, W]``. Tokens that are read but
            not trained on (a tool's answer) belong to it; leave them out of ``fields["loss_mask"]``.
        groups: Group id per sample.
        temperature: Sampling temperature, one for all or one per sample.
        policy_versions: Policy version per sample.
        fields: Per-token fields of a batch by name, aligned with the responses, ``[B, W]`` (``[B, W, K]`` for those of the top
            ``K`` tokens).

    Raises:
        DataError: Shapes differ, a mask holds other values than 0 and 1 or has a hole (the message names the row), a field is
            unknown, or a row's prompt is empty.
    """
    prompts, responses = _ids(prompt_ids_BP, "prompt_ids"), _ids(response_ids_BW, "response_ids")
    prompt_mask = _mask(prompt_mask_BP, prompts.shape, "prompt_mask")
    response_mask = _mask(response_mask_BW, responses.shape, "response_mask")
    if len(prompts) != len(responses):
        raise DataError(f"{len(prompts)} prompts, {len(responses)} responses", where="response_ids")
    prompt_lengths, response_lengths = prompt_mask.sum(1), response_mask.sum(1)
    ids, mask = np.concatenate([prompts, responses], axis=1), np.concatenate([prompt_mask, response_mask], axis=1)
    packed = {name: _packed(value, name, response_mask) for name, value in (fields or {}).items()}
    temperatures = _array(temperature, "temperature")
    batch = Batch(
        token_ids=ids[mask],
        cu_seqlens=np.concatenate([[0], np.cumsum(prompt_lengths + response_lengths)]).astype(np.int64),
        prompt_lengths=prompt_lengths.astype(np.int64),
        groups=tuple(groups),
        temperatures=np.broadcast_to(temperatures, (len(ids),)) if temperatures.ndim == 0 else temperatures,
        policy_versions=None if policy_versions is None else _array(policy_versions, "policy_versions"),
        **packed,
    )
    return PaddedBatch(batch, response_mask)


def _array(value: ArrayLike, where: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors of other devices or with gradient
        raise DataError(f"is no array: {error}", where=where) from None


def _ids(value: ArrayLike, where: str) -> np.ndarray:
    array = _array(value, where)
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"expected a matrix of integers, got {array.dtype} of shape {array.shape}", where=where)
    return array


def _mask(value: ArrayLike, shape: tuple[int, ...], where: str) -> np.ndarray:
    array = _array(value, where)
    if array.shape != shape:
        raise DataError(f"has shape {array.shape}, expected {shape}", where=where)
    if not ((array == 0) | (array == 1)).all():
        raise DataError("a mask holds 0 and 1 only", where=where)
    mask = array == 1
    starts = np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1  # a row without holes has one run of ones at most
    holes = np.flatnonzero(starts.sum(1) > 1)
    if holes.size:
        raise DataError(
            f"row {holes[0]} has padding between tokens",
            where=where,
            remedy="keep tokens that were read in this mask, and leave them out of loss_mask where they are not trained on",
        )
    return mask


def _packed(value: ArrayLike, name: str, mask: np.ndarray) -> np.ndarray:
    if name not in (*TOKEN_FIELDS, *TOPK_FIELDS):
        raise DataError("is no per-token field of a batch", where=f"fields.{name}")
    array = _array(value, f"fields.{name}")
    if array.shape[:2] != mask.shape:
        raise DataError(f"has shape {array.shape}, the responses {mask.shape}", where=f"fields.{name}")
    return array[mask]
