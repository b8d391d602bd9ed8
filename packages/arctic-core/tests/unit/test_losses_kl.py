"""KL estimators against the exact divergence of a small vocabulary: value and gradient in expectation, by enumeration."""

import math

import pytest
import torch

from arctic_core.config.losses import DAPOLossConfig
from arctic_core.losses.base import LossInputs
from arctic_core.losses.clipped import dapo_loss
from arctic_core.losses.kl import ESTIMATORS, k1, k2, k3, kl_estimate, kl_term

LOGITS = torch.tensor([0.3, -0.2, 0.9, 0.1, -1.5], dtype=torch.float64)
REF = torch.tensor([0.1, 0.4, 0.2, -0.6, -0.9], dtype=torch.float64).log_softmax(-1)
OLD = torch.tensor([0.7, -0.5, 0.2, 0.6, -1.0], dtype=torch.float64).log_softmax(-1)


class Expected:
    """The KL term of every token of the vocabulary, averaged over a distribution that samples them."""

    def __init__(self, estimator: str, gradient: str, *, sampled_from_old: bool = False, importance: bool = False) -> None:
        logits = LOGITS.clone().requires_grad_()
        logp = logits.log_softmax(-1)
        p = (OLD if sampled_from_old else logp.detach()).exp()
        values = kl_term(logp, REF, estimator, gradient, (logp - OLD).exp() if importance else None)
        self.value = (p * values).sum().detach()
        (self.gradient,) = torch.autograd.grad((p * values).sum(), logits)


def exact(first: str, second: str) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(first ‖ second) and its gradient in the policy's logits."""
    logits = LOGITS.clone().requires_grad_()
    named = {"policy": logits.log_softmax(-1), "ref": REF}
    a, b = named[first], named[second]
    kl = (a.exp() * (a - b)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


KL, KL_GRADIENT = exact("policy", "ref")
_, REVERSE_GRADIENT = exact("ref", "policy")


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=1e-14)


def apart(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() > 0.01)


@pytest.mark.parametrize("gradient", ["own", "score"])
def test_values_in_expectation_over_the_policy(gradient: str) -> None:
    assert close(Expected("k1", gradient).value, KL)
    assert close(Expected("k3", gradient).value, KL)
    assert apart(Expected("k2", gradient).value, KL)


def test_k2_is_right_to_second_order() -> None:
    """Halving the distance to the reference makes the relative error of k2 half as large."""
    errors = []
    for scale in (0.02, 0.01):
        logp = (REF + scale * LOGITS).log_softmax(-1)
        kl = (logp.exp() * (logp - REF)).sum()
        errors.append(((logp.exp() * kl_estimate(logp, REF, "k2")).sum() - kl).abs() / kl)
    assert (errors[0] / errors[1]).item() == pytest.approx(2.0, abs=0.05)


def test_own_gradients_in_expectation_over_the_policy() -> None:
    assert close(Expected("k1", "own").gradient, torch.zeros(5, dtype=torch.float64))
    assert close(Expected("k2", "own").gradient, KL_GRADIENT)
    assert close(Expected("k3", "own").gradient, REVERSE_GRADIENT)
    assert apart(REVERSE_GRADIENT, KL_GRADIENT)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_score_gradient_is_that_of_the_divergence(estimator: str) -> None:
    assert close(Expected(estimator, "score").gradient, KL_GRADIENT)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["own", "score"])
def test_samples_of_an_older_policy_need_the_importance_weight(estimator: str, gradient: str) -> None:
    plain = Expected(estimator, gradient, sampled_from_old=True)
    assert apart(plain.value, KL)
    assert apart(plain.gradient, KL_GRADIENT)
    weighted = Expected(estimator, gradient, sampled_from_old=True, importance=True)
    assert close(weighted.value, Expected(estimator, gradient).value)
    if (estimator, gradient) == ("k2", "own"):
        assert apart(weighted.gradient, KL_GRADIENT)
    else:
        assert close(weighted.gradient, KL_GRADIENT)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["own", "score"])
@pytest.mark.parametrize("importance", [False, True])
def test_a_loss_gives_the_same_gradient(estimator: str, gradient: str, importance: bool) -> None:
    """Each token of the vocabulary as a response of its own, with advantage 0; chained through log π and averaged."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    leaf = logp.detach().requires_grad_()
    ones = torch.ones(5, dtype=torch.bool)
    inputs = LossInputs(leaf, None, ones, torch.arange(6), torch.zeros(5).double(), OLD, REF)
    config = DAPOLossConfig(kl_coef=0.7, kl_estimator=estimator, kl_gradient=gradient, kl_importance=importance)
    output = dapo_loss(inputs, config)
    (per_token,) = torch.autograd.grad(output.loss, leaf)
    (total,) = torch.autograd.grad(logp, logits, OLD.exp() * per_token)
    expected = Expected(estimator, gradient, sampled_from_old=True, importance=importance)
    assert close(total, 0.7 * expected.gradient)


def test_values_of_single_tokens() -> None:
    d = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert k1(d).tolist() == [0.0, -1.0, 1.0]
    assert k2(d).tolist() == [0.0, 0.5, 0.5]
    assert k3(d).tolist() == pytest.approx([0.0, math.e - 2, 1 / math.e], abs=1e-15)


@pytest.mark.parametrize("gap", [90.0, -90.0, 1e3, -1e3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["own", "score"])
def test_far_references_stay_finite(estimator: str, gradient: str, gap: float) -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    value = kl_term(logp, torch.tensor([-1.0 + gap]), estimator, gradient)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logp)[0]).all()


@pytest.mark.parametrize(("gap", "value", "slope"), [(-45.0, 44.0, 1.0), (45.0, math.expm1(20) - 20, 0.0)])
def test_k3_far_from_the_reference(gap: float, value: float, slope: float) -> None:
    """A token the reference all but excludes is still pulled back; where ``exp`` would overflow, nothing is."""
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = kl_term(logp, logp.detach() + gap, "k3")
    assert found.item() == pytest.approx(value)
    assert torch.autograd.grad(found.sum(), logp)[0].item() == pytest.approx(slope)
