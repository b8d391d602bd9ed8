"""No cut, order or masked slot changes a policy loss: properties over random batches, for every policy loss."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import segment_counts, segment_expand, segment_mean, segment_sum
from arctic_core.plugins.manager import PluginRegistry

REGISTRY = PluginRegistry()
NAMES = ["grpo", "dapo", "dr_grpo", "ppo", "reinforce_pp", "gspo", "rloo", "cispo", "sapo"]
FIELDS = ("logprobs_R", "entropy_R", "advantages_R", "old_logprobs_R", "ref_logprobs_R", "sampler_logprobs_R")
POISON = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 1e3, -1e3]

FULL = {"kl_coef": 0.3, "kl_importance": True, "entropy_coef": 0.1}
OPTIONS = {
    "plain": {},
    "tis": {**FULL, "mismatch": "tis", "mismatch_level": "sequence"},
    "mis": {
        **FULL,
        "mismatch": "mis",
        "mismatch_level": "geometric",
        "mismatch_low": 0.7,
        "mismatch_high": 1.4,
        "kl_gradient": "score",
    },
    "on_policy": {**FULL, "on_policy": True, "mismatch": "mis", "mismatch_level": "sequence", "mismatch_low": 0.5},
}
EXTRA = {
    "grpo": {"ratio_level": "sequence", "dual_clip": 1.5},
    "dr_grpo": {"sequence_reduction": "mean"},
    "cispo": {"clip_high": 0.1},
}


def options_of(name: str) -> list[dict]:
    return [*OPTIONS.values(), OPTIONS["mis"] | EXTRA.get(name, {})]


def make_inputs(lengths: list[int], seed: int, kept: float = 0.7, dtype: torch.dtype = torch.float64) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def draw(scale: float = 0.4) -> torch.Tensor:
        return (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)

    logp = -draw(1.0).abs() - 0.1
    return LossInputs(
        logprobs_R=logp.clone().requires_grad_(),
        entropy_R=draw().abs().requires_grad_(),
        mask_R=torch.rand(size, generator=generator) < kept,
        cu_seqlens_B=torch.tensor([0, *lengths]).cumsum(0),
        advantages_R=draw(1.0),
        old_logprobs_R=logp + draw(),
        ref_logprobs_R=logp + draw(),
        sampler_logprobs_R=logp + draw(),
    )


def packed(inputs: LossInputs, order: list[int]) -> tuple[LossInputs, torch.Tensor]:
    """The batch of some samples, as fresh leaves, and the slots of the old batch that they came from."""
    spans = list(pairwise(inputs.cu_seqlens_B.tolist()))
    slots = torch.tensor([slot for sample in order for slot in range(*spans[sample])], dtype=torch.long)
    fields = {name: getattr(inputs, name).detach()[slots] for name in FIELDS}
    for name in FIELDS[:2]:
        fields[name].requires_grad_()
    lengths = [spans[sample][1] - spans[sample][0] for sample in order]
    return LossInputs(mask_R=inputs.mask_R[slots], cu_seqlens_B=torch.tensor([0, *lengths]).cumsum(0), **fields), slots


def compute(name: str, inputs: LossInputs, options: dict) -> LossOutput:
    definition = REGISTRY.loss(name)
    return definition.compute(inputs, definition.config_model.parse(options))


def gradients(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    leaves = [inputs.logprobs_R, inputs.entropy_R]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return torch.stack([torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)])


LENGTHS = st.lists(st.integers(0, 5), max_size=6)
SEEDS = st.integers(0, 2**31)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, data=st.data())
def test_order_and_split_change_nothing(name: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    """The sum over the parts of a shuffled batch is the whole; each token keeps its gradient and each metric its pair."""
    whole = make_inputs(lengths, seed)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    for options in options_of(name):
        expected = compute(name, whole, options)
        expected_gradient = gradients(expected.loss, whole)
        for parts in ([order], [order[:cut], order[cut:]], [[sample] for sample in order]):
            loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(expected_gradient)
            metrics = dict.fromkeys(expected.metrics, (0.0, 0.0))
            for part in parts:
                inputs, slots = packed(whole, list(part))
                output = compute(name, inputs, options)
                loss = loss + output.loss.detach()
                gradient[:, slots] = gradients(output.loss, inputs)
                metrics = {k: tuple(map(sum, zip(metrics[k], output.metrics[k], strict=True))) for k in metrics}
            torch.testing.assert_close(loss, expected.loss.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-13)
            for key, pair in metrics.items():
                assert pair == pytest.approx(expected.metrics[key], abs=1e-10, rel=0), key


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, data=st.data())
def test_masked_slots_may_hold_anything(name: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    clean = make_inputs(lengths, seed)
    spoiled = {}
    for field in FIELDS:
        poison = data.draw(st.lists(st.sampled_from(POISON), min_size=sum(lengths), max_size=sum(lengths)))
        values = getattr(clean, field).detach()
        spoiled[field] = torch.where(clean.mask_R, values, torch.tensor(poison, dtype=torch.float64))
    for field in FIELDS[:2]:
        spoiled[field].requires_grad_()
    dirty = dataclasses.replace(clean, **spoiled)
    for options in options_of(name):
        expected, actual = compute(name, clean, options), compute(name, dirty, options)
        assert actual.loss.item() == expected.loss.item()
        assert actual.metrics == expected.metrics
        assert torch.equal(gradients(actual.loss, dirty), gradients(expected.loss, clean))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [4, 0, 1, 7]])
def test_nothing_trained_is_exactly_zero(name: str, lengths: list[int]) -> None:
    """An empty batch, empty responses, and all tokens masked, with NaN in every slot."""
    inputs = make_inputs(lengths, 0, kept=0.0, dtype=torch.float32)
    fields = {field: torch.full_like(getattr(inputs, field), float("nan")) for field in FIELDS}
    inputs = dataclasses.replace(inputs, **fields | {f: fields[f].requires_grad_() for f in FIELDS[:2]})
    for options in options_of(name):
        output = compute(name, inputs, options)
        assert output.loss.item() == 0
        assert output.loss.requires_grad
        assert output.loss.ndim == 0
        assert not gradients(output.loss, inputs).any()
        assert set(output.metrics.values()) == {(0.0, 0.0)}


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_token_equals_a_token_that_is_not_there(name: str) -> None:
    inputs = make_inputs([5, 0, 1, 3, 12], 4)
    kept = inputs.mask_R
    fields = {field: getattr(inputs, field).detach()[kept] for field in FIELDS}
    for field in FIELDS[:2]:
        fields[field].requires_grad_()
    counts = segment_counts(kept, inputs.cu_seqlens_B)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    short = LossInputs(mask_R=torch.ones(int(counts.sum()), dtype=torch.bool), cu_seqlens_B=cu, **fields)
    for options in options_of(name):
        one, other = compute(name, inputs, options), compute(name, short, options)
        torch.testing.assert_close(one.loss, other.loss, rtol=0, atol=1e-13)
        torch.testing.assert_close(gradients(one.loss, inputs)[:, kept], gradients(other.loss, short), rtol=0, atol=1e-14)
        assert {k: c for k, (_, c) in one.metrics.items()} == {k: c for k, (_, c) in other.metrics.items()}


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_close_to_float64(name: str) -> None:
    """A long response: sums over its tokens are accumulated in float64 whatever the inputs' type."""
    exact = make_inputs([4000, 3, 0, 2000], 7)
    single = make_inputs([4000, 3, 0, 2000], 7, dtype=torch.float32)
    options = {"sequence_reduction": "mean"} if name != "rloo" else {"clip_low": 0.99, "clip_high": 1e8}
    one, other = compute(name, exact, options), compute(name, single, options)
    assert other.loss.dtype == torch.float32
    torch.testing.assert_close(other.loss.double(), one.loss, rtol=2e-4 if name == "rloo" else 0, atol=1e-5)


