"""Log-probs and entropies from hidden states (or logits), in chunks of rows under a memory budget. Any device, torch only.

With ``x = hidden · weightᵀ + bias``, ``z = softcap · tanh(scale · x / softcap) / temperature`` (``z = scale · x / temperature``
without soft-capping) and ``p = softmax(z)``: ``∂ log p_y / ∂z = onehot_y − p`` and ``∂H / ∂z = −p·(log p + H)``. The logits of
a chunk are made, used and dropped, and made again in the backward pass (compare Wijmans et al., "Cut Your Losses in
Large-Vocabulary Language Models", 2024). Log-sum-exp is taken in float32, in float64 for float64 weights; for bfloat16 weights
the products are added up, and handed on, in float32. A logit of −inf has probability 0 and adds nothing to an entropy or to a
gradient.

Memory: besides inputs, outputs and gradients nothing larger than ``budget_bytes`` exists at a time, but never less than what
one row needs (:func:`bytes_per_row`, about 2 MB for a vocabulary of 150,000). The gradient of the weight is added up over
chunks in one float32 ``[V, D]`` buffer (float64 for float64 weights), which is not part of the budget; autograd then rounds it
to the type in which the parameter keeps its gradient.

Suffix legend: ``_R`` rows (response tokens), ``_C`` rows of one chunk, ``_V`` vocabulary, ``_D`` hidden size, ``_K``
candidates beside each label, ``_J`` the label followed by its candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

__all__ = ["DEFAULT_BUDGET_BYTES", "HeadOutput", "bytes_per_row", "linear_logprob_entropy", "logprob_entropy"]

DEFAULT_BUDGET_BYTES = 512 * 2**20
"""Most bytes of temporaries, unless told otherwise."""

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class HeadOutput(NamedTuple):
    """Scores of ``R`` rows, in nats; float32, or float64 where the weights or logits are."""

    logprobs_R: torch.Tensor
    """Log-probs of the labels, ``[R]``."""
    entropy_R: torch.Tensor | None
    """Entropies ``[R]``, where asked for."""
    topk_logprobs_RK: torch.Tensor | None
    """Log-probs of the candidates ``[R, K]``: differentiable at given ``ids_RK``, without gradient for ``topk``."""
    topk_ids_RK: torch.Tensor | None
    """The candidates, int64 ``[R, K]``; for ``topk`` the most likely first."""


def linear_logprob_entropy(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_R: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    bias_V: torch.Tensor | None = None,
    ids_RK: torch.Tensor | None = None,
    topk: int = 0,
    entropy: bool = True,
    scale: float = 1.0,
    softcap: float | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> HeadOutput:
    """Score labels by a linear output layer without ever holding all logits.

    Differentiable once, with respect to ``hidden_RD`` (in its own type), ``weight_VD`` and ``bias_V``.

    Args:
        hidden_RD: Last hidden states at the rows that predict the labels, ``[R, D]``; ``R`` may be 0.
        weight_VD: The output layer's weight, ``[V, D]``, of the same type: bfloat16, float32 or float64.
        labels_R: Token ids, int64 ``[R]``.
        temperature: Divides the logits: a positive number, or one per row ``[R]`` (no gradient flows to it).
        bias_V: The output layer's bias, ``[V]``; −inf forbids a token.
        ids_RK: More token ids to score in each row, int64 ``[R, K]``.
        topk: Report this many most likely tokens of each row instead.
        entropy: Whether to compute entropies.
        scale: Multiplies the logits, before soft-capping.
        softcap: Bounds the logits smoothly to ±``softcap`` (Gemma Team, 2024); ``None`` does not.
        budget_bytes: Most bytes of temporaries (see the module).

    Raises:
        ValueError: Shapes or types do not fit together, or an argument is out of range.
    """
    plan = _Plan(topk, entropy, scale, softcap, budget_bytes)
    _check(hidden_RD, weight_VD.shape[0], labels_R, ids_RK, plan)
    if weight_VD.dim() != 2 or hidden_RD.shape[1] != weight_VD.shape[1] or hidden_RD.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden states {tuple(hidden_RD.shape)} {hidden_RD.dtype} do not fit the weight {tuple(weight_VD.shape)} "
            f"{weight_VD.dtype}: the last dimensions and the types must agree"
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias_V has shape {tuple(bias_V.shape)}, the vocabulary is {weight_VD.shape[0]}")
    temperatures_R = _temperatures(temperature, labels_R, weight_VD.dtype)
    return _output(_LinearHead.apply(hidden_RD, weight_VD, bias_V, _ids(labels_R, ids_RK), temperatures_R, plan), ids_RK, plan)


def logprob_entropy(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    ids_RK: torch.Tensor | None = None,
    topk: int = 0,
    entropy: bool = True,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> HeadOutput:
    """The same from logits ``[R, V]`` that exist already, bfloat16, float32 or float64; differentiable with respect to them.

    The budget bounds what exists beside the logits and their gradient. For the other arguments and errors see
    :func:`linear_logprob_entropy`.
    """
    plan = _Plan(topk, entropy, 1.0, None, budget_bytes)
    _check(logits_RV, logits_RV.shape[1], labels_R, ids_RK, plan)
    temperatures_R = _temperatures(temperature, labels_R, logits_RV.dtype)
    return _output(_LogitsHead.apply(logits_RV, _ids(labels_R, ids_RK), temperatures_R, plan), ids_RK, plan)


def bytes_per_row(vocabulary: int, dtype: torch.dtype, *, softcap: bool = False) -> int:
    """Bytes of temporaries that one row takes, in value or gradient, for weights of type ``dtype``."""
    wide = _wide(dtype)
    buffers = 3 if softcap else 2  # z and p; the slope of the soft-capping
    rounded = 0 if dtype == wide else dtype.itemsize  # the gradient of a chunk's logits, for a product
    return vocabulary * (buffers * wide.itemsize + rounded + 1)  # 1: where z is −inf


@dataclass(frozen=True)
class _Plan:
    topk: int
    entropy: bool
    scale: float
    softcap: float | None
    budget_bytes: int

    def chunks(self, rows: int, vocabulary: int, dtype: torch.dtype, share: float = 1.0) -> list[slice]:
        need = bytes_per_row(vocabulary, dtype, softcap=self.softcap is not None)
        size = max(1, int(self.budget_bytes * share) // max(1, need))
        return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


# --- arguments and results ----------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _temperatures(temperature: float | torch.Tensor, labels_R: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != labels_R.shape:
            raise ValueError(f"temperature has shape {tuple(temperature.shape)}, the labels {tuple(labels_R.shape)}")
        return temperature.detach().to(_wide(dtype))
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature} is not a positive number")
    return torch.full(labels_R.shape, temperature, dtype=_wide(dtype), device=labels_R.device)


def _check(values: torch.Tensor, vocabulary: int, labels_R: torch.Tensor, ids_RK: torch.Tensor | None, plan: _Plan) -> None:
    rows = values.shape[0]
    if values.dim() != 2 or labels_R.shape != (rows,) or (ids_RK is not None and (ids_RK.dim() != 2 or len(ids_RK) != rows)):
        raise ValueError(
            f"rows do not agree: hidden states or logits {tuple(values.shape)}, labels {tuple(labels_R.shape)}, ids "
            f"{None if ids_RK is None else tuple(ids_RK.shape)}"
        )
    if values.dtype not in _DTYPES:
        raise ValueError(f"{values.dtype} is not supported, use one of {', '.join(map(str, _DTYPES))}")
    if not 0 <= plan.topk <= vocabulary or (plan.topk and ids_RK is not None):
        raise ValueError(f"topk {plan.topk} of a vocabulary of {vocabulary}; it cannot be combined with ids_RK")
    if plan.budget_bytes < 1:
        raise ValueError(f"budget_bytes {plan.budget_bytes} is not positive")
    if plan.softcap is not None and plan.softcap <= 0:
        raise ValueError(f"softcap {plan.softcap} is not positive")


def _ids(labels_R: torch.Tensor, ids_RK: torch.Tensor | None) -> torch.Tensor:
    return labels_R[:, None] if ids_RK is None else torch.cat([labels_R[:, None], ids_RK], dim=1)


def _output(results: tuple[torch.Tensor, ...], ids_RK: torch.Tensor | None, plan: _Plan) -> HeadOutput:
    logprobs_RJ, entropy_R, best_RK, best_ids_RK = results
    given_RK = None if ids_RK is None else logprobs_RJ[:, 1:]
    candidates = (best_RK, best_ids_RK) if plan.topk else (given_RK, ids_RK)
    return HeadOutput(logprobs_RJ[:, 0], entropy_R if plan.entropy else None, *candidates)


# --- one chunk ----------------------------------------------------------------------------------------------------------


def _to_z(x_CV: torch.Tensor, temperatures_C: torch.Tensor, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits to ``z``, in place, and ``∂z/∂x · temperature / scale`` where it is not 1."""
    slope_CV = None
    if plan.scale != 1:
        x_CV.mul_(plan.scale)
    if plan.softcap is not None:
        x_CV.div_(plan.softcap).tanh_()
        slope_CV = x_CV.square().neg_().add_(1)
        x_CV.mul_(plan.softcap)
    return x_CV.div_(temperatures_C[:, None]), slope_CV


