"""Which samples are worth training on.

Suffix legend: ``_B`` samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arctic_core.advantages.parts import Rewards, finite, flags, members, same_length
from arctic_core.data import Group


@dataclass(frozen=True)
class GroupFilter:
    """What :func:`filter_groups` kept."""

    kept: np.ndarray
    """Indices of the samples kept, ascending, int64."""
    groups_dropped: int
    """Groups of which nothing is left."""
    samples_dropped: int
    """Samples that are gone, failed ones included."""
    samples_failed: int
    """Samples dropped because they have no reward."""


def filter_groups(
    rewards: Rewards,
    groups: Sequence[Group],
    *,
    uniform: bool = True,
    failed: bool = False,
    counted: Sequence[bool] | np.ndarray | None = None,
) -> GroupFilter:
    """Leave out what teaches nothing, and count it.

    Args:
        rewards: One per sample.
        groups: The caller's group id per sample.
        uniform: Drop groups whose rewards are all equal, groups of one included (DAPO, Yu et al. 2025, samples others instead).
        failed: Drop samples whose reward is ``None``: the attempt failed for reasons that are not the model's. Otherwise such
            a reward is refused. NaN and infinity are refused always.
        counted: Samples that are False have no part in the decision and share their group's fate (a group without any counted
            sample is uniform); see :func:`counted_samples`.

    Raises:
        RewardError: A reward is NaN, infinite, or missing without ``failed``; the message names the sample's index and group.
        DataError: The lengths differ.
    """
    same_length(rewards, groups)
    present_B = np.array([not failed or reward is not None for reward in rewards], bool)
    rewards_B = np.zeros(len(groups))
    left = np.flatnonzero(present_B)
    for i in left:
        rewards_B[i] = finite(rewards[i], int(i), groups[i])
    kept_B = present_B.copy()
    if uniform:
        voting_B = present_B if counted is None else present_B & flags(counted, groups)
        voters = members(groups, voting_B)
        varied = {group for group, indices in voters.items() if np.ptp(rewards_B[indices]) > 0}
        kept_B &= np.array([group in varied for group in groups], bool)
    remaining = {group for group, kept in zip(groups, kept_B, strict=True) if kept}
    return GroupFilter(
        kept=np.flatnonzero(kept_B).astype(np.int64),
        groups_dropped=len(set(groups) - remaining),
        samples_dropped=int((~kept_B).sum()),
        samples_failed=int((~present_B).sum()),
    )