def test_sums_and_means_of_samples() -> None:
    cu, mask = torch.tensor([0, 2, 2, 3, 6]), torch.tensor([True, False, False, True, True, False])
    values = torch.tensor([1.0, float("nan"), float("inf"), 4.0, 6.0, 9.0], dtype=torch.float64, requires_grad=True)
    mean = segment_mean(values, mask, cu)
    assert mean.tolist() == [1.0, 0.0, 0.0, 5.0]
    (gradient,) = torch.autograd.grad((mean * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(), values)
    assert gradient.tolist() == [1.0, 0.0, 0.0, 2.0, 2.0, 0.0]
    assert segment_counts(mask, cu).tolist() == [1, 0, 0, 2]
    assert segment_sum(torch.arange(6.0), cu).tolist() == [1.0, 0.0, 2.0, 12.0]
    assert segment_expand(torch.tensor([1.0, 2.0, 3.0, 4.0]), cu, 6).tolist() == [1.0, 1.0, 3.0, 4.0, 4.0, 4.0]
    inner = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_expand(x, cu, 6), inner)
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, cu), torch.randn(6, dtype=torch.float64, requires_grad=True))


def test_a_sample_sums_to_the_same_bits_wherever_it_lies() -> None:
    values = torch.randn(1000)
    alone = segment_sum(values, torch.tensor([0, 1000]))
    among = segment_sum(torch.cat([1e6 * torch.randn(77), values, torch.randn(5)]), torch.tensor([0, 77, 1077, 1082]))
    assert torch.equal(among[1:2], alone)
