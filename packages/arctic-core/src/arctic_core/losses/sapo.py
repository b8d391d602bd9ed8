"""SAPO (Gao et al. 2025, "Soft adaptive policy optimization"): a smooth gate in the place of a clip.

Suffix legend: ``_R`` response tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from arctic_core.config.losses import SAPOLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.policy import finish_tokens, policy_view, token_ratio


def sapo_loss(inputs: LossInputs, config: SAPOLossConfig) -> LossOutput:
    """``−f(r)·A`` per token with ``f(r) = 4/τ·σ(τ·(r − 1))``; ``τ`` is ``tau_positive`` where ``A > 0``, else ``tau_negative``.

    ``f' = 1`` at ``r = 1`` and falls off to both sides, so tokens far off the old policy fade out instead of being cut. Metrics
    beside those of :func:`arctic_core.losses.policy.finish`, per trained token: ``ratio``, ``clamped_fraction`` (log-ratios
    beyond ±20), ``gate`` (``f'(r)``, the share of its gradient that a token keeps).
    """
    view = policy_view(inputs, config)
    ratio_R, metrics = token_ratio(view)
    tau_R = torch.full_like(ratio_R, config.tau_negative).masked_fill(view.advantages_R > 0, config.tau_positive)
    open_R = torch.sigmoid(tau_R * (ratio_R - 1.0))
    gate_R = (4.0 * open_R * (1.0 - open_R)).detach()
    metrics["gate"] = (gate_R.masked_fill(~view.mask_R, 0.0).sum(), view.mask_R.sum())
    return finish_tokens(view, config, -4.0 / tau_R * open_R * view.advantages_R, metrics)
