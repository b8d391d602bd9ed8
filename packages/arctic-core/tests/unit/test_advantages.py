"""Group-normalised advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_core.advantages import grpo_advantages, per_token
from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError, RewardError


def test_formula_with_and_without_std_over_interleaved_groups() -> None:
    rewards, groups = [1.0, 10.0, 3.0, 20.0, 8.0], ["a", "b", "a", "b", "a"]
    for normalize in (True, False):
        actual = grpo_advantages(rewards, groups, normalize_std=normalize, epsilon=1e-3)
        for group in "ab":
            rows = [i for i, g in enumerate(groups) if g == group]
            values = np.array(rewards)[rows]
            expected = values - values.mean()
            if normalize:
                expected = expected / (np.std(values, ddof=1) + 1e-3)
            np.testing.assert_allclose(actual[rows], expected, rtol=1e-6)
    assert actual.dtype == np.float32


def test_a_group_of_one_and_equal_rewards_give_exactly_zero() -> None:
    assert grpo_advantages([5.0, 0.1, 0.1, 0.1], [7, 8, 8, 8]).tolist() == [0, 0, 0, 0]
    assert grpo_advantages([5.0], [0], normalize_std=False).tolist() == [0]
    assert grpo_advantages([], []).shape == (0,)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_bad_reward_is_refused_with_its_index_and_group(bad: float | None) -> None:
    with pytest.raises(RewardError, match=r"sample 2 \(group 'q7'\)"):
        grpo_advantages([1.0, 0.0, bad], ["p", "p", "q7"])


def test_samples_that_do_not_count_leave_the_baseline() -> None:
    rewards = [1.0, 3.0, 100.0]
    counted = grpo_advantages(rewards, [0, 0, 0], normalize_std=False, counted=[True, True, False])
    assert counted.tolist() == [-1.0, 1.0, 0.0]


def test_lengths_must_agree() -> None:
    with pytest.raises(DataError, match="2 rewards, 3 groups"):
        grpo_advantages([1.0, 2.0], [0, 0, 0])


@given(
    rows=st.lists(st.tuples(st.floats(-5, 5).map(lambda x: round(x, 3)), st.integers(0, 3)), max_size=20),
    seed=st.integers(0, 9),
)
def test_order_of_samples_does_not_matter(rows: list[tuple[float, int]], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    straight = grpo_advantages([r for r, _ in rows], [g for _, g in rows])
    shuffled = grpo_advantages([rows[i][0] for i in order], [rows[i][1] for i in order])
    np.testing.assert_allclose(straight[order], shuffled, rtol=0, atol=1e-4)
    for group in {g for _, g in rows}:
        assert abs(straight[[g == group for _, g in rows]].sum()) < 1e-3


def test_per_token_spreads_over_responses() -> None:
    batch = Batch.from_samples(
        [Sample(token_ids=np.arange(n), prompt_length=k) for n, k in ((4, 2), (3, 3), (2, 1))],
    )
    assert per_token(batch, np.array([1.5, 9.0, -1.0])).tolist() == [1.5, 1.5, -1.0]
    with pytest.raises(DataError):
        per_token(batch, np.zeros(2))
