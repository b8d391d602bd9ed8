"""Masking and metric helpers that every loss uses.

Suffix legend: ``_R`` response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Bound of a log-ratio before ``exp``: e^20 ≈ 4.9e8 is finite in float32, and so is its gradient."""


def masked(values_R: torch.Tensor, mask_R: torch.Tensor) -> torch.Tensor:
    """``values`` with 0 in the masked slots, before any arithmetic: what they held reaches neither value nor gradient."""
    return values_R.masked_fill(~mask_R, 0.0)


def bounded_log_ratio(log_ratio_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-ratio clamped to ±:data:`LOG_RATIO_LIMIT`, and the (detached) number of slots where that changed it.

    The exponent is bounded, not the result, so the gradient is finite too (0 where clamped). NaN stays NaN.
    """
    clamped = (log_ratio_R.detach().abs() > LOG_RATIO_LIMIT).sum()
    return log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), clamped


def token_metrics(sums: dict[str, torch.Tensor], mask_R: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Pair each sum over trained tokens with their number. One transfer from the device for all of them."""
    values = torch.stack([*(value.detach().double() for value in sums.values()), mask_R.sum().double()]).tolist()
    return {name: (value, values[-1]) for name, value in zip(sums, values, strict=False)}
