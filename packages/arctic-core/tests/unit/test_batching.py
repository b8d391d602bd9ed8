"""Sharding and micro-batching: properties over random ragged batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_core.batching import plan_batch
from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError

SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=30)


def make_batch(shapes: list[tuple[int, int]]) -> Batch:
    return Batch.from_samples(
        Sample(token_ids=np.full(prompt + response, i), prompt_length=prompt, group=i)
        for i, (prompt, response) in enumerate(shapes)
    )


@given(shapes=SHAPES, ranks=st.integers(1, 4), budget=st.integers(40, 100))
def test_every_sample_once_equal_counts_and_a_strict_budget(shapes: list, ranks: int, budget: int) -> None:
    batch = make_batch(shapes)
    plan = plan_batch(batch, ranks=ranks, max_tokens=budget)
    assert len(plan.ranks) == ranks
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    flat = sorted(i for rank in plan.ranks for indices in rank for i in indices)
    assert flat == list(range(len(batch)))
    for rank in plan.ranks:
        for indices in rank:
            assert batch.lengths[list(indices)].sum() <= budget
    assert plan == plan_batch(batch, ranks=ranks, max_tokens=budget)


@given(shapes=SHAPES, ranks=st.integers(1, 4), budget=st.integers(40, 100))
def test_merge_restores_the_callers_order(shapes: list, ranks: int, budget: int) -> None:
    batch = make_batch(shapes)
    plan = plan_batch(batch, ranks=ranks, max_tokens=budget)
    values = np.arange(batch.num_response_tokens, dtype=np.float32)
    rows = batch.split(values)
    empty = np.zeros(0, np.float32)
    outputs = [np.concatenate([empty, *(rows[i] for indices in rank for i in indices)]) for rank in plan.ranks]
    assert np.array_equal(plan.merge(batch, outputs), values)


@given(shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=30), ranks=st.integers(1, 4))
def test_ranks_are_balanced(shapes: list, ranks: int) -> None:
    """Without a binding budget there is one micro-batch per rank, and no two ranks differ by more than the longest sample."""
    batch = make_batch(shapes)
    plan = plan_batch(batch, ranks=ranks, max_tokens=10_000)
    assert plan.micro_batches == 1
    loads = [int(batch.lengths[list(rank[0])].sum()) for rank in plan.ranks]
    assert max(loads) - min(loads) <= batch.lengths.max()


def test_equal_samples_spread_evenly() -> None:
    """Nine equal sequences over four ranks: sizes differ by at most one."""
    plan = plan_batch(make_batch([(3, 4)] * 9), ranks=4, max_tokens=1000)
    assert sorted(sum(len(m) for m in rank) for rank in plan.ranks) == [2, 2, 2, 3]
    plan = plan_batch(make_batch([(3, 4)] * 8), ranks=1, max_tokens=8)
    assert plan.micro_batches == 8


def test_a_sample_over_the_budget_is_named() -> None:
    with pytest.raises(DataError, match="sample 1 has 9 tokens"):
        plan_batch(make_batch([(2, 2), (4, 5)]), ranks=2, max_tokens=8)


def test_a_given_number_of_micro_batches() -> None:
    batch = make_batch([(2, 2)] * 3)
    plan = plan_batch(batch, ranks=1, max_tokens=100, micro_batches=7)
    assert plan.micro_batches == 7
    assert sum(not indices for indices in plan.ranks[0]) == 4
    with pytest.raises(DataError, match="do not fit 1 x 2"):
        plan_batch(batch, ranks=1, max_tokens=5, micro_batches=2)


def test_an_empty_batch_gives_every_rank_one_empty_micro_batch() -> None:
    batch = Batch.from_samples([])
    plan = plan_batch(batch, ranks=3, max_tokens=8)
    assert plan.ranks == (((),), ((),), ((),))
    assert plan.merge(batch, [np.zeros(0, np.float32)] * 3).shape == (0,)


def test_merge_checks_what_ranks_return() -> None:
    batch = make_batch([(2, 2), (2, 3)])
    plan = plan_batch(batch, ranks=1, max_tokens=100)
    with pytest.raises(DataError, match="4 values for 5"):
        plan.merge(batch, [np.zeros(4, np.float32)])
