"""Distillation from a teacher's log-probs: KL in both directions and the generalised Jensen-Shannon divergence.

``p`` is the student (the policy being trained), ``q`` the teacher. Per trained token the loss is

- ``reverse_kl``: ``KL(p ‖ q)``, as in MiniLLM (Gu et al. 2024) and "On-Policy Distillation" (Thinking Machines, 2025);
- ``forward_kl``: ``KL(q ‖ p)``, classical distillation (Hinton et al. 2015);
- ``jsd``: ``β·KL(q ‖ m) + (1 − β)·KL(p ‖ m)``, ``m = β·q + (1 − β)·p``, as in GKD (Agarwal et al. 2024).

Both sides must be at the same temperature. No log-prob of a teacher makes the loss infinite: log-ratios are bounded by
±:data:`~arctic_core.losses.common.LOG_RATIO_LIMIT`, and the tokens where that mattered are counted.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_K`` tokens scored beside each, ``_N`` outcomes (``K``, or ``K + 1``).
"""

from __future__ import annotations

import math

import torch

from arctic_core.config.losses import DistillLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import LOG_RATIO_LIMIT, masked, token_metrics
from arctic_core.losses.divergence import LOGPROB_FLOOR, jsd

TAIL_FLOOR = 2.0**-23
"""Least mass outside the ``K`` tokens: what float32 resolves beside 1."""


def distill_loss(inputs: LossInputs, config: DistillLossConfig) -> LossOutput:
    """Sum over trained tokens of a divergence between policy and teacher.

    ``topk``: the divergence of the two distributions over ``K`` tokens and, with ``tail="bucket"``, over all others as one
    outcome; exact where ``K`` is the vocabulary. ``sampled``: a one-sample estimate from the response's own token, whose
    gradient is in expectation that of the divergence at its position.

    Metrics, per trained token: ``loss``; ``teacher_kl``, KL(policy ‖ teacher) over the same outcomes, or its k1 estimate;
    ``clamped_fraction``, tokens at which a bounded log-ratio entered the loss. ``topk`` adds ``teacher_mass`` and
    ``student_mass``, what the ``K`` tokens hold, and ``agreement``, tokens at which both sides prefer the same one of them
    (among equals, any). ``sampled`` off policy adds ``ratio``, ``π / π_old``.
    """
    loss_R, sums_R = (_topk if config.source == "topk" else _sampled)(inputs, config)
    loss = masked(loss_R, inputs.mask_R).sum()
    sums = {name: masked(values_R.detach(), inputs.mask_R).sum() for name, values_R in sums_R.items()}
    return LossOutput(loss, token_metrics({"loss": loss, **sums}, inputs.mask_R))


# --- over K tokens ------------------------------------------------------------------------------------------------------


