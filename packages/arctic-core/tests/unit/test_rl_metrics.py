"""The numbers of a step against their definitions."""

import math

import numpy as np
import pytest

from arctic_core.advantages import Advantages
from arctic_core.data import Batch, Sample
from arctic_core.protocol import Metric
from arctic_core.rl import metrics


def test_kl_k3_is_unbiased_on_a_small_vocabulary():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    counts = np.round(p * 1_000_000).astype(int)
    tokens = np.repeat(np.arange(5), counts)
    exact = float(np.sum(p * np.log(p / q)))
    assert metrics.kl_k3(np.log(p)[tokens], np.log(q)[tokens]) == pytest.approx(exact, rel=0, abs=1e-4)


def test_kl_k3_stays_finite_and_zero_where_equal():
    same = np.array([-1.0, -2.0], np.float32)
    assert metrics.kl_k3(same, same) == 0.0
    assert metrics.kl_k3(np.zeros(0), np.zeros(0)) == 0.0
    assert math.isfinite(metrics.kl_k3(np.array([-1000.0]), np.array([0.0])))


def test_mismatch():
    found = metrics.mismatch_metrics(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -2.9]))
    assert found["mismatch/max_abs_diff"] == pytest.approx(0.5)
    assert found["mismatch/mean_abs_diff"] == pytest.approx(0.2)
    w = np.exp([0.0, 0.5, -0.1])
    assert found["mismatch/ess"] == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))
    assert metrics.mismatch_metrics(np.zeros(0), np.zeros(0))["mismatch/ess"] == 1.0


def test_rewards():
    found = metrics.reward_metrics(np.array([1.0, 0.0, 1.2, 1.2]), ["a", "a", "b", "b"], solved=1.0)
    assert found["reward/mean"] == pytest.approx(0.85)
    assert found["reward/accuracy"] == 0.75
    assert found["reward/groups_without_signal"] == 0.5
    assert (found["reward/min"], found["reward/max"]) == (0.0, 1.2)


def test_rewards_of_failed_samples_are_left_out():
    found = metrics.reward_metrics([1.0, None, None, 0.0, 0.0], ["a", "a", "b", "c", "c"], solved=1.0)
    assert found["reward/mean"] == pytest.approx(1 / 3)
    assert found["reward/min"] == 0.0
    assert found["reward/groups_without_signal"] == 1.0


def test_advantages_are_counted_over_trained_tokens():
    batch = Batch.from_samples(
        [
            Sample(token_ids=[1, 2, 3, 4], prompt_length=1, loss_mask=[1, 0, 1]),
            Sample(token_ids=[1, 2], prompt_length=1, loss_mask=[0]),
        ]
    )
    values = np.array([1.0, np.nan, 3.0, np.nan], np.float32)
    found = metrics.advantage_metrics(batch, Advantages(values, singleton_groups=2, uncounted_samples=1))
    assert found["advantage/mean"] == 2.0
    assert found["advantage/std"] == 1.0
    assert (found["advantage/min"], found["advantage/max"]) == (1.0, 3.0)
    assert (found["advantage/singleton_groups"], found["advantage/samples_without_tokens"]) == (2.0, 1.0)
    assert metrics.sample_means(batch, values) == [2.0, 0.0]
    nothing = metrics.advantage_metrics(Batch.from_samples([]), Advantages(np.zeros(0, np.float32), 0, 0))
    assert set(nothing.values()) == {0.0}


def test_lengths_count_empty_and_cut_responses():
    batch = Batch.from_samples([Sample(token_ids=[1, 2, 3], prompt_length=1), Sample(token_ids=[1, 2], prompt_length=2)])
    found = metrics.length_metrics(batch, ["length", "stop"])
    assert (found["length/min"], found["length/mean"], found["length/max"]) == (0, 1, 2)
    assert found["length/truncated"] == 0.5
    assert found["length/prompt_mean"] == 1.5


def test_metrics_merge_as_sums_over_counts():
    parts = [{"x": Metric(sum=1.0, count=1.0)}, {"x": Metric(sum=2.0, count=5.0), "a/b": Metric(sum=1.0, count=2.0)}]
    assert metrics.merge_metrics(parts) == {"loss/x": 0.5, "a/b": 0.5}
