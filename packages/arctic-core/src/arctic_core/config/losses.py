"""Options of the named losses (:attr:`arctic_core.protocol.LossSpec.options`). Needs pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from arctic_core.config.base import ConfigModel


class GRPOLossConfig(ConfigModel):
    """The clipped policy loss of GRPO, :mod:`arctic_core.losses.grpo`."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    """The importance ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = Field(0.2, ge=0)
    """The importance ratio is clipped above at ``1 + clip_high``."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, bound the loss of a token by ``dual_clip·|advantage|``; absent does not bound it."""
    on_policy: bool = False
    """Take the importance ratio against the policy as it is now (its value is 1, its gradient the policy gradient) instead
    of against ``old_logprobs``, which are then neither needed nor read."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference; needs ``ref_logprobs`` where it is not 0."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator that is added to the loss and differentiated as it stands. k1's gradient is 0 on average: it moves nothing."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


class SFTLossConfig(ConfigModel):
    """Cross-entropy, :mod:`arctic_core.losses.sft`; it has no options."""
