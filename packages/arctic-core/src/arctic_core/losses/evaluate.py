"""A loss on the client: the second way to a gradient.

``forward_backward`` sends a loss to the engine by name. Or the engine reports scores (``forward``), the loss is computed
here, and its derivatives go back (``backward``): nothing but arrays crosses the border, and the loss can be any code of
yours. The gradient is the same.

Needs the ``train`` extra, for torch on the CPU. Suffix legend: ``_R`` response tokens of a batch, ``_K`` tokens scored beside
each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch

from arctic_core.config.base import ConfigModel
from arctic_core.data import Batch
from arctic_core.errors import DataError, NonFiniteError
from arctic_core.losses.base import LossDefinition, LossInputs, LossOutput, PreparedLoss, prepare_loss
from arctic_core.losses.inputs import check_loss_batch, checked_output, loss_inputs
from arctic_core.losses.named import LossLike, NoOptions, count_divisor, find_loss, named_loss
from arctic_core.protocol import Metric, NamedLoss, Scores

LossFunction = Callable[[LossInputs, Any], LossOutput]


class LossGradients(TypedDict):
    """Arguments of ``backward()``."""

    grad_logprobs: np.ndarray
    grad_entropy: np.ndarray | None
    grad_topk_logprobs: np.ndarray | None


@dataclass(frozen=True)
class LossEvaluation:
    """A loss over one batch, and its derivatives. Sums: nothing is divided yet."""

    loss: float
    metrics: dict[str, Metric]
    grad_logprobs: np.ndarray
    """Derivative with respect to each response token's log-prob, float32 ``[R]``."""
    grad_entropy: np.ndarray | None
    """The same with respect to its entropy, float32 ``[R]``; ``None`` where the loss saw none."""
    grad_topk_logprobs: np.ndarray | None
    """The same with respect to the log-probs of the batch's ``topk_ids``, float32 ``[R, K]``; ``None`` where it saw none."""
    divisor: float
    """What the loss's normalisation divides this batch by: its trained tokens, its sequences with one, or the constant. 0
    where nothing is trained, and then every derivative is 0."""

    def gradients(self, divisor: float | None = None) -> LossGradients:
        """The derivatives as keyword arguments of ``backward()``, divided.

        Args:
            divisor: What the gradient of the whole optimizer step is divided by. Absent means the batch is the whole step.
                With several batches in one step give each the sum of their divisors (with ``constant``: the constant).

        Raises:
            DataError: ``divisor`` is not a positive number.
        """
        divisor = (self.divisor or 1.0) if divisor is None else divisor
        if not 0 < divisor < math.inf:
            raise DataError(f"cannot divide by {divisor}", where="divisor")
        by = np.float32(divisor)
        return LossGradients(
            grad_logprobs=self.grad_logprobs / by,
            grad_entropy=None if self.grad_entropy is None else self.grad_entropy / by,
            grad_topk_logprobs=None if self.grad_topk_logprobs is None else self.grad_topk_logprobs / by,
        )


def evaluate_loss(batch: Batch, scores: Scores, loss: LossLike | LossDefinition | LossFunction) -> LossEvaluation:
    """Compute a loss over scored samples, and its derivatives with respect to the scores.

    Args:
        batch: The samples, with the fields the loss reads.
        scores: What ``forward()`` reported for this very batch, with ``entropy=True`` and ``given_topk=True`` where the loss
            needs them.
        loss: A loss by name, as ``forward_backward()`` takes it; a definition with its default options; or a function
            ``(inputs, config) -> LossOutput``, which is given everything that batch and scores hold, and an empty config. A
            function is normalised by ``token``. ``package.module:attribute`` is imported into this process.

    Raises:
        ConfigError: There is no such loss, or its options or normalisation are wrong.
        DataError: The batch or the scores lack what the loss needs, or do not belong together.
        NonFiniteError: The loss is NaN or infinite.
        PluginError: A loss breaks its contract.

    Example:
        >>> def my_loss(inputs, config):
        ...     kept_R = inputs.mask_R  # what stands in masked slots, NaN included, must reach nothing
        ...     return LossOutput(-(inputs.logprobs_R[kept_R] * inputs.advantages_R[kept_R]).sum())
        >>> scores = client.forward(batch)
        >>> result = evaluate_loss(batch, scores, my_loss)
        >>> client.backward(batch, **result.gradients())
        >>> client.step()
    """
    prepared = _prepare(loss, scores)
    check_loss_batch(batch, prepared)
    leaves = _leaves(batch, scores, prepared)
    output = prepared.compute(loss_inputs(batch, prepared, *leaves))
    scalar, metrics = checked_output(output, prepared.definition.name)
    if not math.isfinite(scalar.item()):
        raise NonFiniteError(
            f"the loss is {scalar.item()}",
            where=f"loss {prepared.definition.name!r}",
            remedy="look for NaN or huge values in the batch's fields",
        )
    found = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(scalar, found, allow_unused=True, materialize_grads=True))
    grad_logprobs, grad_entropy, grad_topk = (None if leaf is None else next(grads).numpy() for leaf in leaves)
    assert grad_logprobs is not None
    return LossEvaluation(
        loss=scalar.item(),
        metrics=metrics,
        grad_logprobs=grad_logprobs,
        grad_entropy=grad_entropy,
        grad_topk_logprobs=grad_topk,
        divisor=count_divisor(batch, prepared),
    )


def _prepare(loss: LossLike | LossDefinition | LossFunction, scores: Scores) -> PreparedLoss:
    if isinstance(loss, LossDefinition):
        return prepare_loss(loss, NamedLoss(name=loss.name))
    if not isinstance(loss, NamedLoss | str | ConfigModel | type) and callable(loss):
        own = LossDefinition(
            getattr(loss, "__name__", "own"),
            NoOptions,
            loss,
            needs_entropy=lambda config: scores.entropy is not None,
            needs_topk=lambda config: scores.topk_logprobs is not None,
        )
        return prepare_loss(own, NamedLoss(name=own.name))
    named = named_loss(loss)  # type: ignore[arg-type] - it refuses what is none
    return prepare_loss(find_loss(named.name, allow_import=True), named)


def _leaves(
    batch: Batch, scores: Scores, prepared: PreparedLoss
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The scores that the loss asked for, as tensors to differentiate by."""
    tokens = (batch.num_response_tokens,)
    entropy = topk = None
    if prepared.needs_entropy:
        entropy = _leaf(scores.entropy, tokens, "entropy", "entropy=True")
    if prepared.needs_topk:
        candidates = np.zeros((0, 0)) if batch.topk_ids is None else batch.topk_ids
        topk = _leaf(scores.topk_logprobs, candidates.shape, "topk_logprobs", "given_topk=True")
        if not np.array_equal(np.asarray(scores.topk_ids), candidates):
            raise DataError(
                "are not the batch's topk_ids", where="scores.topk_ids", remedy="score the batch with given_topk=True"
            )
    return _leaf(scores.logprobs, tokens, "logprobs", ""), entropy, topk


def _leaf(values: np.ndarray | None, shape: tuple[int, ...], name: str, argument: str) -> torch.Tensor:
    if values is None:
        raise DataError("the loss needs them", where=f"scores.{name}", remedy=f"score the batch with forward(..., {argument})")
    if values.shape != shape:
        raise DataError(
            f"have shape {values.shape}, the batch needs {shape}", where=f"scores.{name}", remedy="score this very batch"
        )
    return torch.from_numpy(np.array(values, np.float32)).requires_grad_()
