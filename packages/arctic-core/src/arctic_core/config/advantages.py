"""How rewards become advantages: one model per estimator, told apart by ``name``. Needs pydantic only.

The estimators themselves are in :mod:`arctic_core.advantages`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from arctic_core.config.base import ConfigModel


class GRPOAdvantageConfig(ConfigModel):
    """GRPO: rewards relative to their group's mean, in units of its standard deviation."""

    name: Literal["grpo"] = "grpo"
    """The estimator. In a job file that names none: the one with the loss's name, or ``grpo`` where there is none such."""
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation; false only centres them."""
    epsilon: float = Field(1e-4, gt=0)
    """Added to the standard deviation."""

    def required_fields(self) -> tuple[str, ...]:
        """Batch fields that the estimator reads."""
        return ()


class DrGRPOAdvantageConfig(ConfigModel):
    """Dr. GRPO: rewards less their group's mean."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """The estimator."""

    def required_fields(self) -> tuple[str, ...]:
        """Batch fields that the estimator reads."""
        return ()


class RLOOAdvantageConfig(ConfigModel):
    """RLOO: each reward less the mean of the other rewards of its group."""

    name: Literal["rloo"] = "rloo"
    """The estimator."""

    def required_fields(self) -> tuple[str, ...]:
        """Batch fields that the estimator reads."""
        return ()


class ReinforcePPAdvantageConfig(ConfigModel):
    """REINFORCE++: rewards, less a KL penalty to come, normalised over all trained tokens of the batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """The estimator."""
    baseline: bool = False
    """First subtract the group's mean reward (the variant REINFORCE++-baseline)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty on each token; where it is not 0, ``old_logprobs`` and ``ref_logprobs`` are needed."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimate of that penalty; absent means k1. Goes with a ``kl_coef``."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the standard deviation."""

    @model_validator(mode="after")
    def _estimator_is_used(self) -> ReinforcePPAdvantageConfig:
        if self.kl_estimator is not None and not self.kl_coef:
            raise ValueError("kl_estimator goes with a kl_coef above 0")
        return self

    def required_fields(self) -> tuple[str, ...]:
        """Batch fields that the estimator reads."""
        return ("old_logprobs", "ref_logprobs") if self.kl_coef else ()


AdvantageConfig = Annotated[
    GRPOAdvantageConfig | DrGRPOAdvantageConfig | RLOOAdvantageConfig | ReinforcePPAdvantageConfig,
    Field(discriminator="name"),
]
"""The critic-free estimators, told apart by ``name``. GAE needs a critic's values, so it is a function alone
(:func:`arctic_core.advantages.gae_advantages`)."""
