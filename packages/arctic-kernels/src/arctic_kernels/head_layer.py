"""Products of the chunked head with the output layer's weight.

Suffix legend: as in :mod:`arctic_kernels.head`.
"""

from __future__ import annotations

import torch

from arctic_kernels.head_plan import Plan, Rows, wide

__all__ = ["Layer"]


class Layer:
    """Products with the output layer's weight, with float32 results for bfloat16 weights.

    On a GPU the hardware adds bfloat16 products up in float32. Elsewhere blocks of the weight are widened one after the
    other, within a part of the budget.
    """

    def __init__(self, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, plan: Plan) -> None:
        self.weight_VD, self.bias_V, self.plan = weight_VD, bias_V, plan
        self.dtype = wide(weight_VD.dtype)
        self.same = weight_VD.dtype == self.dtype
        self.mixed = not self.same and weight_VD.is_cuda

    def chunks(self, rows: Rows, ids: int) -> list[slice]:
        """Chunks of rows that score ``ids`` tokens for each label."""
        share = 1.0 if self.same or self.mixed else 0.5
        vocabulary, width = self.weight_VD.shape
        extra = 0 if rows.hidden_S is None else 2 * width * self.dtype.itemsize  # hidden states and their gradient, gathered
        return self.plan.chunks(len(rows), vocabulary, self.weight_VD.dtype, ids=ids, share=share, extra=extra)

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
