"""Sharding and micro-batching: properties over random ragged batches with interleaved groups."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.batching import BatchPlan, CostModel, plan_batch
from arctic_core.batching.balance import best_fit, deal, pack
from arctic_core.batching.plan import DOMINANT
from arctic_core.data import Batch, Sample
from arctic_core.errors import ConfigError, DataError

GROUPS = st.integers(0, 4) | st.sampled_from(["a", "b", "0", "1"])
SAMPLES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), GROUPS), max_size=30)
COST = CostModel(linear=1.0, attention=0.05)


def make_batch(shapes: list) -> Batch:
    """From ``(prompt, response)``, a group each, or ``(prompt, response, group)``."""
    return Batch.from_samples(
        Sample(token_ids=np.full(s[0] + s[1], i), prompt_length=s[0], group=s[2] if len(s) > 2 else i)
        for i, s in enumerate(shapes)
    )


def samples_of(plan: BatchPlan) -> list[list[int]]:
    return [[i for indices in rank for i in indices] for rank in plan.ranks]


def rank_costs(plan: BatchPlan, batch: Batch, cost: CostModel) -> np.ndarray:
    costs = cost.costs(batch.lengths)
    return np.array([costs[rank].sum() for rank in samples_of(plan)])


def members_of(batch: Batch) -> list[list[int]]:
    return [[i for i, g in enumerate(batch.groups) if g == group] for group in dict.fromkeys(batch.groups)]


def must_split(batch: Batch, group: list[int], ranks: int, budget: int) -> bool:
    costs = COST.costs(batch.lengths)
    dominant = costs[group].sum() > DOMINANT * costs.sum() / ranks
    return len(group) > 1 and bool(dominant or batch.lengths[group].sum() > budget)


def check(plan: BatchPlan, batch: Batch, ranks: int, budget: int) -> None:
    """What holds for every plan."""
    assert len(plan.ranks) == ranks
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    assert sorted(plan.order.tolist()) == list(range(len(batch)))
    for indices in (m for rank in plan.ranks for m in rank):
        assert batch.lengths[list(indices)].sum() <= budget
    assert plan.order.dtype == plan.inverse.dtype == np.int64
    assert plan.order[plan.inverse].tolist() == plan.inverse[plan.order].tolist() == list(range(len(batch)))
    assert plan.order.tolist() == [i for rank in samples_of(plan) for i in rank]


# --- plans --------------------------------------------------------------------------------------------------------------


@given(shapes=SAMPLES, ranks=st.integers(1, 6), budget=st.integers(40, 120))
def test_every_sample_once_equal_counts_and_a_strict_budget(shapes: list, ranks: int, budget: int) -> None:
    batch = make_batch(shapes)
    plan = plan_batch(batch, ranks=ranks, max_tokens=budget, cost=COST)
    check(plan, batch, ranks, budget)
    assert plan == plan_batch(batch, ranks=ranks, max_tokens=budget, cost=COST)
    lower = max(1, ceil(batch.lengths.sum() / (ranks * budget)))
    assert lower <= plan.micro_batches <= max(1, ceil(len(batch) / ranks))
    largest = max(int(batch.lengths[rank].sum()) for rank in samples_of(plan))
    assert plan.micro_batches < 2 * largest / budget + 1 or plan.micro_batches == 1


@given(shapes=SAMPLES, ranks=st.integers(1, 6), budget=st.integers(40, 120))
def test_groups_stay_whole_where_they_can(shapes: list, ranks: int, budget: int) -> None:
    """With at least as many groups as ranks, a group is in one micro-batch, side by side, unless it is too big or dominant;
    and then unit counts differ by at most one."""
    batch = make_batch(shapes)
    plan = plan_batch(batch, ranks=ranks, max_tokens=budget, cost=COST)
    groups = members_of(batch)
    if len(groups) < ranks:
        assert sum(bool(rank) for rank in samples_of(plan)) == min(ranks, len(batch))  # no rank idles
        return
    homes = {i: (r, m) for r, rank in enumerate(plan.ranks) for m, indices in enumerate(rank) for i in indices}
    split = [must_split(batch, group, ranks, budget) for group in groups]
    for group, apart in zip(groups, split, strict=True):
        pieces = {homes[i] for i in group}
        assert apart or len(pieces) == 1
        if not apart:
            assert sorted(plan.inverse[group]) == list(range(min(plan.inverse[group]), min(plan.inverse[group]) + len(group)))
    if not any(split):
        counts = Counter(homes[group[0]][0] for group in groups)
        numbers = [counts[rank] for rank in range(ranks)]
        assert max(numbers) - min(numbers) <= 1
        costs = COST.costs(batch.lengths)
        totals = rank_costs(plan, batch, COST)
        assert totals.max() - totals.min() <= max((costs[group].sum() for group in groups), default=0) + 1e-6


@given(lengths=st.lists(st.integers(1, 40), max_size=40), ranks=st.integers(1, 6), budget=st.integers(40, 120))
def test_groups_of_one_are_dealt_evenly(lengths: list[int], ranks: int, budget: int) -> None:
    batch = make_batch([(1, n - 1) for n in lengths])
    plan = plan_batch(batch, ranks=ranks, max_tokens=budget, cost=COST)
    sizes = [len(rank) for rank in samples_of(plan)]
    assert max(sizes) - min(sizes) <= 1
    totals = rank_costs(plan, batch, COST)
    assert totals.max() <= totals.mean() + COST.costs(batch.lengths).max(initial=0) + 1e-6


@given(shapes=SAMPLES, ranks=st.integers(1, 4), budget=st.integers(40, 120), data=st.data())
def test_a_given_number_is_honoured_or_refused(shapes: list, ranks: int, budget: int, data: st.DataObject) -> None:
    batch = make_batch(shapes)
    count = data.draw(st.integers(1, 8))
    bins = [int(batch.lengths[places].sum()) for places in best_fit(batch.lengths.tolist(), budget)]
    try:
        plan = plan_batch(batch, ranks=ranks, max_tokens=budget, micro_batches=count, cost=COST)
    except DataError:
        assert len(bins) > ranks * count  # a packing that best fit finds is never refused
        return
    check(plan, batch, ranks, budget)
    assert plan.micro_batches == count
    filled = [sum(bool(indices) for indices in rank) for rank in plan.ranks]
    if len(bins) * 2 <= ranks * count:  # room for the groups in any case
        assert sum(filled) == min(len(batch), ranks * count)


@given(shapes=SAMPLES, ranks=st.integers(1, 4))
def test_plans_do_not_depend_on_what_groups_are_called(shapes: list, ranks: int) -> None:
    batch = make_batch(shapes)
    names = {group: f"g{place}" for place, group in enumerate(dict.fromkeys(batch.groups))}
    renamed = batch.replace(groups=tuple(names[group] for group in batch.groups))
    assert plan_batch(batch, ranks=ranks, max_tokens=60) == plan_batch(renamed, ranks=ranks, max_tokens=60)


def test_int_and_text_ids_are_different_groups() -> None:
    batch = make_batch([(1, 1, 1), (1, 1, "1")] * 4)
    plan = plan_batch(batch, ranks=2, max_tokens=100)
    assert sorted(sorted(rank) for rank in samples_of(plan)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_nine_equal_sequences_over_four_ranks() -> None:
    plan = plan_batch(make_batch([(3, 4)] * 9), ranks=4, max_tokens=1000)
    assert sorted(len(rank) for rank in samples_of(plan)) == [2, 2, 2, 3]


@pytest.mark.parametrize("groups", [range(8), [0] * 8])
def test_eight_samples_of_seven_tokens_need_eight_micro_batches(groups: list[int]) -> None:
    plan = plan_batch(make_batch([(3, 4, g) for g in groups]), ranks=1, max_tokens=8)
    assert [len(indices) for indices in plan.ranks[0]] == [1] * 8


def test_one_giant_group_becomes_near_equal_parts() -> None:
    plan = plan_batch(make_batch([(3, 4, "all")] * 30), ranks=4, max_tokens=1000)
    assert sorted(len(rank) for rank in samples_of(plan)) == [7, 7, 8, 8]
    assert plan.micro_batches == 1


def test_fewer_groups_than_ranks_leave_no_rank_idle() -> None:
    plan = plan_batch(make_batch([(3, 4, g) for g in [0] * 8 + [1] * 8]), ranks=4, max_tokens=1000)
    assert [len(rank) for rank in samples_of(plan)] == [4] * 4


def test_a_dominant_group_is_split_the_others_stay_whole() -> None:
    batch = make_batch([(5, 35, "big")] * 8 + [(2, 3, g) for g in "abcdefg" for _ in range(4)])
    plan = plan_batch(batch, ranks=4, max_tokens=1000, cost=COST)
    totals = rank_costs(plan, batch, COST)
    assert totals.max() / totals.mean() < 1.25
    homes = {i: r for r, rank in enumerate(samples_of(plan)) for i in rank}
    assert all(len({homes[i] for i in group}) == 1 for group in members_of(batch)[1:])


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_lengths_are_balanced(order: int) -> None:
    batch = make_batch([(1, n) for n in range(1, 101)][::order])
    plan = plan_batch(batch, ranks=4, max_tokens=400, cost=COST)
    totals = rank_costs(plan, batch, COST)
    assert totals.max() / totals.mean() < 1.01


def test_micro_batches_of_a_step_are_alike() -> None:
    batch = make_batch([(1, n % 37 + 1) for n in range(400)])
    plan = plan_batch(batch, ranks=4, max_tokens=400, cost=COST)
    costs = COST.costs(batch.lengths)
    per_step = np.array([[costs[list(indices)].sum() for indices in rank] for rank in plan.ranks])
    assert (np.diff(per_step, axis=1) <= 1e-9).all()  # costly first on every rank
    assert per_step.mean(0).sum() / per_step.max(0).sum() > 0.95


def test_attention_decides_who_gets_what() -> None:
    """One sample of 30 tokens against three of 10: equal by tokens, not by the squares."""
    batch = make_batch([(1, 29)] + [(1, 9)] * 7)
    by_tokens = rank_costs(plan_batch(batch, ranks=2, max_tokens=999, cost=CostModel(1, 0)), batch, CostModel(1, 0))
    by_squares = plan_batch(batch, ranks=2, max_tokens=999, cost=CostModel(0, 1))
    assert by_tokens.max() - by_tokens.min() <= 30
    assert [len(rank) for rank in samples_of(by_squares)] == [4, 4]


def test_empty_responses_and_an_empty_batch() -> None:
    batch = make_batch([(4, 0, g % 2) for g in range(6)])
    plan = plan_batch(batch, ranks=3, max_tokens=8)
    check(plan, batch, 3, 8)
    assert plan.merge(batch, [np.zeros(0, np.float64)] * 3).dtype == np.float64
    batch = make_batch([])
    plan = plan_batch(batch, ranks=3, max_tokens=8)
    assert plan.ranks == (((),), ((),), ((),))
    assert plan_batch(batch, ranks=2, max_tokens=8, micro_batches=2).ranks == (((), ()), ((), ()))
    check(plan, batch, 3, 8)
    merged = plan.merge(batch, [np.zeros((0, 5), np.float16)] * 3)
    assert (merged.shape, merged.dtype) == ((0, 5), np.float16)


def test_a_sample_over_the_budget_is_named() -> None:
    with pytest.raises(DataError, match="sample 1 has 9 tokens"):
        plan_batch(make_batch([(2, 2), (4, 5)]), ranks=2, max_tokens=8)


def test_counts_start_at_one() -> None:
    for ranks, count in ((0, None), (1, 0)):
        with pytest.raises(DataError, match="start at 1"):
            plan_batch(make_batch([(1, 1)]), ranks=ranks, max_tokens=8, micro_batches=count)


def test_a_given_number_of_micro_batches() -> None:
    batch = make_batch([(2, 2)] * 3)
    plan = plan_batch(batch, ranks=1, max_tokens=100, micro_batches=7)
    assert sum(not indices for indices in plan.ranks[0]) == 4
    with pytest.raises(DataError, match="do not fit 1 x 2"):
        plan_batch(batch, ranks=1, max_tokens=5, micro_batches=2)
    one_group = make_batch([(2, 2, 0)] * 6)
    assert [len(m) for m in plan_batch(one_group, ranks=1, max_tokens=100, micro_batches=3).ranks[0]] == [2, 2, 2]


def test_a_tight_number_gives_up_equal_sizes_first() -> None:
    """Two micro-batches of 8 hold these only as {8} and {1 x 8}."""
    batch = make_batch([(8, 0)] + [(1, 0)] * 8)
    plan = plan_batch(batch, ranks=2, max_tokens=8, micro_batches=1)
    assert sorted(len(rank) for rank in samples_of(plan)) == [1, 8]
    assert plan_batch(batch, ranks=2, max_tokens=8).micro_batches == 2


# --- the way back -------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(shapes=SAMPLES, ranks=st.integers(1, 4), width=st.sampled_from([(), (1,), (3,)]), dtype=st.sampled_from("efdi"))
def test_merge_restores_the_callers_order(shapes: list, ranks: int, width: tuple, dtype: str) -> None:
    batch = make_batch(shapes)
    plan = plan_batch(batch, ranks=ranks, max_tokens=50)
    values = np.arange(batch.num_response_tokens * (width[0] if width else 1)).reshape(-1, *width).astype(dtype)
    rows = batch.split(values)
    outputs = [np.concatenate([values[:0], *(rows[i] for i in rank)]) for rank in samples_of(plan)]
    merged = plan.merge(batch, outputs)
    assert merged.dtype == values.dtype
    assert np.array_equal(merged, values)
    assert merged.shape == values.shape


def test_a_filler_may_return_an_empty_array_of_any_shape() -> None:
    batch = make_batch([(1, 2)])
    plan = plan_batch(batch, ranks=2, max_tokens=9)
    outputs = [np.ones((2, 3)) if rank else np.zeros(0, np.float32) for rank in samples_of(plan)]
    assert plan.merge(batch, outputs).tolist() == np.ones((2, 3)).tolist()


def test_merge_checks_what_ranks_return() -> None:
    batch = make_batch([(2, 2), (2, 3)])
    plan = plan_batch(batch, ranks=1, max_tokens=100)
    with pytest.raises(DataError, match="4 values for 5"):
        plan.merge(batch, [np.zeros(4, np.float32)])
    with pytest.raises(DataError, match="2 outputs"):
        plan.merge(batch, [np.zeros(5, np.float32)] * 2)
    with pytest.raises(DataError, match="3 samples for a plan"):
        plan.merge(make_batch([(2, 2)] * 3), [np.zeros(6, np.float32)])
    plan = plan_batch(batch, ranks=2, max_tokens=100)
    lengths = batch.response_lengths[plan.order]
    with pytest.raises(DataError, match="differ in shape"):
        plan.merge(batch, [np.zeros((lengths[0], 2)), np.zeros((lengths[1], 3))])


# --- parts --------------------------------------------------------------------------------------------------------------


@given(costs=st.lists(st.integers(1, 1000), max_size=60), ranks=st.integers(1, 9))
def test_deal_counts_and_gaps(costs: list[int], ranks: int) -> None:
    shares = deal([float(c) for c in costs], ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    totals = [sum(costs[i] for i in share) for share in shares]
    assert max(totals) - min(totals) <= max(costs, default=0)


def test_deal_leaves_the_cheapest_to_who_has_the_costliest() -> None:
    costs = [1.0, 6.0, 6.0, 8.0, 20.0]
    assert sorted(sorted(costs[i] for i in share) for share in deal(costs, 2)) == [[1, 20], [6, 6, 8]]


@settings(max_examples=60)
@given(tokens=st.lists(st.integers(1, 10), max_size=7), capacity=st.integers(10, 15))
def test_best_fit_against_the_smallest_number(tokens: list[int], capacity: int) -> None:
    bins = best_fit(tokens, capacity)
    assert sorted(i for places in bins for i in places) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in places) <= capacity for places in bins)
    smallest = next(k for k in range(len(tokens) + 1) if fits(tokens, capacity, k))
    assert smallest <= len(bins) <= 11 / 9 * smallest + 4
    assert len(bins) <= smallest + 1  # so few items


def fits(tokens: list[int], capacity: int, count: int) -> bool:
    if count ** (max(len(tokens) - 1, 0)) > 10_000:  # more than three bins: seven items of at most capacity fit greedily or not
        return len(best_fit(tokens, capacity)) <= count
    for places in product(range(count), repeat=len(tokens)):
        if all(sum(t for t, p in zip(tokens, places, strict=True) if p == k) <= capacity for k in range(count)):
            return True
    return False


@given(
    items=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 100)), max_size=25),
    capacity=st.integers(20, 60),
    at_least=st.integers(1, 12),
)
def test_pack_makes_so_many_bins_and_wastes_none(items: list, capacity: int, at_least: int) -> None:
    tokens, costs = [t for t, _ in items], [float(c) for _, c in items]
    tightest = best_fit(tokens, capacity)
    bins = pack(tokens, costs, capacity, at_least, tightest)
    assert len(bins) == max(at_least, len(tightest))
    assert sorted(i for places in bins for i in places) == list(range(len(items)))
    assert all(sum(tokens[i] for i in places) <= capacity for places in bins)
    assert sum(bool(places) for places in bins) == min(len(items), len(bins))


def test_cost_model() -> None:
    assert CostModel(2, 3).costs(np.array([0, 1, 10])).tolist() == [0, 5, 320]
    assert CostModel() == CostModel.of_hidden_size(4096)
    linear, attention = CostModel(1, 0), CostModel(0, CostModel().attention)
    crossing = np.array([6 * 4096])
    np.testing.assert_allclose(linear.costs(crossing), attention.costs(crossing), rtol=0, atol=1e-6)
    for wrong in ((-1, 1), (1, np.nan), (np.inf, 0), (0, 0)):
        with pytest.raises(ConfigError):
            CostModel(*wrong)
    with pytest.raises(ConfigError):
        CostModel.of_hidden_size(0)
