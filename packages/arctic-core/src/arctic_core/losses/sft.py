"""Cross-entropy of the trained tokens, for supervised fine-tuning."""

from __future__ import annotations

from arctic_core.config.losses import SFTLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import masked, token_metrics


def sft_loss(inputs: LossInputs, config: SFTLossConfig) -> LossOutput:
    """``−Σ log π`` over trained tokens. Metric: ``loss`` per trained token (nats); the perplexity is its exponential."""
    loss = -masked(inputs.logprobs_R, inputs.mask_R).sum()
    return LossOutput(loss, token_metrics({"loss": loss}, inputs.mask_R))
