"""What the policy-gradient losses share: ratios, mismatch weights, KL and entropy terms, reduction and metrics.

Every loss here is one weighting of its tokens' terms::

    Σ_i w_i · (policy_i + kl_coef·KL_i − entropy_coef·H_i)

over trained tokens, with ``w = 1`` (``sequence_reduction="sum"``) or one over the trained tokens of the token's own sequence
(``"mean"``). It is a sum over sequences either way; the engine divides it, once.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_B`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from arctic_core.config.losses import PolicyLossConfig
from arctic_core.errors import DataError
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import (
    bounded_log_ratio,
    masked,
    metric_pairs,
    segment_counts,
    segment_expand,
    segment_mean,
    segment_sum,
)
from arctic_core.losses.kl import k3, kl_term
from arctic_core.losses.mismatch import Pairs, gap_metrics, token_weights


@dataclass(frozen=True)
class PolicyView:
    """A micro-batch with its masked slots cleared: 0 in every field."""

    mask_R: torch.Tensor
    cu_seqlens_B: torch.Tensor
    counts_B: torch.Tensor
    """Trained tokens of each sample, int64."""
    logp_R: torch.Tensor
    """Carries the gradient."""
    log_ratio_R: torch.Tensor
    """``log π − log π_old``, not bounded; carries the gradient."""
    log_rho_R: torch.Tensor | None
    """``log π_old − log π_sampler``, detached and not bounded, where the sampler's log-probs are known."""
    advantages_R: torch.Tensor
    ref_R: torch.Tensor | None
    entropy_R: torch.Tensor | None

    @property
    def trained_sequences(self) -> torch.Tensor:
        """Number of samples with a trained token."""
        return (self.counts_B > 0).sum()

    def reduce(self, values_R: torch.Tensor, config: PolicyLossConfig) -> torch.Tensor:
        """Sum the tokens' terms by ``sequence_reduction``; masked terms must be finite, they have weight 0."""
        weights_R = self.mask_R.to(values_R.dtype)
        if config.sequence_reduction == "mean":
            share_B = 1.0 / self.counts_B.clamp(min=1).to(values_R.dtype)
            weights_R = weights_R * segment_expand(share_B, self.cu_seqlens_B, len(weights_R))
        return (weights_R * values_R).sum()


def policy_view(inputs: LossInputs, config: PolicyLossConfig) -> PolicyView:
    """Clear the masked slots and take the log-ratios.

    Raises:
        DataError: A field that the options need is missing.
    """

    def field(name: str, *, needed: bool = True) -> torch.Tensor | None:
        value = getattr(inputs, name)
        if value is None and needed:
            raise DataError("is missing, and these options of the loss need it", where=f"loss inputs.{name}")
        return None if value is None else masked(value, inputs.mask_R)

    logp_R = masked(inputs.logprobs_R, inputs.mask_R)
    advantages_R = field("advantages_R")
    old_R = logp_R.detach() if config.on_policy else field("old_logprobs_R")
    sampler_R = field("sampler_logprobs_R", needed=config.mismatch != "none")
    assert advantages_R is not None
    assert old_R is not None
    return PolicyView(
        mask_R=inputs.mask_R,
        cu_seqlens_B=inputs.cu_seqlens_B,
        counts_B=segment_counts(inputs.mask_R, inputs.cu_seqlens_B),
        logp_R=logp_R,
        log_ratio_R=logp_R - old_R,
        log_rho_R=None if sampler_R is None else (old_R - sampler_R).detach(),
        advantages_R=advantages_R,
        ref_R=field("ref_logprobs_R", needed=config.kl_coef != 0),
        entropy_R=field("entropy_R", needed=config.entropy_coef != 0),
    )


def token_ratio(view: PolicyView) -> tuple[torch.Tensor, Pairs]:
    """``π / π_old`` of each token, with ``ratio`` and ``clamped_fraction`` per trained token."""
    bounded_R, clamped = bounded_log_ratio(view.log_ratio_R)
    ratio_R, count = bounded_R.exp(), view.mask_R.sum()
    return ratio_R, {"ratio": (masked(ratio_R.detach(), view.mask_R).sum(), count), "clamped_fraction": (clamped, count)}


def sequence_ratio(view: PolicyView, *, geometric: bool) -> tuple[torch.Tensor, Pairs]:
    """``π / π_old`` of each sample: the product over its trained tokens, or their geometric mean.

    Taken in log space. Metrics ``ratio`` and ``clamped_fraction`` per sample with a trained token.
    """
    if geometric:
        log_ratio_B = segment_mean(view.log_ratio_R, view.mask_R, view.cu_seqlens_B)
    else:
        log_ratio_B = segment_sum(view.log_ratio_R, view.cu_seqlens_B)
    bounded_B, clamped = bounded_log_ratio(log_ratio_B)
    ratio_B, count = bounded_B.exp(), view.trained_sequences
    trained_B = masked(ratio_B.detach(), view.counts_B > 0)
    return ratio_B, {"ratio": (trained_B.sum(), count), "clamped_fraction": (clamped, count)}


def finish_tokens(view: PolicyView, config: PolicyLossConfig, policy_R: torch.Tensor, metrics: Pairs) -> LossOutput:
    """The loss of per-token policy terms: mismatch weights, reduction, then :func:`finish`."""
    if config.mismatch != "none":
        assert view.log_rho_R is not None  # policy_view saw to it
        weights_R, weight_metrics = token_weights(view.log_rho_R, view.mask_R, view.cu_seqlens_B, config)
        policy_R = weights_R * policy_R
        metrics = metrics | weight_metrics
    count = view.trained_sequences if config.sequence_reduction == "mean" else view.mask_R.sum()
    return finish(view, config, view.reduce(policy_R, config), count, metrics)


def finish(view: PolicyView, config: PolicyLossConfig, policy: torch.Tensor, count: torch.Tensor, metrics: Pairs) -> LossOutput:
    """Add KL and entropy terms to the summed policy term and report.

    Metrics beside those given: ``loss`` and ``policy_loss`` by ``count`` (trained tokens where tokens are summed, sequences
    where each is averaged or is one action); per trained token ``old_kl`` (k3 estimate of KL(π_old ‖ π)), ``kl`` where there
    is a reference, ``entropy`` where it was computed, and ``mismatch_kl`` and ``mismatch_abs_diff`` where the sampler's
    log-probs are known.
    """
    loss, tokens = policy, view.mask_R.sum()
    metrics = metrics | {"old_kl": (k3(view.log_ratio_R.detach()).sum(), tokens)}
    if view.ref_R is not None:
        kl_R = kl_term(view.logp_R, view.ref_R, config.kl_estimator, config.kl_gradient, _importance(view, config))
        metrics["kl"] = (kl_R.sum(), tokens)
        if config.kl_coef:
            loss = loss + config.kl_coef * view.reduce(kl_R, config)
    if view.entropy_R is not None:
        metrics["entropy"] = (view.entropy_R.sum(), tokens)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * view.reduce(view.entropy_R, config)
    if view.log_rho_R is not None:
        metrics |= gap_metrics(view.log_rho_R, view.mask_R)
    return LossOutput(loss, metric_pairs({"loss": (loss, count), "policy_loss": (policy, count), **metrics}))


def _importance(view: PolicyView, config: PolicyLossConfig) -> torch.Tensor | None:
    """The weight of the KL terms. A token's own ratio, whatever the ratio of the policy term belongs to."""
    return bounded_log_ratio(view.log_ratio_R)[0].exp() if config.kl_importance else None
