"""Exact divergences and entropy of whole distributions, where logits or all log-probs are at hand.

A token of probability 0 (log-prob −inf) adds 0 to value and gradient wherever its probability is the weight. All results are in
nats and keep their gradient to both arguments.

Suffix legend: ``_R`` response tokens, ``_V`` vocabulary, ``_N`` outcomes of a normalised distribution.
"""

from __future__ import annotations

import math

import torch

LOGPROB_FLOOR = -1e4
"""Stands for a log-prob of −inf, so that differences are numbers. No softmax of a model's logits in float32 comes near it, and
its exponential is 0."""


def full_entropy(logits_RV: torch.Tensor) -> torch.Tensor:
    """Entropy ``−Σ p·log p``, ``[R]``. Takes logits or log-probs; see :func:`full_kl`."""
    log_p_RV = _normalized(logits_RV)
    p_RV = log_p_RV.exp()
    return -(p_RV * log_p_RV.masked_fill(p_RV == 0, 0.0)).sum(-1)


def full_kl(logits_RV: torch.Tensor, ref_logits_RV: torch.Tensor) -> torch.Tensor:
    """``KL(p ‖ q) = Σ p·(log p − log q)`` of the first argument to the second, ``[R]``; swap them for the reverse.

    Either may be logits (already divided by the temperature) or log-probs ``[R, V]`` of any float type: both are normalised
    here by a log-softmax in float32 (float64 stays). Where ``p`` has mass and ``q`` has none the divergence is infinite, and
    is returned as such; its gradient is then undefined. A row without any finite entry gives NaN.
    """
    log_p_RV, log_q_RV = _normalized(logits_RV), _normalized(ref_logits_RV)
    p_RV = log_p_RV.exp()
    impossible_RV = p_RV == 0
    log_ratio_RV = log_p_RV.masked_fill(impossible_RV, 0.0) - log_q_RV.masked_fill(impossible_RV, 0.0)
    return (p_RV * log_ratio_RV).sum(-1)


def full_jsd(logits_RV: torch.Tensor, ref_logits_RV: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of ``p`` (first) and ``q`` (second), ``[R]``: :func:`jsd` of what :func:`full_kl`
    takes. Always finite."""
    return jsd(_normalized(logits_RV), _normalized(ref_logits_RV), beta)


def jsd(log_p_RN: torch.Tensor, log_q_RN: torch.Tensor, beta: float) -> torch.Tensor:
    """``β·KL(q ‖ m) + (1 − β)·KL(p ‖ m)`` with ``m = β·q + (1 − β)·p``, ``[R]``, of normalised log-probs.

    As in GKD (Agarwal et al. 2024, "On-Policy Distillation of Language Models", eq. 1) with ``q`` the teacher and ``p`` the
    student: divided by ``β`` it tends to KL(q ‖ p) as ``β`` goes to 0, and by ``1 − β`` to KL(p ‖ q) as it goes to 1.
    """
    log_p_RN, log_q_RN = log_p_RN.clamp_min(LOGPROB_FLOOR), log_q_RN.clamp_min(LOGPROB_FLOOR)
    log_m_RN = torch.logaddexp(log_q_RN + math.log(beta), log_p_RN + math.log1p(-beta))
    terms_RN = beta * log_q_RN.exp() * (log_q_RN - log_m_RN) + (1.0 - beta) * log_p_RN.exp() * (log_p_RN - log_m_RN)
    return terms_RN.sum(-1)


def _normalized(logits_RV: torch.Tensor) -> torch.Tensor:
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(-1)
