"""What a backend has to offer: variable-length attention with its log-sum-exp, and the backward pass of it.

Suffix legend, here and in the sibling modules: ``_T`` rows of the packed token axis, ``_H`` query heads (keys and values have
``H / group``), ``_D`` head size, ``_G`` gathered rows, ``_S`` segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

__all__ = ["Call", "Inputs", "Kernel"]


class Inputs(NamedTuple):
    """Queries ``[T, H, D]``, keys and values, or their gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Call:
    """One variable-length attention call: segment ``s`` lets its queries look at its keys.

    ``causal`` aligns to the bottom right: query ``i`` of ``Lq`` sees key ``j`` of ``Lk`` where ``j <= i + Lk - Lq``, and with
    ``window`` only where ``j > i + Lk - Lq - window`` too.
    """

    cu_q: torch.Tensor
    """Offsets of the segments' queries, int32 ``[S + 1]``, on the device."""
    cu_k: torch.Tensor
    """Offsets of the segments' keys, likewise."""
    max_q: int
    max_k: int
    causal: bool
    scale: float
    window: int | None = None
    """How many keys a query sees at most, itself included; only with ``causal``."""
    softcap: float | None = None
    """Scores ``s`` become ``softcap * tanh(s / softcap)``, after scaling."""
    deterministic: bool = False


class Kernel(Protocol):
    """Attention on ``q_THD``, ``k_THD``, ``v_THD``; all contiguous, possibly slices of larger tensors."""

    name: str

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[T, H, D]``, contiguous, and natural log-sum-exp ``[H, T]`` in float32 or float64.

        A query without keys has output 0 and log-sum-exp minus infinity.
        """
        ...

    def backward(self, dout: torch.Tensor, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, call: Call) -> Inputs:
        """Gradients of the inputs of this call, where ``out`` and ``lse`` may be those of a larger softmax.

        With ``p = exp(s - lse)`` and ``delta = rowsum(dout * out)``: ``ds = p * (dout @ v - delta)``. So a softmax over several
        calls is differentiated call by call (Dao et al., "FlashAttention", 2022, with the whole row's statistics).
        """
        ...
