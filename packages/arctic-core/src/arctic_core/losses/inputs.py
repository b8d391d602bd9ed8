"""From a micro-batch and its scores to what a loss sees, and the checks on both sides of it.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_K`` tokens scored beside each response token, ``_B`` samples.
"""

from __future__ import annotations

import numpy as np
import torch

from arctic_core.data import TOKEN_FIELDS, TOPK_FIELDS, Batch
from arctic_core.errors import DataError, PluginError
from arctic_core.losses.base import LossInputs, LossOutput, PreparedLoss
from arctic_core.protocol import Metric


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


def checked_output(output: object, name: str) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The scalar and the metrics that a loss returned, or :class:`PluginError` where it breaks its contract."""
    where = f"loss {name!r}"
    if not isinstance(output, LossOutput) or not isinstance(output.loss, torch.Tensor):
        found = f"LossOutput of a {type(output.loss).__name__}" if isinstance(output, LossOutput) else type(output).__name__
        raise PluginError(f"returned a {found}", where=where, remedy="return LossOutput(scalar tensor, metrics)")
    loss = output.loss
    if loss.ndim != 0 or not loss.requires_grad:
        raise PluginError(
            f"returned shape {tuple(loss.shape)} (requires_grad={loss.requires_grad})",
            where=where,
            remedy="a loss is a scalar computed from the policy's log-probs or entropies, even where nothing is trained",
        )
    try:
        pairs = {key: (float(total), float(count)) for key, (total, count) in output.metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise PluginError(
            f"its metrics are no pairs of numbers: {error}", where=where, remedy='return e.g. {"ratio": (sum, count)}'
        ) from error
    return loss, {key: Metric(sum=total, count=count) for key, (total, count) in pairs.items()}
