"""What the estimators share: checks, groups, and sums over trained tokens.

Suffix legend: ``_B`` samples, ``_R`` response tokens of a batch, ``_N`` trained tokens of a batch, ``_G`` samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arctic_core.data import Batch, Group
from arctic_core.errors import DataError, RewardError

Rewards = Sequence[float | None] | np.ndarray
"""One reward per sample."""


def counted_samples(batch: Batch) -> np.ndarray:
    """Which samples have a trained token, bool ``[B]``."""
    return trained_tokens(batch)[1] > 0


def per_token(batch: Batch, values_B: np.ndarray) -> np.ndarray:
    """Give every response token its sample's value: ``[B]`` → ``[R]``, float32."""
    if len(values_B) != len(batch):
        raise DataError(f"{len(values_B)} values for {len(batch)} samples", where="advantages")
    return np.repeat(np.asarray(values_B, np.float32), batch.response_lengths)


def centred(rewards_G: np.ndarray) -> np.ndarray:
    """Rewards less their mean; exactly 0 where all are equal, which the rounding of a mean does not grant."""
    return rewards_G - rewards_G.mean() if np.ptp(rewards_G) > 0 else np.zeros(len(rewards_G))


def whitened(values_N: np.ndarray, epsilon: float) -> np.ndarray:
    """Mean 0 and standard deviation 1; exactly 0 where all are equal."""
    if not len(values_N) or np.ptp(values_N) == 0:
        return np.zeros(len(values_N))
    return centred(values_N) / (values_N.std(ddof=1) + epsilon)


def trained_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Which response tokens are trained, bool ``[R]``, and how many of each sample, int64 ``[B]``."""
    trained_R = batch.mask != 0
    before_R = np.concatenate([[0], np.cumsum(trained_R)])
    return trained_R, np.diff(before_R[batch.cu_responses])


def spread(values_N: np.ndarray, trained_R: np.ndarray) -> np.ndarray:
    """Trained tokens' values in their places, 0 elsewhere: ``[N]`` → ``[R]``, float32."""
    spread_R = np.zeros(len(trained_R), np.float32)
    spread_R[trained_R] = values_N
    return spread_R


def discounted_to_go(values_N: np.ndarray, lengths_B: np.ndarray, decay: float) -> np.ndarray:
    """``S_t = x_t + decay·S_{t+1}`` inside each sample, all samples at once from their ends to their beginnings."""
    order = np.argsort(-lengths_B, kind="stable")
    lengths, ends = lengths_B[order], np.cumsum(lengths_B)[order]
    sums_N, running = np.zeros(len(values_N)), np.zeros(len(order))
    for distance in range(1, int(lengths.max(initial=0)) + 1):
        active = int(np.searchsorted(-lengths, -distance, side="right"))
        rows = ends[:active] - distance
        running[:active] = values_N[rows] + decay * running[:active]
        sums_N[rows] = running[:active]
    return sums_N


def finite_tokens(
    batch: Batch, trained_R: np.ndarray, values_R: np.ndarray, name: str, error: type[DataError] | type[RewardError]
) -> np.ndarray:
    """The trained tokens' values as float64, all finite."""
    if np.shape(values_R) != trained_R.shape:
        raise DataError(f"has shape {np.shape(values_R)}, the batch has {len(trained_R)} response tokens", where=name)
    values_N = np.asarray(values_R)[trained_R].astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(values_N))
    if bad.size:
        token = int(np.flatnonzero(trained_R)[bad[0]])
        sample = int(np.searchsorted(batch.cu_responses, token, side="right")) - 1
        raise error(
            f"sample {sample} (group {batch.groups[sample]!r}) has {values_N[bad[0]]} at response token "
            f"{token - int(batch.cu_responses[sample])}",
            where=name,
            remedy="give every trained token a finite number, or mask the token",
        )
    return values_N


def members(groups: Sequence[Group], counted: Sequence[bool] | np.ndarray | None) -> dict[Group, list[int]]:
    """Indices of each group's counted samples; groups without any are absent."""
    chosen = None if counted is None else flags(counted, groups)
    found: dict[Group, list[int]] = {}
    for i, group in enumerate(groups):
        if chosen is None or chosen[i]:
            found.setdefault(group, []).append(i)
    return found


def flags(counted: Sequence[bool] | np.ndarray, groups: Sequence[Group]) -> np.ndarray:
    """Flags of counted samples, bool ``[B]``."""
    same_length(counted, groups, "flags of counted samples")
    return np.asarray(counted, bool)


def checked(rewards: Rewards, groups: Sequence[Group]) -> np.ndarray:
    """Rewards as float64 ``[B]``; raises :class:`RewardError` where one is no finite number."""
    same_length(rewards, groups)
    return np.array([finite(reward, i, groups[i]) for i, reward in enumerate(rewards)], np.float64)


def same_length(values: Rewards | Sequence[bool], groups: Sequence[Group], what: str = "rewards") -> None:
    """Raise :class:`DataError` unless there is one value per sample."""
    if len(values) != len(groups):
        raise DataError(f"{len(values)} {what}, {len(groups)} groups", where="advantages", remedy="give one of each per sample")


def finite(reward: Any, index: int, group: Group) -> float:
    """One reward, or :class:`RewardError` naming its sample."""
    try:
        number = np.nan if reward is None else float(reward)
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise RewardError(
            f"the reward of sample {index} (group {group!r}) is {reward}",
            where="rewards",
            remedy="fix the reward function, or leave the sample out of the batch",
        )
    return number