def _log_sum_exp(z_CV: torch.Tensor) -> torch.Tensor:
    top_C1 = z_CV.amax(-1, keepdim=True)
    return (z_CV - top_C1).exp_().sum(-1).log_().add_(top_C1[:, 0])


class _Values:
    """Outputs of all rows, filled chunk by chunk."""

    def __init__(self, ids_RJ: torch.Tensor, dtype: torch.dtype, plan: _Plan) -> None:
        rows = len(ids_RJ)
        self.plan, self.ids_RJ = plan, ids_RJ
        self.logprobs_RJ = ids_RJ.new_empty(ids_RJ.shape, dtype=dtype)
        self.entropy_R = ids_RJ.new_zeros(rows, dtype=dtype)
        self.lse_R = ids_RJ.new_empty(rows, dtype=dtype)
        self.best_RK = ids_RJ.new_empty((rows, plan.topk), dtype=dtype)
        self.best_ids_RK = ids_RJ.new_empty((rows, plan.topk))

    def fill(self, part: slice, z_CV: torch.Tensor) -> None:
        """Take ``z`` of some rows; it is overwritten."""
        lse_C = _log_sum_exp(z_CV)
        self.lse_R[part] = lse_C
        self.logprobs_RJ[part] = z_CV.gather(1, self.ids_RJ[part]) - lse_C[:, None]
        if self.plan.topk:
            best = z_CV.topk(self.plan.topk, dim=-1)
            self.best_RK[part] = best.values - lse_C[:, None]
            self.best_ids_RK[part] = best.indices
        if self.plan.entropy:
            logp_CV = z_CV.sub_(lse_C[:, None])
            p_CV = logp_CV.exp()
            logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0)  # so that p · log p is 0 at p = 0
            self.entropy_R[part] = -p_CV.mul_(logp_CV).sum(-1)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.logprobs_RJ, self.entropy_R, self.best_RK, self.best_ids_RK


