"""Packed scoring: log-probs and entropies of response tokens, from one row of sequences.

The logits at a sample's position ``i`` score its token ``i + 1``, inside that sample only. Logits are computed for the rows
that predict a response token and for no others, divided by the temperature, and normalised in float32 (float64 for a
float64 model).

Suffix legend: ``_T`` token axis of a packed row, ``_R`` response tokens, ``_V`` vocabulary, ``_K`` candidates
beside each response token, ``_J`` the response token and its candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from arctic_core.data import Batch
from arctic_core.errors import DataError

LM_ATTRIBUTE = "model"
"""Attribute of :class:`ScoringModule` that holds the language model."""
_CHUNK_ELEMENTS = 1 << 26  # logits handled at once in float32 by the head's value and gradient


Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Log-probs ``[R]``, entropies ``[R]``, log-probs ``[R, K]`` of candidates, ids ``[R, K]`` of candidates."""


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on the device."""

    token_ids_T: torch.Tensor
    """Int64 ``[1, T]``, ``T >= 1``."""
    position_ids_T: torch.Tensor
    """Position of each token inside its own sample, int64 ``[1, T]``."""
    cu_seqlens: tuple[int, ...]
    """Offsets of the samples on the token axis, on the host."""
    rows_R: torch.Tensor
    """Index of the position whose logits predict each response token, int64 ``[R]``."""
    labels_R: torch.Tensor
    """The response tokens, int64 ``[R]``."""
    temperatures_R: torch.Tensor
    """Temperature of each response token, float32 ``[R]``."""
    topk_ids_RK: torch.Tensor | None = None
    """Candidates to score beside each response token, int64 ``[R, K]``."""


def pack(batch: Batch, device: torch.device | str, temperature: float | None = None, *, topk_ids: bool = False) -> PackedInputs:
    """Lay a batch out for :class:`ScoringModule`; ``temperature`` overrides the samples' own.

    Args:
        batch: Samples of one micro-batch.
        device: Where the tensors go.
        temperature: Replaces the samples' temperatures.
        topk_ids: Score the batch's ``topk_ids`` too. Without response tokens it need not have any.

    Raises:
        DataError: ``temperature`` is not a positive number, or the batch has no ``topk_ids``.

    An empty batch becomes one dummy token without response tokens, so that a rank without work takes part in collectives.
    """
    if temperature is not None and not 0 < temperature < np.inf:
        raise DataError(f"temperature {temperature} is not a positive number", where="temperature")
    if topk_ids and batch.topk_ids is None and batch.num_response_tokens:
        raise DataError("the batch has no candidates to score", where="batch.topk_ids", remedy="give every sample topk_ids")
    lengths = batch.lengths
    offsets = batch.cu_seqlens
    token_ids = batch.token_ids.astype(np.int64)
    positions = np.arange(len(token_ids)) - np.repeat(offsets[:-1], lengths)
    targets = np.flatnonzero(positions >= np.repeat(batch.prompt_lengths, lengths))
    temperatures = np.repeat(batch.temperatures, batch.response_lengths).astype(np.float32)
    if temperature is not None:
        temperatures = np.full_like(temperatures, temperature)
    if len(token_ids) == 0:
        token_ids, positions, offsets = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([0, 1])
    candidates = np.zeros((0, 0), np.int64) if batch.topk_ids is None else batch.topk_ids.astype(np.int64)
    return PackedInputs(
        token_ids_T=torch.from_numpy(token_ids)[None].to(device),
        position_ids_T=torch.from_numpy(positions)[None].to(device),
        cu_seqlens=tuple(offsets.tolist()),
        rows_R=torch.from_numpy(targets - 1).to(device),
        labels_R=torch.from_numpy(token_ids[targets]).to(device),
        temperatures_R=torch.from_numpy(temperatures).to(device),
        topk_ids_RK=torch.from_numpy(candidates).to(device) if topk_ids else None,
    )


class ScoringModule(nn.Module):
    """A causal language model that returns scores instead of logits.

    Args:
        model: A transformers model loaded by :func:`arctic_core.models.factory.load_causal_lm`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = model

    def forward(self, inputs: PackedInputs, entropy: bool = False, topk: int = 0) -> Scores:
        """Score a packed row.

        Args:
            inputs: The row; where it has ``topk_ids_RK`` their log-probs are returned, differentiable.
            entropy: Whether entropies are wanted.
            topk: Report this many most likely tokens instead, most likely first, without gradient.

        Returns:
            Log-probs ``[R]``, entropies ``[R]`` or ``None``, log-probs ``[R, K]`` of candidates or ``None``, and the
            candidates' ids, int64 ``[R, K]``, or ``None``. In nats and float32 (float64 for a float64 model). Without response
            tokens all are empty and still connected to every parameter. A plain tuple, since DeepSpeed looks into it.

        Raises:
            DataError: ``topk`` is negative or above the vocabulary's size, or given together with ``inputs.topk_ids_RK``.
        """
        # The model's own head runs, on selected rows, so that logit scaling and soft-capping stay the architecture's.
        output: Any = self.model(
            input_ids=inputs.token_ids_T,
            position_ids=inputs.position_ids_T,
            cu_seqlens=inputs.cu_seqlens,
            logits_to_keep=inputs.rows_R,
            use_cache=False,
        )
        return score_logits(
            output.logits[0], inputs.labels_R, inputs.temperatures_R, entropy=entropy, ids_RK=inputs.topk_ids_RK, topk=topk
        )


