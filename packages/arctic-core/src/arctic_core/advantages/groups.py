"""Estimators relative to a group: one value per sample.

Suffix legend: ``_B`` samples, ``_G`` samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arctic_core.advantages.parts import Rewards, centred, checked, members
from arctic_core.data import Group


def grpo_advantages(
    rewards: Rewards,
    groups: Sequence[Group],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
    counted: Sequence[bool] | np.ndarray | None = None,
) -> np.ndarray:
    """Rewards relative to their group, as in GRPO (Shao et al. 2024, "DeepSeekMath").

    ``A = (r − mean) / (std + epsilon)`` over the samples of a group (std with Bessel's correction); without ``normalize_std``
    ``A = r − mean``. A group of one, or of equal rewards, gets 0.

    Args:
        rewards: One per sample.
        groups: The caller's group id per sample.
        normalize_std: Whether to divide by the standard deviation.
        epsilon: Added to the standard deviation.
        counted: Samples that are False leave their group's mean and std and get 0; see :func:`counted_samples`.

    Returns:
        Float32 ``[B]``.

    Raises:
        RewardError: A reward is NaN, infinite or missing; the message names the sample's index and its group.
        DataError: The lengths differ.
    """
    centred_B = np.zeros(len(groups))
    rewards_B = checked(rewards, groups)
    for indices in members(groups, counted).values():
        centred_G = centred(rewards_B[indices])
        if normalize_std and centred_G.any():
            centred_G /= rewards_B[indices].std(ddof=1) + epsilon
        centred_B[indices] = centred_G
    return centred_B.astype(np.float32)


def dr_grpo_advantages(
    rewards: Rewards, groups: Sequence[Group], *, counted: Sequence[bool] | np.ndarray | None = None
) -> np.ndarray:
    """``A = r − mean`` of the group, as in Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training").

    Arguments, result and errors are those of :func:`grpo_advantages`.
    """
    return grpo_advantages(rewards, groups, normalize_std=False, counted=counted)


def rloo_advantages(
    rewards: Rewards, groups: Sequence[Group], *, counted: Sequence[bool] | np.ndarray | None = None
) -> np.ndarray:
    """Each reward less the mean of the *other* rewards of its group, as in RLOO (Kool et al. 2019; Ahmadian et al. 2024).

    A group of one has no others and gets 0. Arguments, result and errors are those of :func:`grpo_advantages`.
    """
    values_B = np.zeros(len(groups))
    rewards_B = checked(rewards, groups)
    for indices in members(groups, counted).values():
        if len(indices) > 1:
            values_B[indices] = centred(rewards_B[indices]) * (len(indices) / (len(indices) - 1))
    return values_B.astype(np.float32)