class _Gradients:
    """Gradients with respect to the logits, chunk by chunk, from what :func:`_save` kept."""

    def __init__(self, saved: list[torch.Tensor], grads: tuple[torch.Tensor | None, ...], plan: _Plan) -> None:
        self.ids_RJ, self.lse_R, self.entropy_R, self.temperatures_R = saved
        self.grad_logprobs_RJ, self.grad_entropy_R = grads[:2]
        self.plan = plan

    def of(self, part: slice, x_CV: torch.Tensor) -> torch.Tensor:
        """Gradient with respect to the logits of some rows, in their memory."""
        temperatures_C = self.temperatures_R[part]
        z_CV, slope_CV = _to_z(x_CV, temperatures_C, self.plan)
        dx_CV = self._of_z(part, z_CV).mul_(self.plan.scale / temperatures_C[:, None])
        return dx_CV if slope_CV is None else dx_CV.mul_(slope_CV)

    def _of_z(self, part: slice, z_CV: torch.Tensor) -> torch.Tensor:
        logp_CV = z_CV.sub_(self.lse_R[part, None])
        p_CV = logp_CV.exp()
        if self.grad_entropy_R is None:
            out_CV = logp_CV.zero_()
        else:
            logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0)
            out_CV = logp_CV.add_(self.entropy_R[part, None]).mul_(self.grad_entropy_R[part, None])
        if self.grad_logprobs_RJ is None:
            return out_CV.mul_(p_CV).neg_()
        grad_CJ = self.grad_logprobs_RJ[part]
        out_CV.add_(grad_CJ.sum(1, keepdim=True)).mul_(p_CV).neg_()
        return out_CV.scatter_add_(1, self.ids_RJ[part], grad_CJ)


def _save(ctx: Any, values: _Values, temperatures_R: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    ctx.save_for_backward(values.ids_RJ, values.lse_R, values.entropy_R, temperatures_R, *inputs)
    ctx.mark_non_differentiable(values.best_RK, values.best_ids_RK)
    ctx.set_materialize_grads(False)  # so that an entropy nobody differentiates costs nothing in the backward pass
    ctx.plan = values.plan


class _LogitsHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: torch.Tensor, ids_RJ: torch.Tensor, temperatures_R: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, ...]:
        dtype = _wide(logits_RV.dtype)
        values = _Values(ids_RJ, dtype, plan)
        for part in plan.chunks(len(logits_RV), logits_RV.shape[1], logits_RV.dtype):
            values.fill(part, _to_z(logits_RV[part].to(dtype, copy=True), temperatures_R[part], plan)[0])
        _save(ctx, values, temperatures_R, logits_RV)
        return values.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, logits_RV = ctx.saved_tensors
        gradients = _Gradients(saved, grads, ctx.plan)
        grad_RV = torch.empty_like(logits_RV)
        for part in ctx.plan.chunks(len(logits_RV), logits_RV.shape[1], logits_RV.dtype):
            grad_RV[part] = gradients.of(part, logits_RV[part].to(_wide(logits_RV.dtype), copy=True))
        return grad_RV, None, None, None


