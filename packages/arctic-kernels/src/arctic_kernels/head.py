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

Suffix legend: ``_R`` response tokens, ``_P`` hidden rows, ``_S`` scored rows (pairs of a hidden row and a temperature; one for
each response token unless ``rows_R`` is given), ``_C`` scored rows of one chunk, ``_L`` their labels, ``_V`` vocabulary, ``_D``
hidden size, ``_K`` candidates beside each label, ``_J`` the label followed by its candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from arctic_kernels import head_fused
from arctic_kernels.head_layer import Layer
from arctic_kernels.head_plan import Plan, Rows, bytes_per_row, wide

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
    rows_R: torch.Tensor | None = None,
    ids_RK: torch.Tensor | None = None,
    topk: int = 0,
    entropy: bool = True,
    scale: float = 1.0,
    softcap: float | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    backend: str = "torch",
) -> HeadOutput:
    """Score labels by a linear output layer without ever holding all logits.

    Differentiable once, with respect to ``hidden_RD`` (in its own type), ``weight_VD`` and ``bias_V``.

    Args:
        hidden_RD: Last hidden states at the rows that predict the labels, ``[R, D]``; ``R`` may be 0. With ``rows_R`` any
            number of rows.
        weight_VD: The output layer's weight, ``[V, D]``, of the same type: bfloat16, float32 or float64.
        labels_R: Token ids, int64 ``[R]``.
        temperature: Divides the logits: a positive number, or one per row ``[R]`` (no gradient flows to it).
        bias_V: The output layer's bias, ``[V]``; −inf forbids a token.
        rows_R: Hidden row of each label, int64 ``[R]``, in any order. A row is multiplied once for all its labels of equal
            temperature, and not at all without labels.
        ids_RK: More token ids to score in each row, int64 ``[R, K]``.
        topk: Report this many most likely tokens of each row instead.
        entropy: Whether to compute entropies.
        scale: Multiplies the logits, before soft-capping.
        softcap: Bounds the logits smoothly to ±``softcap`` (Gemma Team, 2024); ``None`` does not.
        budget_bytes: Most bytes of temporaries (see the module).
        backend: ``"torch"``, or ``"triton"`` (:mod:`arctic_kernels.head_fused`: bfloat16 on a GPU, neither bias nor ``topk``),
            which has passed its tests in Triton's interpreter and not yet on a GPU.

    Raises:
        ValueError: Shapes or types do not fit together, or an argument is out of range.
    """
    plan = Plan(topk, entropy, scale, softcap, budget_bytes, head_fused.choose(backend, weight_VD, bias_V, topk))
    _check(hidden_RD, weight_VD.shape[0], labels_R, ids_RK, plan, rows_R=rows_R)
    if weight_VD.dim() != 2 or hidden_RD.shape[1] != weight_VD.shape[1] or hidden_RD.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden states {tuple(hidden_RD.shape)} {hidden_RD.dtype} do not fit the weight {tuple(weight_VD.shape)} "
            f"{weight_VD.dtype}: the last dimensions and the types must agree"
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias_V has shape {tuple(bias_V.shape)}, the vocabulary is {weight_VD.shape[0]}")
    temperatures_R = _temperatures(temperature, labels_R, weight_VD.dtype)
    rows = Rows.plain(temperatures_R) if rows_R is None else Rows.grouped(rows_R, temperatures_R, len(hidden_RD))
    ids_RJ = rows.sort(_ids(labels_R, ids_RK))
    return _output(_LinearHead.apply(hidden_RD, weight_VD, bias_V, ids_RJ, rows, plan), rows, ids_RK, plan)


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
    plan = Plan(topk, entropy, 1.0, None, budget_bytes)
    _check(logits_RV, logits_RV.shape[1], labels_R, ids_RK, plan)
    temperatures_R = _temperatures(temperature, labels_R, logits_RV.dtype)
    rows = Rows.plain(temperatures_R)
    return _output(_LogitsHead.apply(logits_RV, _ids(labels_R, ids_RK), rows, plan), rows, ids_RK, plan)


# --- arguments and results ----------------------------------------------------------------------------------------------


def _temperatures(temperature: float | torch.Tensor, labels_R: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != labels_R.shape:
            raise ValueError(f"temperature has shape {tuple(temperature.shape)}, the labels {tuple(labels_R.shape)}")
        return temperature.detach().to(wide(dtype))
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature} is not a positive number")
    return torch.full(labels_R.shape, temperature, dtype=wide(dtype), device=labels_R.device)


