"""Joins softmax parts by their log-sum-exps, and sums gradients of copied rows. Triton on GPUs, torch elsewhere.

With parts ``(o_i, l_i)``: ``l = logsumexp(l_i)`` and ``o = sum(exp(l_i - l) * o_i)`` (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

__all__ = ["add_sinks_", "merge_", "sum_copies"]

Part = tuple[torch.Tensor, torch.Tensor]


def merge_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[Part]) -> None:
    """Merge ``parts`` into ``out`` ``[T, H, D]``, whose rows are contiguous, and ``lse`` ``[H, T]``, in place.

    Minus infinity marks an empty row, plus infinity too (some kernels write it). Empty rows stay (0, minus infinity).
    """
    if out.is_cuda and has_triton():
        from arctic_kernels.zorro.attention import triton_ops

        triton_ops.merge_(out, lse, parts)
    else:
        merge_torch_(out, lse, parts)


def merge_torch_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[Part]) -> None:
    """:func:`merge_` in torch."""
    outs, lses = zip((out, lse), *parts, strict=True)
    lses_PHT = torch.stack([x.masked_fill(x == float("inf"), float("-inf")) for x in lses])
    total = lses_PHT.logsumexp(0)
    weights_PHT = torch.exp(lses_PHT - total.masked_fill(total == float("-inf"), 0.0))
    merged = sum(weights.mT[..., None] * part for weights, part in zip(weights_PHT, outs, strict=True))
    assert isinstance(merged, torch.Tensor)
    out.copy_(merged)
    lse.copy_(total)


def add_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks_H: torch.Tensor) -> None:
    """Add to each row's softmax a key of score ``sinks_H`` and value 0, in place (as GPT-OSS does)."""
    total = torch.logaddexp(lse, sinks_H.to(lse.dtype)[:, None])
    out.mul_(torch.exp(lse - total).mT[..., None])
    lse.copy_(total)


def sum_copies(copies: torch.Tensor, gather_G: torch.Tensor, order_G: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """For ``copies[g]`` of row ``gather_G[g]``: the sum of each row's copies, ``[T, ...]``, in a fixed order.

    ``order_G`` sorts the copies by row, stably; ``starts`` ``[T + 1]`` says where each row's copies begin therein.
    """
    if copies.is_cuda and has_triton():
        from arctic_kernels.zorro.attention import triton_ops

        return triton_ops.sum_copies(copies, order_G, starts)
    wide = torch.float64 if copies.dtype == torch.float64 else torch.float32
    total = copies.new_zeros((len(starts) - 1, *copies.shape[1:]), dtype=wide)
    return total.index_add_(0, gather_G, copies.to(wide)).to(copies.dtype)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
