"""Packed scoring: log-probs and entropies of response tokens, from one row of sequences.

The logits at a sample's position ``i`` score its token ``i + 1``, inside that sample only. Logits are computed for the rows
that predict a response token and for no others, divided by the temperature, and normalised in float32 (float64 for a
float64 model).

Suffix legend: ``_T`` token axis of a packed row, ``_R`` response tokens, ``_V`` vocabulary.
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


def pack(batch: Batch, device: torch.device | str, temperature: float | None = None) -> PackedInputs:
    """Lay a batch out for :class:`ScoringModule`; ``temperature`` overrides the samples' own.

    Raises:
        DataError: ``temperature`` is not a positive number.

    An empty batch becomes one dummy token without response tokens, so that a rank without work takes part in collectives.
    """
    if temperature is not None and not 0 < temperature < np.inf:
        raise DataError(f"temperature {temperature} is not a positive number", where="temperature")
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
    return PackedInputs(
        token_ids_T=torch.from_numpy(token_ids)[None].to(device),
        position_ids_T=torch.from_numpy(positions)[None].to(device),
        cu_seqlens=tuple(offsets.tolist()),
        rows_R=torch.from_numpy(targets - 1).to(device),
        labels_R=torch.from_numpy(token_ids[targets]).to(device),
        temperatures_R=torch.from_numpy(temperatures).to(device),
    )


class ScoringModule(nn.Module):
    """A causal language model that returns scores instead of logits.

    Args:
        model: A transformers model loaded by :func:`arctic_core.models.factory.load_causal_lm`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = model

    def forward(self, inputs: PackedInputs, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Score a packed row.

        Returns:
            Log-probs ``[R]`` and entropies ``[R]`` (``None`` unless asked for), in nats, float32. Without response tokens
            both are empty and still connected to every parameter.
        """
        # The model's own head runs, on selected rows, so that logit scaling and soft-capping stay the architecture's.
        output: Any = self.model(
            input_ids=inputs.token_ids_T,
            position_ids=inputs.position_ids_T,
            cu_seqlens=inputs.cu_seqlens,
            logits_to_keep=inputs.rows_R,
            use_cache=False,
        )
        return logprobs_and_entropy(output.logits[0], inputs.labels_R, inputs.temperatures_R, entropy=entropy)


def checkpoint_name(parameter: str) -> str:
    """Name inside the language model of a parameter of :class:`ScoringModule`."""
    return parameter.removeprefix(f"{LM_ATTRIBUTE}.")


def module_name(parameter: str) -> str:
    """Inverse of :func:`checkpoint_name`."""
    return f"{LM_ATTRIBUTE}.{parameter}"


def logprobs_and_entropy(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, temperatures_R: torch.Tensor, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the labels and, on request, entropies, under ``softmax(logits / temperature)``.

    Differentiable with respect to the logits. A logit of −inf has probability 0 and adds nothing to the entropy or to any
    gradient. Beside the logits (in their own type) and their gradient only a bounded slice exists in float32.
    """
    logprobs_R, entropy_R = _LogprobEntropy.apply(logits_RV, labels_R, temperatures_R, entropy)
    return logprobs_R, entropy_R if entropy else None


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
        ctx: Any, logits_RV: torch.Tensor, labels_R: torch.Tensor, temperatures_R: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
        logprobs_R = torch.empty(len(labels_R), dtype=dtype, device=logits_RV.device)
        entropy_R = torch.zeros_like(logprobs_R)
        for part in _chunks(logits_RV):
            logp_RV = _log_softmax(logits_RV[part], temperatures_R[part])
            logprobs_R[part] = logp_RV.gather(1, labels_R[part, None])[:, 0]
            if entropy:
                p_RV, safe_RV = _plogp(logp_RV)
                entropy_R[part] = -(p_RV * safe_RV).sum(-1)
        ctx.save_for_backward(logits_RV, labels_R, temperatures_R, entropy_R)
        ctx.set_materialize_grads(False)  # so that an entropy nobody differentiates costs nothing in the backward pass
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None, None]:
        grad_logprobs_R, grad_entropy_R = grads
        logits_RV, labels_R, temperatures_R, entropy_R = ctx.saved_tensors
        grad_RV = torch.empty_like(logits_RV)
        for part in _chunks(logits_RV):
            p_RV, safe_RV = _plogp(_log_softmax(logits_RV[part], temperatures_R[part]))
            out_RV = torch.zeros_like(p_RV)
            if grad_entropy_R is not None:
                out_RV -= grad_entropy_R[part, None] * p_RV * (safe_RV + entropy_R[part, None])
            if grad_logprobs_R is not None:
                g_R1 = grad_logprobs_R[part, None]
                out_RV -= g_R1 * p_RV
                out_RV.scatter_add_(1, labels_R[part, None], g_R1)
            grad_RV[part] = out_RV / temperatures_R[part, None]
        return grad_RV, None, None, None