def _check(
    values: torch.Tensor,
    vocabulary: int,
    labels_R: torch.Tensor,
    ids_RK: torch.Tensor | None,
    plan: Plan,
    *,
    rows_R: torch.Tensor | None = None,
) -> None:
    count = values.shape[0] if rows_R is None else len(rows_R)
    if values.dim() != 2 or labels_R.shape != (count,) or (ids_RK is not None and (ids_RK.dim() != 2 or len(ids_RK) != count)):
        raise ValueError(
            f"rows do not agree: hidden states or logits {tuple(values.shape)}, labels {tuple(labels_R.shape)}, ids "
            f"{None if ids_RK is None else tuple(ids_RK.shape)}, rows_R {None if rows_R is None else tuple(rows_R.shape)}"
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


def _output(results: tuple[torch.Tensor, ...], rows: Rows, ids_RK: torch.Tensor | None, plan: Plan) -> HeadOutput:
    logprobs_RJ, entropy_S, best_SK, best_ids_SK = results
    logprobs_RJ = rows.unsort(logprobs_RJ)
    given_RK = None if ids_RK is None else logprobs_RJ[:, 1:]
    candidates = (rows.spread(best_SK), rows.spread(best_ids_SK)) if plan.topk else (given_RK, ids_RK)
    return HeadOutput(logprobs_RJ[:, 0], rows.spread(entropy_S) if plan.entropy else None, *candidates)


# --- one chunk ----------------------------------------------------------------------------------------------------------


def _to_z(x_CV: torch.Tensor, temperatures_C: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
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


def _flat(local_L: torch.Tensor, ids_LJ: torch.Tensor, z_CV: torch.Tensor) -> torch.Tensor:
    """Places of labels in the memory of their chunk."""
    return local_L[:, None] * z_CV.shape[1] + ids_LJ


class _Values:
    """Outputs of all rows, filled chunk by chunk."""

    def __init__(self, ids_RJ: torch.Tensor, rows: Rows, dtype: torch.dtype, plan: Plan) -> None:
        self.plan, self.ids_RJ, self.rows = plan, ids_RJ, rows
        self.logprobs_RJ = ids_RJ.new_empty(ids_RJ.shape, dtype=dtype)
        self.entropy_S = ids_RJ.new_zeros(len(rows), dtype=dtype)
        self.lse_S = ids_RJ.new_empty(len(rows), dtype=dtype)
        self.best_SK = ids_RJ.new_empty((len(rows), plan.topk), dtype=dtype)
        self.best_ids_SK = ids_RJ.new_empty((len(rows), plan.topk))

    def fill(self, part: slice, z_CV: torch.Tensor) -> None:
        """Take ``z`` of some scored rows; it is overwritten."""
        lse_C = _log_sum_exp(z_CV)
        self.lse_S[part] = lse_C
        labels, local_L = self.rows.labels(part), self.rows.local(part)
        self.logprobs_RJ[labels] = z_CV.take(_flat(local_L, self.ids_RJ[labels], z_CV)) - lse_C[local_L, None]
        if self.plan.topk:
            best = z_CV.topk(self.plan.topk, dim=-1)
            self.best_SK[part] = best.values - lse_C[:, None]
            self.best_ids_SK[part] = best.indices
        if self.plan.entropy:
            logp_CV = z_CV.sub_(lse_C[:, None])
            p_CV = logp_CV.exp()
            logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0)  # so that p · log p is 0 at p = 0
            self.entropy_S[part] = -p_CV.mul_(logp_CV).sum(-1)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.logprobs_RJ, self.entropy_S, self.best_SK, self.best_ids_SK


class _Gradients:
    """Gradients with respect to the logits, chunk by chunk, from what :func:`_save` kept."""

    def __init__(self, saved: list[torch.Tensor], rows: Rows, grads: tuple[torch.Tensor | None, ...], plan: Plan) -> None:
        self.ids_RJ, self.lse_S, self.entropy_S = saved
        self.grad_logprobs_RJ, self.grad_entropy_S = grads[:2]
        self.rows, self.plan = rows, plan

    def of(self, part: slice, x_CV: torch.Tensor) -> torch.Tensor:
        """Gradient with respect to the logits of some scored rows, in their memory."""
        temperatures_C = self.rows.temperatures_S[part]
        z_CV, slope_CV = _to_z(x_CV, temperatures_C, self.plan)
        dx_CV = self._of_z(part, z_CV).mul_(self.plan.scale / temperatures_C[:, None])
        return dx_CV if slope_CV is None else dx_CV.mul_(slope_CV)

    def _of_z(self, part: slice, z_CV: torch.Tensor) -> torch.Tensor:
        logp_CV = z_CV.sub_(self.lse_S[part, None])
        p_CV = logp_CV.exp()
        if self.grad_entropy_S is None:
            out_CV = logp_CV.zero_()
        else:
            logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0)
            out_CV = logp_CV.add_(self.entropy_S[part, None]).mul_(self.grad_entropy_S[part, None])
        if self.grad_logprobs_RJ is None:
            return out_CV.mul_(p_CV).neg_()
        labels, local_L = self.rows.labels(part), self.rows.local(part)
        grad_LJ = self.grad_logprobs_RJ[labels]
        total_C = self.lse_S[part].new_zeros(len(out_CV)).index_add_(0, local_L, grad_LJ.sum(1))
        out_CV.add_(total_C[:, None]).mul_(p_CV).neg_()
        out_CV.view(-1).scatter_add_(0, _flat(local_L, self.ids_RJ[labels], out_CV).view(-1), grad_LJ.reshape(-1))
        return out_CV


