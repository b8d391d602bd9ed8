"""The losses against dense float64 formulas, in value and gradient, and with poison in every masked slot."""

import dataclasses

import pytest
import torch

from arctic_core.config.losses import GRPOLossConfig, SFTLossConfig
from arctic_core.errors import ConfigError
from arctic_core.losses.base import LossInputs
from arctic_core.losses.common import LOG_RATIO_LIMIT
from arctic_core.losses.grpo import grpo_loss
from arctic_core.losses.kl import ESTIMATORS, kl_estimate
from arctic_core.losses.sft import sft_loss
from arctic_core.plugins.manager import PluginRegistry

FIELDS = ("advantages_R", "old_logprobs_R", "ref_logprobs_R", "sampler_logprobs_R")


def make_inputs(seed: int = 0, size: int = 23, spread: float = 0.6) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    logp = -draw().abs() - 0.1
    return LossInputs(
        logprobs_R=logp.clone().requires_grad_(),
        entropy_R=draw().abs().requires_grad_(),
        mask_R=torch.rand(size, generator=generator) < 0.7,
        cu_seqlens_B=torch.tensor([0, 5, 5, 6, size]),
        advantages_R=draw(),
        old_logprobs_R=logp + draw(spread),
        ref_logprobs_R=logp + draw(spread),
    )


def dense_grpo(inputs: LossInputs, c: GRPOLossConfig) -> torch.Tensor:
    """The same loss written token by token with python branches."""
    total = torch.zeros((), dtype=torch.float64)
    for i in inputs.mask_R.nonzero()[:, 0].tolist():
        logp, advantage = inputs.logprobs_R[i], inputs.advantages_R[i]
        old = logp.detach() if c.on_policy else inputs.old_logprobs_R[i]
        ratio = torch.exp(logp - old)
        bounded = ratio
        if ratio < 1 - c.clip_low:
            bounded = torch.tensor(1 - c.clip_low, dtype=torch.float64)
        elif ratio > 1 + c.clip_high:
            bounded = torch.tensor(1 + c.clip_high, dtype=torch.float64)
        gain = ratio * advantage if ratio * advantage <= bounded * advantage else bounded * advantage
        if c.dual_clip is not None and advantage < 0 and gain < c.dual_clip * advantage:
            gain = c.dual_clip * advantage
        d = inputs.ref_logprobs_R[i] - logp
        kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[c.kl_estimator]
        total = total - gain + c.kl_coef * kl - c.entropy_coef * inputs.entropy_R[i]
    return total


def gradients(loss: torch.Tensor, inputs: LossInputs) -> list[torch.Tensor]:
    grads = torch.autograd.grad(loss, [inputs.logprobs_R, inputs.entropy_R], allow_unused=True)
    return [torch.zeros_like(inputs.logprobs_R) if g is None else g for g in grads]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.3},
        {"dual_clip": 1.5},
        {"on_policy": True, "kl_coef": 0.2},
        {"kl_coef": 0.5, "kl_estimator": "k1"},
        {"kl_coef": 0.5, "kl_estimator": "k2"},
        {"kl_coef": 0.5, "kl_estimator": "k3", "entropy_coef": 0.05, "dual_clip": 3.0},
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_equals_the_dense_formula(options: dict, seed: int) -> None:
    inputs, config = make_inputs(seed), GRPOLossConfig.parse(options)
    loss, expected = grpo_loss(inputs, config).loss, dense_grpo(inputs, config)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients(loss, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_metrics_are_sums_over_trained_tokens() -> None:
    inputs = make_inputs()
    metrics = grpo_loss(inputs, GRPOLossConfig(kl_coef=0.1, entropy_coef=0.01)).metrics
    trained = int(inputs.mask_R.sum())
    assert set(metrics) == {
        "loss",
        "policy_loss",
        "ratio",
        "clip_fraction",
        "clamped_fraction",
        "old_kl",
        "kl",
        "entropy",
    }
    assert {count for _, count in metrics.values()} == {trained}
    kept = inputs.mask_R
    ratio = (inputs.logprobs_R - inputs.old_logprobs_R)[kept].exp()
    up = inputs.advantages_R[kept] > 0
    beyond = (up & (ratio > 1.2)) | (~up & (ratio < 0.8))
    assert 0 < int(beyond.sum()) < trained
    assert metrics["clip_fraction"][0] == int(beyond.sum())
    assert metrics["ratio"][0] == pytest.approx(ratio.sum().item())
    assert metrics["entropy"][0] == pytest.approx(inputs.entropy_R[kept].sum().item())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_masked_slots_may_hold_anything(poison: float) -> None:
    config = GRPOLossConfig(kl_coef=0.3, entropy_coef=0.1, dual_clip=2.0)
    clean = make_inputs()
    spoiled = {
        field: getattr(clean, field).detach().masked_fill(~clean.mask_R, poison)
        for field in ("logprobs_R", "entropy_R", "advantages_R", "old_logprobs_R", "ref_logprobs_R")
    }
    spoiled["logprobs_R"].requires_grad_()
    spoiled["entropy_R"].requires_grad_()
    dirty = dataclasses.replace(clean, **spoiled)
    for loss_of in (lambda inputs: grpo_loss(inputs, config), lambda inputs: sft_loss(inputs, SFTLossConfig())):
        expected, actual = loss_of(clean), loss_of(dirty)
        assert actual.loss.item() == expected.loss.item()
        assert actual.metrics == expected.metrics
        for mine, theirs in zip(gradients(actual.loss, dirty), gradients(expected.loss, clean), strict=True):
            assert torch.equal(mine, theirs)


def test_nan_in_a_trained_slot_stays_visible() -> None:
    inputs = make_inputs()
    inputs.advantages_R[int(inputs.mask_R.nonzero()[0])] = float("nan")
    assert torch.isnan(grpo_loss(inputs, GRPOLossConfig()).loss)


def test_everything_masked_is_exactly_zero() -> None:
    inputs = dataclasses.replace(make_inputs(), mask_R=torch.zeros(23, dtype=torch.bool))
    output = grpo_loss(inputs, GRPOLossConfig(kl_coef=1.0, entropy_coef=1.0))
    assert output.loss.item() == 0
    assert all(not grad.any() for grad in gradients(output.loss, inputs))
    assert set(output.metrics.values()) == {(0.0, 0.0)}


def test_no_response_tokens_at_all() -> None:
    empty = torch.zeros(0, requires_grad=True)
    inputs = LossInputs(empty, None, empty.detach().bool(), torch.tensor([0]), empty.detach(), empty.detach())
    loss = grpo_loss(inputs, GRPOLossConfig()).loss
    assert loss.item() == 0
    assert loss.requires_grad


@pytest.mark.parametrize("gap", [60.0, -60.0, 500.0])
def test_huge_log_ratios_are_bounded_before_exp_and_counted(gap: float) -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0 - gap, -1.0])
    inputs = LossInputs(
        logp, None, torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]), torch.tensor([-1.0, 0.0]), old, ref_logprobs_R=old
    )
    output = grpo_loss(inputs, GRPOLossConfig(kl_coef=0.1))
    assert torch.isfinite(output.loss)
    assert torch.isfinite(torch.autograd.grad(output.loss, logp)[0]).all()
    assert output.metrics["clamped_fraction"] == (1.0, 2.0)
    assert output.metrics["ratio"][0] <= torch.tensor(LOG_RATIO_LIMIT).exp().item() + 1 + 1e3


