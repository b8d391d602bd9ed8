"""Estimators with a value of its own for each token.

Suffix legend: ``_B`` samples, ``_R`` response tokens of a batch, ``_N`` trained tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from arctic_core.advantages.parts import (
    Rewards,
    centred,
    checked,
    counted_samples,
    discounted_to_go,
    finite_tokens,
    members,
    spread,
    trained_tokens,
    whitened,
)
from arctic_core.data import Batch
from arctic_core.errors import DataError, RewardError

_MAX_LOG_RATIO = 20.0  # exp stays finite


def reinforce_pp_advantages(
    rewards: Rewards,
    batch: Batch,
    *,
    baseline: bool = False,
    kl_coef: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k1",
    epsilon: float = 1e-8,
) -> np.ndarray:
    """REINFORCE++ (Hu et al. 2025): ``A_t = r − kl_coef·Σ_{s ≥ t} KL_s``, normalised over all trained tokens of the batch.

    ``KL_s`` is the estimate of KL(π_old ‖ π_ref) at trained token ``s`` from ``old_logprobs`` and ``ref_logprobs`` (Schulman
    2020: with ``q = log π_ref − log π_old``, k1 is ``−q``, k2 ``q²/2``, k3 ``e^q − 1 − q``, its exponent kept within ±20). With
    ``baseline`` the group's mean is subtracted from ``r`` first. Normalising is ``(A − mean) / (std + epsilon)``, std with
    Bessel's correction.

    Args:
        rewards: One per sample.
        batch: Gives groups, mask and log-probs; the latter are read where ``kl_coef`` is not 0, at trained tokens.
        baseline: Whether to subtract the group's mean.
        kl_coef: Weight of the penalty.
        kl_estimator: Estimate of the penalty.
        epsilon: Added to the standard deviation.

    Returns:
        Float32 ``[R]``; 0 at tokens that are not trained, and everywhere if all advantages are equal.

    Raises:
        RewardError: A reward is NaN, infinite or missing; the message names the sample's index and its group.
        DataError: The lengths differ, a log-prob field is missing, or one holds a trained token's NaN or infinity.
    """
    rewards_B = checked(rewards, batch.groups)
    if baseline:
        for indices in members(batch.groups, counted_samples(batch)).values():
            rewards_B[indices] = centred(rewards_B[indices])
    trained_R, lengths_B = trained_tokens(batch)
    advantages_N = np.repeat(rewards_B, lengths_B)
    if kl_coef and len(batch):  # an empty batch has no fields
        penalty_N = _kl(batch, trained_R, kl_estimator)
        advantages_N -= kl_coef * discounted_to_go(penalty_N, lengths_B, 1.0)
    return spread(whitened(advantages_N, epsilon), trained_R)


@dataclass(frozen=True)
class GAE:
    """What :func:`gae_advantages` returns."""

    advantages_R: np.ndarray
    """Float32 ``[R]``; 0 at tokens that are not trained."""
    returns_R: np.ndarray
    """What a critic should have predicted: advantages (before whitening) plus values, float32 ``[R]``; 0 likewise."""


def gae_advantages(
    batch: Batch,
    rewards_R: np.ndarray,
    values_R: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
    epsilon: float = 1e-8,
) -> GAE:
    """Generalised advantage estimation (Schulman et al. 2016) over the trained tokens of each sample.

    ``δ_t = r_t + γ·V_{t'} − V_t`` and ``A_t = δ_t + γλ·A_{t'}``, where ``t'`` is the *next trained token* of the same sample:
    tokens in between (another turn's, a tool's) are skipped over and pass value and advantage on unchanged. After the last one
    both are 0.

    Args:
        batch: Gives the mask and where samples begin.
        rewards_R: A reward per response token, ``[R]``. Those of tokens that are not trained are not looked at: put a
            response's reward on its last trained token.
        values_R: The critic's value of the state before each response token, ``[R]``; likewise.
        gamma: Discount γ in [0, 1].
        lam: λ in [0, 1]; 0 is one-step temporal difference, 1 the return less the value.
        whiten: Bring advantages to mean 0 and standard deviation 1 over all trained tokens of the batch.
        epsilon: Added to the standard deviation.

    Raises:
        RewardError: A trained token's reward is not finite; the message names the sample's index and its group.
        DataError: A shape, a discount or a trained token's value is wrong.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise DataError(f"{name}={number} is outside 0..1", where=f"gae.{name}")
    trained_R, lengths_B = trained_tokens(batch)
    rewards_N = finite_tokens(batch, trained_R, rewards_R, "rewards", RewardError)
    values_N = finite_tokens(batch, trained_R, values_R, "values", DataError)
    following_N = np.append(values_N[1:], 0.0)[: len(values_N)]
    following_N[np.cumsum(lengths_B)[lengths_B > 0] - 1] = 0.0
    raw_N = discounted_to_go(rewards_N + gamma * following_N - values_N, lengths_B, gamma * lam)
    advantages_N = whitened(raw_N, epsilon) if whiten else raw_N
    return GAE(spread(advantages_N, trained_R), spread(raw_N + values_N, trained_R))


def _kl(batch: Batch, trained_R: np.ndarray, estimator: Literal["k1", "k2", "k3"]) -> np.ndarray:
    """Estimate of KL(old ‖ ref) at each trained token."""
    fields = []
    for name in ("ref_logprobs", "old_logprobs"):
        value_R = getattr(batch, name)
        if value_R is None:
            raise DataError("the KL penalty needs it", where=f"batch.{name}", remedy="set it on every sample, or kl_coef to 0")
        fields.append(finite_tokens(batch, trained_R, value_R, name, DataError))
    log_ratio_N = fields[0] - fields[1]
    if estimator == "k1":
        return -log_ratio_N
    if estimator == "k2":
        return 0.5 * np.square(log_ratio_N)
    bounded_N = np.clip(log_ratio_N, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return np.expm1(bounded_N) - bounded_N
