"""Estimators of KL(policy ‖ reference) from samples of the policy (Schulman, "Approximating KL Divergence", 2020).

With ``d = log π_ref(x) − log π(x)``: k1 = −d, k2 = d²/2, k3 = eᵈ − 1 − d. On average over the policy k1 and k3 equal the
divergence, k2 to second order. These are *values*; a loss that adds one differentiates it as it stands. The gradient of k2
is then that of the divergence, k1's is 0 on average, and k3's is that of KL(reference ‖ policy).

Suffix legend: ``_R`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from arctic_core.losses.common import bounded_log_ratio


def k1(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Unbiased, may be negative."""
    return -log_ratio_R


def k2(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Biased, never negative."""
    return 0.5 * log_ratio_R.square()


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Unbiased, never negative."""
    return torch.expm1(log_ratio_R) - log_ratio_R


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs_R: torch.Tensor, ref_logprobs_R: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate; both inputs already masked (equal values give exactly 0)."""
    log_ratio_R, _ = bounded_log_ratio(ref_logprobs_R - logprobs_R)
    return ESTIMATORS[estimator](log_ratio_R)
