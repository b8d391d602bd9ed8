"""Mismatch corrections: the weights by hand, and what they do to the expected gradient, by enumeration."""

import itertools
import math

import pytest
import torch

from arctic_core.config.losses import DAPOLossConfig, PolicyLossConfig, RLOOLossConfig
from arctic_core.losses.base import LossInputs
from arctic_core.losses.clipped import dapo_loss
from arctic_core.losses.mismatch import sequence_weights, token_weights
from arctic_core.losses.rloo import rloo_loss

CU = torch.tensor([0, 3, 3, 4, 6])
MASK = torch.tensor([True, False, True, True, False, False])
RHO = torch.tensor([0.4, 1.0, 3.0, 6.0, 1.0, 1.0], dtype=torch.float64)  # masked slots are cleared: log ρ = 0


@pytest.mark.parametrize(
    ("options", "expected", "changed"),
    [
        ({"mismatch": "tis"}, [0.4, 2.0, 2.0], 2),
        ({"mismatch": "tis", "mismatch_high": 5.0}, [0.4, 3.0, 5.0], 1),
        ({"mismatch": "mis"}, [0.4, 0.0, 0.0], 2),
        ({"mismatch": "mis", "mismatch_low": 0.5, "mismatch_high": 4.0}, [0.0, 3.0, 0.0], 2),
        ({"mismatch": "icepop"}, [0.0, 3.0, 0.0], 2),
        ({"mismatch": "icepop", "mismatch_low": 0.1, "mismatch_high": 6.5}, [0.4, 3.0, 6.0], 0),
    ],
)
def test_token_weights_by_hand(options: dict, expected: list[float], changed: int) -> None:
    weights, metrics = token_weights(RHO.log(), MASK, CU, PolicyLossConfig(**options))
    assert weights[MASK].tolist() == pytest.approx(expected, abs=1e-14)
    name = "mismatch_truncated" if options["mismatch"] == "tis" else "mismatch_rejected"
    assert metrics.keys() == {"mismatch_weight", name}
    assert metrics["mismatch_weight"][0].item() == pytest.approx(sum(expected), abs=1e-14)
    assert metrics[name][0] == changed
    assert {count.item() for _, count in metrics.values()} == {3}


@pytest.mark.parametrize(
    ("options", "expected", "changed"),
    [
        ({"mismatch": "tis", "mismatch_level": "sequence"}, [1.2, 2.0], 1),
        ({"mismatch": "tis", "mismatch_level": "geometric", "mismatch_high": 1.05}, [1.05, 1.05], 2),
        ({"mismatch": "mis", "mismatch_level": "sequence"}, [1.2, 0.0], 1),
        ({"mismatch": "mis", "mismatch_level": "geometric", "mismatch_low": 1.3, "mismatch_high": 7.0}, [0.0, 6.0], 1),
        ({"mismatch": "mis", "mismatch_level": "geometric"}, [math.sqrt(1.2), 0.0], 1),
    ],
)
def test_sequence_weights_by_hand(options: dict, expected: list[float], changed: int) -> None:
    config = PolicyLossConfig(**options)
    weights, metrics = sequence_weights(RHO.log(), MASK, CU, config)
    assert weights[[0, 2]].tolist() == pytest.approx(expected, abs=1e-14)
    assert [sums.item() for sums, _ in metrics.values()] == pytest.approx([sum(expected), changed], abs=1e-14)
    assert {count.item() for _, count in metrics.values()} == {2}
    spread, same = token_weights(RHO.log(), MASK, CU, config)
    assert spread[MASK].tolist() == pytest.approx([expected[0], expected[0], expected[1]], abs=1e-14)
    assert same.keys() == metrics.keys()


def test_a_long_product_is_taken_in_log_space() -> None:
    """300 tokens of e⁻⁵ each: their product underflows in any float type, and the clamp keeps it at e⁻²⁰."""
    log_rho, mask, cu = torch.full((300,), -5.0), torch.ones(300, dtype=torch.bool), torch.tensor([0, 300])
    weights, _ = sequence_weights(log_rho, mask, cu, PolicyLossConfig(mismatch="tis", mismatch_level="sequence"))
    assert weights.item() == pytest.approx(math.exp(-20), abs=1e-14)
    weights, _ = sequence_weights(log_rho, mask, cu, PolicyLossConfig(mismatch="tis", mismatch_level="geometric"))
    assert weights.item() == pytest.approx(math.exp(-5), abs=1e-8)
    weights, _ = sequence_weights(-log_rho, mask, cu, PolicyLossConfig(mismatch="mis", mismatch_level="sequence"))
    assert weights.item() == 0