def test_sft_is_the_negative_log_likelihood() -> None:
    inputs = make_inputs()
    output = sft_loss(inputs, SFTLossConfig())
    assert output.loss.item() == pytest.approx(-inputs.logprobs_R[inputs.mask_R].sum().item())
    assert torch.equal(gradients(output.loss, inputs)[0], -inputs.mask_R.double())


def test_kl_estimators_on_an_exact_distribution() -> None:
    """Averaged over the policy, k1 and k3 are the divergence; only k2's derivative is its gradient, k1's vanishes."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.25, 0.0, 0.7, 0.3], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    p = logp.detach().exp()
    exact = (logp.exp() * (logp - ref)).sum()
    exact_gradient = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    average = {name: (p * kl_estimate(logp, ref, name)).sum() for name in ESTIMATORS}
    derivative = {name: torch.autograd.grad(value, logits, retain_graph=True)[0] for name, value in average.items()}
    torch.testing.assert_close(average["k1"], exact, rtol=0, atol=1e-14)
    torch.testing.assert_close(average["k3"], exact, rtol=0, atol=1e-14)
    torch.testing.assert_close(average["k2"], exact, rtol=0.1, atol=0)
    torch.testing.assert_close(derivative["k2"], exact_gradient, rtol=0, atol=1e-14)
    torch.testing.assert_close(derivative["k1"], torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-14)
    reverse = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits)[0]
    torch.testing.assert_close(derivative["k3"], reverse, rtol=0, atol=1e-14)


def test_registered_with_the_fields_they_need() -> None:
    registry = PluginRegistry()
    grpo = registry.loss("grpo")
    needs = {
        (): ("old_logprobs",),
        (("on_policy", True),): (),
        (("kl_coef", 0.1),): ("old_logprobs", "ref_logprobs"),
    }
    assert grpo.requires == ("advantages",)
    for options, expected in needs.items():
        assert grpo.requires_for(grpo.config_model.parse(dict(options))) == expected
    assert grpo.needs_entropy(GRPOLossConfig(entropy_coef=0.1))
    assert not grpo.needs_entropy(GRPOLossConfig())
    inputs = make_inputs()
    assert torch.equal(grpo.compute(inputs, GRPOLossConfig()).loss, grpo_loss(inputs, GRPOLossConfig()).loss)
    assert registry.loss("sft").requires == ()


@pytest.mark.parametrize("options", [{"clip": 0.2}, {"dual_clip": 1.0}, {"kl_estimator": "k4"}, {"clip_low": 1.0}])
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GRPOLossConfig.parse(options)
