"""Cross-entropy: its value and gradient, and what stands in masked slots."""

import pytest
import torch

from arctic_core.config.losses import SFTLossConfig
from arctic_core.losses.base import LossInputs
from arctic_core.losses.sft import sft_loss
from arctic_core.plugins.manager import PluginRegistry


def make_inputs(poison: float = -7.0) -> LossInputs:
    logp = torch.tensor([-1.0, -0.5, poison, -2.0, poison, -0.25], requires_grad=True)
    return LossInputs(logp, None, torch.tensor([True, True, False, True, False, True]), torch.tensor([0, 2, 2, 5, 6]))


@pytest.mark.parametrize("poison", [-7.0, float("nan"), float("inf"), float("-inf"), 1e30])
def test_sft_is_the_negative_log_likelihood_of_trained_tokens(poison: float) -> None:
    inputs = make_inputs(poison)
    output = sft_loss(inputs, SFTLossConfig())
    assert output.loss.item() == 3.75
    assert output.metrics["loss"] == (3.75, 4.0)
    assert torch.equal(torch.autograd.grad(output.loss, inputs.logprobs_R)[0], -inputs.mask_R.float())


def test_sft_needs_no_field() -> None:
    assert PluginRegistry().loss("sft").requires == ()
