"""What the parts of the chunked head share: options, chunks of rows under a budget, the hidden row of each label.

Suffix legend: as in :mod:`arctic_kernels.head`, and ``_P`` hidden rows, ``_S`` scored rows (pairs of a hidden row and a
temperature).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Plan", "Rows", "bytes_per_row", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_per_row(vocabulary: int, dtype: torch.dtype, *, softcap: bool = False) -> int:
    """Bytes of temporaries that the logits of one row take, in value or gradient, for weights of type ``dtype``."""
    buffers = 3 if softcap else 2  # z and p; the slope of the soft-capping
    rounded = 0 if dtype == wide(dtype) else dtype.itemsize  # the gradient of a chunk's logits, for a product
    return vocabulary * (buffers * wide(dtype).itemsize + rounded + 1)  # 1: where z is −inf


@dataclass(frozen=True)
class Plan:
    """Options of one call; for their meaning see :func:`arctic_kernels.head.linear_logprob_entropy`."""

    topk: int
    entropy: bool
    scale: float
    softcap: float | None
    budget_bytes: int
    fused: bool = False
    """Whether to compute in tiles (:mod:`arctic_kernels.head_fused`)."""

    def chunks(
        self, rows: int, vocabulary: int, dtype: torch.dtype, *, ids: int = 1, share: float = 1.0, extra: int = 0
    ) -> list[slice]:
        """Rows in chunks whose temporaries fit into this share of the budget, with ``ids`` labels and ``extra`` bytes a row."""
        picked = max(ids, self.topk) * (8 + 2 * wide(dtype).itemsize)  # places, logits and log-probs of labels and candidates
        need = bytes_per_row(vocabulary, dtype, softcap=self.softcap is not None) + picked + extra
        size = max(1, int(self.budget_bytes * share) // max(1, need))
        return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


@dataclass(frozen=True)
class Rows:
    """Scored rows and their labels, sorted by row, so that the labels of a chunk of rows lie side by side."""

    temperatures_S: torch.Tensor
    """Temperature of each scored row, float32 or float64 ``[S]``."""
    row_R: torch.Tensor
    """Scored row of each label, non-decreasing, int64 ``[R]``."""
    hidden_S: torch.Tensor | None = None
    """Hidden row of each scored row, non-decreasing, int64 ``[S]``; ``None``: one label for each hidden row."""
    unique: bool = True
    """Whether no hidden row is scored twice."""
    starts_S: torch.Tensor | None = None
    """First label of each scored row and the end, int64 ``[S + 1]`` on the CPU; ``None`` as for ``hidden_S``."""
    order_R: torch.Tensor | None = None
    """Position of each sorted label in the caller's order, int64 ``[R]``; ``None``: the same order."""

    @classmethod
    def plain(cls, temperatures_R: torch.Tensor) -> Rows:
        """One label in each row."""
        return cls(temperatures_R, torch.arange(len(temperatures_R), device=temperatures_R.device))

    @classmethod
    def grouped(cls, rows_R: torch.Tensor, temperatures_R: torch.Tensor, hidden_rows: int) -> Rows:
        """Labels that share hidden row and temperature share a scored row.

        Raises:
            ValueError: A row is not one of the ``hidden_rows``.
        """
        order_R = temperatures_R.argsort(stable=True)
        order_R = order_R[rows_R[order_R].argsort(stable=True)]
        sorted_R, heats_R = rows_R[order_R], temperatures_R[order_R]
        fresh_R = torch.ones_like(sorted_R, dtype=torch.bool)
        fresh_R[1:] = (sorted_R[1:] != sorted_R[:-1]) | (heats_R[1:] != heats_R[:-1])
        first_S = fresh_R.nonzero()[:, 0]
        hidden_S = sorted_R[first_S]
        starts_S = torch.cat([first_S, first_S.new_tensor([len(rows_R)])]).cpu()
        unique = True
        if len(hidden_S):
            low, high, twice = torch.stack([hidden_S[0], hidden_S[-1], (hidden_S[1:] == hidden_S[:-1]).sum()]).tolist()
            unique = twice == 0
            if low < 0 or high >= hidden_rows:
                raise ValueError(f"rows_R names rows {low} to {high}, there are {hidden_rows} hidden rows")
        return cls(heats_R[first_S], fresh_R.cumsum(0) - 1, hidden_S, unique, starts_S, order_R)

    def __len__(self) -> int:
        return len(self.temperatures_S)

    def first_labels(self) -> torch.Tensor:
        """First label of each scored row and the end, int64 ``[S + 1]``, where the labels are."""
        if self.starts_S is None:
            return torch.arange(len(self) + 1, device=self.row_R.device)
        return self.starts_S.to(self.row_R.device)

    def labels(self, part: slice) -> slice:
        """The sorted labels of a chunk of scored rows."""
        if self.starts_S is None:
            return part
        return slice(int(self.starts_S[part.start]), int(self.starts_S[part.stop]))

    def local(self, part: slice) -> torch.Tensor:
        """Row within the chunk of each of its labels."""
        return self.row_R[self.labels(part)] - part.start

    def gather(self, hidden_PD: torch.Tensor, part: slice) -> torch.Tensor:
        """Hidden states of a chunk of scored rows."""
        return hidden_PD[part] if self.hidden_S is None else hidden_PD.index_select(0, self.hidden_S[part])

    def new_gradient(self, hidden_PD: torch.Tensor) -> torch.Tensor:
        """Zeros for the gradient of the hidden states; wider than them where several chunks may add to one row."""
        return torch.zeros_like(hidden_PD, dtype=hidden_PD.dtype if self.unique else wide(hidden_PD.dtype))

    def add(self, grad_PD: torch.Tensor, part: slice, grad_CD: torch.Tensor) -> None:
        """Add the gradient of a chunk's hidden states."""
        if self.hidden_S is None:
            grad_PD[part] = grad_CD
        elif self.unique:
            grad_PD.index_copy_(0, self.hidden_S[part], grad_CD.to(grad_PD.dtype))
        else:
            grad_PD.index_add_(0, self.hidden_S[part], grad_CD.to(grad_PD.dtype))

    def sort(self, values_R: torch.Tensor) -> torch.Tensor:
        """Values of the labels from the caller's order."""
        return values_R if self.order_R is None else values_R[self.order_R]

    def unsort(self, values_R: torch.Tensor) -> torch.Tensor:
        """Values of the labels to the caller's order."""
        return values_R if self.order_R is None else values_R[self._places()]

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Values of scored rows to the labels in the caller's order."""
        return values_S if self.order_R is None else values_S[self.row_R[self._places()]]

    def _places(self) -> torch.Tensor:
        assert self.order_R is not None
        places_R = torch.arange(len(self.order_R), device=self.order_R.device)
        return torch.empty_like(self.order_R).scatter_(0, self.order_R, places_R)