def test_nan_is_not_rejected_but_shown() -> None:
    log_rho = torch.tensor([float("nan"), 0.0])
    for kind in ("tis", "mis", "icepop"):
        weights, _ = token_weights(log_rho, torch.ones(2).bool(), torch.tensor([0, 2]), PolicyLossConfig(mismatch=kind))
        assert weights.isnan().tolist() == [True, False]


def test_a_rejected_token_keeps_its_place_in_the_count() -> None:
    logp = torch.full((4,), -1.0, requires_grad=True)
    sampler = torch.tensor([-1.0, -9.0, -1.0, 3.0])
    inputs = LossInputs(
        logp, None, torch.ones(4).bool(), torch.tensor([0, 4]), torch.ones(4), logp.detach(), sampler_logprobs_R=sampler
    )
    output = dapo_loss(inputs, DAPOLossConfig(mismatch="icepop"))
    assert output.loss.item() == -2.0
    assert output.metrics["loss"] == (-2.0, 4.0)
    assert output.metrics["mismatch_rejected"] == (2.0, 4.0)
    assert torch.autograd.grad(output.loss, logp)[0].tolist() == [-1.0, 0.0, -1.0, 0.0]


def two_token_model(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a first token ``[3]``, and of a second after each first one ``[3, 3]``."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(3, generator=generator), torch.randn(3, 3, generator=generator)
    return first.double().log_softmax(-1), second.double().log_softmax(-1)


def expected_gradient(loss_of, weights_by: str) -> torch.Tensor:
    """``E[∇loss]`` in the policy's log-probs over all nine responses, each with its own reward."""
    policy, sampler = two_token_model(0), two_token_model(1)
    rewards = torch.randn(9, generator=torch.Generator().manual_seed(2)).double()
    total = torch.zeros(12, dtype=torch.float64)
    for reward, (a, b) in zip(rewards, itertools.product(range(3), range(3)), strict=True):
        ours, theirs = (torch.stack([model[0][a], model[1][a, b]]) for model in (policy, sampler))
        leaf = ours.clone().requires_grad_()
        advantages, mask = reward.repeat(2), torch.ones(2, dtype=torch.bool)
        inputs = LossInputs(leaf, None, mask, torch.tensor([0, 2]), advantages, ours, sampler_logprobs_R=theirs)
        (gradient,) = torch.autograd.grad(loss_of(inputs), leaf)
        probability = (theirs if weights_by == "sampler" else ours).sum().exp()
        total[[a, 3 + 3 * a + b]] += probability * gradient
    return total


@pytest.mark.parametrize("loss", ["dapo", "rloo"])
def test_the_product_makes_a_samplers_responses_stand_for_the_policys(loss: str) -> None:
    """With bounds out of the way, the sequence-level weight removes the bias that no weight has. Token weights leave some."""
    compute, config = {"dapo": (dapo_loss, DAPOLossConfig), "rloo": (rloo_loss, RLOOLossConfig)}[loss]

    def gradient(weights_by: str, **options) -> torch.Tensor:
        return expected_gradient(lambda inputs: compute(inputs, config(**options)).loss, weights_by)

    wanted = gradient("policy")
    assert (gradient("sampler") - wanted).abs().max() > 0.05
    for kind in ("tis", "mis"):
        wide = {"mismatch": kind, "mismatch_level": "sequence", "mismatch_high": 1e6}
        torch.testing.assert_close(gradient("sampler", **wide), wanted, rtol=0, atol=1e-14)
    if loss == "dapo":
        token = gradient("sampler", mismatch="tis", mismatch_high=1e6)
        assert (token - wanted).abs().max() > 0.01
    narrow = gradient("sampler", mismatch="tis", mismatch_level="sequence", mismatch_high=1.0)
    assert (narrow - wanted).abs().max() > 0.01


def test_only_the_policy_term_is_weighted_and_weights_have_no_gradient() -> None:
    """Everything rejected: what is left is the gradient of KL and entropy."""
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 0.7], requires_grad=True)
    inputs = LossInputs(
        logp,
        entropy,
        torch.ones(2).bool(),
        torch.tensor([0, 2]),
        torch.ones(2),
        ref_logprobs_R=torch.tensor([-1.5, -1.5]),
        sampler_logprobs_R=torch.tensor([-8.0, -8.0]),
    )
    config = DAPOLossConfig(on_policy=True, mismatch="mis", kl_coef=1.0, kl_estimator="k2", entropy_coef=0.25)
    output = dapo_loss(inputs, config)
    assert output.loss.item() == pytest.approx(0.25 - 0.25 * 1.2, abs=1e-6)
    gradient = torch.autograd.grad(output.loss, [logp, entropy])
    assert [g.tolist() for g in gradient] == [[0.5, -0.5], [-0.25, -0.25]]
    assert output.metrics["policy_loss"] == (0.0, 2.0)
