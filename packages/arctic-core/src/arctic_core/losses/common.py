"""Masking, bounded ratios, per-sample sums and metrics that every loss uses.

Suffix legend: ``_R`` response tokens of a packed micro-batch, ``_B`` its samples, ``_X`` either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

LOG_RATIO_LIMIT = 20.0
"""Bound of a log-ratio before ``exp``: e^20 ≈ 4.9e8 is finite in float32, and so is its gradient."""


def masked(values_R: torch.Tensor, mask_R: torch.Tensor) -> torch.Tensor:
    """``values`` with 0 in the masked slots, before any arithmetic: what they held reaches neither value nor gradient."""
    return values_R.masked_fill(~mask_R, 0.0)


def bounded_log_ratio(log_ratio_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-ratio clamped to ±:data:`LOG_RATIO_LIMIT`, and the (detached) number of slots where that changed it.

    The exponent is bounded, not the result, so the gradient is finite too (0 where clamped). NaN stays NaN.
    """
    clamped = (log_ratio_X.detach().abs() > LOG_RATIO_LIMIT).sum()
    return log_ratio_X.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), clamped


# --- one value per sample -----------------------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Sum per sample. Accumulates in float64 and in a fixed order, so a sample's sum does not depend on its neighbours."""

    @staticmethod
    def forward(ctx: Any, values_R: torch.Tensor, cu_seqlens_B: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cu_seqlens_B)
        ctx.size = values_R.shape[0]
        sums_B = torch.segment_reduce(values_R.double(), "sum", offsets=cu_seqlens_B, axis=0, initial=0.0)
        return sums_B.to(values_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (cu_seqlens_B,) = ctx.saved_tensors
        return segment_expand(grads[0], cu_seqlens_B, ctx.size), None


class _Expand(torch.autograd.Function):
    """Each sample's value at each of its tokens. Written out because torch's own backward is an atomic add on GPUs."""

    @staticmethod
    def forward(ctx: Any, values_B: torch.Tensor, cu_seqlens_B: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(cu_seqlens_B)
        return values_B.repeat_interleave(cu_seqlens_B.diff(), output_size=size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (cu_seqlens_B,) = ctx.saved_tensors
        return segment_sum(grads[0], cu_seqlens_B), None, None


def segment_sum(values_R: torch.Tensor, cu_seqlens_B: torch.Tensor) -> torch.Tensor:
    """Sum of each sample's slots, ``[B]``; 0 for an empty sample. Mask the values first."""
    return _apply(_Sum, values_R, cu_seqlens_B)


def segment_counts(mask_R: torch.Tensor, cu_seqlens_B: torch.Tensor) -> torch.Tensor:
    """Number of trained tokens of each sample, int64 ``[B]``."""
    total_R = torch.nn.functional.pad(mask_R.long().cumsum(0), (1, 0))
    return total_R[cu_seqlens_B[1:]] - total_R[cu_seqlens_B[:-1]]


def segment_mean(values_R: torch.Tensor, mask_R: torch.Tensor, cu_seqlens_B: torch.Tensor) -> torch.Tensor:
    """Mean over each sample's trained tokens, ``[B]``; 0, with gradient 0, where a sample has none."""
    counts_B = segment_counts(mask_R, cu_seqlens_B).clamp(min=1)
    return segment_sum(masked(values_R, mask_R), cu_seqlens_B) / counts_B.to(values_R.dtype)


def segment_expand(values_B: torch.Tensor, cu_seqlens_B: torch.Tensor, size: int) -> torch.Tensor:
    """Each sample's value at each of its ``size`` slots in all, ``[R]``."""
    return _apply(_Expand, values_B, cu_seqlens_B, size)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return function.apply(*arguments)


# --- metrics ------------------------------------------------------------------------------------------------------------


def metric_pairs(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    """Scalars as ``name → (sum, count)`` in Python floats. One transfer from the device for all of them."""
    if not pairs:
        return {}
    flat = torch.stack([value.detach().double() for pair in pairs.values() for value in pair]).tolist()
    return dict(zip(pairs, zip(flat[::2], flat[1::2], strict=True), strict=True))


def token_metrics(sums: Mapping[str, torch.Tensor], mask_R: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Pair each sum over trained tokens with their number."""
    trained = mask_R.sum()
    return metric_pairs({name: (value, trained) for name, value in sums.items()})
