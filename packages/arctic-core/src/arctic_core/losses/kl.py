"""Estimators of KL(policy ‖ reference) from samples of the policy (Schulman, "Approximating KL Divergence", 2020).

With ``d = log π_ref(x) − log π(x)``: k1 = −d, k2 = d²/2, k3 = eᵈ − 1 − d. On average over the policy k1 and k3 equal the
divergence, k2 to second order. That is their *value*. Their *gradient* is another matter, and named apart:

- ``own`` differentiates the estimator as it stands. On average over the policy, k2 gives the gradient of KL(π ‖ π_ref), k1
  gives 0, and k3 that of KL(π_ref ‖ π).
- ``score`` keeps the value and takes ``(log π − log π_ref)·∇log π``: the gradient of KL(π ‖ π_ref) whatever the value.

Where the samples are an older policy's, each token is weighted by ``r = π / π_old`` (Tang and Munos, "On a few pitfalls in
KL divergence gradient estimation for RL", 2025). Differentiated with its weight, ``own`` gives the gradient of
KL(π ‖ π_ref) for k1 and k3, not for k2. ``score`` is weighted by the value of ``r`` alone and stays right for all three.

Suffix legend: ``_R`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from arctic_core.losses.common import LOG_RATIO_LIMIT


def k1(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Unbiased, may be negative."""
    return -log_ratio_R


def k2(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Biased, never negative."""
    return 0.5 * log_ratio_R.square()


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Unbiased, never negative. ``d`` is bounded to 20 from above, where it carries no gradient.

    Below −20 nothing overflows: the value goes on as ``−1 − d``, and the pull towards a reference that finds the token all but
    impossible stays.
    """
    bounded_R = log_ratio_R.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(bounded_R) - bounded_R


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs_R: torch.Tensor, ref_logprobs_R: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate with its ``own`` gradient; both inputs already masked (equal values give exactly 0)."""
    return ESTIMATORS[estimator](ref_logprobs_R - logprobs_R)


def kl_term(
    logprobs_R: torch.Tensor,
    ref_logprobs_R: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    gradient: Literal["own", "score"] = "own",
    importance_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token KL with a chosen value and a chosen gradient; all inputs already masked.

    Args:
        importance_R: ``π / π_old`` with its gradient, where the samples are not the policy's own.
    """
    value_R = kl_estimate(logprobs_R, ref_logprobs_R, estimator)
    if gradient == "score":
        score_R = (logprobs_R - ref_logprobs_R).detach()
        value_R = value_R.detach() + score_R * (logprobs_R - logprobs_R.detach())
        importance_R = None if importance_R is None else importance_R.detach()
    return value_R if importance_R is None else importance_R * value_R
