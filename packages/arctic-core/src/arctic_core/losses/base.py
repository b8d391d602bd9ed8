"""The contract of a loss: packed tensors and a final mask in, a *sum* and (sum, count) metrics out.

Suffix legend: ``_R`` response-token axis of a packed micro-batch, ``_B`` samples.

A loss never divides by a token or sample count: the engine divides the accumulated gradient once per optimizer step
(:class:`arctic_core.protocol.LossSpec`). It never looks at masked slots: they may hold NaN, so mask *before* arithmetic.

This module imports torch for types only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arctic_core.config.base import ConfigModel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossInputs:
    """One packed micro-batch as a loss sees it. All floats are float32; fields the caller did not send are ``None``."""

    logprobs_R: torch.Tensor
    """Log-probs of the response tokens under the policy being trained; carries the gradient."""
    entropy_R: torch.Tensor | None
    """Entropy of each response token's distribution, with gradient; ``None`` unless the loss asked for it."""
    mask_R: torch.Tensor
    """Final mask, bool. Masked slots of the other fields may hold anything."""
    cu_seqlens_B: torch.Tensor
    """Offsets of the samples on the response axis, int64 ``[B + 1]``."""
    advantages_R: torch.Tensor | None = None
    old_logprobs_R: torch.Tensor | None = None
    ref_logprobs_R: torch.Tensor | None = None
    sampler_logprobs_R: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns."""

    loss: torch.Tensor
    """Scalar, summed over the micro-batch, differentiable. Exactly 0 with zero gradient where nothing is trained."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """``name → (sum, count)``, detached."""


@dataclass(frozen=True)
class LossDefinition:
    """A loss as registered through the ``arctic_losses`` hook."""

    name: str
    config_model: type[ConfigModel]
    """Validates :attr:`LossSpec.options`."""
    compute: Callable[[LossInputs, Any], LossOutput]
    """``compute(inputs, config)``; pure."""
    requires: tuple[str, ...] = ()
    """Batch fields (see :data:`arctic_core.data.TOKEN_FIELDS`) that must be present whatever the options."""
    requires_for: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """Further fields that these options need."""
    needs_entropy: Callable[[Any], bool] = lambda config: False
    """Whether these options need :attr:`LossInputs.entropy_R`."""
