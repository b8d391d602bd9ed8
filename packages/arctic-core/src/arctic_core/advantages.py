"""Advantages from rewards. Needs numpy only.

Suffix legend: ``_B`` samples, ``_R`` response tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arctic_core.data import Batch, Group
from arctic_core.errors import DataError, RewardError


def grpo_advantages(
    rewards: Sequence[float | None] | np.ndarray,
    groups: Sequence[Group],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
    counted: Sequence[bool] | None = None,
) -> np.ndarray:
    """Rewards relative to their group, as in GRPO (Shao et al. 2024, "DeepSeekMath").

    ``A = (r − mean) / (std + epsilon)`` over the samples of a group (std with Bessel's correction); without ``normalize_std``
    ``A = r − mean``, as in Dr. GRPO (Liu et al. 2025). A group of one, or of equal rewards, gets 0.

    Args:
        rewards: One per sample.
        groups: The caller's group id per sample, in any order, interleaved or not.
        counted: Samples that are False leave their group's mean and std and get 0 (e.g. those without a trained token).

    Returns:
        Float32 ``[B]``.

    Raises:
        RewardError: A reward is NaN, infinite or missing; the message names the sample's index and its group.
        DataError: The lengths differ.
    """
    size = len(groups)
    if len(rewards) != size or (counted is not None and len(counted) != size):
        raise DataError(f"{len(rewards)} rewards, {size} groups", where="advantages", remedy="give one of each per sample")
    rewards_B = np.array([_checked(reward, i, groups[i]) for i, reward in enumerate(rewards)], np.float64)
    advantages_B = np.zeros(size, np.float64)
    members: dict[Group, list[int]] = {}
    for i, group in enumerate(groups):
        if counted is None or counted[i]:
            members.setdefault(group, []).append(i)
    for indices in members.values():
        group_rewards = rewards_B[indices]
        centred = group_rewards - group_rewards.mean()
        if len(indices) < 2 or np.ptp(group_rewards) == 0:
            continue
        advantages_B[indices] = centred / (group_rewards.std(ddof=1) + epsilon) if normalize_std else centred
    return advantages_B.astype(np.float32)


def per_token(batch: Batch, values_B: np.ndarray) -> np.ndarray:
    """Give every response token its sample's value: ``[B]`` → ``[R]``, float32."""
    if len(values_B) != len(batch):
        raise DataError(f"{len(values_B)} values for {len(batch)} samples", where="advantages")
    return np.repeat(np.asarray(values_B, np.float32), batch.response_lengths)


def _checked(reward: float | None, index: int, group: Group) -> float:
    if reward is None or not np.isfinite(reward):
        raise RewardError(
            f"the reward of sample {index} (group {group!r}) is {reward}",
            where="rewards",
            remedy="fix the reward function, or leave the sample out of the batch",
        )
    return float(reward)
