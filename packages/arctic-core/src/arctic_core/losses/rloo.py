"""RLOO (Ahmadian et al. 2024, "Back to basics"): a whole response is one action.

Suffix legend: ``_B`` samples.
"""

from __future__ import annotations

from arctic_core.config.losses import RLOOLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.clipped import clipped_term
from arctic_core.losses.common import segment_mean
from arctic_core.losses.mismatch import sequence_weights
from arctic_core.losses.policy import finish, policy_view, sequence_ratio


def rloo_loss(inputs: LossInputs, config: RLOOLossConfig) -> LossOutput:
    """``Σ_B −min(r·A, clip(r)·A)`` with ``r`` the ratio of the response's probability, the product over its trained tokens.

    The product is taken in log space and bounded to ±20 there. ``A`` is the mean of the response's trained tokens'
    advantages, which usually are all equal. On the first step of a policy the gradient is REINFORCE's, ``−A·∇log π(response)``.
    KL and entropy are summed over tokens. Metrics beside those of :func:`arctic_core.losses.policy.finish`, per response with a
    trained token: ``loss``, ``policy_loss``, ``ratio``, ``clip_fraction``, ``clamped_fraction``.
    """
    view = policy_view(inputs, config)
    ratio_B, metrics = sequence_ratio(view, geometric=False)
    advantages_B = segment_mean(view.advantages_R, view.mask_R, view.cu_seqlens_B)
    policy_B, clipped_B = clipped_term(ratio_B, advantages_B, config.clip_low, config.clip_high)
    metrics["clip_fraction"] = (clipped_B.sum(), view.trained_sequences)
    if config.mismatch != "none":
        assert view.log_rho_R is not None  # policy_view saw to it
        weights_B, weight_metrics = sequence_weights(view.log_rho_R, view.mask_R, view.cu_seqlens_B, config)
        policy_B = weights_B * policy_B
        metrics |= weight_metrics
    return finish(view, config, policy_B.sum(), view.trained_sequences, metrics)
