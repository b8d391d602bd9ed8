"""Advantage estimators against loops in float64 that follow the papers word by word, and the filters of groups."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.advantages import (
    compute_advantages,
    counted_samples,
    dr_grpo_advantages,
    filter_groups,
    gae_advantages,
    grpo_advantages,
    per_token,
    reinforce_pp_advantages,
    rloo_advantages,
)
from arctic_core.config.advantages import (
    AdvantageConfig,
    DrGRPOAdvantageConfig,
    GRPOAdvantageConfig,
    ReinforcePPAdvantageConfig,
    RLOOAdvantageConfig,
)
from arctic_core.data import Batch, Sample
from arctic_core.errors import ConfigError, DataError, RewardError

ATOL = 1e-6
REWARDS, GROUPS = [1.0, 10.0, 3.0, 20.0, 8.0, 7.0], ["a", "b", "a", "b", "a", 5]  # interleaved, and a group of one
RELATIVE = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}


# --- oracles: one sample, one token at a time ------------------------------------------------------------------------


def relative_oracle(name, rewards, groups, counted):
    found = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mates = [rewards[j] for j in range(len(rewards)) if groups[j] == group and counted[j]]
        if not counted[i] or len(mates) < 2 or len(set(mates)) == 1:
            found.append(0.0)
        elif name == "rloo":
            others = [rewards[j] for j in range(len(rewards)) if groups[j] == group and counted[j] and j != i]
            found.append(reward - math.fsum(others) / len(others))
        else:
            scale = statistics.stdev(mates) + 1e-4 if name == "grpo" else 1.0
            found.append((reward - statistics.fmean(mates)) / scale)
    return found


def whiten_oracle(values):
    """Over the entries that are not ``None``."""
    present = [value for value in values if value is not None]
    if len(present) < 2 or len(set(present)) == 1:
        return [0.0] * len(values)
    mean, std = statistics.fmean(present), statistics.stdev(present)
    return [0.0 if value is None else (value - mean) / (std + 1e-8) for value in values]


def reinforce_pp_oracle(rewards, samples, baseline, kl_coef, estimator):
    trained = [mask_of(sample).any() for sample in samples]
    flat = []
    for i, sample in enumerate(samples):
        score = rewards[i]
        if baseline and trained[i]:
            score -= statistics.fmean(rewards[j] for j, s in enumerate(samples) if s.group == sample.group and trained[j])
        for t in range(sample.response_length):
            if not mask_of(sample)[t]:
                flat.append(None)
                continue
            penalty = 0.0
            for s in range(t, sample.response_length):
                if mask_of(sample)[s] and kl_coef:
                    q = float(sample.ref_logprobs[s]) - float(sample.old_logprobs[s])
                    penalty += {"k1": -q, "k2": q * q / 2, "k3": math.exp(q) - 1 - q}[estimator]
            flat.append(score - kl_coef * penalty)
    return whiten_oracle(flat)


def gae_oracle(samples, rewards, values, gamma, lam):
    """By the definition: a sum over later trained tokens of discounted temporal differences."""
    advantages, returns, start = [], [], 0
    for sample in samples:
        chosen = [start + t for t in range(sample.response_length) if mask_of(sample)[t]]
        for t in range(start, start + sample.response_length):
            if t not in chosen:
                advantages.append(0.0)
                returns.append(0.0)
                continue
            k, total = chosen.index(t), 0.0
            for distance, s in enumerate(chosen[k:]):
                after = values[chosen[k + distance + 1]] if k + distance + 1 < len(chosen) else 0.0
                total += (gamma * lam) ** distance * (rewards[s] + gamma * after - values[s])
            advantages.append(total)
            returns.append(total + values[t])
        start += sample.response_length
    return advantages, returns


def mask_of(sample):
    return np.ones(sample.response_length, bool) if sample.loss_mask is None else sample.loss_mask != 0


def make_sample(mask, group=0, seed=0, prompt=2):
    """A sample whose masked slots hold NaN in every other field."""
    rng = np.random.default_rng(seed)
    mask = np.asarray(mask, np.float32)
    noise = lambda: np.where(mask != 0, rng.normal(-2, 1, len(mask)), np.nan)  # noqa: E731
    return Sample(
        token_ids=np.ones(prompt + len(mask), np.int32),
        prompt_length=prompt,
        group=group,
        loss_mask=mask,
        old_logprobs=noise(),
        ref_logprobs=noise(),
    )


SAMPLES = [
    make_sample([1, 0, 1, 1], "a", 1),
    make_sample([1, 1], "b", 2, prompt=3),
    make_sample([0, 1, 0], "a", 3),
    make_sample([0, 0], "b", 4),  # nothing trained
    make_sample([1, 1, 1, 1, 1], "b", 5),
    make_sample([], "a", 6),  # an empty response
    make_sample([1], 5, 7),  # a group of one
]
SCORES = [1.0, 0.25, -2.0, 50.0, 3.0, -40.0, 0.5]

masks = st.lists(st.integers(0, 1), max_size=5)
batches = st.lists(st.tuples(masks, st.sampled_from([0, 1, "a"]), st.integers(-8, 8).map(lambda x: x / 4)), max_size=8)


def build(rows):
    return [make_sample(mask, group, i, prompt=1 + i % 3) for i, (mask, group, _) in enumerate(rows)], [r for *_, r in rows]


# --- relative to a group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_estimators_follow_their_formula(name):
    actual = RELATIVE[name](REWARDS, GROUPS)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, relative_oracle(name, REWARDS, GROUPS, [True] * 6), rtol=0, atol=ATOL)
    counted = [True, True, False, True, True, True]
    actual = RELATIVE[name](REWARDS, GROUPS, counted=counted)
    assert actual[2] == 0
    np.testing.assert_allclose(actual, relative_oracle(name, REWARDS, GROUPS, counted), rtol=0, atol=ATOL)


def test_the_epsilon_is_the_one_given():
    deviation = statistics.stdev([1.0, 3.0])
    assert grpo_advantages([1.0, 3.0], [0, 0], epsilon=0.5)[1] == pytest.approx(1 / (deviation + 0.5), abs=ATOL)
    tiny = grpo_advantages([0.5, 0.50001], [0, 0], epsilon=1e-4)  # rewards closer together than the epsilon
    assert tiny[1] == pytest.approx(5e-6 / (statistics.stdev([0.5, 0.50001]) + 1e-4), abs=ATOL)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one_and_equal_rewards_give_exactly_zero(name):
    assert RELATIVE[name]([5.0, 0.1, 0.1, 0.1], [7, 8, 8, 8]).tolist() == [0, 0, 0, 0]  # 0.1 * 3 / 3 is not 0.1
    assert RELATIVE[name]([5.0, 6.0], [0, 0], counted=[True, False]).tolist() == [0, 0]
    assert RELATIVE[name]([], []).shape == (0,)


@given(rows=st.lists(st.tuples(st.integers(-20, 20).map(lambda x: x / 4), st.integers(0, 3)), max_size=20), data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", RELATIVE)
def test_order_shift_and_scale_of_rewards(name, rows, data):
    rewards, groups = np.array([r for r, _ in rows], float), [g for _, g in rows]
    plain = RELATIVE[name](rewards, groups)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = RELATIVE[name](rewards[order], [groups[i] for i in order])
    np.testing.assert_allclose(plain[order], shuffled, rtol=0, atol=ATOL)
    shifts = np.array([10.0 * g for g in groups])  # each group its own
    np.testing.assert_allclose(RELATIVE[name](rewards + shifts, groups), plain, rtol=0, atol=1e-5)
    scaled = RELATIVE[name](rewards * 4, groups)
    np.testing.assert_allclose(scaled, plain if name == "grpo" else plain * 4, rtol=0, atol=2e-3 if name == "grpo" else 1e-5)
    for group in set(groups):
        assert abs(plain[[g == group for g in groups]].sum()) < 1e-4
    np.testing.assert_allclose(plain, relative_oracle(name, rewards.tolist(), groups, [True] * len(rows)), rtol=0, atol=1e-5)


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -math.inf, "high", np.float32("nan")])
def test_a_bad_reward_is_refused_with_its_index_and_group(bad):
    rewards, groups = [1.0, 0.0, bad], ["p", "p", "q7"]
    batch = Batch.from_samples(make_sample([1], group) for group in groups)
    calls = [lambda function=function: function(rewards, groups) for function in (*RELATIVE.values(), filter_groups)]
    calls += [
        lambda: reinforce_pp_advantages(rewards, batch),
        lambda: compute_advantages(RLOOAdvantageConfig(), rewards, batch),
    ]
    for call in calls:
        with pytest.raises(RewardError, match=r"sample 2 \(group 'q7'\)"):
            call()


def test_lengths_must_agree():
    batch = Batch.from_samples(SAMPLES)
    for function in (*RELATIVE.values(), filter_groups):
        with pytest.raises(DataError, match="2 rewards, 3 groups"):
            function([1.0, 2.0], [0, 0, 0])
    with pytest.raises(DataError, match="2 flags of counted samples, 3 groups"):
        grpo_advantages([1.0, 2.0, 3.0], [0, 0, 0], counted=[True, True])
    with pytest.raises(DataError, match="2 rewards, 7 groups"):
        reinforce_pp_advantages([1.0, 2.0], batch)
    for rewards, values in ((np.zeros(3), np.zeros(17)), (np.zeros(17), np.zeros((17, 1)))):
        with pytest.raises(DataError, match="17 response tokens"):
            gae_advantages(batch, rewards, values)


# --- REINFORCE++ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize(("kl_coef", "estimator"), [(0.0, "k1"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")])
def test_reinforce_pp_follows_its_formula(baseline, kl_coef, estimator):
    actual = reinforce_pp_advantages(
        SCORES, Batch.from_samples(SAMPLES), baseline=baseline, kl_coef=kl_coef, kl_estimator=estimator
    )
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, reinforce_pp_oracle(SCORES, SAMPLES, baseline, kl_coef, estimator), rtol=0, atol=ATOL)


@given(rows=batches, data=st.data())
@settings(max_examples=60, deadline=None)
def test_reinforce_pp_is_global_and_blind_to_order_shift_and_scale(rows, data):
    samples, rewards = build(rows)
    batch = Batch.from_samples(samples)
    plain = reinforce_pp_advantages(rewards, batch, kl_coef=0.1)
    np.testing.assert_allclose(plain, reinforce_pp_oracle(rewards, samples, False, 0.1, "k1"), rtol=0, atol=1e-5)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = reinforce_pp_advantages([rewards[i] for i in order], batch.select(order), kl_coef=0.1)
    pieces = batch.split(plain)
    np.testing.assert_allclose(np.concatenate([[], *(pieces[i] for i in order)]), shuffled, rtol=0, atol=1e-5)
    unpenalised = reinforce_pp_advantages(rewards, batch)
    moved = reinforce_pp_advantages([5 * r + 3 for r in rewards], batch)
    np.testing.assert_allclose(moved, unpenalised, rtol=0, atol=1e-5)


def test_a_huge_log_ratio_stays_finite_and_an_infinite_one_is_refused():
    sample = make_sample([1, 1, 0]).replace(old_logprobs=[-800.0, -1.0, np.nan], ref_logprobs=[-1.0, -2.0, np.inf])
    batch = Batch.from_samples([sample])
    assert np.isfinite(reinforce_pp_advantages([1.0], batch, kl_coef=1.0, kl_estimator="k3")).all()
    broken = Batch.from_samples([make_sample([1], "x"), sample.replace(group="y", ref_logprobs=[-1.0, -np.inf, 0.0])])
    with pytest.raises(DataError, match=r"sample 1 \(group 'y'\) has -inf at response token 1"):
        reinforce_pp_advantages([1.0, 2.0], broken, kl_coef=1.0)
    assert np.isfinite(reinforce_pp_advantages([1.0, 2.0], broken)).all()  # without a penalty nobody looks
    with pytest.raises(DataError, match="ref_logprobs"):
        reinforce_pp_advantages([1.0], batch.replace(ref_logprobs=None), kl_coef=1.0)


# --- GAE ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_follows_its_definition_and_skips_masked_tokens(gamma, lam):
    batch = Batch.from_samples(SAMPLES)
    rng = np.random.default_rng(0)
    rewards, values = (np.where(batch.mask != 0, rng.normal(size=17), np.nan) for _ in range(2))
    found = gae_advantages(batch, rewards, values, gamma=gamma, lam=lam)
    advantages, returns = gae_oracle(SAMPLES, rewards, values, gamma, lam)
    np.testing.assert_allclose(found.advantages_R, advantages, rtol=0, atol=ATOL)
    np.testing.assert_allclose(found.returns_R, returns, rtol=0, atol=ATOL)
    assert found.advantages_R.dtype == found.returns_R.dtype == np.float32
    white = gae_advantages(batch, rewards, values, gamma=gamma, lam=lam, whiten=True)
    expected = whiten_oracle([a if m else None for a, m in zip(advantages, batch.mask != 0, strict=True)])
    np.testing.assert_allclose(white.advantages_R, expected, rtol=0, atol=ATOL)
    np.testing.assert_array_equal(white.returns_R, found.returns_R)


@given(rows=batches, gamma=st.sampled_from([0.0, 0.5, 1.0]), lam=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_gae_of_any_batch(rows, gamma, lam):
    samples, _ = build(rows)
    batch = Batch.from_samples(samples)
    rng = np.random.default_rng(len(rows))
    rewards, values = (rng.integers(-8, 8, batch.num_response_tokens) / 4 for _ in range(2))
    found = gae_advantages(batch, rewards, values, gamma=gamma, lam=lam)
    advantages, returns = gae_oracle(samples, rewards, values, gamma, lam)
    np.testing.assert_allclose(found.advantages_R, advantages, rtol=0, atol=ATOL)
    np.testing.assert_allclose(found.returns_R, returns, rtol=0, atol=ATOL)
    # Taking the masked tokens out of the batch changes nothing for the others.
    kept = [make_sample(np.ones(int(mask_of(s).sum()))) for s in samples]
    trained = batch.mask != 0
    short = gae_advantages(Batch.from_samples(kept), rewards[trained], values[trained], gamma=gamma, lam=lam)
    np.testing.assert_array_equal(short.advantages_R, found.advantages_R[trained])


def test_gae_refuses_what_is_not_finite_or_out_of_range():
    batch = Batch.from_samples(SAMPLES[:2])
    good, bad = np.zeros(6), np.array([0, np.nan, 0, 0, np.nan, 0])
    with pytest.raises(RewardError, match=r"sample 1 \(group 'b'\) has nan at response token 0"):
        gae_advantages(batch, bad, good)
    with pytest.raises(DataError, match=r"sample 1 \(group 'b'\)"):
        gae_advantages(batch, good, bad)
    for wrong in ({"gamma": 1.1}, {"lam": -0.1}, {"gamma": math.nan}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            gae_advantages(batch, good, good, **wrong)


def test_gae_is_linear_in_tokens():
    rng = np.random.default_rng(0)
    batch = Batch.from_samples(make_sample(np.ones(n)) for n in rng.integers(0, 2000, 200))
    rewards, values = rng.normal(size=(2, batch.num_response_tokens))
    found = gae_advantages(batch, rewards, values, gamma=1.0, lam=1.0)
    expected = np.concatenate([np.cumsum(piece[::-1])[::-1] for piece in batch.split(rewards)])
    np.testing.assert_allclose(found.returns_R, expected, rtol=0, atol=1e-4)


# --- by configuration ---------------------------------------------------------------------------------------------------

CONFIGS: list[AdvantageConfig] = [
    GRPOAdvantageConfig(),
    GRPOAdvantageConfig(normalize_std=False),
    GRPOAdvantageConfig(epsilon=0.3),
    DrGRPOAdvantageConfig(),
    RLOOAdvantageConfig(),
    ReinforcePPAdvantageConfig(),
    ReinforcePPAdvantageConfig(baseline=True, kl_coef=0.2, kl_estimator="k2", epsilon=1e-3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_configuration_calls_its_estimator(config):
    batch = Batch.from_samples(SAMPLES)
    found = compute_advantages(config, SCORES, batch)
    counted = counted_samples(batch)
    assert counted.tolist() == [True, True, True, False, True, False, True]
    if isinstance(config, ReinforcePPAdvantageConfig):
        options = config.model_dump(exclude={"name"}) | {"kl_estimator": config.kl_estimator or "k1"}
        expected = reinforce_pp_advantages(SCORES, batch, **options)
    else:
        options = config.model_dump(exclude={"name"})
        expected = per_token(batch, RELATIVE[config.name](SCORES, batch.groups, counted=counted, **options)) * batch.mask
    np.testing.assert_array_equal(found.advantages_R, expected)
    assert (found.singleton_groups, found.uncounted_samples) == (1, 2)
    assert (found.advantages_R[batch.mask == 0] == 0).all()
    assert found.advantages_R.any()


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("masks", [[], [[]], [[0, 0], [0]], [[], [0]], [[1]]])
def test_empty_batches_and_fully_masked_ones_give_zeros(config, masks):
    batch = Batch.from_samples(make_sample(mask) for mask in masks)
    found = compute_advantages(config, [3.0] * len(masks), batch)
    assert found.advantages_R.tolist() == [0.0] * batch.num_response_tokens
    assert found.uncounted_samples == sum(not any(mask) for mask in masks)


@given(rows=batches)
@settings(max_examples=60, deadline=None)
def test_samples_without_a_trained_token_might_as_well_be_absent(rows):
    samples, rewards = build(rows)
    batch = Batch.from_samples(samples)
    present = np.flatnonzero(counted_samples(batch))
    for config in CONFIGS:
        whole = compute_advantages(config, rewards, batch)
        part = compute_advantages(config, [rewards[i] for i in present], batch.select(present.tolist()))
        pieces = [batch.split(whole.advantages_R)[i] for i in present]
        np.testing.assert_array_equal(np.concatenate([[], *pieces]), part.advantages_R)
        assert whole.singleton_groups == part.singleton_groups
        assert np.isfinite(whole.advantages_R).all()


def test_options_without_effect_are_refused():
    with pytest.raises(ConfigError, match="kl_estimator"):
        ReinforcePPAdvantageConfig(kl_estimator="k2")


def test_per_token_spreads_over_responses():
    batch = Batch.from_samples(
        [Sample(token_ids=np.arange(n), prompt_length=k) for n, k in ((4, 2), (3, 3), (2, 1))],
    )
    assert per_token(batch, np.array([1.5, 9.0, -1.0])).tolist() == [1.5, 1.5, -1.0]
    with pytest.raises(DataError):
        per_token(batch, np.zeros(2))


# --- filters ------------------------------------------------------------------------------------------------------------


def test_groups_with_equal_rewards_are_dropped_and_counted():
    found = filter_groups([1, 0, 1, 0, 1, 1, 3], ["a", "b", "a", "b", "c", "c", "d"])
    assert (found.kept.tolist(), found.groups_dropped, found.samples_dropped) == ([], 4, 7)
    found = filter_groups([1, 0, 2, 0, 1, 1.5, 3], ["a", "b", "a", "b", "c", "c", "d"])
    assert (found.kept.tolist(), found.groups_dropped, found.samples_dropped, found.samples_failed) == ([0, 2, 4, 5], 2, 3, 0)
    everything = filter_groups([1, 1], [0, 0], uniform=False)
    assert (everything.kept.tolist(), everything.groups_dropped) == ([0, 1], 0)
    assert filter_groups([], []).kept.tolist() == []


def test_failed_samples_are_dropped_only_where_asked_for_and_never_count_as_zero():
    rewards, groups = [1.0, None, 1.0, None, 2.0, 3.0], ["a", "a", "a", "b", "c", "c"]
    with pytest.raises(RewardError, match=r"sample 1 \(group 'a'\) is None"):
        filter_groups(rewards, groups)
    found = filter_groups(rewards, groups, failed=True, uniform=False)
    assert (found.kept.tolist(), found.groups_dropped, found.samples_dropped, found.samples_failed) == ([0, 2, 4, 5], 1, 2, 2)
    found = filter_groups(rewards, groups, failed=True)  # what is left of group a is uniform
    assert (found.kept.tolist(), found.groups_dropped, found.samples_dropped, found.samples_failed) == ([4, 5], 2, 4, 2)
    with pytest.raises(RewardError, match="sample 0"):
        filter_groups([math.nan], [0], failed=True)


def test_samples_that_do_not_count_do_not_keep_a_group_alive():
    found = filter_groups([1.0, 1.0, 9.0, 1.0, 2.0, 5.0], [0, 0, 0, 1, 1, 1], counted=[True, True, False, True, True, False])
    assert (found.kept.tolist(), found.groups_dropped) == ([3, 4, 5], 1)


@given(rows=batches)
@settings(max_examples=60, deadline=None)
def test_a_filter_takes_away_exactly_the_samples_without_signal(rows):
    samples, rewards = build(rows)
    batch = Batch.from_samples(samples)
    found = filter_groups(rewards, batch.groups, counted=counted_samples(batch))
    for config in (GRPOAdvantageConfig(), DrGRPOAdvantageConfig(), RLOOAdvantageConfig()):
        whole = compute_advantages(config, rewards, batch).advantages_R
        kept = found.kept.tolist()
        part = compute_advantages(config, [rewards[i] for i in kept], batch.select(kept)).advantages_R
        pieces = batch.split(whole)
        np.testing.assert_array_equal(np.concatenate([[], *(pieces[i] for i in kept)]), part)
        assert not np.concatenate([[], *(pieces[i] for i in range(len(rows)) if i not in kept)]).any()
