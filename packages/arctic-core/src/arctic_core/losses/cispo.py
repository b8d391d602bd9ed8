"""CISPO (MiniMax 2025, "MiniMax-M1"): clip the importance weight, not the update.

Suffix legend: ``_R`` response tokens of a micro-batch.
"""

from __future__ import annotations

from arctic_core.config.losses import CISPOLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import masked
from arctic_core.losses.policy import finish_tokens, policy_view, token_ratio


def cispo_loss(inputs: LossInputs, config: CISPOLossConfig) -> LossOutput:
    """``−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log π`` per token, where ``sg`` stops the gradient.

    Every trained token keeps a gradient, clipped or not. Metrics beside those of :func:`arctic_core.losses.policy.finish`, per
    trained token: ``ratio`` and ``clamped_fraction`` (log-ratios beyond ±20) before the clip, ``clip_fraction`` (tokens whose
    weight was clipped).
    """
    view = policy_view(inputs, config)
    ratio_R, metrics = token_ratio(view)
    ratio_R = ratio_R.detach()
    weight_R = ratio_R.clamp(None if config.clip_low is None else 1.0 - config.clip_low, 1.0 + config.clip_high)
    metrics["clip_fraction"] = (masked((weight_R != ratio_R).float(), view.mask_R).sum(), view.mask_R.sum())
    return finish_tokens(view, config, -weight_R * view.advantages_R * view.logp_R, metrics)
