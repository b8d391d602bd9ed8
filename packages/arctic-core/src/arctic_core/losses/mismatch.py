"""Corrections for a sampler whose probabilities differ from the trainer's: ``ρ = π_old / π_sampler``.

- TIS truncates: ``min(ρ, high)`` (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
- MIS masks: ``ρ`` inside ``[low, high]``, 0 outside (Liu et al. 2025, "When speed kills stability").
- IcePop masks too, tokens only, with a lower bound by default (Ling team 2025, "Every step evolves").

``ρ`` belongs to a token, or to a sequence: the product over its trained tokens, or their geometric mean. Both are taken in log
space, and every exponent is bounded to ±20. The weights carry no gradient and multiply the policy term, not the KL and entropy
terms. What gets weight 0 keeps its place in the denominator that the engine divides by: a rejected token is a token with no
policy gradient, not a token that was never there. NaN stays NaN.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_B`` samples, ``_X`` either.
"""

from __future__ import annotations

import torch

from arctic_core.config.losses import PolicyLossConfig
from arctic_core.losses.common import bounded_log_ratio, segment_counts, segment_expand, segment_mean, segment_sum
from arctic_core.losses.kl import k3

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def mismatch_weights(log_rho_X: torch.Tensor, config: PolicyLossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights by ``config.mismatch`` (not ``none``), and where a bound changed ``ρ`` (bool). No gradient."""
    bounded_X, _ = bounded_log_ratio(log_rho_X.detach())
    rho_X = bounded_X.exp()
    low, high = config.mismatch_bounds
    if config.mismatch == "tis":
        return rho_X.clamp(max=high), rho_X > high
    outside_X = (rho_X < low) | (rho_X > high)  # false for NaN, which so stays visible
    return torch.where(outside_X, 0.0, rho_X), outside_X


def sequence_log_rho(log_rho_R: torch.Tensor, mask_R: torch.Tensor, cu_seqlens_B: torch.Tensor, level: str) -> torch.Tensor:
    """``log ρ`` of each sample: the sum (``sequence``) or the mean (``geometric``) of its trained tokens' (masked already)."""
    if level == "sequence":
        return segment_sum(log_rho_R, cu_seqlens_B)
    return segment_mean(log_rho_R, mask_R, cu_seqlens_B)


def token_weights(
    log_rho_R: torch.Tensor, mask_R: torch.Tensor, cu_seqlens_B: torch.Tensor, config: PolicyLossConfig
) -> tuple[torch.Tensor, Pairs]:
    """The weight of each token, at whatever level ``ρ`` lives, with metrics (see :func:`weight_metrics`)."""
    if config.mismatch_level == "token":
        weights_R, changed_R = mismatch_weights(log_rho_R, config)
        return weights_R, weight_metrics(weights_R, changed_R, mask_R, config)
    weights_B, metrics = sequence_weights(log_rho_R, mask_R, cu_seqlens_B, config)
    return segment_expand(weights_B, cu_seqlens_B, len(mask_R)), metrics


def sequence_weights(
    log_rho_R: torch.Tensor, mask_R: torch.Tensor, cu_seqlens_B: torch.Tensor, config: PolicyLossConfig
) -> tuple[torch.Tensor, Pairs]:
    """The weight of each sample, with metrics (see :func:`weight_metrics`)."""
    log_rho_B = sequence_log_rho(log_rho_R, mask_R, cu_seqlens_B, config.mismatch_level)
    weights_B, changed_B = mismatch_weights(log_rho_B, config)
    return weights_B, weight_metrics(weights_B, changed_B, segment_counts(mask_R, cu_seqlens_B) > 0, config)


def weight_metrics(
    weights_X: torch.Tensor, changed_X: torch.Tensor, trained_X: torch.Tensor, config: PolicyLossConfig
) -> Pairs:
    """``mismatch_weight``, and ``mismatch_truncated`` (TIS) or ``mismatch_rejected``: per trained token, or per sample with
    one."""
    count = trained_X.sum()
    changed = "mismatch_truncated" if config.mismatch == "tis" else "mismatch_rejected"
    return {
        "mismatch_weight": (weights_X.masked_fill(~trained_X, 0.0).sum(), count),
        changed: ((changed_X & trained_X).sum(), count),
    }


def gap_metrics(log_rho_R: torch.Tensor, mask_R: torch.Tensor) -> Pairs:
    """How far sampler and trainer are apart, per trained token, corrected or not: ``mismatch_kl``, the k3 estimate of
    KL(sampler ‖ trainer) in nats, and ``mismatch_abs_diff``, the mean ``|Δ log π|``. The input is masked already."""
    count = mask_R.sum()
    return {"mismatch_kl": (k3(log_rho_R).sum(), count), "mismatch_abs_diff": (log_rho_R.abs().sum(), count)}
