"""Value loss of PPO (Schulman et al. 2017; the clipping is that of OpenAI's baselines, "PPO2"), for critics you run yourself.

No engine of this package trains a critic: this is a function for your own training loop.

Suffix legend: ``_R`` response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from arctic_core.config.losses import ValueLossConfig
from arctic_core.errors import DataError
from arctic_core.losses.base import LossOutput
from arctic_core.losses.common import masked, token_metrics


def value_loss(
    values_R: torch.Tensor,
    returns_R: torch.Tensor,
    old_values_R: torch.Tensor | None,
    mask_R: torch.Tensor,
    config: ValueLossConfig,
) -> LossOutput:
    """``½·Σ max((v − R)², (clip(v, v_old ± c) − R)²)`` over trained tokens; without ``clip``, ``½·Σ (v − R)²``.

    Args:
        values_R: The critic's predictions, with gradient. Any float type; computed in float32 (float64 stays).
        returns_R: Their targets, e.g. of :mod:`arctic_core.advantages`; no gradient reaches them.
        old_values_R: Predictions when the responses were sampled; not read where ``config.clip`` is absent.
        mask_R: Final mask, bool. Masked slots of the others may hold anything.
        config: Options.

    Metrics, per trained token: ``loss``; ``clip_fraction``, tokens whose gradient the clip took; and ``return``,
    ``return_squared``, ``error``, ``error_squared`` (``R`` and ``R − v``), of which :func:`explained_variance` is made. They
    may be added up over micro-batches, ranks and steps.

    Raises:
        DataError: Shapes differ, the mask is not bool, or ``clip`` has no ``old_values_R``.
    """
    fields = {"values": values_R, "returns": returns_R, "mask": mask_R}
    if config.clip is not None:
        if old_values_R is None:
            raise DataError("`clip` needs old_values_R", where="value loss", remedy="give them, or set clip to None")
        fields["old_values"] = old_values_R
    if mask_R.dtype != torch.bool or len({tensor.shape for tensor in fields.values()}) > 1:
        shapes = {name: tuple(tensor.shape) for name, tensor in fields.items()}
        raise DataError(f"expected equal shapes and a bool mask, got {shapes} and {mask_R.dtype}", where="value loss")

    values_R = masked(_wide(values_R), mask_R)
    returns_R = masked(_wide(returns_R.detach()), mask_R)
    error_R = returns_R - values_R
    squared_R = error_R.square()
    clipped_R = torch.zeros_like(mask_R)
    if config.clip is not None and old_values_R is not None:
        old_R = masked(_wide(old_values_R.detach()), mask_R)
        bound_R = (values_R.clamp(old_R - config.clip, old_R + config.clip) - returns_R).square()
        clipped_R = bound_R > squared_R
        squared_R = torch.where(clipped_R, bound_R, squared_R)
    loss = 0.5 * squared_R.sum()
    returns_R, error_R = returns_R.double(), error_R.detach().double()  # a variance is a small difference of large sums
    sums = {
        "loss": loss,
        "clip_fraction": clipped_R.sum(),
        "return": returns_R.sum(),
        "return_squared": returns_R.square().sum(),
        "error": error_R.sum(),
        "error_squared": error_R.square().sum(),
    }
    return LossOutput(loss, token_metrics(sums, mask_R))


def explained_variance(metrics: Mapping[str, tuple[float, float]]) -> float:
    """``1 − Var(R − v) / Var(R)`` from the added-up metrics of :func:`value_loss`; NaN where the returns do not vary."""

    def variance(name: str) -> float:
        (total, count), (squares, _) = metrics[name], metrics[f"{name}_squared"]
        return max(squares / count - (total / count) ** 2, 0.0) if count else 0.0

    spread = variance("return")
    return 1.0 - variance("error") / spread if spread > 0 else math.nan


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
