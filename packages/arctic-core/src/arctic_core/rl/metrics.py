"""The numbers of one training step, from plain arrays. Needs numpy only.

Suffix legend: ``_R`` response-token axis of a packed batch, ``_B`` samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from arctic_core.advantages import Advantages
from arctic_core.data import Batch
from arctic_core.protocol import FinishReason, Metric

_ENGINE_METRICS = {"zorro_saved": "tokens/zorro_saved"}
_MAX_LOG_RATIO = 20.0  # exp stays finite; a token this far off is reported by the largest difference anyway


def kl_k3(samples_R: np.ndarray, other_R: np.ndarray) -> float:
    """Mean of the k3 estimate (nats) of KL(sampled ‖ other) from tokens drawn by the first.

    ``k3 = exp(r) - 1 - r`` with ``r = other - sampled`` (Schulman, "Approximating KL Divergence", 2020); 0 without tokens.
    """
    if not len(samples_R):
        return 0.0
    log_ratio_R = np.clip(other_R.astype(np.float64) - samples_R, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float(np.mean(np.expm1(log_ratio_R) - log_ratio_R))


def mismatch_metrics(trainer_R: np.ndarray, sampler_R: np.ndarray) -> dict[str, float]:
    """How far the trainer's log-probs of the sampled tokens are from the sampler's own.

    ``ess`` is the effective share of tokens, ``(Σw)² / (N Σw²)`` with ``w = exp(trainer - sampler)``; 1 when they agree.
    """
    if not len(trainer_R):
        return {"mismatch/max_abs_diff": 0.0, "mismatch/mean_abs_diff": 0.0, "mismatch/kl_k3": 0.0, "mismatch/ess": 1.0}
    difference_R = trainer_R.astype(np.float64) - sampler_R
    weight_R = np.exp(np.clip(difference_R, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    return {
        "mismatch/max_abs_diff": float(np.abs(difference_R).max()),
        "mismatch/mean_abs_diff": float(np.abs(difference_R).mean()),
        "mismatch/kl_k3": kl_k3(sampler_R, trainer_R),
        "mismatch/ess": float(weight_R.sum() ** 2 / (len(weight_R) * np.square(weight_R).sum())),
    }


def reward_metrics(rewards: Sequence[float | None], groups: Sequence[int | str], solved: float) -> dict[str, float]:
    """Moments of the rewards, the share solved, and the share of groups whose rewards are all equal (no signal).

    Samples without a reward are left out; at least one must have one.
    """
    by_group: dict[int | str, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            by_group.setdefault(group, []).append(reward)
    rewards_B = np.array([reward for reward in rewards if reward is not None], np.float64)
    flat = [min(values) == max(values) for values in by_group.values()]
    return {
        "reward/mean": float(rewards_B.mean()),
        "reward/std": float(rewards_B.std()),
        "reward/min": float(rewards_B.min()),
        "reward/max": float(rewards_B.max()),
        "reward/accuracy": float((rewards_B >= solved).mean()),
        "reward/groups_without_signal": float(np.mean(flat)),
    }


def length_metrics(batch: Batch, finish: Sequence[FinishReason]) -> dict[str, float]:
    """Lengths in tokens, and the share of responses cut at the limit."""
    lengths_B = batch.response_lengths
    return {
        "length/mean": float(lengths_B.mean()),
        "length/min": float(lengths_B.min()),
        "length/max": float(lengths_B.max()),
        "length/prompt_mean": float(batch.prompt_lengths.mean()),
        "length/truncated": float(np.mean([reason == "length" for reason in finish])),
    }


def advantage_metrics(batch: Batch, advantages: Advantages) -> dict[str, float]:
    """Moments of the advantages over trained tokens (0 where there is none), and what the estimator left out."""
    trained_N = advantages.advantages_R[batch.mask != 0].astype(np.float64)
    values_N = trained_N if len(trained_N) else np.zeros(1)
    return {
        "advantage/mean": float(values_N.mean()),
        "advantage/std": float(values_N.std()),
        "advantage/min": float(values_N.min()),
        "advantage/max": float(values_N.max()),
        "advantage/singleton_groups": float(advantages.singleton_groups),
        "advantage/samples_without_tokens": float(advantages.uncounted_samples),
    }


def sample_means(batch: Batch, values_R: np.ndarray) -> list[float]:
    """Each sample's mean over its trained tokens; 0 where it has none."""
    pairs = zip(batch.split(values_R), batch.split(batch.mask), strict=True)
    return [float(values[mask != 0].mean(dtype=np.float64)) if mask.any() else 0.0 for values, mask in pairs]


def merge_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Exact means of (sum, count) metrics over several optimizer steps; those that are not the engine's own are the loss's."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name] + metric if name in total else metric
    places = {name: _ENGINE_METRICS.get(name, name if "/" in name else f"loss/{name}") for name in total}
    return {places[name]: metric.mean for name, metric in total.items()}
