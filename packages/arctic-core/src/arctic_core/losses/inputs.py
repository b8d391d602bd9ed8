"""From a micro-batch and its scores to what a loss sees, and the checks on both sides of it.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_K`` tokens scored beside each response token, ``_B`` samples.
"""

from __future__ import annotations

import numpy as np
import torch

from arctic_core.data import TOKEN_FIELDS, TOPK_FIELDS, Batch
from arctic_core.errors import DataError, PluginError
from arctic_core.losses.base import LossInputs, PreparedLoss


def check_loss_batch(batch: Batch, prepared: PreparedLoss) -> None:
    """Raise :class:`DataError` naming the field that a loss misses, or a mask that is none."""
    loss = prepared.definition.name
    for name in prepared.required:
        if name not in (*TOKEN_FIELDS, *TOPK_FIELDS):
            raise PluginError(f"requires a field {name!r} that samples do not have", where=f"loss {loss!r}")
        if len(batch) and getattr(batch, name) is None:
            raise DataError(f"the loss {loss!r} needs {name}", where=f"batch.{name}", remedy="set it on every sample")
    mask = batch.mask
    if not ((mask == 0) | (mask == 1)).all():
        raise DataError("a loss mask holds 0 and 1 only", where="batch.loss_mask", remedy="put weights into the advantages")


def loss_inputs(
    batch: Batch,
    prepared: PreparedLoss,
    logprobs_R: torch.Tensor,
    entropy_R: torch.Tensor | None,
    topk_logprobs_RK: torch.Tensor | None,
) -> LossInputs:
    """The batch's fields beside its scores, on the scores' device. The fields a loss requires have been checked."""
    device = logprobs_R.device
    fields: dict[str, torch.Tensor] = {}
    for name in (*TOKEN_FIELDS, "teacher_topk_logprobs"):
        value = getattr(batch, name)
        wide = name == "teacher_topk_logprobs"
        if value is None and name in prepared.required:  # an empty batch: nothing to say, but a tensor to say it with
            value = np.zeros((0, 0) if wide else 0, np.float32)
        if value is not None and name != "loss_mask":
            fields[f"{name}_RK" if wide else f"{name}_R"] = torch.from_numpy(value.copy()).to(device)
    return LossInputs(
        logprobs_R=logprobs_R,
        entropy_R=entropy_R,
        mask_R=torch.from_numpy(batch.mask == 1).to(device),
        cu_seqlens_B=torch.from_numpy(batch.cu_responses).to(device),
        topk_logprobs_RK=topk_logprobs_RK,
        **fields,
    )


def checked_scalar(loss: torch.Tensor, name: str) -> torch.Tensor:
    """The loss, or :class:`PluginError` where a loss breaks its contract."""
    if loss.ndim != 0 or not loss.requires_grad:
        raise PluginError(
            f"returned shape {tuple(loss.shape)} (requires_grad={loss.requires_grad})",
            where=f"loss {name!r}",
            remedy="a loss is a scalar computed from the policy's log-probs or entropies, even where nothing is trained",
        )
    return loss
