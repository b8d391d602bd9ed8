"""Clipped policy loss at token level, as in GRPO (Shao et al. 2024, "DeepSeekMath") after PPO (Schulman et al. 2017).

Separate clip bounds follow DAPO (Yu et al. 2025), the bound for negative advantages "dual-clip PPO" (Ye et al. 2020). The
loss is a sum over trained tokens; what it is divided by is the engine's business.

Suffix legend: ``_R`` response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from arctic_core.config.losses import GRPOLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import bounded_log_ratio, masked, token_metrics
from arctic_core.losses.kl import k3, kl_estimate


def grpo_loss(inputs: LossInputs, config: GRPOLossConfig) -> LossOutput:
    """``Σ −min(r·A, clip(r)·A) + kl_coef·KL − entropy_coef·H`` over trained tokens, with ``r = π / π_old``.

    Metrics, per trained token: ``loss``, ``policy_loss``, ``ratio``, ``clip_fraction`` (tokens whose ratio lies beyond the
    bound that matters for the sign of their advantage), ``clamped_fraction`` (log-ratio beyond ±20), ``old_kl`` (k3 of the
    policy to the old policy), ``kl`` (to the reference) where ``ref_logprobs`` are given, ``entropy`` where it has a bonus.
    """
    assert inputs.advantages_R is not None
    mask_R = inputs.mask_R
    logp_R = masked(inputs.logprobs_R, mask_R)
    advantages_R = masked(inputs.advantages_R, mask_R)
    if config.on_policy:
        old_R = logp_R.detach()
    else:
        assert inputs.old_logprobs_R is not None
        old_R = masked(inputs.old_logprobs_R, mask_R)

    log_ratio_R, clamped = bounded_log_ratio(logp_R - old_R)
    ratio_R = log_ratio_R.exp()
    policy_R, clipped_R = _clipped(ratio_R, advantages_R, config)
    loss = policy_R.sum()
    metrics = {
        "policy_loss": loss,
        "ratio": masked(ratio_R.detach(), mask_R).sum(),
        "clip_fraction": clipped_R.sum(),
        "clamped_fraction": clamped,
        "old_kl": k3(-log_ratio_R.detach()).sum(),
    }
    if inputs.ref_logprobs_R is not None:
        kl = kl_estimate(logp_R, masked(inputs.ref_logprobs_R, mask_R), config.kl_estimator).sum()
        metrics["kl"] = kl
        if config.kl_coef:
            loss = loss + config.kl_coef * kl
    if inputs.entropy_R is not None:
        metrics["entropy"] = masked(inputs.entropy_R, mask_R).sum()
        loss = loss - config.entropy_coef * metrics["entropy"]
    return LossOutput(loss, token_metrics({"loss": loss, **metrics}, mask_R))


def _clipped(ratio_R: torch.Tensor, advantages_R: torch.Tensor, config: GRPOLossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token policy loss, and where clipping took the gradient away. Masked slots come out as 0 (their advantage is 0)."""
    free_R = -ratio_R * advantages_R
    bound_R = -ratio_R.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_R
    loss_R = torch.maximum(free_R, bound_R)
    clipped_R = bound_R > free_R
    if config.dual_clip is not None:
        ceiling_R = torch.where(advantages_R < 0, -config.dual_clip * advantages_R, torch.inf)
        clipped_R = clipped_R | (loss_R > ceiling_R)
        loss_R = torch.minimum(loss_R, ceiling_R)
    return loss_R, clipped_R