def _save(ctx: Any, values: _Values, *inputs: torch.Tensor | None) -> None:
    ctx.save_for_backward(values.ids_RJ, values.lse_S, values.entropy_S, *inputs)
    ctx.mark_non_differentiable(values.best_SK, values.best_ids_SK)
    ctx.set_materialize_grads(False)  # so that an entropy nobody differentiates costs nothing in the backward pass
    ctx.rows, ctx.plan = values.rows, values.plan


class _LogitsHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: torch.Tensor, ids_RJ: torch.Tensor, rows: Rows, plan: Plan) -> tuple[torch.Tensor, ...]:
        dtype = wide(logits_RV.dtype)
        values = _Values(ids_RJ, rows, dtype, plan)
        for part in plan.chunks(len(logits_RV), logits_RV.shape[1], logits_RV.dtype, ids=ids_RJ.shape[1]):
            values.fill(part, _to_z(logits_RV[part].to(dtype, copy=True), rows.temperatures_S[part], plan)[0])
        _save(ctx, values, logits_RV)
        return values.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, logits_RV = ctx.saved_tensors
        gradients = _Gradients(saved, ctx.rows, grads, ctx.plan)
        grad_RV = torch.empty_like(logits_RV)
        for part in ctx.plan.chunks(len(logits_RV), logits_RV.shape[1], logits_RV.dtype, ids=saved[0].shape[1]):
            grad_RV[part] = gradients.of(part, logits_RV[part].to(wide(logits_RV.dtype), copy=True))
        return grad_RV, None, None, None


# --- the output layer ---------------------------------------------------------------------------------------------------


class _LinearHead(torch.autograd.Function):
    # Weight and bias are saved as the parameters they are, not as views: a runtime that shards them takes their data away
    # after the forward pass and brings it back before the backward pass.

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        hidden_PD, weight_VD, bias_V, ids_RJ, rows, plan = inputs
        layer = Layer(weight_VD, bias_V, plan)
        values = _Values(ids_RJ, rows, layer.dtype, plan)
        if plan.fused:
            fused = head_fused.values(hidden_PD, weight_VD, ids_RJ, rows, plan, kernels=head_fused.triton_kernels())
            values.logprobs_RJ, values.entropy_S, values.lse_S = fused
            _save(ctx, values, hidden_PD, weight_VD, bias_V)
            return values.outputs()
        for part in layer.chunks(rows, ids_RJ.shape[1]):
            values.fill(part, _to_z(layer.logits(rows.gather(hidden_PD, part)), rows.temperatures_S[part], plan)[0])
        _save(ctx, values, hidden_PD, weight_VD, bias_V)
        return values.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, hidden_PD, weight_VD, bias_V = ctx.saved_tensors
        rows: Rows = ctx.rows
        if ctx.plan.fused:
            scored = head_fused.Scored(hidden_PD, weight_VD, saved[0], saved[1], saved[2], rows)
            wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
            fused = head_fused.gradients(scored, grads[0], grads[1], ctx.plan, wanted, kernels=head_fused.triton_kernels())
            return *fused, None, None, None, None
        gradients = _Gradients(saved, rows, grads, ctx.plan)
        layer = Layer(weight_VD, bias_V, ctx.plan)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_PD = rows.new_gradient(hidden_PD) if wants_hidden else None
        grad_VD = torch.zeros_like(weight_VD, dtype=layer.dtype) if wants_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=layer.dtype) if wants_bias and bias_V is not None else None
        for part in layer.chunks(rows, saved[0].shape[1]):
            hidden_CD = rows.gather(hidden_PD, part)
            grad_CD = None if grad_PD is None else torch.empty_like(hidden_CD)
            # No name for the gradient of a chunk's logits: it must be gone when the next chunk comes.
            layer.add_gradients(gradients.of(part, layer.logits(hidden_CD)), hidden_CD, grad_CD, grad_VD, grad_V)
            if grad_PD is not None and grad_CD is not None:
                rows.add(grad_PD, part, grad_CD)
        return None if grad_PD is None else grad_PD.to(hidden_PD.dtype), grad_VD, grad_V, None, None, None
