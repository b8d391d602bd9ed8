"""The clipped policy losses: PPO's, and those that differ from it in what a ratio belongs to and in how tokens are averaged.

The term of a token is ``−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)`` (PPO, Schulman et al. 2017), with the bounds apart
as in DAPO (Yu et al. 2025), and where ``dual_clip`` is given and ``A < 0`` at most ``dual_clip·|A|`` (Ye et al. 2020).

Metrics beside those of :func:`arctic_core.losses.policy.finish`: ``ratio`` and ``clamped_fraction`` (log-ratios beyond ±20) per
trained token, or per sequence where the ratio is the sequence's; ``clip_fraction``, the trained tokens whose gradient a bound
took away.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_B`` samples, ``_X`` either.
"""

from __future__ import annotations

import torch

from arctic_core.config.losses import (
    ClippedLossConfig,
    DAPOLossConfig,
    DrGRPOLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    PPOLossConfig,
    ReinforcePPLossConfig,
)
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import segment_expand
from arctic_core.losses.policy import finish_tokens, policy_view, sequence_ratio, token_ratio


def grpo_loss(inputs: LossInputs, config: GRPOLossConfig) -> LossOutput:
    """GRPO (Shao et al. 2024, "DeepSeekMath"): the clipped term, by default averaged over each response.

    ``ratio_level="sequence"`` takes the ratio of :func:`gspo_loss` instead of the token's.
    """
    return _sequence_level(inputs, config) if config.ratio_level == "sequence" else _token_level(inputs, config)


def dapo_loss(inputs: LossInputs, config: DAPOLossConfig) -> LossOutput:
    """DAPO (Yu et al. 2025): clip-higher, tokens summed, for one mean over the tokens of the whole step."""
    return _token_level(inputs, config)


def dr_grpo_loss(inputs: LossInputs, config: DrGRPOLossConfig) -> LossOutput:
    """Dr. GRPO (Liu et al. 2025, "Understanding R1-zero-like training"): tokens summed, to be divided by a constant."""
    return _token_level(inputs, config)


def ppo_loss(inputs: LossInputs, config: PPOLossConfig) -> LossOutput:
    """PPO's policy loss (Schulman et al. 2017), tokens summed."""
    return _token_level(inputs, config)


def reinforce_pp_loss(inputs: LossInputs, config: ReinforcePPLossConfig) -> LossOutput:
    """REINFORCE++ (Hu 2025): PPO's token loss without a critic; what is new is in its advantages."""
    return _token_level(inputs, config)


def gspo_loss(inputs: LossInputs, config: GSPOLossConfig) -> LossOutput:
    """GSPO (Zheng et al. 2025): the ratio is the sequence's, the geometric mean over its trained tokens.

    Each token's term is that ratio, clipped, with the token's own advantage. The gradient goes through the ratio, and so
    reaches all trained tokens of the sequence alike.
    """
    return _sequence_level(inputs, config)


def _token_level(inputs: LossInputs, config: ClippedLossConfig) -> LossOutput:
    view = policy_view(inputs, config)
    ratio_R, metrics = token_ratio(view)
    policy_R, clipped_R = clipped_term(ratio_R, view.advantages_R, config.clip_low, config.clip_high, config.dual_clip)
    return finish_tokens(view, config, policy_R, metrics | {"clip_fraction": (clipped_R.sum(), view.mask_R.sum())})


def _sequence_level(inputs: LossInputs, config: ClippedLossConfig) -> LossOutput:
    view = policy_view(inputs, config)
    ratio_B, metrics = sequence_ratio(view, geometric=True)
    ratio_R = segment_expand(ratio_B, view.cu_seqlens_B, len(view.mask_R))
    policy_R, clipped_R = clipped_term(ratio_R, view.advantages_R, config.clip_low, config.clip_high, config.dual_clip)
    return finish_tokens(view, config, policy_R, metrics | {"clip_fraction": (clipped_R.sum(), view.mask_R.sum())})


def clipped_term(
    ratio_X: torch.Tensor, advantages_X: torch.Tensor, low: float, high: float, dual: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped term, and (bool) where a bound took its gradient away. An advantage of 0 gives 0; NaN stays NaN."""
    free_X = -ratio_X * advantages_X
    bound_X = -ratio_X.clamp(1.0 - low, 1.0 + high) * advantages_X
    clipped_X = bound_X > free_X
    term_X = torch.where(clipped_X, bound_X, free_X)
    if dual is not None:
        ceiling_X = -dual * advantages_X
        over_X = (advantages_X < 0) & (term_X > ceiling_X)
        term_X = torch.where(over_X, ceiling_X, term_X)
        clipped_X = clipped_X | over_X
    return term_X, clipped_X