def checkpoint_name(parameter: str) -> str:
    """Name inside the language model of a parameter of :class:`ScoringModule`."""
    return parameter.removeprefix(f"{LM_ATTRIBUTE}.")


def module_name(parameter: str) -> str:
    """Inverse of :func:`checkpoint_name`."""
    return f"{LM_ATTRIBUTE}.{parameter}"


def score_logits(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    *,
    entropy: bool,
    ids_RK: torch.Tensor | None = None,
    topk: int = 0,
) -> Scores:
    """Log-probs of the labels and, on request, entropies and log-probs of candidates, under ``softmax(logits / temperature)``.

    Candidates are ``ids_RK``, differentiable, or the ``topk`` most likely tokens, without gradient. Differentiable with respect
    to the logits. A logit of −inf has probability 0 and adds nothing to the entropy or to any gradient. Beside the logits (in
    their own type) and their gradient only a bounded slice exists in float32.

    Raises:
        DataError: Both ``ids_RK`` and ``topk`` are given, or ``topk`` is negative or above the vocabulary's size.
    """
    if not 0 <= topk <= logits_RV.shape[1] or (topk and ids_RK is not None):
        raise DataError(
            f"topk {topk} with{'out' if ids_RK is None else ''} given candidates, of a vocabulary of {logits_RV.shape[1]}",
            where="topk",
            remedy="ask for at most the vocabulary's size, and for either the most likely tokens or given ones",
        )
    found_RK = _most_likely(logits_RV.detach(), topk) if topk else ids_RK
    ids_RJ = labels_R[:, None] if found_RK is None else torch.cat([labels_R[:, None], found_RK], dim=1)
    logprobs_RJ, entropy_R = _LogprobEntropy.apply(logits_RV, ids_RJ, temperatures_R, entropy)
    candidates_RK = None if found_RK is None else logprobs_RJ[:, 1:]
    if topk and candidates_RK is not None:
        candidates_RK = candidates_RK.detach()
    return logprobs_RJ[:, 0], entropy_R if entropy else None, candidates_RK, found_RK


def logprobs_and_entropy(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, temperatures_R: torch.Tensor, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`score_logits` without candidates."""
    return score_logits(logits_RV, labels_R, temperatures_R, entropy=entropy)[:2]


def _most_likely(logits_RV: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest logits of each row, largest first, int64 ``[R, K]``. A temperature does not change the order."""
    return logits_RV.topk(count, dim=-1).indices


def _chunks(logits_RV: torch.Tensor) -> list[slice]:
    rows, width = logits_RV.shape
    size = max(1, _CHUNK_ELEMENTS // max(1, width))
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _log_softmax(logits_RV: torch.Tensor, temperatures_R: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits_RV.to(dtype) / temperatures_R.to(dtype)[:, None], dim=-1)


def _plogp(logp_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``p`` and ``log p`` with 0 in place of −inf, so that their product is right at ``p = 0``."""
    return logp_RV.exp(), logp_RV.masked_fill(logp_RV == -torch.inf, 0.0)


class _LogprobEntropy(torch.autograd.Function):
    """With ``z = logits / T``: ``∂ log p_y / ∂z = onehot_y − p`` and ``∂H / ∂z = −p·(log p + H)``."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: torch.Tensor, ids_RJ: torch.Tensor, temperatures_R: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
        logprobs_RJ = torch.empty(ids_RJ.shape, dtype=dtype, device=logits_RV.device)
        entropy_R = torch.zeros(len(ids_RJ), dtype=dtype, device=logits_RV.device)
        for part in _chunks(logits_RV):
            logp_RV = _log_softmax(logits_RV[part], temperatures_R[part])
            logprobs_RJ[part] = logp_RV.gather(1, ids_RJ[part])
            if entropy:
                p_RV, safe_RV = _plogp(logp_RV)
                entropy_R[part] = -(p_RV * safe_RV).sum(-1)
        ctx.save_for_backward(logits_RV, ids_RJ, temperatures_R, entropy_R)
        ctx.set_materialize_grads(False)  # so that an entropy nobody differentiates costs nothing in the backward pass
        return logprobs_RJ, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None, None]:
        grad_logprobs_RJ, grad_entropy_R = grads
        logits_RV, ids_RJ, temperatures_R, entropy_R = ctx.saved_tensors
        grad_RV = torch.empty_like(logits_RV)
        for part in _chunks(logits_RV):
            p_RV, safe_RV = _plogp(_log_softmax(logits_RV[part], temperatures_R[part]))
            out_RV = torch.zeros_like(p_RV)
            if grad_entropy_R is not None:
                out_RV -= grad_entropy_R[part, None] * p_RV * (safe_RV + entropy_R[part, None])
            if grad_logprobs_RJ is not None:
                g_RJ = grad_logprobs_RJ[part]
                out_RV -= g_RJ.sum(1, keepdim=True) * p_RV
                out_RV.scatter_add_(1, ids_RJ[part], g_RJ)
            grad_RV[part] = out_RV / temperatures_R[part, None]
        return grad_RV, None, None, None