# --- the output layer ---------------------------------------------------------------------------------------------------


class _LinearHead(torch.autograd.Function):
    # Weight and bias are saved as the parameters they are, not as views: a runtime that shards them takes their data away
    # after the forward pass and brings it back before the backward pass.

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        hidden_RD, weight_VD, bias_V, ids_RJ, temperatures_R, plan = inputs
        layer = _Layer(weight_VD, bias_V, plan)
        values = _Values(ids_RJ, layer.dtype, plan)
        for part in layer.chunks(len(hidden_RD)):
            values.fill(part, _to_z(layer.logits(hidden_RD[part]), temperatures_R[part], plan)[0])
        _save(ctx, values, temperatures_R, hidden_RD, weight_VD, bias_V)
        return values.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, hidden_RD, weight_VD, bias_V = ctx.saved_tensors
        gradients = _Gradients(saved, grads, ctx.plan)
        layer = _Layer(weight_VD, bias_V, ctx.plan)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_RD = torch.zeros_like(hidden_RD) if wants_hidden else None
        grad_VD = torch.zeros_like(weight_VD, dtype=layer.dtype) if wants_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=layer.dtype) if wants_bias and bias_V is not None else None
        for part in layer.chunks(len(hidden_RD)):
            hidden_CD, grad_CD = hidden_RD[part], None if grad_RD is None else grad_RD[part]
            # No name for the gradient of a chunk's logits: it must be gone when the next chunk comes.
            layer.add_gradients(gradients.of(part, layer.logits(hidden_CD)), hidden_CD, grad_CD, grad_VD, grad_V)
        return grad_RD, grad_VD, grad_V, None, None, None


class _Layer:
    """Products with the output layer's weight, with float32 results for bfloat16 weights.

    On a GPU the hardware adds bfloat16 products up in float32. Elsewhere blocks of the weight are widened one after the
    other, within a part of the budget.
    """

    def __init__(self, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, plan: _Plan) -> None:
        self.weight_VD, self.bias_V, self.plan = weight_VD, bias_V, plan
        self.dtype = _wide(weight_VD.dtype)
        self.same = weight_VD.dtype == self.dtype
        self.mixed = not self.same and weight_VD.is_cuda

    def chunks(self, rows: int) -> list[slice]:
        share = 1.0 if self.same or self.mixed else 0.5
        return self.plan.chunks(rows, len(self.weight_VD), self.weight_VD.dtype, share)

    def _blocks(self, rows: int) -> list[slice]:
        vocabulary, width = self.weight_VD.shape
        size = max(1, self.plan.budget_bytes // 2 // (self.dtype.itemsize * (rows + width)))
        return [slice(i, min(i + size, vocabulary)) for i in range(0, vocabulary, size)]

    def logits(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """``[C, V]``, a new tensor."""
        if self.same:
            x_CV = hidden_CD @ self.weight_VD.T
        elif self.mixed:
            x_CV = torch.mm(hidden_CD, self.weight_VD.T, out_dtype=self.dtype)
        else:
            wide_CD = hidden_CD.to(self.dtype)
            x_CV = wide_CD.new_empty(len(hidden_CD), len(self.weight_VD))
            for block in self._blocks(len(hidden_CD)):
                x_CV[:, block] = wide_CD @ self.weight_VD[block].to(self.dtype).T
        return x_CV if self.bias_V is None else x_CV.add_(self.bias_V)

    def add_gradients(self, dx_CV: torch.Tensor, hidden_CD: torch.Tensor, *grads: torch.Tensor | None) -> None:
        """Write the gradient of the hidden states, add those of weight and bias, where there is a tensor for them."""
        grad_CD, grad_VD, grad_V = grads
        if grad_V is not None:
            grad_V += dx_CV.sum(0)
        if self.mixed:
            dx_CV = dx_CV.to(self.weight_VD.dtype)
        if grad_CD is not None:
            if self.same or self.mixed:
                grad_CD.copy_(dx_CV @ self.weight_VD)
            else:
                wide_CD = torch.zeros_like(grad_CD, dtype=self.dtype)
                for block in self._blocks(len(hidden_CD)):
                    wide_CD.addmm_(dx_CV[:, block], self.weight_VD[block].to(self.dtype))
                grad_CD.copy_(wide_CD)
        if grad_VD is None:
            return
        if self.mixed:
            for block in self._blocks(len(hidden_CD)):
                grad_VD[block] += torch.mm(dx_CV[:, block].T, hidden_CD, out_dtype=self.dtype)
        else:
            grad_VD.addmm_(dx_CV.T, hidden_CD.to(self.dtype))
