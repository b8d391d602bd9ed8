"""A loss that learns from good responses alone, after RAFT (Dong et al., 2023).

Suffix legend: ``_R`` response-token axis of a packed micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arctic_core.config import ConfigModel
from arctic_core.losses.base import LossInputs, LossOutput

if TYPE_CHECKING:
    import torch


class PositiveOnlyConfig(ConfigModel):
    """Options of the loss; an unknown one is an error."""

    weighted: bool = False
    """Weigh each token by its advantage instead of by 1."""


# --8<-- [start:loss]
def positive_only(inputs: LossInputs, config: PositiveOnlyConfig) -> LossOutput:
    """``−Σ w·logprob`` over trained tokens with a positive advantage; ``w`` is 1, or the advantage.

    A sum, as every loss: the engine divides once per optimizer step. The mask comes first, so that whatever stands in a
    masked slot, NaN included, touches neither the value nor the gradient.
    """
    advantages_R = _required(inputs.advantages_R)
    kept_R = inputs.mask_R & (advantages_R > 0)
    weights_R = advantages_R if config.weighted else advantages_R.new_ones(advantages_R.shape)
    loss = -(inputs.logprobs_R[kept_R] * weights_R[kept_R]).sum()
    return LossOutput(loss, {"positive_only/kept": (float(kept_R.sum()), float(inputs.mask_R.sum()))})


# --8<-- [end:loss]


def _required(advantages_R: torch.Tensor | None) -> torch.Tensor:
    """The engine has checked ``requires``; this tells the type checker."""
    assert advantages_R is not None
    return advantages_R
