"""The contract of a loss: packed tensors and a final mask in, a *sum* and (sum, count) metrics out.

Suffix legend: ``_R`` response-token axis of a packed micro-batch, ``_K`` tokens scored beside each response token, ``_B``
samples.

A loss never divides by a token or sample count of the batch: the engine divides the accumulated gradient once per optimizer
step (:class:`arctic_core.protocol.NamedLoss`). A sample is never cut, so a loss may average inside one. It never looks at
masked slots: they may hold NaN, so mask *before* arithmetic.

This module imports torch for types only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arctic_core.config.base import ConfigModel
from arctic_core.errors import ConfigError
from arctic_core.protocol import NamedLoss, Normalization

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
    teacher_logprobs_R: torch.Tensor | None = None
    topk_logprobs_RK: torch.Tensor | None = None
    """Log-probs of the batch's ``topk_ids`` under the policy, with gradient; ``None`` unless the loss asked for it."""
    teacher_topk_logprobs_RK: torch.Tensor | None = None
    """Log-probs of the same tokens under the teacher."""


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
    """Validates :attr:`NamedLoss.options`."""
    compute: Callable[[LossInputs, Any], LossOutput]
    """``compute(inputs, config)``; pure."""
    requires: tuple[str, ...] = ()
    """Batch fields (:data:`arctic_core.data.TOKEN_FIELDS`, ``TOPK_FIELDS``) that must be present whatever the options."""
    requires_for: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """Further fields that these options need."""
    needs_entropy: Callable[[Any], bool] = lambda config: False
    """Whether these options need :attr:`LossInputs.entropy_R`."""
    needs_topk: Callable[[Any], bool] = lambda config: False
    """Whether these options need :attr:`LossInputs.topk_logprobs_RK`."""
    normalization: Normalization = "token"
    """What divides the summed loss where the caller leaves it open. With ``constant`` the caller must give one."""


@dataclass(frozen=True)
class PreparedLoss:
    """A named loss with its options checked: what engines and clients compute with."""

    definition: LossDefinition
    config: Any
    """The validated options."""
    required: tuple[str, ...]
    """Batch fields that must be present."""
    normalization: Normalization
    constant: float | None
    """The divisor of ``constant``."""

    @property
    def needs_entropy(self) -> bool:
        return self.definition.needs_entropy(self.config)

    @property
    def needs_topk(self) -> bool:
        return self.definition.needs_topk(self.config)

    def compute(self, inputs: LossInputs) -> LossOutput:
        return self.definition.compute(inputs, self.config)


def prepare_loss(definition: LossDefinition, loss: NamedLoss) -> PreparedLoss:
    """Check a loss's options and settle what divides it.

    Raises:
        ConfigError: An option is unknown or out of range, the normalisation contradicts the options, or its constant is
            missing.
    """
    where = f"loss {loss.name!r}"
    config = definition.config_model.parse(dict(loss.options), where=where)
    normalization = loss.normalization or ("constant" if loss.constant is not None else definition.normalization)
    if normalization == "constant" and loss.constant is None:
        raise ConfigError(
            "is normalised by a constant that you give",
            where=where,
            remedy="set `constant`, e.g. to samples per optimizer step times the longest response, or another normalization",
        )
    if normalization == "token" and getattr(config, "sequence_reduction", "sum") == "mean":
        raise ConfigError(
            "a mean over each sequence cannot be divided by tokens again",
            where=where,
            remedy='set normalization="sequence", or the option sequence_reduction="sum"',
        )
    required = tuple(dict.fromkeys((*definition.requires, *definition.requires_for(config))))
    return PreparedLoss(definition, config, required, normalization, loss.constant)
