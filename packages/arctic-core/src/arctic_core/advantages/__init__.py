"""Advantages from rewards, and filters of groups. Needs numpy only; float64 inside, float32 out.

Suffix legend: ``_B`` samples, ``_R`` response tokens of a batch.

Three rules hold for all estimators. Groups are what the caller says they are, in any order, interleaved or not. A reward that
is no finite number is refused with its sample's index and group. A sample without a trained token has no part in a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arctic_core.advantages.filters import GroupFilter, filter_groups
from arctic_core.advantages.groups import dr_grpo_advantages, grpo_advantages, rloo_advantages
from arctic_core.advantages.parts import Rewards, counted_samples, members, per_token
from arctic_core.advantages.tokens import GAE, gae_advantages, reinforce_pp_advantages
from arctic_core.config.advantages import (
    AdvantageConfig,
    DrGRPOAdvantageConfig,
    GRPOAdvantageConfig,
    ReinforcePPAdvantageConfig,
    RLOOAdvantageConfig,
)
from arctic_core.data import Batch, Group

__all__ = [
    "GAE",
    "Advantages",
    "GroupFilter",
    "compute_advantages",
    "counted_samples",
    "dr_grpo_advantages",
    "filter_groups",
    "gae_advantages",
    "grpo_advantages",
    "per_token",
    "reinforce_pp_advantages",
    "rloo_advantages",
]


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch, and what there is to say about them."""

    advantages_R: np.ndarray
    """Float32 ``[R]``; 0 at tokens that are not trained."""
    singleton_groups: int
    """Groups with one counted sample. Estimators relative to a group give it 0."""
    uncounted_samples: int
    """Samples without a trained token, which have no part in any mean."""


def compute_advantages(config: AdvantageConfig, rewards: Rewards, batch: Batch) -> Advantages:
    """Per-token advantages of a batch by the estimator that ``config`` describes.

    Args:
        config: One of the models of :mod:`arctic_core.config.advantages`.
        rewards: One per sample.
        batch: Needs the fields of ``config.required_fields()``.

    Raises:
        RewardError: A reward is NaN, infinite or missing; the message names the sample's index and its group.
        DataError: The lengths differ, or the batch lacks a field.
    """
    counted_B = counted_samples(batch)
    sizes = [len(indices) for indices in members(batch.groups, counted_B).values()]
    match config:
        case ReinforcePPAdvantageConfig():
            advantages_R = reinforce_pp_advantages(
                rewards,
                batch,
                baseline=config.baseline,
                kl_coef=config.kl_coef,
                kl_estimator=config.kl_estimator or "k1",
                epsilon=config.epsilon,
            )
        case _:
            values_B = _per_sample(config, rewards, batch.groups, counted_B)
            advantages_R = np.where(batch.mask != 0, per_token(batch, values_B), np.float32(0))
    return Advantages(advantages_R, sizes.count(1), int(len(batch) - counted_B.sum()))


def _per_sample(
    config: GRPOAdvantageConfig | DrGRPOAdvantageConfig | RLOOAdvantageConfig,
    rewards: Rewards,
    groups: Sequence[Group],
    counted_B: np.ndarray,
) -> np.ndarray:
    match config:
        case GRPOAdvantageConfig():
            return grpo_advantages(
                rewards, groups, normalize_std=config.normalize_std, epsilon=config.epsilon, counted=counted_B
            )
        case DrGRPOAdvantageConfig():
            return dr_grpo_advantages(rewards, groups, counted=counted_B)
        case RLOOAdvantageConfig():
            return rloo_advantages(rewards, groups, counted=counted_B)
