"""Plans for engines that compute a group's prompt once: what is counted, and that forests keep to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.batching import BatchPlan, CostModel, plan_batch, shared
from arctic_core.batching.shared import group_prefixes
from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError

torch = pytest.importorskip("torch")

from arctic_core.models.shared_prompts import shared_forest  # noqa: E402 - needs torch
from arctic_kernels.zorro import discovery, forest  # noqa: E402

COST = CostModel(linear=1.0, attention=0.001)
#: Per group: its prompt's length, how much of the prompt its samples have in common, whether the prompt goes on from that of
#: the group before, and the responses' lengths.
GROUPS = st.lists(
    st.tuples(
        st.integers(1, 150),
        st.sampled_from([1.0, 1.0, 1.0, 0.6]),
        st.booleans(),
        st.lists(st.integers(0, 120), min_size=1, max_size=6),
    ),
    max_size=6,
)


def make_batch(groups: list, seed: int = 0) -> Batch:
    """Interleaved, in an order of its own."""
    rng = np.random.default_rng(seed)
    rows, before = [], np.zeros(0, np.int64)
    for number, (length, common, goes_on, responses) in enumerate(groups):
        prompt = np.concatenate([before[:100] if goes_on else before[:0], rng.integers(0, 50, length)])
        for response in responses:
            mine = prompt.copy()
            mine[int(common * len(mine)) :] = rng.integers(0, 50, len(mine) - int(common * len(mine)))
            tokens = np.concatenate([mine, rng.integers(0, 50, response)])
            rows.append(Sample(token_ids=tokens, prompt_length=len(mine), group=number))
        before = prompt
    return Batch.from_samples([rows[i] for i in rng.permutation(len(rows))])


def micro_batches(plan: BatchPlan) -> list[list[int]]:
    return [list(indices) for rank in plan.ranks for indices in rank]


def packed_tokens(batch: Batch, budget: int) -> int:
    """Tokens that an engine computes."""
    found = shared_forest(batch, "cpu", budget)
    return int(batch.lengths.sum()) if found is None else found.num_tokens


@settings(deadline=None)
@given(groups=GROUPS, ranks=st.integers(1, 4), budget=st.integers(370, 900), count=st.none() | st.integers(1, 6))
def test_no_micro_batch_computes_more_than_the_budget(groups: list, ranks: int, budget: int, count: int | None) -> None:
    batch = make_batch(groups)

    def plan() -> BatchPlan:
        return plan_batch(batch, ranks=ranks, max_tokens=budget, micro_batches=count, cost=COST, shared_prompts=True)

    try:
        made = plan()
    except DataError:
        assert count is not None
        return
    assert made == plan()
    assert {len(rank) for rank in made.ranks} == {made.micro_batches}
    assert count in (None, made.micro_batches)
    assert sorted(made.order.tolist()) == list(range(len(batch)))
    for indices in micro_batches(made):
        assert packed_tokens(batch.select(indices), budget) <= budget


@settings(deadline=None)
@given(groups=GROUPS, ranks=st.integers(1, 3), budget=st.integers(370, 900))
def test_a_group_that_fits_once_shared_stays_together(groups: list, ranks: int, budget: int) -> None:
    batch = make_batch(groups)
    names = list(dict.fromkeys(batch.groups))
    if len(names) < ranks:
        return
    made = plan_batch(batch, ranks=ranks, max_tokens=budget, cost=COST, shared_prompts=True)
    group_B = np.array([names.index(group) for group in batch.groups], np.int64)
    prefix_G = group_prefixes(batch, group_B)
    rests = COST.costs(batch.lengths) - COST.costs(prefix_G[group_B])
    total = rests.sum() + COST.costs(prefix_G).sum()
    for number in range(len(names)):
        members = np.flatnonzero(group_B == number)
        tokens = batch.lengths[members].sum() - (len(members) - 1) * prefix_G[number]
        dominant = rests[members].sum() * ranks > 1.25 * total
        homes = [indices for indices in micro_batches(made) if set(indices) & set(members.tolist())]
        assert len(homes) == 1 or tokens > budget or dominant


@given(groups=GROUPS)
def test_without_sharing_nothing_is_counted_as_shared(groups: list) -> None:
    """Prompts below 64 tokens, or of one sample each, plan as they always did."""
    batch = make_batch([(min(length, 60), common, False, responses) for length, common, _, responses in groups])
    plain = plan_batch(batch, ranks=2, max_tokens=500, cost=COST)
    assert plain == plan_batch(batch, ranks=2, max_tokens=500, cost=COST, shared_prompts=True)


@given(groups=GROUPS)
def test_prefixes_are_what_the_prompts_of_a_group_have_in_common(groups: list) -> None:
    batch = make_batch(groups)
    names = list(dict.fromkeys(batch.groups))
    prefix_G = group_prefixes(batch, np.array([names.index(group) for group in batch.groups], np.int64))
    for name, prefix in zip(names, prefix_G.tolist(), strict=True):
        prompts = [sample.token_ids[: sample.prompt_length] for sample in batch.samples() if sample.group == name]
        common = min(map(len, prompts))
        while not all(np.array_equal(prompt[:common], prompts[0][:common]) for prompt in prompts):
            common -= 1
        worth = common >= 64 and (len(prompts) - 1) * common >= 63 * (
            1 + sum(len(s.token_ids) - common for s in batch.samples() if s.group == name) / 4096
        )
        assert prefix == (common if worth else 0)


def test_the_price_of_sharing_is_that_of_the_kernels() -> None:
    assert shared.MIN_SHARED_TOKENS == forest.DEFAULT_MIN_SHARED_TOKENS
    assert shared.QUERIED_PER_NODE == discovery.QUERIED_PER_NODE


def test_eight_responses_to_a_long_prompt_fit_where_two_did() -> None:
    batch = make_batch([(800, 1.0, False, [100] * 8)])
    assert plan_batch(batch, ranks=1, max_tokens=1800).micro_batches == 4
    assert plan_batch(batch, ranks=1, max_tokens=1600, shared_prompts=True).micro_batches == 1
    assert plan_batch(batch, ranks=1, max_tokens=1599, shared_prompts=True).micro_batches == 2


def test_a_group_over_the_budget_has_its_prompt_in_each_part() -> None:
    """800 shared tokens and eight times 100 in parts of at most 1,000: two responses each."""
    batch = make_batch([(800, 1.0, False, [100] * 8)])
    plan = plan_batch(batch, ranks=1, max_tokens=1000, shared_prompts=True)
    assert [len(indices) for indices in micro_batches(plan)] == [2] * 4
    assert [packed_tokens(batch.select(indices), 1000) for indices in micro_batches(plan)] == [1000] * 4


def test_a_long_prompt_alone_is_no_reason_to_cut_a_group() -> None:
    """Three quarters of all cost is one group's prompt: cutting the group would repeat it and relieve nobody."""
    batch = make_batch([(3000, 1.0, False, [10] * 8)] + [(5, 1.0, False, [110] * 8)] * 3)
    plan = plan_batch(batch, ranks=2, max_tokens=4000, cost=COST, shared_prompts=True)
    long = {i for i, group in enumerate(batch.groups) if group == 0}
    assert sum(bool(long & set(indices)) for indices in micro_batches(plan)) == 1