def _topk(inputs: LossInputs, config: DistillLossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert inputs.topk_logprobs_RK is not None
    assert inputs.teacher_topk_logprobs_RK is not None
    student_RK, teacher_RK = inputs.topk_logprobs_RK, inputs.teacher_topk_logprobs_RK.detach()
    if not len(student_RK):  # an empty batch may not know its K
        student_RK, teacher_RK = student_RK.sum(-1, keepdim=True), teacher_RK.sum(-1, keepdim=True)
    mask_R1 = inputs.mask_R[:, None]
    student_RK = masked(student_RK, mask_R1).clamp_min(LOGPROB_FLOOR)
    teacher_RK = masked(teacher_RK, mask_R1).clamp_min(LOGPROB_FLOOR)
    outcomes = _with_tail if config.tail == "bucket" else _renormalized
    log_p_RN, log_q_RN = outcomes(student_RK), outcomes(teacher_RK)

    raw_RN = (log_p_RN - log_q_RN).detach()
    log_ratio_RN = raw_RN.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + _gradient_of(log_p_RN)
    reverse_R = (log_p_RN.exp() * log_ratio_RN).sum(-1)
    if config.divergence == "reverse_kl":
        loss_R, clamped_RN = reverse_R, raw_RN > LOG_RATIO_LIMIT
    elif config.divergence == "forward_kl":
        loss_R, clamped_RN = -(log_q_RN.exp() * log_ratio_RN).sum(-1), raw_RN < -LOG_RATIO_LIMIT
    else:
        loss_R, clamped_RN = jsd(log_p_RN, log_q_RN, config.beta), torch.zeros_like(raw_RN, dtype=torch.bool)

    preferred_RK = (student_RK == student_RK.amax(-1, keepdim=True)) & (teacher_RK == teacher_RK.amax(-1, keepdim=True))
    return loss_R, {
        "teacher_kl": reverse_R,
        "clamped_fraction": clamped_RN.any(-1),
        "teacher_mass": teacher_RK.exp().sum(-1),
        "student_mass": student_RK.exp().sum(-1),
        "agreement": preferred_RK.any(-1),
    }


def _with_tail(logprobs_RK: torch.Tensor) -> torch.Tensor:
    """``[R, K + 1]``: the log-probs, and that of all other tokens together, ``log(1 − Σp)``.

    Rounding can bring the sum to 1 and beyond. The tail then holds :data:`TAIL_FLOOR` and the rest is scaled to fit, so that
    both sides are distributions and every divergence stays at or above 0. Of a teacher in bfloat16 the rounding of the sum
    (some 1e-3) may be all there is of a tail, and KL(p ‖ q) sees its logarithm: better is float32, or no tail.
    """
    mass_R1 = logprobs_RK.logsumexp(-1, keepdim=True)
    covered_R1 = mass_R1.clamp_max(math.log1p(-TAIL_FLOOR))
    return torch.cat([logprobs_RK - (mass_R1 - covered_R1), _log1mexp(covered_R1)], -1)


def _renormalized(logprobs_RK: torch.Tensor) -> torch.Tensor:
    """Scaled to sum to 1 over the ``K`` tokens. Tokens that all have probability 0 come out equal."""
    return logprobs_RK.log_softmax(-1)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """``log(1 − eˣ)`` for ``x < 0``, accurate near 0 and far from it (Mächler 2012, a note of the R package Rmpfr)."""
    return torch.where(x > -math.log(2.0), (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


# --- from the sampled token ---------------------------------------------------------------------------------------------


def _sampled(inputs: LossInputs, config: DistillLossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each divergence is ``E_π[f(u)]`` with ``u = q/π``; its gradient is ``E_π[(f − u·f')·∇log π]``.

    The value reported is ``f``. The factor of ``∇log π`` is known up to a constant, whose contribution is 0 on average; here
    it is 0 at ``u = 1``, where there is nothing to learn. Samples of ``π_old`` weigh both by ``π / π_old``.
    """
    assert inputs.teacher_logprobs_R is not None
    mask_R = inputs.mask_R
    logp_R = masked(inputs.logprobs_R, mask_R).clamp_min(LOGPROB_FLOOR)
    raw_u_R = masked(inputs.teacher_logprobs_R.detach(), mask_R).clamp_min(LOGPROB_FLOOR) - logp_R.detach()
    log_u_R = raw_u_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value_R, factor_R = _value_and_factor(log_u_R, config)
    sums_R = {"teacher_kl": -log_u_R, "clamped_fraction": raw_u_R.abs() > LOG_RATIO_LIMIT}
    if not config.on_policy:
        assert inputs.old_logprobs_R is not None
        raw_w_R = logp_R.detach() - masked(inputs.old_logprobs_R.detach(), mask_R).clamp_min(LOGPROB_FLOOR)
        weight_R = raw_w_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        value_R, factor_R = weight_R * value_R, weight_R * factor_R
        sums_R["teacher_kl"] = weight_R * sums_R["teacher_kl"]
        sums_R["clamped_fraction"] = sums_R["clamped_fraction"] | (raw_w_R.abs() > LOG_RATIO_LIMIT)
        sums_R["ratio"] = weight_R
    return value_R + factor_R * _gradient_of(logp_R), sums_R


def _value_and_factor(log_u_R: torch.Tensor, config: DistillLossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """``f(u)``, and what multiplies ``∇log π``."""
    if config.divergence == "reverse_kl":  # f = −log u, f − u·f' = 1 − log u
        return -log_u_R, -log_u_R
    u_R = log_u_R.exp()
    if config.divergence == "forward_kl":  # f = u·log u, f − u·f' = −u
        return u_R * log_u_R, -torch.expm1(log_u_R)
    beta = config.beta  # f = β·u·log u − m·log m with m = β·u + 1 − β, f − u·f' = −(1 − β)·log m
    log_m_R = torch.log1p(beta * torch.expm1(log_u_R))
    value_R = beta * u_R * (log_u_R - log_m_R) - (1.0 - beta) * log_m_R
    return value_R, -(1.0 - beta) * log_m_R


def _gradient_of(values: torch.Tensor) -> torch.Tensor:
    """Zeros with the gradient of ``values``, which must be finite."""
    return values - values.detach()
